"""Settings of the loaders, checked where they are made; and how many buffers a budget allows."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike

from fivefold.errors import ConfigurationError, InfeasibleError, UnsupportedError
from fivefold.gnn.loading._assemble import checked_form
from fivefold.gnn.loading._order import Remainder
from fivefold.units import format_bytes

DEFAULT_PREFETCH = 4
FEWEST_BUFFERS = 2  # one is with the training loop while the next is prepared


def checked_device(device: torch.device | str) -> torch.device:
    """The device, if torch can use it.

    Raises:
        ConfigurationError: There is no such kind of device.
        UnsupportedError: It is a CUDA device, and torch sees none.
    """
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(
            f"there is no device {device!r}", hint='use "cpu" or "cuda"'
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        message = f"the batches were wanted on {chosen}, but torch sees no CUDA device"
        raise UnsupportedError(message, hint='use device="cpu"')
    return chosen


def checked_ids(ids: ArrayLike, num_nodes: int) -> npt.NDArray[np.int64]:
    """Seeds from ids or from a mask over all nodes.

    Raises:
        ConfigurationError: They are neither, out of range, or not distinct.
    """
    values = np.asarray(ids)
    if values.dtype == bool and values.ndim == 1:
        if len(values) != num_nodes:
            raise ConfigurationError(
                f"the mask of ids has {len(values)} entries for {num_nodes} nodes",
                hint="give one boolean per node, or ids",
            )
        return np.flatnonzero(values)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise ConfigurationError(
            f"ids have shape {list(values.shape)} and dtype {values.dtype}",
            hint="give a list of node ids, or a mask",
        )
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < num_nodes:
        raise ConfigurationError(
            f"ids go from {values.min()} to {values.max()}, the graph has {num_nodes} nodes",
            hint="ids of nodes count from 0",
        )
    if np.unique(values).size != values.size:
        message = "ids name a node twice"
        raise ConfigurationError(message, hint="name each node once")
    return np.ascontiguousarray(values, np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How a ``DiskLoader`` works; its arguments, under the same names.

    Raises:
        ConfigurationError: A value is out of range.
    """

    device: torch.device
    shuffle: bool | Literal["segments"]
    seed: int
    prefetch: int | None
    rank: int
    world_size: int
    memory_bytes: int | None
    form: str
    remainder: Remainder
    timeout_s: float

    def __post_init__(self) -> None:
        checked_form(self.form)
        if self.prefetch is not None and self.prefetch < 1:
            raise ConfigurationError(f"prefetch must be at least 1; got {self.prefetch}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"rank must be in 0..world_size-1; got rank={self.rank}, "
                f"world_size={self.world_size}"
            )
        if not self.timeout_s > 0:
            raise ConfigurationError(f"timeout_s must be positive; got {self.timeout_s}")
        if self.seed < 0:
            raise ConfigurationError(f"seed must not be negative; got {self.seed}")
        if self.shuffle not in (True, False, "segments"):
            raise ConfigurationError(
                f"shuffle is {self.shuffle!r}", hint='use True, False, None or "segments"'
            )
        if self.remainder not in ("drop", "repeat"):
            raise ConfigurationError(f'remainder is {self.remainder!r}; use "drop" or "repeat"')


def buffer_count(*, batch_bytes: int, memory_bytes: int | None, prefetch: int | None) -> int:
    """Buffers of a ring: one with the training loop, the others being filled or ready.

    Args:
        batch_bytes: Bytes of the largest batch.
        memory_bytes: What all buffers may take; None for no limit.
        prefetch: Batches that are prepared ahead; None for as many as are useful and fit.

    Raises:
        InfeasibleError: The budget does not hold the buffers that were asked for.

    Examples:
        >>> buffer_count(batch_bytes=100, memory_bytes=350, prefetch=None)
        3
    """
    wanted = 1 + (DEFAULT_PREFETCH if prefetch is None else prefetch)
    fitting = wanted if memory_bytes is None else memory_bytes // max(batch_bytes, 1)
    least = FEWEST_BUFFERS if prefetch is None else wanted
    if fitting < least:
        raise InfeasibleError(
            f"{least} buffers of the largest batch take {format_bytes(least * batch_bytes)}, more "
            f"than memory_bytes={memory_bytes}",
            hint="raise memory_bytes, lower prefetch, or sample smaller batches",
        )
    return min(wanted, fitting)
