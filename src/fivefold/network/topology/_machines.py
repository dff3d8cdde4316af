"""Machines that people have, from published descriptions, and the Lingjun data set of hosts.

Each topology's ``source`` names what it was written down from.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fivefold.errors import DataError, require_one_of
from fivefold.files import read_text
from fivefold.network.topology._build import Builder, HostSpec, Wire, check_count
from fivefold.network.topology._fabrics import Port, add_clos
from fivefold.network.topology._graph import Aggregation, SwitchAbility
from fivefold.network.topology._topology import Topology

# Physical links between two devices, in each direction.
_DGX1_NVLINKS = """
0-1:2 0-2:1 0-3:1 0-4:2 1-2:1 1-3:2 1-5:1 2-3:2 2-6:2 3-7:1 4-5:2 4-6:1 4-7:1 5-6:1 5-7:2 6-7:2
"""
_MI250_XGMI = """
0-1:4 0-4:2 0-8:1 1-5:1 1-9:1 1-10:1 2-3:4 2-6:1 2-9:1 2-10:1 3-7:2 3-11:1 4-5:4 4-6:1 5-6:1 5-7:1
6-7:4 8-9:4 8-12:2 9-13:1 10-11:4 10-14:1 11-15:2 12-13:4 12-14:1 13-14:1 13-15:1 14-15:4
"""
# NVLink SHARP of the third NVSwitch generation. Slots and slot size are not published; the pool is
# taken as large enough never to bind.
_NVLS = Aggregation(slots=1 << 20, slot_bytes=16, dtypes=("float16", "bfloat16", "float32"))
_LINGJUN_COLUMNS = ("ip", "DSW", "PSW", "ASW")
_LEAST_DIGITS = 8
# Assumptions, for the data says nothing: 8 GPUs on NVLink and 4 NICs of 200 Gbit/s, a pair of GPUs
# and a NIC under each PCIe switch.
LINGJUN_HOST = HostSpec(gpus=8, nics=4, nvlink="300 GB/s", pcie="32 GB/s")
LINGJUN_PORT = Port("25 GB/s", "1 us")


def _pairs(table: str) -> list[tuple[int, int, int]]:
    found = []
    for entry in table.split():
        ends, _, count = entry.partition(":")
        first, _, second = ends.partition("-")
        found.append((int(first), int(second), int(count)))
    return found


DGX1_PAIRS = _pairs(_DGX1_NVLINKS)


def named_topology(name: str, *, boxes: int = 1) -> Topology:
    """Return a machine by name, one box or several joined by its network.

    Nodes of several boxes are named ``box1/gpu3``, those of a single box ``gpu3``. Ranks are
    numbered box by box.

    Args:
        name: One of those that :func:`catalogue` lists.
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
    require_one_of(name, MACHINES, f"there is no machine named {name!r}")
    machine = MACHINES[name]
    check_count("boxes", boxes)
    builder = Builder()
    insides = [(f"box{box}/" if boxes > 1 else "", f"box{box}") for box in range(boxes)]
    devices = [machine.box(builder, prefix, host) for prefix, host in insides]
    if boxes > 1:
        machine.fabric(builder, devices)
    label = name if boxes == 1 else f"{name}:{boxes}"
    return builder.done(label, source=machine.source)


def _wired_box(
    table: str, wire: Wire, device: str, builder: Builder, prefix: str, host: str
) -> list[str]:
    """Add a box whose devices are joined by direct links."""
    pairs = _pairs(table)
    names = builder.row(f"{prefix}{device}", 1 + max(b for _, b, _ in pairs), host=host)
    for first, second, count in pairs:
        builder.join(names[first], names[second], replace(wire, count=count))
    return names


def _switched_box(
    size: int, wire: Wire, unit: Aggregation | None, builder: Builder, prefix: str, host: str
) -> list[str]:
    """Add a box whose GPUs sit on one non-blocking NVSwitch plane, which may sum."""
    names = builder.row(f"{prefix}gpu", size, host=host)
    plane = builder.node(f"{prefix}nvswitch0", "nvswitch", host=host)
    for name in names:
        builder.join(name, plane, wire)
    if unit is not None:
        builder.switches.append(SwitchAbility(plane, multicast=True, aggregation=unit))
    return names


def _relay(
    pairs: list[tuple[int, int]],
    wire: Wire,
    switched: Wire,
    builder: Builder,
    boxes: list[list[str]],
) -> None:
    """Join a sender of each box to a receiver of each other box."""
    if len(boxes) == 2:
        for sending, receiving in (boxes, boxes[::-1]):
            for sender, receiver in pairs:
                builder.send(sending[sender], receiving[receiver], wire)
        return
    # A switch for each pair, so that a NIC has its rate once, however many boxes there are.
    switches = builder.row("ib", len(pairs), kind="tor")
    for middle, (sender, receiver) in zip(switches, pairs, strict=True):
        for names in boxes:
            builder.send(names[sender], middle, switched)
            builder.send(middle, names[receiver], switched)


def _planes(count: int, wire: Wire, builder: Builder, boxes: list[list[str]]) -> None:
    """Join GPU i of every box to switch i mod ``count``."""
    planes = builder.row("ib", count, kind="tor")
    for names in boxes:
        for index, name in enumerate(names):
            builder.join(name, planes[index % count], wire)


def _dgx1_fabric(builder: Builder, boxes: list[list[str]]) -> None:
    middle = builder.node("ib0", "tor")
    pcie, port = Wire("16 GB/s"), Wire("12.5 GB/s", "0.65 us")
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


_NCCL_LATENCIES = (
    "Latencies: NVIDIA/nccl (src/graph/tuning.cc, protocol LL), 0.6 us for a hop over NVLink and "
    "2.7 us for one of a ring between boxes, each shared by its two links."
)

MACHINES: Mapping[str, _Machine] = {
    "dgx1": _Machine(
        partial(_wired_box, _DGX1_NVLINKS, Wire("25 GB/s", "0.7 us"), "gpu"),
        _dgx1_fabric,
        "8 V100, 6 NVLinks of 25 GB/s each: link counts in microsoft/sccl (topologies/nvidia.py) "
        "and microsoft/TE-CCL (topologies/dgx1.py). Between boxes: 4 EDR InfiniBand ports of 12.5 "
        "GB/s, each under a PCIe switch with GPUs 2i and 2i + 1 (NVIDIA DGX-1 system architecture "
        "white paper), PCIe taken at 16 GB/s; all ports on one switch. Latencies as "
        "of ndv2, the same GPUs: 0.7 us per NVLink, 1.3 us between boxes, shared by the two ports.",
    ),
    "dgx2": _Machine(
        partial(_switched_box, 16, Wire("125 GB/s", "0.35 us"), None),
        partial(
            _relay,
            [(odd, odd - 1) for odd in range(1, 16, 2)],
            Wire("12.5 GB/s", "2.6 us"),
            Wire("12.5 GB/s", "1.3 us"),
        ),
        "16 V100 on one NVSwitch plane, 125 GB/s per GPU: microsoft/TE-CCL (topologies/dgx2.py). "
        "Between boxes: odd GPU to the even GPU below it, 8 NICs, as there and in the sketch "
        "sk1-dgx2-n2 of microsoft/taccl (both for 2 boxes; here more boxes are joined by a switch "
        "for each such pair, with the latency shared by its two links).",
    ),
    "ndv2": _Machine(
        partial(_wired_box, _DGX1_NVLINKS, Wire("25 GB/s", "0.7 us"), "gpu"),
        partial(_relay, [(0, 1)], Wire("12.5 GB/s", "1.3 us"), Wire("12.5 GB/s", "1.3 us")),
        "Azure NDv2: the NVLink graph of DGX-1, one 12.5 GB/s NIC: GPU 0 sends to GPU 1 of other "
        "boxes, through one switch from 3 boxes on; microsoft/TE-CCL (topologies/ndv2.py, after "
        "the transposition it applies).",
    ),
    "dgx_a100": _Machine(
        partial(_switched_box, 8, Wire("300 GB/s", "0.3 us"), None),
        partial(_planes, 2, Wire("25 GB/s", "1.35 us")),
        "8 A100 on one NVSwitch plane, 300 GB/s per GPU; one 25 GB/s NIC per GPU, even and odd "
        "GPUs on an InfiniBand plane each: liangyuRain/ForestColl (topologies.py); its NIC nodes "
        "lie in series at the same rate and are left out. " + _NCCL_LATENCIES,
    ),
    "dgx_h100": _Machine(
        partial(_switched_box, 8, Wire("450 GB/s", "0.3 us"), _NVLS),
        partial(_planes, 8, Wire("50 GB/s", "1.35 us")),
        "8 H100 on one NVSwitch plane, 18 NVLinks of 25 GB/s per GPU and direction, one 400 Gbit/s "
        "NIC per GPU: NVIDIA DGX H100 user guide. Between boxes: one switch per rail, as in the "
        "DGX SuperPOD reference architecture (leaf switches only). " + _NCCL_LATENCIES,
    ),
    "mi250": _Machine(
        partial(_wired_box, _MI250_XGMI, Wire("50 GB/s", "1.2 us"), "gcd"),
        partial(_planes, 1, Wire("16 GB/s", "1 us")),
        "16 GCDs, 7 xGMI links of 50 GB/s each; 16 GB/s per GCD to one InfiniBand switch: "
        "liangyuRain/ForestColl (topologies.py). The fabric of microsoft/TE-CCL (topologies/amd.py)"
        " differs: GCDs 2i and 2i + 1 share a 25 GB/s NIC. Latencies: ROCm/rccl "
        "(src/graph/tuning.cc), 1.2 us for a hop of a tree over xGMI, 2 us for one of a ring "
        "between boxes, shared by its two links.",
    ),
}


def load_lingjun(
    path: str | Path,
    *,
    host: HostSpec = LINGJUN_HOST,
    port: Port = LINGJUN_PORT,
    aggs: int = 8,
    cores: int = 32,
    pods: Collection[str] | None = None,
) -> Topology:
    r"""Build the cluster that a Lingjun ``topo.csv`` describes.

    Hosts are numbered pod by pod and rack by rack, in the order of the file within a rack; a host
    is named ``P8/S14/0c9d9de1``: pod, rack, first digits of its hashed address.

    Args:
        path: The CSV file.
        host: What each host is like (assumed).
        port: Rate and latency of a port, and the rack switches' oversubscription (assumed).
        aggs: Aggregation switches per pod (assumed).
        cores: Core switches, a multiple of ``aggs`` (assumed).
        pods: Only these pods (PSW labels); None for all.

    Raises:
        DataError: The file is missing, has other columns, repeats a host, or holds no host.
        ConfigurationError: A pod is not in the file.

    References:
        Cao et al.: Crux, SIGCOMM 2024; data: alibaba/alibaba-lingjun-dataset-2023 on GitHub.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "topo.csv"
        >>> _ = file.write_text("ip,DSW,PSW,ASW\na1,G6,P8,S1\nb2,G6,P8,S2\nc3,G6,P10,S1\n")
        >>> load_lingjun(file).num_ranks, load_lingjun(file, pods=["P8"]).num_ranks
        (24, 16)
    """
    file = Path(path)
    rows = _lingjun_rows(file)
    if pods is not None:
        known = sorted({row["PSW"] for row in rows}, key=_natural)
        for pod in [*pods] or ["(none named)"]:
            require_one_of(pod, known, f"there is no pod {pod} in the file")
        rows = [row for row in rows if row["PSW"] in pods]
    rows.sort(key=lambda row: (_natural(row["PSW"]), _natural(row["ASW"])))
    names = _short_names([row["ip"] for row in rows], file)
    places: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        rack = f"{row['PSW']}/{row['ASW']}"
        in_pod = places.setdefault(row["PSW"], {})
        in_pod.setdefault(rack, []).append(f"{rack}/{names[row['ip']]}")
    builder = Builder()
    add_clos(builder, places, host, fabric=(aggs, cores, "split"), port=port)
    source = (
        f"Alibaba Lingjun 2023 data set ({file.name}, {len(rows)} hosts), published with Crux, "
        f"SIGCOMM 2024. Assumed, not in the data: {host.gpus} GPUs and {host.ports} ports per "
        f"host, {port.bandwidth} and {port.latency} per port, {aggs} aggregation switches per pod, "
        f"{cores} core switches, oversubscription {port.oversubscription:g}"
    )
    return builder.done("lingjun", source=source)


def _lingjun_rows(file: Path) -> list[dict[str, str]]:
    text = read_text(file, what="Lingjun topology")
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        missing = [name for name in _LINGJUN_COLUMNS if name not in (reader.fieldnames or ())]
        rows = list(reader)
    except csv.Error as error:
        raise DataError(f"{file} cannot be read: {error}", hint="name a topo.csv file") from None
    if missing:
        raise DataError(
            f"{file} has no column {', '.join(missing)}",
            hint=f"a Lingjun topology file has the columns {', '.join(_LINGJUN_COLUMNS)}",
        )
    for number, row in enumerate(rows, start=2):
        if not all((row[name] or "").strip() for name in _LINGJUN_COLUMNS):
            raise DataError(f"{file} has an incomplete row in line {number}")
    if not rows:
        raise DataError(f"{file} holds no host", hint="its rows are hosts")
    return rows


def _natural(label: str) -> tuple[str, int, str]:
    letters, digits = re.fullmatch(r"(\D*)(\d*).*", label, re.DOTALL).groups()  # type: ignore[union-attr]
    return letters, int(digits or -1), label


def _short_names(addresses: list[str], file: Path) -> Mapping[str, str]:
    if len(set(addresses)) != len(addresses):
        twice = next(one for one in addresses if addresses.count(one) > 1)
        raise DataError(f"{file} names host {twice} more than once", hint="one row per host")
    for length in range(_LEAST_DIGITS, 1 + max(_LEAST_DIGITS, *map(len, addresses))):
        short = {address: address[:length] for address in addresses}
        if len(set(short.values())) == len(short):
            return short
    return {address: address for address in addresses}
