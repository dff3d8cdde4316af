"""Memory of large results in huge pages, where the system lets a process ask for them.

The C library takes blocks from 32 MiB on from the system each time and gives them back when they
are freed; the system then fills them with zeros page by page, at the first touch, 4 KiB each. For
the gradients of many experts' weights that costs as much as a product. Asked for huge pages
(madvise(2), MADV_HUGEPAGE), it takes one fault for 2 MiB. Values do not depend on any of this.
"""

from __future__ import annotations

import math
import mmap

import torch

LARGE_BYTES = 32 * 2**20  # the C library's own limit, mallopt(3): M_MMAP_THRESHOLD


def large_empty(like: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return a contiguous tensor of any values, in huge pages where it is large and on the CPU.

    Args:
        like: Of this data type and on this device.
        sizes: Its shape.

    Returns:
        The tensor.
    """
    num_bytes = math.prod(sizes) * like.element_size()
    if like.device.type != "cpu" or num_bytes < LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(sizes)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages, or no memory, which torch then says
        return like.new_empty(sizes)
    return torch.frombuffer(memory, dtype=like.dtype).view(sizes)
