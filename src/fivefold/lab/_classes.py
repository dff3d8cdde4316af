"""Priority classes on a shaped link: which ``tc`` commands serve them, and how packets name them.

Each link has a tree of token buckets (``htb``): the whole link's rate above, one leaf per class
below. A leaf borrows what the link has left in strict order of its class, and has a hundredth of
the rate for itself, so that no job waits for ever. Class 0 goes first, the last class last.

A packet's class is, in this order: that of its class selector (RFC 2474), which any program may set
with the socket option ``IP_TOS``; that of the host that sent it; for what a summing switch sends,
that of the host it goes to; else the last. Pure data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fivefold.lab._spec import LabSpec

MAX_CLASSES = 8  # what the three bits of a class selector tell apart, and htb's priorities
OWN_SHARE = 0.01
_SELECTOR_SHIFT = 5
_SELECTOR_MASK = 0xE0
_QUANTUM_BYTES = 66_000  # one large packet; only classes of one priority would take turns
_FIRST_LEAF = 16


def class_tos(priority: int, classes: int) -> int:
    """The value of ``IP_TOS`` with which a socket puts its packets into a class.

    The last class has the value of packets that nobody marked: 0.

    Args:
        priority: The class, 0 the most urgent.
        classes: How many there are.

    Returns:
        The byte.

    Raises:
        ConfigurationError: There is no such class.

    Examples:
        >>> [class_tos(priority, 3) for priority in range(3)]
        [64, 32, 0]
    """
    if not 1 <= classes <= MAX_CLASSES or not 0 <= priority < classes:
        raise ConfigurationError(
            f"there is no class {priority} among {classes}",
            hint=f"links have 1 to {MAX_CLASSES} classes, numbered from 0",
        )
    return classes - 1 - priority << _SELECTOR_SHIFT


def htb_commands(
    spec: LabSpec, rate: float, *, device: str, parent: str = "root", sizes: tuple[int, int]
) -> tuple[str, ...]:
    """What ``tc -batch`` reads to give one direction of a link its rate and classes.

    Args:
        spec: The cluster.
        rate: Bytes per second.
        device: The interface.
        parent: What it hangs below.
        sizes: Bytes of a burst, and of the queue of each class.

    Returns:
        The commands in order.

    Examples:
        >>> from fivefold.lab import LabSpec
        >>> spec = LabSpec(hosts=2, rate=1e6, classes=2, host_classes={0: 0})
        >>> lines = htb_commands(spec, 1e6, device="eth0", sizes=(3028, 50000))
        >>> lines[0]
        'qdisc add dev eth0 root handle 8: htb default 11'
        >>> [line.partition("htb ")[2] for line in lines[2:4]]  # doctest: +NORMALIZE_WHITESPACE
        ['rate 7920000bit ceil 8000000bit prio 0 burst 3028b cburst 3028b quantum 66000',
         'rate 80000bit ceil 8000000bit prio 1 burst 3028b cburst 3028b quantum 66000']
    """
    classes, (burst, held) = spec.classes, sizes
    bits, own = round(rate * 8), round(rate * 8 * OWN_SHARE)
    bursts = f"burst {burst}b cburst {burst}b quantum {_QUANTUM_BYTES}"
    lines = [
        f"qdisc add dev {device} {parent} handle 8: htb default {_leaf(classes - 1)}",
        f"class add dev {device} parent 8: classid 8:1 htb rate {bits}bit {bursts}",
    ]
    for priority in range(classes):
        share = bits - own * (classes - 1) if priority == 0 else own
        lines.append(
            f"class add dev {device} parent 8:1 classid 8:{_leaf(priority)} htb rate {share}bit "
            f"ceil {bits}bit prio {priority} {bursts}"
        )
    lines += [
        f"qdisc add dev {device} parent 8:{_leaf(priority)} bfifo limit {held}"
        for priority in range(classes)
    ]
    lines += [
        f"filter add dev {device} parent 8: protocol ip prio {order} u32 {match} "
        f"flowid 8:{_leaf(priority)}"
        for order, match, priority in _matches(spec)
    ]
    return tuple(lines)


def _matches(spec: LabSpec) -> Iterator[tuple[int, str, int]]:
    """Order, condition and class of each filter; what none of them takes is of the last class."""
    from fivefold.lab._plan import AGGREGATOR_NETWORK, address_of  # noqa: PLC0415 - it imports this

    for priority in range(spec.classes - 1):
        tos = class_tos(priority, spec.classes)
        yield 1, f"match ip dsfield {tos:#x} {_SELECTOR_MASK:#x}", priority
    for host, priority in sorted(spec.host_classes.items()):
        yield 2, f"match ip src {address_of(host)}/32", priority
        if spec.aggregators:
            sums = f"match ip src {AGGREGATOR_NETWORK} match ip dst {address_of(host)}/32"
            yield 3, sums, priority


def _leaf(priority: int) -> str:
    # tc reads and shows numbers of classes in base 16.
    return f"{_FIRST_LEAF + priority:x}"
