"""Compile the exchange kernel for a GPU that is not there; see ``_offline``."""

from __future__ import annotations

import importlib
from typing import Any

from fivefold.errors import UnsupportedError
from fivefold.moe._exchange_layout import ExchangeConfig, constants_of, heap_layout, private_layout
from fivefold.moe._offline import _TYPES, OfflineKernel, _compiled
from fivefold.moe._routing import Router

_MODULES = {
    "exchange_kernel": "_exchange_kernel_triton",
    "scatter_kernel": "_exchange_rows_triton",
    "gather_kernel": "_exchange_rows_triton",
}
_DATA = frozenset({"x", "gate", "b13", "b2", "out", "inner", "rows"})
_POINTERS = {
    "ids": "*i64",
    "weights": "*fp32",
    "selection_bias": "*fp32",
    "bases": "*i64",
    "stats": "*i64",
    "scalars": "*fp32",
    "scalars_out": "*fp32",
} | dict.fromkeys(("return_address", "shadow_address", "scalar_address", "count_address"), "*i64")


def compile_exchange(
    config: ExchangeConfig,
    *,
    num_local: int = 1,
    biases: bool = True,
    router: Router | None = None,
    name: str = "exchange_kernel",
) -> OfflineKernel:
    """Compile a kernel that a configuration would use.

    Args:
        config: Sizes.
        num_local: Ranks of a launch: 1, or all of them where they are virtual.
        biases: Whether there are any.
        router: Of the gate in the launch; None for none.
        name: ``"exchange_kernel"``, or ``"scatter_kernel"`` or ``"gather_kernel"`` of a backward.

    Returns:
        The kernel.

    Raises:
        UnsupportedError: Triton's interpreter is switched on: then there is no compiler.
    """
    kernel = getattr(importlib.import_module(f"fivefold.moe.{_MODULES[name]}"), name)
    if type(kernel).__name__ != "JITFunction":
        message = "kernels cannot be compiled while TRITON_INTERPRET=1"
        raise UnsupportedError(message, hint="unset it and start again")
    constants: dict[str, Any] = constants_of(
        config, num_local=num_local, weight_on_input=False, router=router
    )
    if not biases:
        constants |= {"b13": None, "b2": None}
    if router is None:
        constants |= {"gate": None, "selection_bias": None}
    constants |= {"W": 2 * config.hidden, "SEND_WEIGHTS": True, "PLAIN_SUM": True, "SCALARS": True}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    data, tiles = _TYPES[config.dtype], config.tiles
    weights = {"w13": f"*{data}", "w2": f"*{data}"}
    if config.by_descriptor:
        weights = {
            "w13": f"tensordesc<{data}[{tiles.columns},{tiles.depth}]>",
            "w2": f"tensordesc<{data}[{tiles.second_columns},{tiles.depth}]>",
        }
    tables = dict.fromkeys(private_layout(config).sections, "*i32") | {
        "control": "*i32",
        "token_first": "*i32",
        "row_expert": "*i32",
    }
    # Heaps may be larger than 2 GiB.
    offsets = dict.fromkeys(heap_layout(config).sections, "i64")
    offsets["limit_ns"] = "i64"
    known = {**tables, **offsets, **_POINTERS, **dict.fromkeys(_DATA, f"*{data}"), **weights}
    signature = {
        name: "constexpr" if name in constants else known.get(name, "i32")
        for name in kernel.arg_names
    }
    return _compiled(kernel, signature, constants, warps=tiles.warps, capability=90)
