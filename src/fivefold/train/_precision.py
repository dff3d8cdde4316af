"""Arithmetic of forward and backward: bfloat16 where the hardware has it, else float32."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_LOG = logging.getLogger(__name__)


def choose_precision(wished: str, device: torch.device) -> str:
    """Settle "auto": "bf16" only where matrix units for it exist.

    Emulated bfloat16 is slower than float32 (five times on a CPU without AVX512-BF16 or AMX).

    Args:
        wished: "auto", "fp32" or "bf16".
        device: Device of the model.

    Returns:
        "fp32" or "bf16".

    Examples:
        >>> choose_precision("fp32", torch.device("cpu"))
        'fp32'
    """
    native = _has_native_bf16(device)
    if wished == "auto":
        return "bf16" if native else "fp32"
    if wished == "bf16" and not native:
        _LOG.warning('this %s emulates bfloat16; precision = "fp32" is faster', device.type)
    return wished


def autocast_context(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Context of forward passes; parameters, gradients and optimizer stay in float32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _has_native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
