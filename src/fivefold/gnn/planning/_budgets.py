"""What a plan is made for: how much memory and disk there is, and how large a feature row is."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """How many bytes a packed store and its training may take.

    Args:
        host_bytes: Host memory for the feature cache, the buffers of batches in flight and the
            scratch memory of packing. The topology, the samples in flight, the model and the
            interpreter are not in it.
        disk_bytes: Disk space for all that is written: packed rows, cached rows, batch records
            and, for a while, the scratch files of packing. The features themselves are not in it.
        device_bytes: Device memory for the feature cache and the batches on the device.

    Raises:
        ConfigurationError: A budget is negative or no whole number.

    Examples:
        >>> Budgets(host_bytes=2 * 10**9, disk_bytes=40 * 10**9).device_bytes
        0
    """

    host_bytes: int
    disk_bytes: int
    device_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "device_bytes"):
            _check_count(name, getattr(self, name), least=0)


@dataclass(frozen=True, kw_only=True)
class FeatureInfo:
    """What planning has to know of a feature matrix.

    Args:
        num_nodes: Rows of the matrix.
        row_bytes: Bytes of a row, any number above zero.
        fingerprint: Text that changes when the matrix changes.

    Raises:
        ConfigurationError: A number is out of range.

    Examples:
        >>> FeatureInfo(num_nodes=1000, row_bytes=512, fingerprint="ab12").nbytes
        512000
    """

    num_nodes: int
    row_bytes: int
    fingerprint: str

    def __post_init__(self) -> None:
        _check_count("num_nodes", self.num_nodes, least=0)
        _check_count("row_bytes", self.row_bytes, least=1)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix."""
        return self.num_nodes * self.row_bytes


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            f"{name} must be a whole number of at least {least}; got {value!r}",
            hint="sizes are in bytes; fivefold.units.parse_bytes reads texts such as '2 GB'",
        )
