"""What must hold of a topology's parts together, and errors that name the part and the fix."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

from fivefold.errors import ConfigurationError
from fivefold.network.topology._elements import Link, Node, SwitchAbility

_Element = TypeVar("_Element")
_NAMED_IN_ERRORS = 5


def check_topology(
    name: str,
    nodes: Sequence[Node],
    links: Sequence[Link],
    switches: Sequence[SwitchAbility],
) -> None:
    """Check names, links' ends and switch abilities.

    Raises:
        ConfigurationError: Something does not fit.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a topology needs a name; got {name!r}")
    known = {node.name: node for node in nodes}
    _check_unique((node.name for node in nodes), f"topology {name!r} has several nodes named")
    if not any(node.is_rank for node in nodes):
        raise ConfigurationError(
            f"topology {name!r} has no compute node",
            hint="at least one node must be of kind gpu or cpu",
        )
    for link in links:
        for end in (link.source, link.target):
            if end not in known:
                raise ConfigurationError(
                    f"link {link.source!r} -> {link.target!r} ends at {end!r}, "
                    f"which is no node of topology {name!r}",
                    hint=nearest_node(end, known),
                )
    for ability in switches:
        node = known.get(ability.node)
        if node is None or node.is_rank:
            what = "no node of the topology" if node is None else "a compute node"
            raise ConfigurationError(
                f"switches names {ability.node!r}, which is {what}",
                hint="only nodes that forward can be switches"
                if node
                else nearest_node(ability.node, known),
            )
    _check_unique((ability.node for ability in switches), "switches says several times")


def nearest_node(name: object, known: Collection[str]) -> str:
    """A hint for a name that is no node."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"its nodes are {listed(list(known))}"


def listed(names: Sequence[str]) -> str:
    """The first few of many names."""
    shown = ", ".join(repr(name) for name in names[:_NAMED_IN_ERRORS])
    return f"{shown}, ..." if len(names) > _NAMED_IN_ERRORS else shown


def all_of(kind: type[_Element], values: Iterable[Any], what: str) -> tuple[_Element, ...]:
    """The values as a tuple of one class.

    Raises:
        ConfigurationError: One of them is something else.
    """
    found = tuple(values)
    wrong = next((value for value in found if not isinstance(value, kind)), None)
    if wrong is not None:
        raise ConfigurationError(
            f"{what} of a topology must be {kind.__name__} objects; got {wrong!r}",
            hint=f"write {kind.__name__}(...)",
        )
    return found


def _check_unique(names: Iterable[str], complaint: str) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigurationError(f"{complaint} {listed(twice)}", hint="name each of them once")
