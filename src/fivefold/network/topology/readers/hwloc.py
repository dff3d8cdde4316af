"""hwloc's XML (``lstopo box.xml``): the tree of PCIe with the rate of every link.

GPUs and RDMA adapters are PCI devices below bridges, and those below a package, a group or the
machine. NVLinks and what adapters carry are not said there.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fivefold.errors import DataError
from fivefold.files import XmlElement, parse_xml
from fivefold.network.topology._build import Builder, Wire
from fivefold.network.topology._topology import Topology
from fivefold.network.topology.readers.boxes import Port, Source, joined, root_tag

OPTIONS = ("nvlinks", "nvlink", "pcie", "socket", "nic", "nics", "network")
_AMD = "1002"
_GPU_VENDORS = ("10de", _AMD)  # NVIDIA, AMD: others' class 03 is a console's display
_OPEN_FABRICS = "3"  # osdev_type of an RDMA device
_PLACES = ("Machine", "Package", "Socket", "Group", "NUMANode", "Die")
_READ = {
    "object": {"type", "os_index", "name", "osdev_type", "bridge_type", "pci_busid", "pci_type",
               "pci_link_speed"},
    "topology": set[str](),
}  # fmt: skip
_NUMBERED = re.compile(r"(?:cuda|nvml|rsmi)\d{1,4}")
_TYPE = re.compile(r"([0-9a-fA-F]{4})\s*\[([0-9a-fA-F]{4}):")


def recognises(text: str) -> bool:
    """Return whether a text is hwloc's XML."""
    return root_tag(text) == "topology" and "<object" in text


def read(text: str, source: Source, *, name: str) -> Topology:
    """Return the topology of a file of ``lstopo``.

    Raises:
        DataError: It is no XML, has no GPU, or a value that cannot be read.
    """
    root = parse_xml(text, where=source.reading.source)
    _account(root, source)
    tree = _Tree(source)
    for child in root.children:
        tree.walk(child, "", ())
    return joined(source, *tree.built(), name=name)


def _account(root: XmlElement, source: Source) -> None:
    """Give every tag, every type of object and every attribute its place."""
    attributes: dict[str, set[str]] = {}
    kinds: set[str] = set()
    waiting = [root]
    while waiting:
        element = waiting.pop()
        attributes.setdefault(element.tag, set()).update(element.attributes)
        if element.tag == "object":
            kinds.add(element.attributes.get("type", ""))
        waiting += element.children
    reading = source.reading
    for tag, keys in attributes.items():
        if tag in _READ:
            reading.take(tag)
        elif tag.startswith("distances"):
            reading.leave_out(tag, "distances, NVLinks' among them: nvlinks= says these")
        else:
            reading.ignore(tag, "memory, processor cores and names of products")
        for key in sorted(keys):
            place = reading.take if key in _READ.get(tag, ()) else reading.ignore
            place(f"{tag}@{key}", "")
    for kind in sorted(kinds):
        known = kind in (*_PLACES, "Bridge", "PCIDev", "OSDev")
        (reading.take if known else reading.ignore)(f"object {kind}", "")


@dataclass
class _Device:
    name: str
    kind: str
    above: tuple[str, ...]  # nodes from the machine down to the one that it hangs on
    rate: float
    order: int
    vendor: str = ""


class _Tree:
    """Devices that matter, and the bridges above them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.devices: list[_Device] = []
        self.rates: dict[str, float] = {}  # of the link from a node to what is above it

    def walk(self, element: XmlElement, place: str, above: tuple[str, ...]) -> None:
        """Look at an object and those in it."""
        if element.tag != "object":
            return
        kind = element.attributes.get("type", "")
        if kind in _PLACES and kind not in ("NUMANode", "Die"):
            number = element.attributes.get("os_index")  # Groups have none
            place = f"{kind.lower()}{number or f' in line {element.line}'}"
        elif kind == "Bridge":
            bus = element.attributes.get("pci_busid")
            if bus:
                node = f"pci {bus}"
                self.rates[node] = self._rate(element, bus, bridge=True)
                above = (*above, node)
        elif kind == "PCIDev":
            self._device(element, (place, *above))
        for child in element.children:
            self.walk(child, place, above)

    def _device(self, element: XmlElement, above: tuple[str, ...]) -> None:
        bus = element.attributes.get("pci_busid", f"in line {element.line}")
        match = _TYPE.match(element.attributes.get("pci_type", ""))
        number, vendor = (match[1], match[2].lower()) if match else ("", "")
        inside = [child.attributes for child in element.children if child.tag == "object"]
        names = [one.get("name", "") for one in inside]
        fabrics = [one.get("name", bus) for one in inside if one.get("osdev_type") == _OPEN_FABRICS]
        if number.startswith("03") and vendor in _GPU_VENDORS:
            order = next((int(n[4:]) for n in names if _NUMBERED.fullmatch(n)), -1)
            rate = self._rate(element, bus, bridge=False)
            self.devices.append(_Device(f"gpu {bus}", "gpu", above, rate, order, vendor))
        elif number.startswith("02") and (fabrics or number == "0207"):
            name = fabrics[0] if fabrics else f"nic {bus}"
            rate = self._rate(element, bus, bridge=False)
            self.devices.append(_Device(name, "nic", above, rate, 0))
        else:
            why = "neither a GPU nor an RDMA adapter"
            self.source.reading.leave_out(f"PCIDev {bus}", f"class {number or 'not said'}: {why}")

    def _rate(self, element: XmlElement, bus: str, *, bridge: bool) -> float:
        if "pcie" in self.source.told:
            return self.source.told_or("pcie", 0.0, "")
        text = element.attributes.get("pci_link_speed", "0")
        try:
            gigabytes = float(text)
        except ValueError:
            gigabytes = math.nan
        if not 0 <= gigabytes < 1e6:
            message = f"line {element.line}: pci_link_speed={text!r:.40} is no rate in GB/s"
            raise DataError(message, hint="is it a file of lstopo?")
        if gigabytes and "rates of PCIe" not in self.source.reading.names():
            why = "a device at rest may run its link slower than it can; pcie= says another"
            self.source.reading.assume("rates of PCIe", "those when lstopo ran", why)
        if gigabytes == 0 and not bridge:
            why = "0 is said; PCIe 3.0 with 16 lanes, as NCCL takes it; pcie= says another"
            self.source.reading.assume(f"pci_link_speed of {bus}", "15.75 GB/s", why)
        return gigabytes * 1e9 or 15.75e9

    def built(self) -> tuple[Builder, list[Port]]:
        """Return nodes and links, of bridges only those above a GPU or an adapter."""
        source, builder = self.source, Builder()
        gpus = [device for device in self.devices if device.kind == "gpu"]
        if not gpus:
            message = f"{source.reading.source} has no GPU of NVIDIA's or AMD's"
            raise DataError(
                message, hint="run lstopo --whole-io box.xml where the driver is loaded"
            )
        if any(device.order < 0 for device in gpus):
            source.reading.assume(
                "ranks", "in order of the file", "no GPU has a cuda, nvml or rsmi device"
            )
        else:
            gpus.sort(key=lambda device: device.order)
        kind = "amdgpu" if all(device.vendor == _AMD for device in gpus) else "gpu"
        for number, device in enumerate(gpus):
            device.name = builder.node(f"{kind}{number}", "gpu", host="box0")
        adapters = [device for device in self.devices if device.kind == "nic"]
        for device in adapters:
            builder.node(device.name, "nic", host="box0")
        known: set[str] = set()
        for device in [*gpus, *adapters]:
            for upper, node in zip(("", *device.above), device.above, strict=False):
                if node not in known:
                    known.add(builder.node(node, "pcie", host="box0"))
                    if upper:
                        builder.join(node, upper, Wire(self.rates[node]))
            builder.join(device.name, device.above[-1], Wire(device.rate))
        self._sockets(builder, known)
        self._nvlinks(builder, [device.name for device in gpus])
        return builder, [Port(device.name, device.name, None) for device in adapters]

    def _sockets(self, builder: Builder, known: set[str]) -> None:
        tops = sorted(node for node in known if node not in self.rates)
        for first in tops:
            for second in tops:
                if first < second:
                    rate = self.source.told_or(
                        "socket", 16e9, "what NCCL takes for AMD's processors"
                    )
                    builder.join(first, second, Wire(rate))

    def _nvlinks(self, builder: Builder, gpus: list[str]) -> None:
        number = self.source.told_or(
            "nvlinks", 0, "lstopo's objects do not say NVLinks", decisive=len(gpus) > 1
        )
        if number:
            rate = self.source.told_or("nvlink", 25e9, "V100, A100 and H100", decisive=True)
            plane = builder.node("nvswitch", "nvswitch", host="box0")
            for gpu in gpus:
                builder.join(gpu, plane, Wire(rate, count=number))
