"""The host's side of the single kernel: tiles, memory, descriptors, launch. Loads triton when used.

``forward_fused`` is one launch, ``forward_split`` the same tasks as five launches (the honest
ablation: what does one launch buy?). Nothing here waits for the device, except in debug mode
(``FIVEFOLD_MOE_DEBUG=1``) and in Triton's interpreter, where waits are bounded and looked at.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fivefold.errors import CommunicationError, ConfigurationError
from fivefold.moe._activations import Activation
from fivefold.moe._tiles import Tiles, constants_for, debugging, interpreting, tiles_for
from fivefold.moe._workspace import CHUNK_SLOTS, Layout, Workspace, layout_for

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_OLDEST_TRITON = (3, 6)
OPTIONS = {"enable_fp_fusion": True}  # triton 3.9 warns where it is not said


@cache
def _triton_problem() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'fivefold[moe]'"
    found = importlib.metadata.version("triton")
    if tuple(int(part) for part in found.split(".")[:2]) < _OLDEST_TRITON:
        return f"it needs triton 3.6 or newer, found {found}"
    return None


def missing_fused(device: torch.device) -> str | None:
    """Why the kernel cannot work on a device, or None where it can."""
    return _triton_problem() or (
        _problem_of_cuda(device) if device.type == "cuda" else _problem_of_other(device)
    )


def _problem_of_other(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it needs a CUDA device; {device.type} is none"
    if interpreting():
        return None
    return "it needs a CUDA device (for tests, TRITON_INTERPRET=1 runs it on the CPU, slowly)"


def _problem_of_cuda(device: torch.device) -> str | None:
    if interpreting():
        return "TRITON_INTERPRET=1 is set, which is for tests on the CPU"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"it needs compute capability 9.0 or more; {device} has {major}.{minor}"
    return None


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What was asked for; weights and tokens contiguous."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None
    activation: Activation
    weight_on_input: bool
    precision: str
    interpreted: bool
    hidden: torch.Tensor | None = None  # where W13 x is kept for the backward

    @property
    def sizes(self) -> dict[str, int]:
        """H, I, E and K by their names in ``layout_for``."""
        experts, hidden, inner = self.w2.shape
        return {
            "hidden": hidden,
            "intermediate": inner,
            "num_experts": experts,
            "top_k": self.ids.shape[1],
        }


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One forward, made ready for a launch."""

    known: dict[str, Any]  # all arguments by the kernels' names for them
    tiles: Tiles
    layout: Layout
    out: torch.Tensor
    workspace: Workspace
    programs: int

    def arguments(self, kernel: Any) -> dict[str, Any]:
        """What a kernel asks for, by name."""
        return {name: self.known[name] for name in kernel.arg_names}


def _is_aligned(*weights: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read them: it wants multiples of 16 bytes."""
    return all(w.data_ptr() % 16 == 0 and w.shape[2] * w.dtype.itemsize % 16 == 0 for w in weights)


def _descriptor(weight: torch.Tensor, columns: int, depth: int) -> Any:
    # By name: triton is optional and has no types.
    kind = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return kind.from_tensor(weight.view(-1, weight.shape[2]), [columns, depth])


def _request(  # noqa: PLR0913 - the operator's own operands
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    activation: Activation,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    weight_on_input: bool = False,
    precision: str = "ieee",
    hidden: torch.Tensor | None = None,
) -> _Request:
    if w2.numel() == 0:
        raise ConfigurationError(
            f"w2 has shape {tuple(w2.shape)}: the kernel needs an expert with an inner size",
            hint='use backend="reference"',
        )
    return _Request(
        x=x.contiguous(),
        w13=w13.contiguous(),
        w2=w2.contiguous(),
        ids=ids.contiguous(),
        weights=weights.contiguous(),
        b13=None if b13 is None else b13.contiguous(),
        b2=None if b2 is None else b2.contiguous(),
        activation=activation,
        weight_on_input=weight_on_input,
        precision=precision,
        interpreted=interpreting(),
        hidden=hidden,
    )


def _prepare(request: _Request, workspace: Workspace | None, programs: int | None) -> _Call:
    x, interpreted = request.x, request.interpreted
    by_descriptor = _is_aligned(request.w13, request.w2)
    tiles = tiles_for(
        x.dtype,
        gated=request.activation.gated,
        precision=request.precision,
        by_descriptor=by_descriptor,
        interpreted=interpreted,
    )
    layout = layout_for(
        num_tokens=len(x),
        **request.sizes,
        dtype=x.dtype,
        tile_rows=tiles.rows,
        chunk_slots=CHUNK_SLOTS[interpreted],
    )
    if workspace is None:
        workspace = Workspace(
            control=torch.zeros(layout.control_words, dtype=torch.int32, device=x.device),
            scratch=torch.empty(layout.scratch_bytes, dtype=torch.uint8, device=x.device),
        )
    workspace.check(layout, x.device)
    if programs is None:
        programs = 3 if interpreted else _multiprocessors(x.device)
    out = torch.empty_like(x)
    constants = constants_for(
        tiles,
        activation=request.activation,
        **request.sizes,
        weight_on_input=request.weight_on_input,
        precision=request.precision,
        by_descriptor=by_descriptor,
        interpreted=interpreted,
    )
    known = {
        **_operands(request, tiles, by_descriptor=by_descriptor),
        "out": out,
        "hidden": request.hidden,
        "control": workspace.control,
        **layout.cut(workspace.scratch),
        **_run_time_sizes(request, tiles, layout, programs),
        **constants,
    }
    return _Call(
        known=known,
        tiles=tiles,
        layout=layout,
        out=out,
        workspace=workspace,
        programs=programs,
    )


def _operands(request: _Request, tiles: Tiles, *, by_descriptor: bool) -> dict[str, Any]:
    w13: Any = request.w13
    w2: Any = request.w2
    if by_descriptor:
        w13 = _descriptor(w13, tiles.columns, tiles.depth)
        w2 = _descriptor(w2, tiles.second_columns, tiles.depth)
    names = ("x", "ids", "weights", "b13", "b2")
    return {"w13": w13, "w2": w2, **{name: getattr(request, name) for name in names}}


def _run_time_sizes(
    request: _Request, tiles: Tiles, layout: Layout, programs: int
) -> dict[str, int]:
    num_tokens, hidden = request.x.shape
    # Few tokens: cut the combination along the columns too, or a few programs would do it all.
    blocks = -(-num_tokens // tiles.combine_tokens)
    steps = -(-hidden // tiles.combine_columns)
    steps_each = max(1, steps * blocks // (4 * programs))
    return {
        "num_tokens": num_tokens,
        "num_slots": request.ids.numel(),
        "num_chunks": layout.num_chunks,
        "max_tiles": layout.max_tiles,
        "max_lag": _lag(tiles, request.sizes["intermediate"], programs),
        "combine_columns": min(steps, steps_each) * tiles.combine_columns,
    }


def _lag(tiles: Tiles, intermediate: int, programs: int) -> int:
    """Steps by which the second product trails: two waves of first products lie between."""
    in_a_step = tiles.group * -(-intermediate // tiles.columns)
    return max(1, -(-2 * programs // in_a_step))


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _look_for_errors(workspace: Workspace) -> None:
    if not (interpreting() or debugging()):
        return
    from fivefold.moe._sync_triton import ERROR  # noqa: PLC0415 - optional

    if int(workspace.control[ERROR.value]):
        workspace.reset()
        message = "the mixture-of-experts kernel gave up waiting for a task with a lower ticket"
        raise CommunicationError(
            message, hint="the workspace was dirty or shared by two calls at a time, or it is a bug"
        )


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def forward_fused(
    *operands: torch.Tensor,
    workspace: Workspace | None = None,
    programs: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Compute what ``experts_one_by_one`` does in one launch.

    Args:
        *operands: As there; ids out of range are dropped like -1.
        workspace: Memory to work in; None takes some for this call.
        programs: How many to launch; None: one per multiprocessor. The result does not depend on
            it.
        **options: As there, and ``precision``: "ieee", "tf32x3" or "tf32", for float32; and
            ``hidden``: where to keep W13 x for the backward, [T K, rows of w13], by rows.

    Returns:
        [T, H].

    Raises:
        CommunicationError: In debug mode and in the interpreter: a wait did not end.
        ConfigurationError: The workspace is too small, or there are no experts.
    """
    x, ids = operands[0], operands[3]
    if x.numel() == 0 or ids.numel() == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    from fivefold.moe._kernels_triton import moe_kernel  # noqa: PLC0415 - optional

    call = _prepare(_request(*operands, **options), workspace, programs)
    with _on(x.device):
        moe_kernel[call.programs,](
            **call.arguments(moe_kernel), **OPTIONS, num_warps=call.tiles.warps
        )
    _look_for_errors(call.workspace)
    return call.out


def forward_split(
    *operands: torch.Tensor, workspace: Workspace | None = None, **options: Any
) -> torch.Tensor:
    """``forward_fused`` in five launches, ordered by their borders instead of flags."""
    x, ids = operands[0], operands[3]
    if x.numel() == 0 or ids.numel() == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    from fivefold.moe import _kernels_triton as kernels  # noqa: PLC0415 - optional

    call = _prepare(_request(*operands, **options), workspace, None)
    tiles, known = call.tiles, call.known
    padded = -(-call.layout.max_tiles // tiles.group) * tiles.group
    launches = {
        kernels.count_kernel: known["num_chunks"],
        kernels.place_kernel: known["num_chunks"],
        kernels.first_kernel: padded * -(-known["I"] // tiles.columns),
        kernels.second_kernel: padded * -(-known["H"] // tiles.second_columns),
        kernels.combine_kernel: -(-known["num_tokens"] // tiles.combine_tokens)
        * -(-known["H"] // known["combine_columns"]),
    }
    with _on(x.device):
        for kernel, programs in launches.items():
            kernel[programs,](**call.arguments(kernel), **OPTIONS, num_warps=tiles.warps)
    return call.out
