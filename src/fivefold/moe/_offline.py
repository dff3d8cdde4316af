"""Compile the kernels for a GPU that is not there, and look at what came out.

ptxas and the disassembler are in triton's wheel, so the machine code, its registers, spills and
shared memory, and the spelling of its synchronisation can be checked on any machine. This says
nothing about speed.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fivefold.errors import UnsupportedError
from fivefold.moe._activations import activation_named
from fivefold.moe._fused import OPTIONS
from fivefold.moe._tiles import Tiles, constants_for, tiles_for

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_DATA = frozenset({"x", "b13", "b2", "out", "inner", "hidden", "outputs"})
_TABLES = frozenset(
    {"control", "counts", "num_tiles", "tile_expert", "tile_first", "tile_stop"}
    | {"slot_of_row", "tile_of_slot"}
)


@dataclass(frozen=True, kw_only=True)
class OfflineKernel:
    """What the compiler made of a kernel.

    Attributes:
        registers: Of a thread.
        spilled_bytes: Stack and local memory of a thread.
        shared_bytes: Of a program.
        instructions: How often each machine instruction stands in it, modifiers cut off.
        products: The tensor-core instructions in full.
        ptx: The code before ptxas.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: Counter[str]
    products: frozenset[str]
    ptx: str


def compile_offline(  # noqa: PLR0913 - the sizes of a call
    name: str,
    *,
    dtype: torch.dtype,
    activation: str,
    precision: str = "ieee",
    hidden: int = 2048,
    intermediate: int = 2048,
    num_experts: int = 32,
    top_k: int = 2,
    biases: bool = True,
    keeps_hidden: bool = False,
    by_descriptor: bool = True,
    capability: int = 90,
    tiles: Tiles | None = None,
) -> OfflineKernel:
    """Compile one of the kernels of ``_kernels_triton``.

    Args:
        name: Of the kernel, such as "moe_kernel".
        dtype: Of tokens and weights.
        activation: A key of ``ACTIVATIONS``.
        precision: Of float32.
        hidden: H.
        intermediate: I.
        num_experts: E.
        top_k: K.
        biases: Whether there are any.
        keeps_hidden: Whether it keeps W13 x for the backward.
        by_descriptor: Whether weights come through the tensor memory accelerator.
        capability: 90 for Hopper.
        tiles: The variant; None: the one that a call would use.

    Returns:
        The kernel.

    Raises:
        UnsupportedError: Triton's interpreter is switched on: then there is no compiler.
    """
    kind = activation_named(activation)
    kernel = getattr(importlib.import_module("fivefold.moe._kernels_triton"), name)
    if type(kernel).__name__ != "JITFunction":
        message = "kernels cannot be compiled while TRITON_INTERPRET=1"
        raise UnsupportedError(message, hint="unset it and start again")
    if tiles is None:
        tiles = tiles_for(
            dtype,
            gated=kind.gated,
            precision=precision,
            by_descriptor=by_descriptor,
            interpreted=False,
        )
    constants = constants_for(
        tiles,
        activation=kind,
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        top_k=top_k,
        weight_on_input=False,
        precision=precision,
        by_descriptor=by_descriptor,
        interpreted=False,
    )
    if not biases:
        constants |= {"b13": None, "b2": None}
    if not keeps_hidden:
        constants |= {"hidden": None}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    data = _TYPES[dtype]
    weights = {
        "w13": f"tensordesc<{data}[{tiles.columns},{tiles.depth}]>",
        "w2": f"tensordesc<{data}[{tiles.second_columns},{tiles.depth}]>",
    }
    signature = {
        key: _type_of(key, constants, data, weights if by_descriptor else {})
        for key in kernel.arg_names
    }
    return _compiled(kernel, signature, constants, warps=tiles.warps, capability=capability)


def _type_of(name: str, constants: dict[str, Any], data: str, weights: dict[str, str]) -> str:
    if name in constants:
        return "constexpr"
    if name in {"w13", "w2"}:
        return weights.get(name, f"*{data}")
    others = {"ids": "*i64", "weights": "*fp32"}
    if name in _DATA:
        return f"*{data}"
    return "*i32" if name in _TABLES else others.get(name, "i32")


def _compiled(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    warps: int,
    capability: int,
) -> OfflineKernel:
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    built = triton.compile(
        compiler.ASTSource(kernel, signature, constants, aligned),
        target=backends.GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, **OPTIONS},
    )
    usage, code = _disassembled(built.asm["cubin"])
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    instructions = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE
    )
    counts = Counter(instruction.split(".")[0] for instruction in instructions)
    return OfflineKernel(
        registers=numbers["REG"],
        spilled_bytes=numbers["STACK"] + numbers["LOCAL"],
        shared_bytes=int(built.metadata.shared),
        instructions=counts,
        products=frozenset(i for i in instructions if i.startswith(("HGMMA", "HMMA"))),
        ptx=built.asm["ptx"],
    )


def _disassembled(cubin: bytes) -> tuple[str, str]:
    tool = importlib.import_module("triton").knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, code = (
            subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return usage, code
