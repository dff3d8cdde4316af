"""What stands in a rack: a host with its GPUs, its inner links and its network ports."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.errors import ConfigurationError
from fivefold.network.topology._build import Builder, Wire, check_count
from fivefold.network.topology._elements import NodeKind


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """A host: GPUs on one NVSwitch plane, and its ports to the network.

    Without ``nics`` each GPU is itself a port: its link to the fabric starts at the GPU, as where a
    NIC of the same rate lies in series. With ``nics`` the GPUs and NICs are dealt out in order to
    PCIe switches, one switch for each NIC (or GPU, where there are fewer), and a GPU reaches the
    NICs of its own switch only; others it reaches through NVLink and another GPU.

    Args:
        gpus: GPUs in the host.
        nvlink: Rate of each GPU's link to the NVSwitch plane; None where GPUs have none.
        nvlink_latency: Latency of each of those links.
        nics: NICs in the host; None for one port per GPU without a NIC of its own.
        pcie: Rate of the links between GPU, PCIe switch and NIC.
        pcie_latency: Latency of each of those links.
        kind: Kind of the compute nodes, ``gpu`` or ``cpu``.

    Raises:
        ConfigurationError: A count is below one, or the kind is no compute node.

    Examples:
        >>> HostSpec(gpus=8, nics=4).ports
        4
    """

    gpus: int = 1
    nvlink: str | float | None = "300 GB/s"
    nvlink_latency: str | float = 0.0
    nics: int | None = None
    pcie: str | float = "32 GB/s"
    pcie_latency: str | float = 0.0
    kind: NodeKind = "gpu"

    def __post_init__(self) -> None:
        check_count("gpus of a host", self.gpus)
        if self.nics is not None:
            check_count("nics of a host", self.nics)
        if self.kind not in ("gpu", "cpu"):
            raise ConfigurationError(
                f"the compute nodes of a host are of kind {self.kind!r}", hint="use gpu or cpu"
            )

    @property
    def ports(self) -> int:
        """Links to the network."""
        return self.gpus if self.nics is None else self.nics


def add_host(builder: Builder, name: str, spec: HostSpec) -> list[str]:
    """Add a host's nodes and inner links.

    Returns:
        The nodes that its ports are at, in order.
    """
    if spec.gpus == 1 and spec.nics is None:
        return [builder.node(name, spec.kind, host=name)]
    gpus = builder.row(f"{name}/{spec.kind}", spec.gpus, kind=spec.kind, host=name)
    if spec.gpus > 1 and spec.nvlink is not None:
        plane = builder.node(f"{name}/nvswitch", "nvswitch", host=name)
        for gpu in gpus:
            builder.join(gpu, plane, Wire(spec.nvlink, spec.nvlink_latency))
    if spec.nics is None:
        return gpus
    groups = min(spec.gpus, spec.nics)
    wire = Wire(spec.pcie, spec.pcie_latency)
    roots = builder.row(f"{name}/pcie", groups, kind="pcie", host=name)
    nics = builder.row(f"{name}/nic", spec.nics, kind="nic", host=name)
    for devices in (gpus, nics):
        for index, device in enumerate(devices):
            builder.join(device, roots[index * groups // len(devices)], wire)
    return nics
