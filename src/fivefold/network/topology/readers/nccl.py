"""NCCL's topology files (``NCCL_TOPO_DUMP_FILE``, ``NCCL_TOPO_FILE``) and those of RCCL.

Elements mean what NCCL's own reader takes from them (src/graph/topo.cc): a ``cpu`` is a NUMA
domain, a ``pci`` a bridge or a device by its class, NVLinks are counted and not rated, all NVLinks
to switches end at one plane, ``net`` has megabits per second. Rates here are nominal ones, since
what software reaches of them is a question of the software.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from fivefold.errors import DataError
from fivefold.files import XmlElement, parse_xml
from fivefold.network.topology._build import Builder, Wire
from fivefold.network.topology._topology import Topology
from fivefold.network.topology.readers.boxes import Port, Source, joined, root_tag
from fivefold.units import format_bytes_per_s

OPTIONS = ("nvlink", "nvlinks", "pcie", "socket", "nic", "nics", "network")
_READ, _HARMLESS, _LEFT_OUT = "read", "harmless", "left out"
_PRODUCT = (_HARMLESS, "says which product it is, not what it carries")
_TAGS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "system": {"version": (_HARMLESS, "the form of the file")},
    "cpu": {
        "numaid": (_READ, "name of the NUMA domain"),
        "host_hash": (_READ, "the machine"),
        **dict.fromkeys(("arch", "vendor", "familyid", "modelid"), (_READ, "rate between sockets")),
        "affinity": (_HARMLESS, "processor cores"),
    },
    "pci": {
        "busid": (_READ, "name"), "class": (_READ, "bridge, GPU or adapter"),
        "link_speed": (_READ, "rate of a lane"), "link_width": (_READ, "lanes"),
        **dict.fromkeys(("vendor", "device", "subsystem_vendor", "subsystem_device"), _PRODUCT),
    },
    "gpu": {
        "dev": (_READ, "order, where there is no rank"), "rank": (_READ, "rank"),
        "sm": (_READ, "rate of an NVLink"), "gcn": (_READ, "rate of an xGMI link"),
        "arch": _PRODUCT, "localrank": (_HARMLESS, "rank says it"),
        "gdr": (_LEFT_OUT, "whether adapters reach its memory directly: not priced"),
        "mlopart": (_LEFT_OUT, "partitions of a GPU are not told apart"),
    },
    "nvlink": {
        "target": (_READ, "other end"), "count": (_READ, "links"),
        "tclass": (_READ, "GPU, NVSwitch or processor"),
    },
    "c2c": {"bw": (_READ, "MB/s of a link"), "count": (_READ, "links")},
    "pcilink": {"target": (_READ, "other switch")},
    "nic": {},
    "net": {
        "name": (_READ, "name"), "dev": (_READ, "whether NCCL uses it"),
        "speed": (_READ, "Mbit/s"), "latency": (_READ, "us"), "port": (_READ, "name"),
        "net": (_READ, "whether collectives use it"),
        "guid": (_HARMLESS, "the adapter's number"), "maxconn": (_HARMLESS, "most connections"),
        "gin": (_HARMLESS, "messages that GPUs start"), "rma": (_HARMLESS, "one-sided messages"),
        "gdr": (_LEFT_OUT, "whether it reaches GPUs' memory directly: not priced"),
        "coll": (_LEFT_OUT, "whether switches can sum for it: their slots are not said"),
        "rail": (_LEFT_OUT, "network=rails says it"),
        "plane": (_LEFT_OUT, "planes are not told apart"),
    },
}  # fmt: skip
_TAGS = {**_TAGS, "xgmi": _TAGS["nvlink"]}
_KEEP = (_HARMLESS, "keeps NCCL from leaving it out of a smaller communicator")
_MAY_HOLD = {
    "system": {"cpu"}, "cpu": {"pci", "nic"}, "nic": {"net"},
    "pci": {"pci", "gpu", "nic", "pcilink"}, "gpu": {"nvlink", "xgmi", "c2c"},
}  # fmt: skip
# Gigatransfers per second: bytes per second of a lane and direction, after line coding.
_LANES = {2.5: 2.5e9 * 0.8 / 8, 5.0: 5e9 * 0.8 / 8} | {
    speed: speed * 1e9 * 128 / 130 / 8 for speed in (8.0, 16.0, 32.0, 64.0, 128.0)
}
_UNKNOWN_SPEED, _UNKNOWN_WIDTH, _UNKNOWN_MBIT = 8.0, 16, 10_000
# NVIDIA's data sheets: one link in one direction, by compute capability.
_NVLINKS = ((100, 50e9), (90, 25e9), (87, 25e9), (86, 14.0625e9), (70, 25e9), (60, 20e9))
_KNOWN_SM = {60, 70, 72, 80, 86, 90, 100, 103}
# As RCCL wrote models before ROCm 6.
_GCN = {"906": "gfx906", "908": "gfx908", "910": "gfx90a", "940": "gfx942", "942": "gfx942"}
_XGMI = {"gfx942": 64e9, "gfx950": 76.8e9, "gfx90a": 50e9, "gfx908": 46e9, "gfx906": 46e9}
# What NCCL takes for the link between sockets: src/graph/topo.h.
_INTEL = ((0xCF, 40e9), (0x8F, 22e9), (0x55, 10e9), (0, 6e9))
_ARCHES = {"arm64": 6e9, "ppc64": 32e9}
_AMD, _OTHER = 16e9, 10e9


def recognises(text: str) -> bool:
    """Return whether a text is a topology of NCCL's."""
    return root_tag(text) == "system"


def read(text: str, source: Source, *, name: str) -> Topology:
    """Return the topology of a file of NCCL's.

    Raises:
        DataError: It is no XML, has no GPU, or an attribute that cannot be read; names its line.
    """
    root = parse_xml(text, where=source.reading.source)
    machine = _Machine(source, root)
    machine.account()
    machine.build()
    return joined(source, machine.builder, machine.ports, name=name)


@dataclass
class _Device:
    """An element below a NUMA domain that becomes a node, and where it hangs."""

    element: XmlElement
    kind: str
    above: str
    host: str
    name: str = ""
    nets: list[XmlElement] = field(default_factory=list)
    gpu: XmlElement | None = None


def _kind(pci: XmlElement) -> str:
    tags = {child.tag for child in pci.children}
    for tag, kind in (("gpu", "gpu"), ("nic", "nic"), ("pci", "pcie")):
        if tag in tags:
            return kind
    number = pci.attributes.get("class", "").lower()
    kinds = {"0x03": "gpu", "0x02": "nic", "0x0604": "pcie", "": "other"}
    return next((kind for start, kind in kinds.items() if number.startswith(start)), "other")


def _place(element: XmlElement) -> str:
    """Return the bus address of a device, or its line."""
    return element.attributes.get("busid") or f"in line {element.line}"


def _fail(element: XmlElement, what: str) -> NoReturn:
    message = f"line {element.line}, <{element.tag}>: {what}"
    raise DataError(message, hint="is it a file of NCCL_TOPO_DUMP_FILE?")


def _integer(element: XmlElement, name: str, default: int) -> int:
    text = element.attributes.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text, 16 if text.lower().startswith("0x") else 10)
    except ValueError:
        _fail(element, f"{name}={text!r:.40} is no whole number")
    if abs(value) > 1 << 40:
        _fail(element, f"{name}={text!r:.40} is out of range")
    return value


def _bus(text: str) -> int | None:
    digits = re.sub(r"[:.]", "", text.strip())
    return int(digits, 16) if re.fullmatch(r"[0-9a-fA-F]{1,20}", digits) else None


class _Machine:
    """Elements in their places, then nodes and links."""

    def __init__(self, source: Source, root: XmlElement) -> None:
        self.source, self.reading, self.root = source, source.reading, root
        self.builder = Builder()
        self.ports: list[Port] = []
        self._misplaced: dict[str, list[int]] = {}
        self._bridges: set[str] = set()
        self._links: list[tuple[_Device, XmlElement]] = []  # of NVLink and its like
        self._switch_links: list[tuple[_Device, XmlElement]] = []
        self._cpus: dict[str, XmlElement] = {}
        self._hosts: dict[str, str] = {}
        self._devices = list(self._found())
        self._by_bus = {
            (device.host, _bus(device.element.attributes.get("busid", ""))): device
            for device in self._devices
        }

    # Which elements there are

    def account(self) -> None:
        """Give every tag and attribute its place in the account."""
        counts: dict[str, int] = {}
        attributes: dict[tuple[str, str], int] = {}
        waiting: list[tuple[str | None, XmlElement]] = [(None, self.root)]
        while waiting:
            parent, element = waiting.pop()
            if parent is not None and element.tag not in _MAY_HOLD.get(parent, ()):
                key = f"{parent}/{element.tag}"
                self._misplaced.setdefault(key, []).append(element.line)
                continue
            counts[element.tag] = counts.get(element.tag, 0) + 1
            for key in element.attributes:
                attributes[element.tag, key] = attributes.get((element.tag, key), 0) + 1
            waiting += [(element.tag, child) for child in reversed(element.children)]
        for tag, number in counts.items():
            self.reading.take(tag, f"{number} of them")
        for tag, key in attributes:
            fate, why = _TAGS[tag].get(key, (_LEFT_OUT, "not known of NCCL's files"))
            fate, why = _KEEP if key == "keep" else (fate, why)
            note = {
                _READ: self.reading.take, _HARMLESS: self.reading.ignore,
                _LEFT_OUT: self.reading.leave_out,
            }[fate]  # fmt: skip
            note(f"{tag}@{key}", why)
        for key, lines in self._misplaced.items():
            where = f"line {', '.join(map(str, lines[:5]))}" + (", ..." if len(lines) > 5 else "")
            self.reading.leave_out(key, f"no such element stands there, with all in it: {where}")

    def _found(self) -> Iterator[_Device]:
        """Yield the devices from the processors downward, bridges before what hangs on them."""
        for number, cpu in enumerate(child for child in self.root.children if child.tag == "cpu"):
            hashed = cpu.attributes.get("host_hash", "")
            host = self._hosts.setdefault(hashed, f"box{len(self._hosts)}")
            numa = f"{host}/numa{_integer(cpu, 'numaid', number)}"
            if numa in self._cpus:
                _fail(cpu, f"numaid={cpu.attributes.get('numaid')!r} stands twice")
            self._cpus[numa] = cpu
            yield from self._below(cpu, numa, host)

    def _below(self, element: XmlElement, above: str, host: str) -> Iterator[_Device]:
        for child in element.children:
            if child.tag == "nic" and element.tag == "cpu":
                yield _Device(child, "nic", above, host, nets=_nets(child))
            if child.tag != "pci":
                continue
            device = _Device(child, _kind(child), above, host)
            self._leave_out(device)
            if device.kind == "pcie":
                device.name = f"{host}/pci {_place(child)}"
                while device.name in self._bridges:  # as NCCL, which keeps both
                    device.name += "'"
                self._bridges.add(device.name)
            if device.kind != "other":
                yield device
            if device.kind == "pcie":
                yield from self._below(child, device.name, host)

    def _leave_out(self, device: _Device) -> None:
        """Name what hangs on a device and is not looked at; keep what is its own."""
        pci, kind = device.element, device.kind
        if kind == "other":
            name = f"pci {_place(pci)}"
            name += f" in line {pci.line}" * (name in self.reading.names())  # of another host
            self.reading.leave_out(name, "neither bridge nor GPU nor adapter")
        if kind == "nic":
            device.nets = [n for child in pci.children if child.tag == "nic" for n in _nets(child)]
        for child in pci.children:
            if child.tag == "gpu" and device.gpu is None:
                device.gpu = child
            elif child.tag == "gpu":
                self.reading.leave_out(f"gpu in line {child.line}", "another rank on one GPU")
            elif kind != "pcie" and (child.tag == "pci" or (kind == "gpu" and child.tag == "nic")):
                name = f"{child.tag} in line {child.line}"
                self.reading.leave_out(name, f"it hangs on a {kind}: NCCL does not look there")

    # Nodes and links

    def build(self) -> None:
        """Make the nodes in the order of ranks, and the links."""
        gpus = self._gpus()
        prefix = len(self._hosts) > 1
        amd = any(gpu.gpu is not None and "gcn" in gpu.gpu.attributes for gpu in gpus)
        for number, gpu in enumerate(gpus):
            name = f"{'amdgpu' if amd else 'gpu'}{number}"
            gpu.name = f"{gpu.host}/{name}" if prefix else name
            self.builder.node(gpu.name, "gpu", host=gpu.host)
        bare = {
            name: name if prefix else name.removeprefix(f"{name.partition('/')[0]}/")
            for name in self._names()
        }
        self._bare = bare
        for numa in self._cpus:
            self.builder.node(bare[numa], "pcie", host=numa.partition("/")[0])
        for device in self._devices:
            if device.kind == "pcie":
                self.builder.node(bare[device.name], "pcie", host=device.host)
        self._sockets()
        self._adapters(prefix=prefix)
        for device in self._devices:
            if device.name:
                self._to_above(device)
        self._nvlinks(gpus)
        self._between_switches()

    def _names(self) -> list[str]:
        return [*self._cpus, *(device.name for device in self._devices if device.kind == "pcie")]

    def _gpus(self) -> list[_Device]:
        found = [device for device in self._devices if device.kind == "gpu"]
        used = [
            device for device in found if device.gpu is not None and "rank" in device.gpu.attributes
        ]
        if not used:
            used = [device for device in found if device.gpu is not None] or found
            if found and used[0].gpu is None:
                self.reading.assume(
                    "gpus", len(found), "devices of class 0x03; NCCL asks the driver for the rest"
                )
            elif found:
                self.reading.assume("ranks", "in order", "no gpu says its rank")
        if not used:
            raise DataError(
                f"{self.reading.source} names no GPU",
                hint="NCCL writes them where ranks run: set NCCL_TOPO_DUMP_FILE in a job that uses "
                "all GPUs of the machine",
            )
        for device in found:
            if device not in used:
                self.reading.leave_out(
                    f"pci {_place(device.element)}", "a GPU that no rank uses, as in NCCL"
                )
        ranks = [_integer(d.gpu, "rank", place) if d.gpu else place for place, d in enumerate(used)]
        if len(set(ranks)) < len(ranks):
            _fail(self.root, "two GPUs have one rank")
        return [
            device for _, device in sorted(zip(ranks, used, strict=True), key=lambda pair: pair[0])
        ]

    def _sockets(self) -> None:
        numas = list(self._cpus)
        for first in numas:
            for second in numas:
                if first != second and first.partition("/")[0] == second.partition("/")[0]:
                    self.builder.send(
                        self._bare[first], self._bare[second], Wire(self._socket(first))
                    )

    def _socket(self, numa: str) -> float:
        cpu = self._cpus[numa]
        arch, vendor = cpu.attributes.get("arch", ""), cpu.attributes.get("vendor", "")
        rate, whose = _ARCHES.get(arch, _OTHER), arch or "a processor that is not named"
        if vendor == "GenuineIntel":
            model = _integer(cpu, "modelid", 0) if _integer(cpu, "familyid", 0) == 6 else 0
            rate, whose = next(r for least, r in _INTEL if model >= least), f"Intel, model {model}"
        elif vendor in {"AuthenticAMD", "AMD"}:
            rate, whose = _AMD, "AMD"
        why = f"what NCCL takes for {whose}" if rate != _OTHER or vendor else f"for {whose}"
        return self.source.told_or("socket", rate, why, name=f"link between sockets ({whose})")

    def _adapters(self, *, prefix: bool) -> None:
        for device in self._devices:
            if device.kind != "nic":
                continue
            nets = [net for net in device.nets if self._is_used(net)]
            names = [net.attributes.get("name") or f"net{_integer(net, 'dev', 0)}" for net in nets]
            known = {node.name for node in self.builder.nodes}
            base = (
                names[0]
                if names
                else f"nic{sum(node.kind == 'nic' for node in self.builder.nodes)}"
            )
            base = f"{device.host}/{base}" if prefix else base
            while base in known:
                base += "'"
            device.name = self.builder.node(base, "nic", host=device.host)
            for net, name in zip(nets, names, strict=True):
                self.ports.append(Port(base, name, self._speed(net, name), _latency_s(net)))
            if not nets and not device.nets:
                self.ports.append(Port(base, base, None))

    def _is_used(self, net: XmlElement) -> bool:
        used = "dev" in net.attributes and _integer(net, "net", 1) > 0
        if not used:
            name = f"net {net.attributes.get('name', '')} in line {net.line}"
            self.reading.leave_out(name, "NCCL does not use it: no dev, or net=0")
        return used

    def _speed(self, net: XmlElement, name: str) -> float:
        mbit = _integer(net, "speed", 0)
        if mbit <= 0:
            mbit = _UNKNOWN_MBIT
            self.reading.assume(
                f"speed of {name} (line {net.line})", "10 Gbit/s",
                "as NCCL does where none is said; nic= says another", decisive=True,
            )  # fmt: skip
        return mbit * 1e6 / 8

    def _to_above(self, device: _Device) -> None:
        above = self._bare[device.above]
        name = self._bare.get(device.name, device.name)
        if device.element.tag == "nic":  # no PCIe is said of it
            rate = self.source.told_or(
                "pcie", 32e9, "the file does not say where it is plugged in", name=f"PCIe of {name}"
            )
        else:
            rate = self._pcie(device.element)
        self.builder.join(name, above, Wire(rate))

    def _pcie(self, pci: XmlElement) -> float:
        if "pcie" in self.source.told:
            return self.source.told_or("pcie", 0.0, "")
        text = pci.attributes.get("link_speed", "")
        match = re.match(r"\s*([0-9]+(?:\.[0-9]+)?)\s*GT/s", text)
        speed = float(match[1]) if match else 0.0
        width = _integer(pci, "link_width", 0)
        bus = _place(pci)
        if speed not in _LANES:
            speed = _UNKNOWN_SPEED
            why = f"link_speed is {text!r:.20}; so NCCL takes it"
            self._assume_of(f"link_speed of pci {bus}", "8 GT/s", why)
        if width <= 0:
            width = _UNKNOWN_WIDTH
            self._assume_of(f"link_width of pci {bus}", 16, "none is said; so NCCL takes it")
        return _LANES[speed] * width

    def _assume_of(self, name: str, value: object, why: str) -> None:
        if name not in self.reading.names():
            self.reading.assume(name, value, f"{why}; pcie= says another")

    # NVLink and its like

    def _nvlinks(self, gpus: list[_Device]) -> None:
        plane, used = "", {id(gpu): gpu for gpu in gpus}
        inside = [part for gpu in gpus if gpu.gpu is not None for part in gpu.gpu.children]
        if not any(part.tag in {"nvlink", "xgmi"} for part in inside):
            self._told_nvlinks(gpus)
        for gpu in used.values():
            switched: dict[float, int] = {}
            for link in gpu.gpu.children if gpu.gpu is not None else ():
                if link.tag == "c2c":
                    self._c2c(gpu, link)
                if link.tag not in {"nvlink", "xgmi"}:
                    continue
                count = _integer(link, "count", 1)
                target = self._target(gpu, link, used)
                if count < 1 or target is None:
                    continue
                rate = self._link_rate(gpu, link.tag)
                if target == "nvswitch":
                    switched[rate] = switched.get(rate, 0) + count
                elif target == "cpu":
                    self.builder.join(
                        gpu.name, self._bare[self._numa_of(gpu)], Wire(rate, count=count)
                    )
                else:
                    self.builder.send(gpu.name, target, Wire(rate, count=count))
            for rate, count in switched.items():
                host = gpu.host if len(self._hosts) == 1 else None
                plane = plane or self.builder.node("nvswitch", "nvswitch", host=host)
                self.builder.join(gpu.name, plane, Wire(rate, count=count))

    def _told_nvlinks(self, gpus: list[_Device]) -> None:
        """Join GPUs of a file without NVLinks, as those are that clouds give to NCCL."""
        number = self.source.told_or(
            "nvlinks", 0, "the file has none; NCCL asks the driver for them", decisive=True
        )
        if number:
            gpu = gpus[0].gpu
            sm = _integer(gpu, "sm", 0) if gpu is not None else 0
            rate = next((rate for least, rate in _NVLINKS if sm >= least), 25e9)
            why = f"one link and direction of sm {sm}" if sm else "V100, A100 and H100"
            rate = self.source.told_or("nvlink", rate, why, decisive=not sm)
            plane = self.builder.node("nvswitch", "nvswitch", host=gpus[0].host)
            for gpu_of in gpus:
                self.builder.join(gpu_of.name, plane, Wire(rate, count=number))

    def _target(self, gpu: _Device, link: XmlElement, used: Mapping[int, _Device]) -> str | None:
        """Return the name of the GPU at the other end, nvswitch or cpu; None where it is gone."""
        kind, text = link.attributes.get("tclass", "").lower(), link.attributes.get("target", "")
        other = self._by_bus.get((gpu.host, _bus(text)))
        if not kind:
            kind = "0x03" if other is not None and other.kind == "gpu" else "0x068000"
            name = f"tclass of {link.tag} in line {link.line}"
            self.reading.assume(name, kind, "by the device that target names", decisive=True)
        if not kind.startswith("0x03") and link.tag != "xgmi":
            return "cpu" if kind == "0x068001" else "nvswitch"
        if other is not None and id(other) in used and other is not gpu:
            return other.name
        name = f"{link.tag} in line {link.line}"
        self.reading.leave_out(
            name, f"it leads to {text or 'nothing'}, which is no rank's GPU here"
        )
        return None

    def _link_rate(self, gpu: _Device, tag: str) -> float:
        assert gpu.gpu is not None, "links stand below a gpu"
        if tag == "xgmi":
            model = gpu.gpu.attributes.get("gcn", "")
            key = _GCN.get(model, model).partition(":")[0]
            return self._said_rate(_XGMI.get(key), 50e9, f"xGMI of {model or 'a GPU'}", "AMD")
        sm = _integer(gpu.gpu, "sm", 0)
        rate = next((rate for least, rate in _NVLINKS if sm >= least), 20e9)
        known = rate if sm in _KNOWN_SM else None
        return self._said_rate(known, rate, f"NVLink of sm {sm}", "NVIDIA")

    def _said_rate(self, known: float | None, likely: float, name: str, whose: str) -> float:
        """Return the rate of a link that the file says by its GPU's model; else what is likely."""
        if known is None or "nvlink" in self.source.told:
            why = f"one link and direction; its GPU is none that is known of {whose}"
            return self.source.told_or("nvlink", likely, why, name=name, decisive=True)
        if name not in self.reading.names():
            rate = format_bytes_per_s(known)
            self.reading.take(name, f"{rate} a link and direction, by {whose}'s data sheets")
        return known

    def _c2c(self, gpu: _Device, link: XmlElement) -> None:
        rate, count = _integer(link, "bw", 0) * 1e6, _integer(link, "count", 1)
        if rate > 0 and count > 0:
            self.builder.join(gpu.name, self._bare[self._numa_of(gpu)], Wire(rate, count=count))
        else:
            self.reading.leave_out(f"c2c in line {link.line}", "it says no rate")

    def _numa_of(self, device: _Device) -> str:
        above = device.above
        parents = {one.name: one.above for one in self._devices if one.kind == "pcie"}
        while above in parents:
            above = parents[above]
        return above

    def _between_switches(self) -> None:
        for device in self._devices:
            for link in device.element.children:
                if link.tag != "pcilink":
                    continue
                other = self._by_bus.get((device.host, _bus(link.attributes.get("target", ""))))
                if (
                    device.kind != "pcie"
                    or other is None
                    or other.kind != "pcie"
                    or other is device
                ):
                    self.reading.leave_out(f"pcilink in line {link.line}", "no switch is at an end")
                    continue
                ends = self._bare[device.name], self._bare[other.name]
                self.builder.send(*ends, Wire(self._pcie(device.element)))


def _nets(nic: XmlElement) -> list[XmlElement]:
    return [child for child in nic.children if child.tag == "net"]


def _latency_s(net: XmlElement) -> float:
    text = net.attributes.get("latency", "0") or "0"
    try:
        value = float(text)
    except ValueError:
        _fail(net, f"latency={text!r:.40} is no number")
    if not 0 <= value < 1e6:
        _fail(net, f"latency={text!r:.40} is no time in microseconds")
    return value * 1e-6
