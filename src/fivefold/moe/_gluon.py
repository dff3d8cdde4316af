"""The host's side of the Gluon kernel: EXPERIMENTAL, never run on a GPU, off unless asked for.

The forward in one launch of ``_gluon_kernel.gluon_kernel``: tensor memory accelerator and warp
group products by warps of their own. It is there to be measured against the Triton kernel on a
Hopper GPU, and to be kept only where it is more than 10 % faster. What could be checked without
one: the machine code (``compile_gluon``), and the protocol of its roles, by running the kernel's
source on a simulated machine (in the tests). What could not: numbers from real tensor cores, the
hardware's memory order, and speed.

Gluon changes between triton's releases, so the kernel asks for the release it was written for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe._activations import Activation, activation_named
from fivefold.moe._fused import (
    OPTIONS,
    _is_aligned,
    _look_for_errors,
    _multiprocessors,
    _on,
    _Request,
    _request,
    _run_time_sizes,
)
from fivefold.moe._offline import OfflineKernel, examined
from fivefold.moe._tiles import Tiles, constants_for, interpreting
from fivefold.moe._workspace import CHUNK_SLOTS, Layout, Workspace, layout_for

__all__ = ["GLUON_DTYPES", "compile_gluon", "forward_gluon", "missing_gluon"]

GLUON_DTYPES = frozenset({torch.bfloat16, torch.float16})
DEPTH = 64
"""Columns of a step: hidden and inner sizes are multiples of it."""
_TRITON = "3.9"
_WARPS = 8  # of the products role; the other roles' warps come on top
_STATUS = "experimental, not measured on a Hopper GPU, needs sm_90"

# A program has 12 warps and all 65,536 registers of a multiprocessor: 168 a thread on the average,
# multiples of 8. The warp group of the rows and weights roles gives up what it does not need, and
# the products role gets 168 + (168 - 72) / 2 = 216: it must hold 128 sums and not spill.
_REGISTERS = 168
_ROLE_REGISTERS = {"ROWS_REGISTERS": 72, "WEIGHTS_REGISTERS": 72}
# 4 stages of 48 KiB: what fits beside the epilogue's 32 KiB. AHEAD: at most STAGES - 2.
_RING = {"AHEAD": 2, "SLOTS": 2}


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The kernel's modules, loaded when used: triton is optional and has no types."""

    kernel: Any
    language: Any
    descriptor: Any


@cache
def _source() -> _Source:
    return _Source(
        kernel=importlib.import_module("fivefold.moe._gluon_kernel").gluon_kernel,
        language=importlib.import_module("triton.experimental.gluon.language"),
        descriptor=importlib.import_module(
            "triton.experimental.gluon.nvidia.hopper"
        ).TensorDescriptor,
    )


def missing_gluon(device: torch.device) -> str | None:
    """Why the Gluon kernel cannot work on a device, or None where it can.

    Args:
        device: Where the tokens are.

    Returns:
        The reason.
    """
    problem = _problem_of_triton() or _problem_of_device(device)
    return None if problem is None else f"{_STATUS}: {problem}"


@cache
def _problem_of_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'fivefold[moe]'"
    found = importlib.metadata.version("triton")
    if not found.startswith(f"{_TRITON}."):
        return f"Gluon changes between releases; it is written for triton {_TRITON}, found {found}"
    return None


def _problem_of_device(device: torch.device) -> str | None:
    if interpreting():
        return "TRITON_INTERPRET=1 is set, and Gluon has no interpreter"
    if device.type != "cuda":
        return f"it needs a CUDA device; {device.type} is none"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"{device} has compute capability {major}.{minor}"
    return None


def _tiles(*, gated: bool) -> Tiles:
    """Both products are 128 x 256 at a time: gate and up lie side by side in the first."""
    return Tiles(
        rows=128,
        columns=128 if gated else 256,
        second_columns=256,
        depth=DEPTH,
        stages=4,
        warps=_WARPS,
    )


def _constants(
    tiles: Tiles,
    *,
    activation: Activation,
    sizes: dict[str, int],
    weight_on_input: bool,
) -> dict[str, Any]:
    known = constants_for(
        tiles,
        activation=activation,
        **sizes,
        weight_on_input=weight_on_input,
        precision="ieee",
        by_descriptor=True,
        interpreted=False,
    )
    known |= {"BN": tiles.second_columns, **_RING, **_ROLE_REGISTERS}
    return {name: value for name, value in known.items() if name in _source().kernel.arg_names}


def _check(request: _Request) -> None:
    sizes = {name: request.sizes[name] for name in ("hidden", "intermediate")}
    wrong = {name: size for name, size in sizes.items() if size % DEPTH}
    if wrong:
        raise UnsupportedError(
            f'backend "gluon" takes sizes that are multiples of {DEPTH}; got {wrong}',
            hint='use backend="fused"',
        )
    if not _is_aligned(request.w13, request.w2) or request.x.data_ptr() % 16:
        message = "x, w13 or w2 does not begin at a multiple of 16 bytes"
        raise ConfigurationError(message, hint="clone() it")
    if request.hidden is not None:
        message = 'backend "gluon" cannot keep the first product for the backward'
        raise UnsupportedError(message, hint='leave recompute=True, or use backend="fused"')


def _layout(request: _Request, tiles: Tiles) -> Layout:
    return layout_for(
        num_tokens=len(request.x),
        **request.sizes,
        dtype=request.x.dtype,
        tile_rows=tiles.rows,
        chunk_slots=CHUNK_SLOTS[False],
    )


def _workspace_for(request: _Request, layout: Layout, given: Workspace | None) -> Workspace:
    device = request.x.device
    if given is None:
        given = Workspace(
            control=torch.zeros(layout.control_words, dtype=torch.int32, device=device),
            scratch=torch.empty(layout.scratch_bytes, dtype=torch.uint8, device=device),
        )
    given.check(layout, device)
    return given


def _descriptor(weight: torch.Tensor, columns: int) -> Any:
    source = _source()
    language = source.language
    kind = {torch.bfloat16: language.bfloat16, torch.float16: language.float16}[weight.dtype]
    swizzled = language.NVMMASharedLayout.get_default_for([columns, DEPTH], kind)
    return source.descriptor.from_tensor(
        weight.view(-1, weight.shape[2]), [columns, DEPTH], swizzled
    )


def _arguments(
    request: _Request, tiles: Tiles, workspace: Workspace, layout: Layout, programs: int
) -> dict[str, Any]:
    sizes = _run_time_sizes(request, tiles, layout, programs)
    blocks = -(-sizes["num_tokens"] // tiles.combine_tokens)
    parts = -(-request.sizes["hidden"] // sizes["combine_columns"])
    known: dict[str, Any] = {
        **{name: getattr(request, name) for name in ("x", "ids", "weights", "b13", "b2")},
        "w13": _descriptor(request.w13, tiles.columns),
        "w2": _descriptor(request.w2, tiles.second_columns),
        "out": torch.empty_like(request.x),
        "control": workspace.control,
        **layout.cut(workspace.scratch),
        **sizes,
        "num_combines": blocks * parts,
        **_constants(
            tiles,
            activation=request.activation,
            sizes=request.sizes,
            weight_on_input=request.weight_on_input,
        ),
    }
    return {name: known[name] for name in _source().kernel.arg_names}


def forward_gluon(
    *operands: torch.Tensor,
    workspace: Workspace | None = None,
    programs: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """``forward_fused`` by the kernel with specialised warps.

    Args:
        *operands: As there.
        workspace: As there.
        programs: As there; one fits on a multiprocessor.
        **options: As there, but ``hidden``: it cannot keep W13 x for the backward.

    Returns:
        [T, H].

    Raises:
        CommunicationError: In debug mode: a wait did not end.
        ConfigurationError: The workspace is too small, or there are no experts.
        UnsupportedError: A size is no multiple of 64, or ``hidden`` is asked for.
    """
    x, ids = operands[0], operands[3]
    if x.numel() == 0 or ids.numel() == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    request = _request(*operands, **options)
    _check(request)
    tiles = _tiles(gated=request.activation.gated)
    layout = _layout(request, tiles)
    memory = _workspace_for(request, layout, workspace)
    programs = programs or _multiprocessors(x.device)
    arguments = _arguments(request, tiles, memory, layout, programs)
    with _on(x.device):
        _source().kernel[programs,](**arguments, **OPTIONS, num_warps=_WARPS, maxnreg=_REGISTERS)
    _look_for_errors(memory)
    result: torch.Tensor = arguments["out"]
    return result


def compile_gluon(  # noqa: PLR0913 - the sizes of a call
    *,
    dtype: torch.dtype,
    activation: str,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    biases: bool = False,
    weight_on_input: bool = False,
) -> OfflineKernel:
    """Compile the kernel for sm_90a without a GPU, as ``compile_offline`` does the others.

    Args:
        dtype: Of tokens and weights.
        activation: A key of ``ACTIVATIONS``.
        hidden: H.
        intermediate: I.
        num_experts: E.
        top_k: K.
        biases: Whether there are any.
        weight_on_input: As in ``fused_moe``.

    Returns:
        The kernel. Its registers are the average of a thread: roles trade them.
    """
    sizes = {
        "hidden": hidden,
        "intermediate": intermediate,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    kind = activation_named(activation)
    tiles = _tiles(gated=kind.gated)
    constants = _constants(tiles, activation=kind, sizes=sizes, weight_on_input=weight_on_input) | (
        {} if biases else {"b13": None, "b2": None}
    )
    types = _types(dtype, tiles)
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in _source().kernel.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind_of in enumerate(signature.values())
        if kind_of.startswith("*")
    }
    runtime = importlib.import_module("triton.experimental.gluon")
    backends = importlib.import_module("triton.backends.compiler")
    built = importlib.import_module("triton").compile(
        runtime.GluonASTSource(_source().kernel, signature, constants, aligned),
        target=backends.GPUTarget("cuda", 90, 32),
        options={"num_warps": _WARPS, "maxnreg": _REGISTERS, **OPTIONS},
    )
    return examined(built)


def _types(dtype: torch.dtype, tiles: Tiles) -> dict[str, str]:
    language = _source().language
    data = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    kind = {torch.bfloat16: language.bfloat16, torch.float16: language.float16}[dtype]
    types = dict.fromkeys(("x", "b13", "b2", "out", "inner", "outputs"), f"*{data}")
    tables = ("control", "counts", "num_tiles", "tile_expert", "tile_first", "tile_stop")
    types |= dict.fromkeys((*tables, "slot_of_row", "tile_of_slot"), "*i32")
    types |= {"ids": "*i64", "weights": "*fp32"}
    for name, columns in {"w13": tiles.columns, "w2": tiles.second_columns}.items():
        swizzled = language.NVMMASharedLayout.get_default_for([columns, tiles.depth], kind)
        types[name] = f"tensordesc<{data}[{columns},{tiles.depth}],{swizzled!r}>"
    return types
