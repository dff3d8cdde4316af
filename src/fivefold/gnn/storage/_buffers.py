"""Memory that direct I/O and the GPU's copy engine accept: page-aligned, pinned on request."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fivefold.errors import UnsupportedError
from fivefold.gnn.storage._xxhash import PAGE_BYTES


def aligned_empty(
    shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8, *, pin: bool = False
) -> NDArray[Any]:
    """Array whose first byte lies on a page boundary; its contents are not set.

    Args:
        shape: Shape of the array.
        dtype: Its dtype.
        pin: Lock the pages for copies to a CUDA device.

    Returns:
        The array. A pinned one is released when the last view of it is gone.

    Raises:
        UnsupportedError: ``pin`` where torch sees no CUDA device, or the driver refuses.

    Examples:
        >>> buffer = aligned_empty((3, 1000), np.float32)
        >>> buffer.shape, buffer.ctypes.data % 4096
        ((3, 1000), 0)
    """
    kind = np.dtype(dtype)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    count = math.prod(sizes) * kind.itemsize
    # Pinned memory is registered by whole pages, so the last one must be ours as well.
    padded = -(-count // PAGE_BYTES) * PAGE_BYTES
    memory = np.empty(padded + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    if pin and padded:
        _pin(memory, start, padded)
    array: NDArray[Any] = memory[start : start + count].view(kind).reshape(sizes)
    return array


def _pin(memory: NDArray[np.uint8], start: int, count: int) -> None:
    import torch  # noqa: PLC0415 - loading torch takes seconds, and most callers do not pin

    if not torch.cuda.is_available():
        message = "memory cannot be pinned: torch sees no CUDA device"
        raise UnsupportedError(message, hint="leave pin=False")
    address = memory.ctypes.data + start
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(runtime.cudaHostRegister(address, count, 0))
    if status:
        raise UnsupportedError(
            f"CUDA error {status} on pinning {count} bytes",
            hint="raise the limit on locked memory (ulimit -l) or leave pin=False",
        )
    # The base array outlives every view of it.
    weakref.finalize(memory, runtime.cudaHostUnregister, address)
