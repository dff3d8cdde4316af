"""The host's side of the kernels' backward: memory, descriptors, launches. Loads triton when used.

Up to twelve launches on one stream, ordered by their borders: the rows are placed as in the
forward; z = W13 x is computed again unless it was kept; then come the gradients, by the formulas
of ``_backward_tasks_triton``. Nothing waits for the device, and all sizes follow from shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.moe._fused import OPTIONS, _descriptor, _is_aligned, _on, _Request, _request
from fivefold.moe._tiles import Tiles, backward_tiles_for, constants_for
from fivefold.moe._workspace import CHUNK_SLOTS, layout_for


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """One kernel, how many tasks it has, and what its arguments are called otherwise."""

    kernel: Any
    tasks: int
    other: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Gradients:
    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None

    def in_order(self) -> tuple[torch.Tensor | None, ...]:
        return self.x, self.w13, self.w2, self.weights, self.b13, self.b2


def _tables(request: _Request, tiles: Tiles) -> tuple[dict[str, Any], int, int]:
    """Memory by name, and the numbers of chunks and of row tiles at most."""
    x = request.x
    layout = layout_for(
        num_tokens=len(x),
        **request.sizes,
        dtype=x.dtype,
        tile_rows=tiles.rows,
        chunk_slots=CHUNK_SLOTS[request.interpreted],
    )
    scratch = torch.empty(layout.scratch_bytes, dtype=torch.uint8, device=x.device)
    slots, experts = request.ids.numel(), len(request.w2)
    parts = -(-request.sizes["intermediate"] // tiles.columns)
    ranges = torch.empty(2, experts, dtype=torch.int32, device=x.device)
    memory = {
        **layout.cut(scratch),
        "range_first": ranges[0],
        "range_stop": ranges[1],
        "partial": torch.empty(parts * slots, dtype=torch.float32, device=x.device),
        "d_hidden": torch.empty(slots, request.w13.shape[1], dtype=x.dtype, device=x.device),
    }
    return memory, layout.num_chunks, layout.max_tiles


def _known(
    request: _Request, gradient: torch.Tensor, hidden: torch.Tensor | None
) -> tuple[dict[str, Any], Tiles, int]:
    """All arguments by the kernels' names for them, the variant, and the most row tiles."""
    w13, w2 = request.w13, request.w2
    by_descriptor = _is_aligned(w13, w2)
    how: dict[str, Any] = {"precision": request.precision, "by_descriptor": by_descriptor}
    tiles = backward_tiles_for(request.x.dtype, interpreted=request.interpreted, **how)
    constants = constants_for(
        tiles,
        activation=request.activation,
        weight_on_input=request.weight_on_input,
        interpreted=request.interpreted,
        **{**how, **request.sizes},
    )
    memory, num_chunks, max_tiles = _tables(request, tiles)
    views: dict[str, Any] = dict.fromkeys(("w13", "w13_deep"), w13) | {"w2_deep": w2}
    if by_descriptor:
        views = {
            "w13": _descriptor(w13, tiles.columns, tiles.depth),
            "w13_deep": _descriptor(w13, tiles.depth, tiles.second_columns),
            "w2_deep": _descriptor(w2, tiles.depth, tiles.columns),
        }
    known = {
        **{name: getattr(request, name) for name in ("x", "ids", "weights", "b13", "b2")},
        **views,
        **constants,
        **memory,
        "D": w13.shape[1],
        "gradient": gradient,
        # In place where it is computed here: what was kept may be asked for again.
        "hidden": memory["d_hidden"] if hidden is None else hidden,
        "num_tokens": len(request.x),
        "num_slots": request.ids.numel(),
        "num_chunks": num_chunks,
    }
    return known, tiles, max_tiles


def _placing(known: dict[str, Any]) -> Iterator[_Launch]:
    from fivefold.moe import _backward_kernels_triton as backward  # noqa: PLC0415 - optional
    from fivefold.moe import _kernels_triton as forward  # noqa: PLC0415 - optional

    for kernel in (forward.count_kernel, forward.place_kernel):
        yield _Launch(kernel=kernel, tasks=known["num_chunks"], other={})
    yield _Launch(kernel=backward.ranges_kernel, tasks=1, other={})


def _through_the_rows(
    known: dict[str, Any], tiles: Tiles, max_tiles: int, *, kept: bool
) -> Iterator[_Launch]:
    from fivefold.moe import _backward_kernels_triton as backward  # noqa: PLC0415 - optional
    from fivefold.moe import _kernels_triton as forward  # noqa: PLC0415 - optional

    padded = -(-max_tiles // tiles.group) * tiles.group
    first = padded * -(-known["I"] // tiles.columns)
    if not kept:
        yield _Launch(kernel=forward.first_kernel, tasks=first, other={"inner": None})
    yield _Launch(kernel=backward.hidden_gradient_kernel, tasks=first, other={})
    tasks = padded * -(-known["H"] // tiles.second_columns)
    yield _Launch(kernel=backward.token_gradient_kernel, tasks=tasks, other={})


def _through_the_experts(
    known: dict[str, Any], tiles: Tiles, found: _Gradients
) -> Iterator[_Launch]:
    from fivefold.moe import _backward_kernels_triton as kernels  # noqa: PLC0415 - optional

    on_input = known["WEIGHT_ON_INPUT"]
    experts = known["E"]
    of_w2 = {"left": known["gradient"], "right": known["inner"]}
    of_w13 = {"left": known["d_hidden"], "right": known["x"]}
    products: tuple[tuple[torch.Tensor, dict[str, Any]], ...] = (
        (found.w2, of_w2 | {"GATHER_LEFT": True, "WEIGHTED": False}),
        (found.w13, of_w13 | {"GATHER_LEFT": False, "WEIGHTED": on_input}),
    )
    for out, other in products:
        rows, columns = out.shape[1:]
        tasks = experts * -(-rows // tiles.rows) * -(-columns // tiles.second_columns)
        yield _Launch(
            kernel=kernels.weight_gradient_kernel,
            tasks=tasks,
            other={"out": out, "P": rows, "Q": columns, **other},
        )
    sums: tuple[tuple[torch.Tensor | None, dict[str, Any]], ...] = (
        (found.b2, {"source": known["gradient"], "GATHER": True, "WEIGHTED": not on_input}),
        (found.b13, {"source": known["d_hidden"], "GATHER": False, "WEIGHTED": False}),
    )
    for bias, other in sums:
        if bias is None:
            continue
        width = bias.shape[1]
        yield _Launch(
            kernel=kernels.bias_gradient_kernel,
            tasks=experts * -(-width // tiles.columns),
            other={"out": bias, "N": width, **other},
        )


def _through_the_slots(known: dict[str, Any], tiles: Tiles, found: _Gradients) -> Iterator[_Launch]:
    from fivefold.moe import _backward_kernels_triton as backward  # noqa: PLC0415 - optional
    from fivefold.moe import _kernels_triton as forward  # noqa: PLC0415 - optional

    tasks = -(-known["num_slots"] // tiles.combine_tokens)
    other: dict[str, Any] = {"out": found.weights}
    yield _Launch(kernel=backward.routing_gradient_kernel, tasks=tasks, other=other)
    # A weight on the output is in d_hidden already; one on the input comes in here.
    other = {
        "out": found.x,
        "WEIGHT_ON_INPUT": not known["WEIGHT_ON_INPUT"],
        "combine_columns": tiles.combine_columns,
    }
    blocks = -(-known["num_tokens"] // tiles.combine_tokens)
    tasks = blocks * -(-known["H"] // tiles.combine_columns)
    yield _Launch(kernel=forward.combine_kernel, tasks=tasks, other=other)


def backward_fused(
    gradient: torch.Tensor,
    *operands: torch.Tensor,
    hidden: torch.Tensor | None = None,
    programs: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of ``forward_fused``, in Triton kernels; the same bits every time.

    Args:
        gradient: Of the output, [T, H].
        *operands: As in the forward.
        hidden: What the forward kept; None: it is computed again.
        programs: Most programs of a launch of the new kernels; None: one per task. The result does
            not depend on it.
        **options: As in the forward.

    Returns:
        Gradients of x, w13, w2, weights, b13 and b2.

    Raises:
        ConfigurationError: There are no experts.
    """
    x, w13, w2, ids, weights = operands
    biases = (options.get("b13"), options.get("b2"))
    if x.numel() == 0 or ids.numel() == 0:
        return tuple(
            None if t is None else torch.zeros_like(t, memory_format=torch.contiguous_format)
            for t in (x, w13, w2, weights, *biases)
        )
    request = _request(*operands, **options)
    found = _Gradients(
        **{name: _empty(getattr(request, name)) for name in ("x", "w13", "w2", "weights")},
        **{name: _empty(getattr(request, name)) for name in ("b13", "b2")},
    )
    with _on(x.device):
        known, tiles, max_tiles = _known(request, gradient.contiguous(), hidden)
        launches = [
            *_placing(known),
            *_through_the_rows(known, tiles, max_tiles, kept=hidden is not None),
            *_through_the_experts(known, tiles, found),
            *_through_the_slots(known, tiles, found),
        ]
        for launch in launches:
            _start(launch, known, tiles, programs)
    return found.in_order()


def _empty(like: torch.Tensor | None) -> Any:
    return None if like is None else torch.empty_like(like)


def _start(launch: _Launch, known: dict[str, Any], tiles: Tiles, programs: int | None) -> None:
    names = launch.kernel.arg_names
    values = known | {"tasks": launch.tasks} | launch.other
    grid = launch.tasks
    if "tasks" in names and programs is not None:
        grid = min(grid, programs)
    launch.kernel[grid,](**{name: values[name] for name in names}, **OPTIONS, num_warps=tiles.warps)
