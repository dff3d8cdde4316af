"""The host's side of the kernels on one rank: tiles, memory, descriptors, launches.

``forward_fused`` is one launch, ``forward_split`` the same tasks as five launches (the honest
ablation: what does one launch buy?), ``backward_fused`` up to fourteen, ordered by the stream.
Triton is loaded when one is called. Nothing here waits for the device, except in debug mode
(``FIVEFOLD_MOE_DEBUG=1``) and in Triton's interpreter, where waits are bounded and looked at.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fivefold.errors import CommunicationError
from fivefold.moe.kernels.arguments import (
    CHUNK_SLOTS,
    GatedFunction,
    Layout,
    Operands,
    Sizes,
    Tables,
    Tiles,
    Workspace,
    call_sizes,
    debugging,
    interpreting,
    layout_for,
    sizes_for,
    tiles_for,
    wait_limit_ns,
)

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_OLDEST_TRITON = (3, 6)
_FEW_ROWS = 8  # of an expert, on average
_OPTIONS = {"enable_fp_fusion": True}  # triton 3.9 warns where it is not said


@cache
def _triton_problem() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'fivefold[moe]'"
    found = importlib.metadata.version("triton")
    if tuple(int(part) for part in found.split(".")[:2]) < _OLDEST_TRITON:
        return f"it needs triton 3.6 or newer, found {found}"
    return None


@cache
def _compiler_problem() -> str | None:
    """Return why triton cannot build what starts its kernels, or None where it can."""
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))):
        return "triton needs a C compiler: install gcc, or set CC"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "triton needs Python.h: install Python's headers (python3-dev)"
    return None


def missing_fused(device: torch.device) -> str | None:
    """Return why the kernel cannot work on a device, or None where it can."""
    if (problem := _triton_problem()) is not None:
        return problem
    if device.type == "cuda":
        return _problem_of_cuda(device)
    if device.type != "cpu":
        return f"it needs a CUDA device; got {device.type}"
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
    return _compiler_problem()


def start(kernel: Any, programs: int, known: dict[str, Any], warps: int) -> None:
    """Launch a kernel with what it asks for, by name."""
    arguments = {name: known[name] for name in kernel.arg_names}
    kernel[programs,](**arguments, **_OPTIONS, num_warps=warps)


def on(device: torch.device) -> Any:
    """Return the context of launches on a device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many programs run at a time."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def descriptor(weight: torch.Tensor, columns: int, depth: int) -> Any:
    """Return a weight, or rows, for the tensor memory accelerator, in blocks."""
    # By name: triton is optional and has no types.
    kind = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return kind.from_tensor(weight.view(-1, weight.shape[-1]), [columns, depth])


def contiguous(*tensors: torch.Tensor | None) -> Iterator[Any]:
    """Return tensors as the kernels take them; None where there is none."""
    return (None if tensor is None else tensor.contiguous() for tensor in tensors)


def unfilled(like: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of any values for a result."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def lag_for(tiles: Tiles, intermediate: int, programs: int) -> int:
    """Return by how many steps the second product trails: two waves of first products between."""
    in_a_step = tiles.group * -(-intermediate // tiles.columns)
    return max(1, -(-2 * programs // in_a_step))


def combine_columns_for(tiles: Tiles, hidden: int, blocks: int, programs: int) -> int:
    """Return the columns of a combining task: fewer where a few programs would do it all."""
    steps = -(-hidden // tiles.combine_columns)
    return min(steps, max(1, steps * blocks // (4 * programs))) * tiles.combine_columns


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, made ready for launches: the kernels' arguments by name, and their numbers."""

    known: dict[str, Any]
    sizes: Sizes
    tiles: Tiles
    layout: Layout

    def per_tile(self, width: int, columns: int) -> int:
        """Return the tasks of a launch over the most row tiles there can be."""
        padded = -(-self.layout.max_tiles // self.tiles.group) * self.tiles.group
        return padded * -(-width // columns)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel, how many tasks it has, and which arguments differ from those of the call."""

    kernel: Any
    tasks: int
    other: dict[str, Any] = field(default_factory=dict)

    def start(self, call: Call, programs: int | None = None) -> None:
        """Launch it, by at most so many programs where it may be any number."""
        names, grid = self.kernel.arg_names, self.tasks
        if "tasks" in names and programs is not None:
            grid = min(grid, programs)
        known = call.known | {"tasks": self.tasks} | self.other
        start(self.kernel, grid, known, call.tiles.warps)


def _prepare(  # noqa: PLR0913 - the operator's own options
    *operands: torch.Tensor,
    activation: GatedFunction,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    weight_on_input: bool = False,
    precision: str = "ieee",
    hidden: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    tiles: Tiles | None = None,
    backward: bool = False,
) -> Call:
    x, w13, w2, ids, weights = operands
    w13, w2 = w13.contiguous(), w2.contiguous()
    # The tensor memory accelerator wants multiples of 16 bytes.
    aligned = all(
        w.data_ptr() % 16 == 0 and w.shape[2] * w.dtype.itemsize % 16 == 0 for w in (w13, w2)
    )
    how: dict[str, Any] = {"precision": precision, "by_descriptor": aligned}
    if tiles is None:
        few = not backward and ids.numel() <= _FEW_ROWS * len(w2)
        tiles = tiles_for(x.dtype, halves=activation.gated or backward, few=few, **how)
    shape = call_sizes(x, w2, ids.shape[1])
    layout = layout_for(**shape, tile_rows=tiles.rows, chunk_slots=CHUNK_SLOTS[interpreting()])
    if workspace is None:
        scratch = torch.empty(layout.nbytes, dtype=torch.uint8, device=x.device)
    else:
        workspace.check(layout, x.device)
        scratch = workspace.scratch
    memory = layout.cut(scratch)
    sizes = sizes_for(tiles, shape, activation=activation, weight_on_input=weight_on_input, **how)
    known = {
        "given": Operands(*contiguous(x, ids, weights, b13, b2)),
        "w13": w13,
        "w2": w2,
        "t": Tables(*(memory.pop(name) for name in Tables._fields)),
        **memory,
        "hidden": hidden,
        "num_tokens": len(x),
        "num_slots": ids.numel(),
        "max_tiles": layout.max_tiles,
        "S": sizes,
    }
    return Call(known=known, sizes=sizes, tiles=tiles, layout=layout)


def prepare_forward(
    *operands: torch.Tensor, programs: int, lag: int | None = None, **options: Any
) -> Call:
    """Make the launches of a forward ready: memory, descriptors, sizes; nothing is started.

    ``programs`` are those of the single kernel, ``lag`` the steps by which its second product
    trails the first (None: chosen by them); the options are ``forward_fused``'s, and ``tiles``.
    """
    call = _prepare(*operands, **options)
    x, tiles, sizes = operands[0], call.tiles, call.sizes
    if sizes.TMA:
        call.known["w13"] = descriptor(call.known["w13"], tiles.columns, tiles.depth)
        call.known["w2"] = descriptor(call.known["w2"], tiles.second_columns, tiles.depth)
    blocks = -(-len(x) // tiles.combine_tokens)
    call.known.update(
        given=call.known["given"]._replace(out=unfilled(x)),
        max_lag=lag_for(tiles, sizes.I, programs) if lag is None else lag,
        combine_columns=combine_columns_for(tiles, sizes.H, blocks, programs),
        limit_ns=wait_limit_ns(),
    )
    return call


def _programs_on(device: torch.device) -> int:
    return 3 if interpreting() else multiprocessors(device)


def forward_fused(
    *operands: torch.Tensor,
    workspace: Workspace | None = None,
    programs: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Compute the operator in one launch; ids out of range are dropped like -1.

    The result does not depend on ``programs``, of which None is one per multiprocessor. What the
    backward takes goes to ``hidden`` [T K, rows of w13], by rows, where that is given.
    """
    x, ids = operands[0], operands[3]
    if x.numel() == 0 or ids.numel() == 0:
        return unfilled(x).zero_()
    from fivefold.moe.kernels._forward import moe_kernel  # noqa: PLC0415 - optional

    programs = _programs_on(x.device) if programs is None else programs
    call = prepare_forward(*operands, workspace=workspace, programs=programs, **options)
    if workspace is None:
        control = torch.zeros(call.layout.control_words, dtype=torch.int32, device=x.device)
    else:
        control = workspace.control
    with on(x.device):
        start(moe_kernel, programs, call.known | {"control": control}, call.tiles.warps)
    _look_for_errors(control)
    out: torch.Tensor = call.known["given"].out
    return out


def _look_for_errors(control: torch.Tensor) -> None:
    if not (interpreting() or debugging()):
        return
    from fivefold.moe.kernels import sync  # noqa: PLC0415 - optional

    words = control[: sync.FLAGS.value].tolist()
    if words[sync.ERROR.value]:
        control.zero_()
        raise CommunicationError(
            "the mixture-of-experts kernel gave up waiting for a task with a lower ticket "
            f"(tickets taken {words[sync.QUEUES.value]}, chunks counted "
            f"{words[sync.COUNTED.value]} and placed {words[sync.PLACED.value]})",
            hint="the workspace was dirty or shared by two calls at a time, or it is a bug",
        )


def forward_split(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute ``forward_fused`` in five launches, ordered by their ends instead of flags."""
    x, ids = operands[0], operands[3]
    if x.numel() == 0 or ids.numel() == 0:
        return unfilled(x).zero_()
    call = prepare_forward(*operands, programs=_programs_on(x.device), **options)
    with on(x.device):
        for launch in forward_launches(call):
            launch.start(call)
    out: torch.Tensor = call.known["given"].out
    return out


def forward_launches(call: Call) -> list[Launch]:
    """Return the five launches that ``forward_split`` makes: count, place, products, combine."""
    from fivefold.moe.kernels import _forward as kernels  # noqa: PLC0415 - optional

    tiles, sizes = call.tiles, call.sizes
    parts = -(-sizes.H // call.known["combine_columns"])
    blocks = -(-call.known["num_tokens"] // tiles.combine_tokens)
    tasks = {
        kernels.count_kernel: call.layout.num_chunks,
        kernels.place_kernel: call.layout.num_chunks,
        kernels.first_kernel: call.per_tile(sizes.I, tiles.columns),
        kernels.second_kernel: call.per_tile(sizes.H, tiles.second_columns),
        kernels.combine_kernel: blocks * parts,
    }
    return [Launch(kernel=kernel, tasks=count) for kernel, count in tasks.items()]


def backward_fused(
    gradient: torch.Tensor,
    *operands: torch.Tensor,
    hidden: torch.Tensor | None = None,
    programs: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, w13, w2, weights, b13 and b2; the same bits every time.

    The rows are placed as in the forward; the first product is done again without ``hidden``.
    ``programs`` is the most of a launch of the new kernels; the result does not depend on it.
    """
    x, w13, w2, ids, weights = operands
    leaves = (x, w13, w2, weights, options.get("b13"), options.get("b2"))
    found = tuple(None if t is None else unfilled(t) for t in leaves)
    if x.numel() == 0 or ids.numel() == 0:
        return tuple(None if t is None else t.zero_() for t in found)
    call = prepare_backward(gradient, *operands, hidden=hidden, **options)
    with on(x.device):
        for launch in backward_launches(call, found, kept=hidden is not None):
            launch.start(call, programs)
    return found


def prepare_backward(
    gradient: torch.Tensor,
    *operands: torch.Tensor,
    hidden: torch.Tensor | None = None,
    **options: Any,
) -> Call:
    """Make the launches of a backward ready, as ``prepare_forward``; ``hidden`` is a kept z."""
    call = _prepare(*operands, **options, backward=True)
    known, tiles, sizes = call.known, call.tiles, call.sizes
    given, w13, w2 = known["given"], known["w13"], known["w2"]
    slots, parts = given.ids.numel(), -(-sizes.I // tiles.columns)
    d_hidden = given.x.new_empty(slots, w13.shape[1])
    known |= {
        "w13_deep": w13,
        "w2_deep": w2,
        "gradient": gradient.contiguous(),
        "weights": given.weights,
        "ranges": given.x.new_empty(2, len(w2), dtype=torch.int32),
        "partial": given.x.new_empty(parts * slots, dtype=torch.float32),
        "d_hidden": d_hidden,
        # In place where it is computed here: what was kept may be asked for again.
        "hidden": d_hidden if hidden is None else hidden,
    }
    if sizes.TMA:
        known |= {
            "w13": descriptor(w13, tiles.columns, tiles.depth),
            "w13_deep": descriptor(w13, tiles.depth, tiles.second_columns),
            "w2_deep": descriptor(w2, tiles.depth, tiles.columns),
        }
    return call


def backward_launches(
    call: Call, found: tuple[torch.Tensor | None, ...], *, kept: bool
) -> Iterator[Launch]:
    """Yield the launches of ``backward_fused``, in order; gradients go to ``found``.

    ``kept``: z was given, and is not computed again.
    """
    from fivefold.moe.kernels import _backward as backward  # noqa: PLC0415 - optional
    from fivefold.moe.kernels import _forward as forward  # noqa: PLC0415 - optional

    known, tiles, sizes = call.known, call.tiles, call.sizes
    d_x, d_w13, d_w2, d_weights, d_b13, d_b2 = found
    given: Operands = known["given"]
    for kernel in (forward.count_kernel, forward.place_kernel):
        yield Launch(kernel=kernel, tasks=call.layout.num_chunks)
    yield Launch(kernel=backward.ranges_kernel, tasks=1)
    first = call.per_tile(sizes.I, tiles.columns)
    if not kept:
        yield Launch(kernel=forward.first_kernel, tasks=first, other={"inner": None})
    yield Launch(kernel=backward.hidden_gradient_kernel, tasks=first)
    # The rows of g, then those of x, lie where afterwards the token gradients go.
    slots = given.ids.numel()
    rows, inner = (
        known[name][: slots * width].view(slots, width)
        for name, width in (("outputs", sizes.H), ("inner", sizes.I))
    )
    blocks = -(-slots // tiles.combine_tokens) * -(-sizes.H // tiles.combine_columns)
    pairs: tuple[tuple[Any, ...], ...] = (
        (known["gradient"], False, rows, inner, d_w2),
        (given.x, sizes.WEIGHT_ON_INPUT, known["d_hidden"], rows, d_w13),
    )
    for source, weighted, left, right, out in pairs:
        other = {"source": source, "rows": rows, "WEIGHTED": weighted}
        yield Launch(kernel=backward.gather_rows_kernel, tasks=blocks, other=other)
        experts, height, width = out.shape
        tasks = experts * -(-height // tiles.rows) * -(-width // tiles.second_columns)
        other = {"left": left, "right": right, "out": out, "P": height, "Q": width}
        if sizes.TMA:
            other["left"] = descriptor(left, tiles.depth, tiles.rows)
            other["right"] = descriptor(right, tiles.depth, tiles.second_columns)
        yield Launch(kernel=backward.weight_gradient_kernel, tasks=tasks, other=other)
    tasks = call.per_tile(sizes.H, tiles.second_columns)
    yield Launch(kernel=backward.token_gradient_kernel, tasks=tasks)
    of_b2 = {"source": known["gradient"], "out": d_b2}
    of_b13 = {"source": known["d_hidden"], "out": d_b13}
    for other in (
        of_b2 | {"GATHER": True, "WEIGHTED": not sizes.WEIGHT_ON_INPUT},
        of_b13 | {"GATHER": False, "WEIGHTED": False},
    ):
        if other["out"] is not None:
            experts, width = other["out"].shape
            tasks = experts * -(-width // tiles.columns)
            other |= {"N": width}
            yield Launch(kernel=backward.bias_gradient_kernel, tasks=tasks, other=other)
    tasks = -(-given.ids.numel() // tiles.combine_tokens)
    other = {"out": d_weights}
    yield Launch(kernel=backward.routing_gradient_kernel, tasks=tasks, other=other)
    # A weight on the output is in d_hidden already; one on the input comes in here.
    other = {
        "given": given._replace(out=d_x),
        "S": replace(sizes, WEIGHT_ON_INPUT=not sizes.WEIGHT_ON_INPUT),
        "combine_columns": tiles.combine_columns,
    }
    blocks = -(-len(given.x) // tiles.combine_tokens)
    tasks = blocks * -(-sizes.H // tiles.combine_columns)
    yield Launch(kernel=forward.combine_kernel, tasks=tasks, other=other)
