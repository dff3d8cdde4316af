"""Machines that people have: boxes of GPUs, alone or several joined as their vendors do.

Each is written down from a published description, which the topology's ``source`` names. Where
sources differ, the docstring of the machine says how.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fivefold.errors import ConfigurationError
from fivefold.network.topology._build import Builder, Wire, check_count
from fivefold.network.topology._elements import Aggregation, SwitchAbility
from fivefold.network.topology._topology import Topology

# Physical links between two devices, in each direction.
_DGX1_NVLINKS = """
0-1:2 0-2:1 0-3:1 0-4:2 1-2:1 1-3:2 1-5:1 2-3:2 2-6:2 3-7:1 4-5:2 4-6:1 4-7:1 5-6:1 5-7:2 6-7:2
"""
_MI250_XGMI = """
0-1:4 0-4:2 0-8:1 1-5:1 1-9:1 1-10:1 2-3:4 2-6:1 2-9:1 2-10:1 3-7:2 3-11:1 4-5:4 4-6:1 5-6:1 5-7:1
6-7:4 8-9:4 8-12:2 9-13:1 10-11:4 10-14:1 11-15:2 12-13:4 12-14:1 13-14:1 13-15:1 14-15:4
"""


def _pairs(table: str) -> list[tuple[int, int, int]]:
    found = []
    for entry in table.split():
        ends, _, count = entry.partition(":")
        first, _, second = ends.partition("-")
        found.append((int(first), int(second), int(count)))
    return found


DGX1_PAIRS = _pairs(_DGX1_NVLINKS)


def named_topology(name: str, *, boxes: int = 1) -> Topology:
    """A machine by name, one box or several joined by its network.

    Nodes of several boxes are named ``box1/gpu3``, those of a single box ``gpu3``. Ranks are
    numbered box by box.

    Args:
        name: One of :func:`machine_names`.
        boxes: Number of boxes.

    Returns:
        The topology; its ``source`` says where the figures come from.

    Raises:
        ConfigurationError: The name is unknown, or the number of boxes not allowed.

    References:
        SCCL, arXiv 2008.08708; TACCL, 2111.04867; TE-CCL, 2305.13479; ForestColl, 2402.06787.

    Examples:
        >>> machine = named_topology("dgx_a100", boxes=2)
        >>> machine.num_ranks, machine.ranks[9], machine.host_of(9)
        (16, 'box1/gpu1', 'box1')
    """
    machine = _machine(name)
    check_count("boxes", boxes)
    builder = Builder()
    insides = [_inside(box, boxes) for box in range(boxes)]
    devices = [machine.box(builder, prefix, host) for prefix, host in insides]
    if boxes > 1:
        machine.fabric(builder, devices)
    label = name if boxes == 1 else f"{name}:{boxes}"
    return builder.done(label, source=machine.source)


def machine_names() -> tuple[str, ...]:
    """The machines that :func:`named_topology` knows.

    Examples:
        >>> "dgx1" in machine_names()
        True
    """
    return tuple(_MACHINES)


def machine_source(name: str) -> str:
    """Where a machine's figures come from, in a sentence or two.

    Raises:
        ConfigurationError: The name is unknown.

    Examples:
        >>> "NVLink" in machine_source("dgx1")
        True
    """
    return _machine(name).source


def _machine(name: str) -> _Machine:
    if name not in _MACHINES:
        near = difflib.get_close_matches(str(name), list(_MACHINES), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(
            f"there is no machine named {name!r}",
            hint=f"{hint}the machines are {', '.join(_MACHINES)}",
        )
    return _MACHINES[name]


def _inside(box: int, boxes: int) -> tuple[str, str]:
    return ("" if boxes == 1 else f"box{box}/"), f"box{box}"


def _wired_box(
    table: str, wire: Wire, *, device: str = "gpu"
) -> Callable[[Builder, str, str], list[str]]:
    """A box whose devices are joined by direct links."""
    pairs = _pairs(table)
    size = 1 + max(second for _, second, _ in pairs)

    def add(builder: Builder, prefix: str, host: str) -> list[str]:
        names = builder.row(f"{prefix}{device}", size, host=host)
        for first, second, count in pairs:
            wide = Wire(wire.bandwidth, wire.latency, count)
            builder.join(names[first], names[second], wide)
        return names

    return add


def _switched_box(
    size: int, wire: Wire, *, sums: bool = False
) -> Callable[[Builder, str, str], list[str]]:
    """A box whose GPUs sit on one non-blocking NVSwitch plane."""

    def add(builder: Builder, prefix: str, host: str) -> list[str]:
        names = builder.row(f"{prefix}gpu", size, host=host)
        plane = builder.node(f"{prefix}nvswitch0", "nvswitch", host=host)
        for name in names:
            builder.join(name, plane, wire)
        if sums:
            builder.switches.append(SwitchAbility(plane, multicast=True, aggregation=_NVLS))
        return names

    return add


def _relay(
    pairs: list[tuple[int, int]], wire: Wire, *, switched: Wire
) -> Callable[[Builder, list[list[str]]], None]:
    """A sender of each box to a receiver of each other box.

    Two boxes are joined by links, more by a switch for each pair of sender and receiver, so that a
    NIC has its rate once, however many boxes there are.
    """

    def add(builder: Builder, boxes: list[list[str]]) -> None:
        if len(boxes) == 2:
            for sending, receiving in (boxes, boxes[::-1]):
                for sender, receiver in pairs:
                    builder.send(sending[sender], receiving[receiver], wire)
            return
        for middle, (sender, receiver) in zip(
            builder.row("ib", len(pairs), kind="tor"), pairs, strict=True
        ):
            for names in boxes:
                builder.send(names[sender], middle, switched)
                builder.send(middle, names[receiver], switched)

    return add


def _planes(count: int, wire: Wire) -> Callable[[Builder, list[list[str]]], None]:
    """GPU i of every box on switch i mod ``count``."""

    def add(builder: Builder, boxes: list[list[str]]) -> None:
        planes = builder.row("ib", count, kind="tor")
        for names in boxes:
            for index, name in enumerate(names):
                builder.join(name, planes[index % count], wire)

    return add


def _dgx1_fabric(builder: Builder, boxes: list[list[str]]) -> None:
    middle = builder.node("ib0", "tor")
    pcie, port = Wire("16 GB/s"), Wire("12.5 GB/s")
    for box, names in enumerate(boxes):
        for pair in range(len(names) // 2):
            host = f"box{box}"
            root = builder.node(f"{host}/pcie{pair}", "pcie", host=host)
            nic = builder.node(f"{host}/nic{pair}", "nic", host=host)
            for name in names[2 * pair : 2 * pair + 2]:
                builder.join(name, root, pcie)
            builder.join(root, nic, pcie)
            builder.join(nic, middle, port)


@dataclass(frozen=True)
class _Machine:
    box: Callable[[Builder, str, str], list[str]]
    fabric: Callable[[Builder, list[list[str]]], None]
    source: str


# NVLink SHARP of the third NVSwitch generation. Slots and slot size are not published; the pool is
# taken as large enough never to bind.
_NVLS = Aggregation(slots=1 << 20, slot_bytes=16, dtypes=("float16", "bfloat16", "float32"))

_MACHINES: Mapping[str, _Machine] = {
    "dgx1": _Machine(
        _wired_box(_DGX1_NVLINKS, Wire("25 GB/s")),
        _dgx1_fabric,
        "8 V100, 6 NVLinks of 25 GB/s each: link counts in microsoft/sccl (topologies/nvidia.py) "
        "and microsoft/TE-CCL (topologies/dgx1.py). Between boxes: 4 EDR InfiniBand ports of 12.5 "
        "GB/s, each under a PCIe switch with GPUs 2i and 2i + 1 (NVIDIA DGX-1 system architecture "
        "white paper), PCIe taken at 16 GB/s; all ports on one switch.",
    ),
    "dgx2": _Machine(
        _switched_box(16, Wire("125 GB/s", "0.35 us")),
        _relay(
            [(odd, odd - 1) for odd in range(1, 16, 2)],
            Wire("12.5 GB/s", "2.6 us"),
            switched=Wire("12.5 GB/s", "1.3 us"),
        ),
        "16 V100 on one NVSwitch plane, 125 GB/s per GPU: microsoft/TE-CCL (topologies/dgx2.py). "
        "Between boxes: odd GPU to the even GPU below it, 8 NICs, as there and in the sketch "
        "sk1-dgx2-n2 of microsoft/taccl (both for 2 boxes; here more boxes are joined by a switch "
        "for each such pair, with the latency shared by its two links).",
    ),
    "ndv2": _Machine(
        _wired_box(_DGX1_NVLINKS, Wire("25 GB/s", "0.7 us")),
        _relay([(0, 1)], Wire("12.5 GB/s", "1.3 us"), switched=Wire("12.5 GB/s", "1.3 us")),
        "Azure NDv2: the NVLink graph of DGX-1, one 12.5 GB/s NIC: GPU 0 sends to GPU 1 of other "
        "boxes, through one switch from 3 boxes on; microsoft/TE-CCL (topologies/ndv2.py, after "
        "the transposition it applies).",
    ),
    "dgx_a100": _Machine(
        _switched_box(8, Wire("300 GB/s")),
        _planes(2, Wire("25 GB/s")),
        "8 A100 on one NVSwitch plane, 300 GB/s per GPU; one 25 GB/s NIC per GPU, even and odd "
        "GPUs on an InfiniBand plane each: liangyuRain/ForestColl (topologies.py); its NIC nodes "
        "lie in series at the same rate and are left out.",
    ),
    "dgx_h100": _Machine(
        _switched_box(8, Wire("450 GB/s"), sums=True),
        _planes(8, Wire("50 GB/s")),
        "8 H100 on one NVSwitch plane, 18 NVLinks of 25 GB/s per GPU and direction, one 400 Gbit/s "
        "NIC per GPU: NVIDIA DGX H100 user guide. Between boxes: one switch per rail, as in the "
        "DGX SuperPOD reference architecture (leaf switches only).",
    ),
    "mi250": _Machine(
        _wired_box(_MI250_XGMI, Wire("50 GB/s"), device="gcd"),
        _planes(1, Wire("16 GB/s")),
        "16 GCDs, 7 xGMI links of 50 GB/s each; 16 GB/s per GCD to one InfiniBand switch: "
        "liangyuRain/ForestColl (topologies.py). The fabric of microsoft/TE-CCL (topologies/amd.py)"
        " differs: GCDs 2i and 2i + 1 share a 25 GB/s NIC.",
    ),
}
