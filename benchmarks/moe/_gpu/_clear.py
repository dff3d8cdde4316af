# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
"""The least that shows that kernels run: setting words to zero, as a launch of its own."""

import triton

from fivefold.moe.kernels.sync import clear


@triton.jit
def clear_kernel(words, num_words):
    """Set words to zero."""
    clear(words, num_words)
