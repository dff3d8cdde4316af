"""The matrix of ``nvidia-smi topo -m``: how each pair of GPUs and adapters is joined.

A cell names the farthest thing that lies between two devices. NVLinks are counted; PCIe is a tree
whose levels are those of the legend: one bridge (PIX), several (PXB), a processor's host bridge
(PHB), the host bridges of a NUMA domain (NODE), the sockets (SYS). No cell says a rate.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fivefold.errors import DataError
from fivefold.files import read_text
from fivefold.network.topology._build import Builder, Wire
from fivefold.network.topology._topology import Topology
from fivefold.network.topology.readers.boxes import Port, Source, joined

OPTIONS = ("nvlink", "nvswitch", "pcie", "socket", "nic", "nics", "ibstat", "network")
_LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_OLD_LEVELS = {"SOC": "SYS"}  # as drivers before 384 wrote it
_NVLINK = re.compile(r"NV(\d{1,3})")
_LEGEND = re.compile(r"\s*(X|SYS|SOC|NODE|PHB|PXB|PIX|NV#)\s*=\s*\S")
_ALIAS = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*$")
_GPU = re.compile(r"GPU\d+")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MOST_NVLINKS = 18  # of one GPU, up to Blackwell
_MOST_DEVICES = 512
_SMI = "run nvidia-smi topo -m again, and save all of it"


def recognises(text: str) -> bool:
    """Return whether a text holds such a matrix."""
    return any(_header(line) for line in _plain(text[: 1 << 16]))


def read(text: str, source: Source, *, name: str) -> Topology:
    """Return the topology of a matrix.

    Raises:
        DataError: The matrix is cut, repeats a row, or its cells contradict one another.
    """
    matrix = _matrix(text, source)
    return joined(source, *_built(matrix, source), name=name)


_CELL = r"(?:NV\d{1,3}|NODE|PIX|PXB|PHB|SYS|SOC|X)"


def _plain(text: str) -> list[str]:
    """Return the lines without colours, and with blanks where columns have run into one another."""
    lines = [_ESCAPES.sub("", line).rstrip() for line in text.splitlines()]
    lines = [re.sub(r"(?<=\d)(?=(?:NIC|GPU)\d|CPU Affinity)", " ", line) for line in lines]
    return [re.sub(rf"(?<=\s){_CELL}{{2,}}(?!\S)", _apart, line) for line in lines]


def _apart(cells: re.Match[str]) -> str:
    return " ".join(re.findall(_CELL, cells[0]))


def _header(line: str) -> list[str]:
    """Return the devices that a header line names; none where it is no header."""
    words = line.split()
    if not words or not _GPU.fullmatch(words[0]) or "X" in words:
        return []
    devices = list(itertools.takewhile(lambda word: word not in {"CPU", "NUMA"}, words))
    cells = {*_LEVELS, *_OLD_LEVELS}
    whole = all(re.fullmatch(r"[A-Za-z][\w.:-]*", word) and word not in cells for word in devices)
    named = len(devices) > 1 or len(words) > len(devices)
    return devices if whole and named and not _NVLINK.fullmatch(devices[-1]) else []


@dataclass
class _Matrix:
    """Devices, what lies between each pair, and their NUMA domains."""

    devices: list[str]
    cells: dict[tuple[str, str], str] = field(default_factory=dict)
    numa: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> list[str]:
        return sorted((d for d in self.devices if _GPU.fullmatch(d)), key=lambda one: int(one[3:]))

    @property
    def adapters(self) -> list[str]:
        return [device for device in self.devices if not _GPU.fullmatch(device)]


def _matrix(text: str, source: Source) -> _Matrix:
    """Return the matrix of a text, and note what each of its lines is."""
    reading, lines = source.reading, _plain(text)
    start = next(number for number, line in enumerate(lines) if _header(line))
    found = _Matrix(_header(lines[start]))
    twice = [device for device, number in Counter(found.devices).items() if number > 1]
    if twice or len(found.devices) > _MOST_DEVICES:
        raise DataError(f"the header names {(twice or found.devices)[0]} more than once", hint=_SMI)
    further = re.search(r"\b(CPU|NUMA)\s.*", lines[start])
    extra = re.split(r"\t+|\s{2,}", further[0].strip()) if further else []
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if number - 1 == start or not words:
            continue
        if words[0] in found.devices and words[0] not in rows and number - 1 > start:
            rows[words[0]] = _cells(line, len(found.devices))
            reading.take(f"row {words[0]}")
        elif words[0] in found.devices and number - 1 > start:
            raise DataError(f"line {number} is a second row of {words[0]}", hint=_SMI)
        elif _LEGEND.match(line) or line.strip().lower() in {"legend:", "nic legend:"}:
            reading.ignore(f"line {number}", "legend of the cells")
        elif alias := _ALIAS.match(line):
            found.aliases[alias[1]] = alias[2]
            reading.take(f"line {number}", f"{alias[1]} is {alias[2]}")
        else:
            reading.leave_out(f"line {number}", f"no row of the matrix: {line.strip():.40}")
    reading.take("header", f"{len(found.gpus)} GPUs, {len(found.adapters)} adapters")
    _fill(found, rows, [word for word in extra if word], source)
    return found


def _cells(line: str, count: int) -> list[str]:
    """Return the cells of a row, and what its further columns say, empty ones among them."""
    words, fields = line.split(), [field.strip() for field in line.split("\t")]
    if len(fields) > count and fields[: count + 1] == words[: count + 1]:
        return fields[1:]
    return words[1:]


def _fill(
    found: _Matrix, rows: Mapping[str, Sequence[str]], columns: Sequence[str], source: Source
) -> None:
    """Check every cell, and keep it once for both of its devices."""
    count = len(found.devices)
    missing = [device for device in found.devices if device not in rows]
    if missing:
        raise DataError(f"the matrix has no row of {', '.join(missing[:6])}", hint=_SMI)
    numa_at = next((i for i, column in enumerate(columns) if column == "NUMA Affinity"), None)
    for device, words in rows.items():
        cells, further = words[:count], words[count:]
        if len(cells) < count:
            message = f"the row of {device} has {len(cells)} of {count} cells"
            raise DataError(message, hint=_SMI)
        for other, cell in zip(found.devices, cells, strict=True):
            _keep(found, device, other, _OLD_LEVELS.get(cell, cell))
        if numa_at is not None and _GPU.fullmatch(device) and len(further) > numa_at:
            found.numa[device] = further[numa_at]
    for column in columns:
        if column == "NUMA Affinity":
            source.reading.take(column, "where PCIe of two GPUs is not said")
        else:
            source.reading.ignore(column, "processor cores, and memory of GPUs as NUMA domains")


def _keep(found: _Matrix, device: str, other: str, cell: str) -> None:
    if (device == other) != (cell == "X"):
        raise DataError(f"the cell of {device} and {other} is {cell!r:.20}", hint=_SMI)
    if device == other:
        return
    if cell not in _LEVELS and not _NVLINK.fullmatch(cell):
        message = (
            f"the cell of {device} and {other} is {cell!r:.20}, which the legend does not have"
        )
        raise DataError(message, hint=f"known are NV#, {', '.join(_LEVELS)}; {_SMI}")
    if found.cells.setdefault((other, device), cell) != cell:
        message = f"{device} to {other} is {cell}, and back it is {found.cells[other, device]}"
        raise DataError(message, hint=_SMI)
    found.cells[device, other] = cell


# Nodes and links


def _built(matrix: _Matrix, source: Source) -> tuple[Builder, list[Port]]:
    builder = Builder()
    names = {gpu: f"gpu{number}" for number, gpu in enumerate(matrix.gpus)}
    for gpu in matrix.gpus:
        builder.node(names[gpu], "gpu", host="box0")
    for adapter in matrix.adapters:
        names[adapter] = builder.node(matrix.aliases.get(adapter, adapter), "nic", host="box0")
    _add_nvlinks(builder, matrix, names, source)
    _add_pcie(builder, matrix, names, source)
    rates = _rates(source, [names[adapter] for adapter in matrix.adapters])
    ports = [
        Port(names[a], names[a], rates.get(names[a]))
        for a in matrix.adapters
        if rates.get(names[a], 1) != 0
    ]
    return builder, ports


def _add_nvlinks(
    builder: Builder, matrix: _Matrix, names: Mapping[str, str], source: Source
) -> None:
    counts = {
        (a, b): int(match[1])
        for a, b in itertools.combinations(matrix.gpus, 2)
        if (match := _NVLINK.fullmatch(matrix.cells[a, b])) and int(match[1])
    }
    if not counts:
        return
    rate = source.told_or(
        "nvlink", 25e9, "V100, A100 and H100; B200 has 50 GB/s, RTX cards 14 GB/s", decisive=True
    )
    for group in _switched(matrix, counts, source):
        plane = builder.node(f"nvswitch{len(builder.nodes)}", "nvswitch", host="box0")
        for gpu in group:
            number = max(counts.get((gpu, b), counts.get((b, gpu), 0)) for b in group if b != gpu)
            builder.join(names[gpu], plane, Wire(rate, count=number))
        counts = {pair: n for pair, n in counts.items() if not set(pair) <= set(group)}
    for (a, b), number in counts.items():
        builder.join(names[a], names[b], Wire(rate, count=number))


def _switched(
    matrix: _Matrix, counts: Mapping[tuple[str, str], int], source: Source
) -> list[list[str]]:
    """Return the groups of GPUs on one NVSwitch plane each.

    A switch gives every pair all links of a GPU, so their sum is more than a GPU has, also where a
    link is down and cells differ. Where it is not, links may be direct: three times four of four
    A100; those of two GPUs, and those whose cells differ, are taken to be, unless it is told.
    """
    groups = [part for part in _parts(matrix.gpus, counts) if len(part) > 1]
    found = []
    for group in groups:
        pairs = [counts.get(pair, 0) for pair in itertools.combinations(group, 2)]
        total = max(sum(number for pair, number in counts.items() if gpu in pair) for gpu in group)
        why = f"{total} links of a GPU are counted, and none has more than {_MOST_NVLINKS}"
        over = total > _MOST_NVLINKS
        if not over and "nvswitch" not in source.told and (len(set(pairs)) > 1 or len(group) == 2):
            continue
        if not over:
            why = f"{total} links of a GPU are counted: they may be direct"
        if source.told_or("nvswitch", over, why, decisive=not over):
            found.append(group)
    return found


def _parts(
    members: Sequence[str], pairs: Iterator[tuple[str, str]] | Mapping[tuple[str, str], object]
) -> list[list[str]]:
    """Return the members joined by pairs, in order."""
    part = {member: member for member in members}

    def head(member: str) -> str:
        while part[member] != member:
            member = part[member]
        return member

    for a, b in pairs:
        part[head(b)] = head(a)
    found: dict[str, list[str]] = {}
    for member in members:
        found.setdefault(head(member), []).append(member)
    return list(found.values())


def _add_pcie(builder: Builder, matrix: _Matrix, names: Mapping[str, str], source: Source) -> None:
    """Add the tree of PCIe, level by level from the devices up."""
    cells = dict(matrix.cells)
    hidden = [
        pair for pair in itertools.combinations(matrix.gpus, 2) if _NVLINK.fullmatch(cells[pair])
    ]
    known = {a: matrix.numa.get(a, "N/A") for a in matrix.gpus}
    for a, b in hidden:  # NVLink hides what lies between them on PCIe
        told = "N/A" not in (known[a], known[b])
        cells[a, b] = cells[b, a] = "NODE" if told and known[a] == known[b] else "SYS"
    devices = [*matrix.gpus, *matrix.adapters]
    if len(devices) < 2:
        return
    if hidden:
        why = "a pair on NVLink does not say it: by NUMA affinity, and what adapters say"
        source.reading.assume("PCIe of GPUs on NVLink", "NODE or SYS", why)
    below = {device: names[device] for device in devices}
    rate = source.told_or("pcie", 32e9, "PCIe 4.0 with 16 lanes", decisive=not hidden)
    for place, level in enumerate(_LEVELS):
        close = [p for p in itertools.combinations(devices, 2) if _LEVELS.index(cells[p]) <= place]
        wire = Wire(rate)
        if level == "SYS" and close:
            socket = source.told_or(
                "socket", 16e9, "what NCCL takes for AMD's processors; Intel's have 10 to 40 GB/s"
            )
            wire = Wire(socket)
        for part in _parts(devices, iter(close)):
            tops = list(dict.fromkeys(below[device] for device in part))
            if len(tops) < 2:
                continue
            node = builder.node(f"{level.lower()}{len(builder.nodes)}", "pcie", host="box0")
            for top in tops:
                builder.join(top, node, wire)
            below.update(dict.fromkeys(part, node))
    _note_contradictions(matrix, devices, source)


def _note_contradictions(matrix: _Matrix, devices: Sequence[str], source: Source) -> None:
    """Name cells that say farther than the tree: a near to b, b near to c, but a far from c."""
    odd = []
    for place, _ in enumerate(_LEVELS):
        close = [
            pair
            for pair in itertools.combinations(devices, 2)
            if (cell := matrix.cells[pair]) in _LEVELS and _LEVELS.index(cell) <= place
        ]
        for part in _parts(devices, iter(close)):
            for pair in itertools.combinations(part, 2):
                cell = matrix.cells[pair]
                if cell in _LEVELS and _LEVELS.index(cell) > place:
                    odd.append(pair)
    for a, b in dict.fromkeys(odd):
        why = "both are near to a third device: taken to be as near to one another"
        source.reading.leave_out(f"cell {a} {b} = {matrix.cells[a, b]}", why)


# Rates of adapters


_CA = re.compile(r"CA '([^']+)'")
_FIELD = re.compile(r"\s*([A-Za-z][\w ]*?)\s*:\s*(.*)$")


def _rates(source: Source, adapters: Sequence[str]) -> dict[str, float]:
    """Return the rates that the text of ``ibstat`` gives, 0 where a port is down."""
    path = source.told.get("ibstat")
    if path is None:
        return {}
    reading = source.reading
    reading.take("ibstat=", str(path))
    rates: dict[str, float] = {}
    port: dict[str, str] = {}
    adapter = ""
    for line in [*read_text(path, what="text of ibstat").splitlines(), "CA 'end'"]:
        if match := _CA.search(line):
            _keep_port(rates, adapter, port, source)
            adapter, port = match[1], {}
        elif match := _FIELD.match(line):
            if match[1].startswith("Port ") and not match[2]:
                _keep_port(rates, adapter, port, source)
                port = {}
            port[match[1]] = match[2].strip()
    reading.ignore("ibstat, other lines", "all but CA, Port, State and Rate")
    for name in rates:
        if name not in adapters:
            reading.leave_out(f"ibstat {name}", "the matrix has no such adapter")
    for name in adapters:
        if name not in rates:
            reading.leave_out(f"adapter {name}", "ibstat does not name it: its rate is not known")
    return rates


def _keep_port(
    rates: dict[str, float], adapter: str, port: Mapping[str, str], source: Source
) -> None:
    if not adapter or "Rate" not in port:
        return
    text, state = port["Rate"], port.get("State", "Active")
    match = re.match(r"(\d+(?:\.\d+)?)", text)
    if match is None:
        raise DataError(f"ibstat of {adapter} has the rate {text!r:.40}", hint="it is in Gbit/s")
    up = state == "Active"
    rates[adapter] = rates.get(adapter, 0.0) + (float(match[1]) * 1e9 / 8 if up else 0.0)
    if adapter in source.reading.names():
        return
    why = f"{text} Gbit/s" if up else f"its port is {state}: it carries nothing"
    (source.reading.take if up else source.reading.leave_out)(adapter, why)
