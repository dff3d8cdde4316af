"""Compile the backward's kernels for a GPU that is not there; see ``_offline``."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fivefold.errors import UnsupportedError
from fivefold.moe._activations import activation_named
from fivefold.moe._offline import _DATA, _TABLES, _TYPES, OfflineKernel, _compiled
from fivefold.moe._tiles import Tiles, backward_tiles_for, constants_for

BACKWARD_LAUNCHES = {
    "ranges": "ranges_kernel",
    "d_hidden": "hidden_gradient_kernel",
    "d_x": "token_gradient_kernel",
    "d_w13": "weight_gradient_kernel",
    "d_w2": "weight_gradient_kernel",
    "d_b13": "bias_gradient_kernel",
    "d_b2": "bias_gradient_kernel",
    "d_weights": "routing_gradient_kernel",
    "hidden": "first_kernel",
}
"""What is launched, and the kernel that does it; "hidden" where W13 x is computed again."""


def compile_backward(  # noqa: PLR0913 - the sizes of a call
    launch: str,
    *,
    dtype: torch.dtype,
    activation: str,
    precision: str = "ieee",
    hidden: int = 2048,
    intermediate: int = 2048,
    num_experts: int = 32,
    top_k: int = 2,
    weight_on_input: bool = False,
    by_descriptor: bool = True,
    tiles: Tiles | None = None,
) -> OfflineKernel:
    """Compile one of the backward's launches, with biases.

    Args:
        launch: A key of ``BACKWARD_LAUNCHES``.
        dtype: Of tokens and weights.
        activation: A key of ``ACTIVATIONS``.
        precision: Of float32.
        hidden: H.
        intermediate: I.
        num_experts: E.
        top_k: K.
        weight_on_input: As in ``fused_moe``.
        by_descriptor: Whether weights come through the tensor memory accelerator.
        tiles: The variant; None: the one that a call would use.

    Returns:
        The kernel.

    Raises:
        UnsupportedError: Triton's interpreter is switched on: then there is no compiler.
    """
    forward = launch == "hidden"
    module = "_kernels_triton" if forward else "_backward_kernels_triton"
    kernel = getattr(importlib.import_module(f"fivefold.moe.{module}"), BACKWARD_LAUNCHES[launch])
    if type(kernel).__name__ != "JITFunction":
        message = "kernels cannot be compiled while TRITON_INTERPRET=1"
        raise UnsupportedError(message, hint="unset it and start again")
    how: dict[str, Any] = {"precision": precision, "by_descriptor": by_descriptor}
    if tiles is None:
        tiles = backward_tiles_for(dtype, interpreted=False, **how)
    kind = activation_named(activation)
    constants = constants_for(
        tiles,
        activation=kind,
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        top_k=top_k,
        weight_on_input=weight_on_input,
        interpreted=False,
        **how,
    )
    width = kind.width(intermediate)
    shapes: dict[str, dict[str, Any]] = {
        "d_w13": {"P": width, "Q": hidden, "GATHER_LEFT": False, "WEIGHTED": weight_on_input},
        "d_w2": {"P": hidden, "Q": intermediate, "GATHER_LEFT": True, "WEIGHTED": False},
        "d_b13": {"N": width, "GATHER": False, "WEIGHTED": False},
        "d_b2": {"N": hidden, "GATHER": True, "WEIGHTED": not weight_on_input},
        "hidden": {"inner": None},
    }
    constants |= {"D": width, **shapes.get(launch, {})}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = _signature(kernel, constants, tiles, _TYPES[dtype], by_descriptor=by_descriptor)
    if launch == "d_weights":
        signature["out"] = "*fp32"
    return _compiled(kernel, signature, constants, warps=tiles.warps, capability=90)


def _signature(
    kernel: Any, constants: dict[str, Any], tiles: Tiles, data: str, *, by_descriptor: bool
) -> dict[str, str]:
    names = _DATA | {"gradient", "hidden", "d_hidden", "left", "right", "source"}
    tables = _TABLES | {"range_first", "range_stop"}
    known = dict.fromkeys(names | {"w13", "w13_deep", "w2_deep"}, f"*{data}")
    known |= dict.fromkeys(tables, "*i32") | {"weights": "*fp32", "partial": "*fp32"}
    if by_descriptor:
        blocks = {
            "w13": (tiles.columns, tiles.depth),
            "w13_deep": (tiles.depth, tiles.second_columns),
            "w2_deep": (tiles.depth, tiles.columns),
        }
        known |= {name: f"tensordesc<{data}[{a},{b}]>" for name, (a, b) in blocks.items()}
    return {
        name: "constexpr" if name in constants else known.get(name, "i32")
        for name in kernel.arg_names
    }
