# mypy: disable-error-code="no-untyped-call,import-untyped,misc"
"""The checks of the ladder, each of which one child can run by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.ladder import say
from benchmarks.moe._gpu._bench import TOLERANCE, Bench
from benchmarks.moe._gpu._cases import Case, kind_of
from benchmarks.moe._gpu._exact import Exact
from benchmarks.moe._gpu._operands import Operands, operands_of
from fivefold.errors import CommunicationError
from fivefold.moe import OneSidedConfig, OneSidedGroup, VirtualHeap, Workspace, fused_moe
from fivefold.moe.kernels import launch as launches
from fivefold.moe.kernels import sync
from fivefold.moe.operator.activations import activation_named

__all__ = ["BACKWARD", "RUNGS", "exchanged", "group_of", "options_of"]

BACKWARD = (
    *("ranges", "d_hidden", "rows of g", "d_w2", "rows of x", "d_w13", "rows of dx"),
    *("d_b2", "d_b13", "d_weights", "dx"),
)
"""The launches of a backward that keeps z, in order, behind count and place."""
_FORWARD = ("count", "place", "first", "second", "combine")


def options_of(case: Case, given: Operands) -> dict[str, Any]:
    """What the launches take by name."""
    return {
        "activation": activation_named(case.activation),
        "b13": given.b13,
        "b2": given.b2,
        "weight_on_input": case.weight_on_input,
        "precision": case.precision,
    }


def _prepared(case: Case, bench: Bench) -> tuple[Operands, Exact, launches.Call, dict[str, Any]]:
    """Operands, what is right, and the forward's five launches by name, memory poisoned."""
    given = operands_of(case, bench.device)
    call = launches.prepare_forward(*given.positional, programs=16, **options_of(case, given))
    made = dict(zip(_FORWARD, launches.forward_launches(call), strict=True))
    _poison(*call.known["t"], call.known["inner"], call.known["outputs"], call.known["given"].out)
    return given, Exact(case, given), call, made


def _poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -7)


def _by_row(flat: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    return flat[: rows * width].view(rows, width)


def _right_tables(case: Case, exact: Exact, call: launches.Call) -> dict[str, torch.Tensor]:
    """What the tables of rows and row tiles hold when they are right."""
    flat = exact.slot_of_row.new_full((case.tokens * case.top_k,), -1)
    tiles = exact.tiles(call.tiles.rows)
    for number, (_, first, stop) in enumerate(tiles):
        flat[exact.slot_of_row[first:stop]] = number
    of_tiles = torch.tensor(tiles, dtype=torch.int32, device=flat.device).view(-1, 3)
    return {
        "num_tiles": flat.new_tensor([len(tiles)]),
        "tile_expert": of_tiles[:, 0],
        "tile_first": of_tiles[:, 1],
        "tile_stop": of_tiles[:, 2],
        "slot_of_row": exact.slot_of_row,
        "tile_of_slot": flat,
    }


def _set_tables(case: Case, exact: Exact, call: launches.Call) -> None:
    for name, value in _right_tables(case, exact, call).items():
        getattr(call.known["t"], name)[: len(value)] = value.to(torch.int32)


def _right_counts(case: Case, given: Operands, call: launches.Call) -> torch.Tensor:
    chunks = given.ids.reshape(-1).split(call.sizes.CHUNK)
    kept = [chunk[(chunk >= 0) & (chunk < case.experts)] for chunk in chunks]
    return torch.stack([torch.bincount(chunk, minlength=case.experts) for chunk in kept])


def count_and_place(case: Case, bench: Bench, _parameter: int) -> None:
    """The two kernels that find the rows, each with the right input, against torch."""
    given, exact, call, made = _prepared(case, bench)
    table, counts = call.known["t"], _right_counts(case, given, call)
    bench.run(lambda: made["count"].start(call), table.counts)
    bench.equal("counts of chunks", table.counts.view_as(counts), counts)
    table.counts.copy_(counts.to(torch.int32).view(-1))
    bench.run(lambda: made["place"].start(call), table.slot_of_row)
    for name, wanted in _right_tables(case, exact, call).items():
        bench.equal(name, getattr(table, name)[: len(wanted)], wanted)


def first_product(case: Case, bench: Bench, _parameter: int) -> None:
    """The first product with the right tables."""
    _, exact, call, made = _prepared(case, bench)
    _set_tables(case, exact, call)
    inner = _by_row(call.known["inner"], len(exact.slot_of_row), case.inner)
    bench.run(lambda: made["first"].start(call), inner)
    how: dict[str, Any] = {
        "rows": exact.tiles(call.tiles.rows),
        "most": 2 * TOLERANCE[kind_of(case)],
    }
    bench.tiles("the first product", inner, exact.inner, columns=call.tiles.columns, **how)


def second_product(case: Case, bench: Bench, _parameter: int) -> None:
    """The second product with the right tables and inner values."""
    _, exact, call, made = _prepared(case, bench)
    _set_tables(case, exact, call)
    rows = len(exact.slot_of_row)
    inner = _by_row(call.known["inner"], rows, case.inner)
    inner.copy_(exact.inner.detach())
    outputs = _by_row(call.known["outputs"], case.tokens * case.top_k, case.hidden)
    bench.run(lambda: made["second"].start(call), outputs)
    found, wanted = outputs[exact.slot_of_row], exact.second(inner.double())
    how: dict[str, Any] = {
        "rows": exact.tiles(call.tiles.rows),
        "most": 2 * TOLERANCE[kind_of(case)],
    }
    bench.tiles("the second product", found, wanted, columns=call.tiles.second_columns, **how)


def combination(case: Case, bench: Bench, _parameter: int) -> None:
    """The weighted sum with the right outputs."""
    _, exact, call, made = _prepared(case, bench)
    _set_tables(case, exact, call)
    outputs = _by_row(call.known["outputs"], case.tokens * case.top_k, case.hidden)
    outputs[exact.slot_of_row] = exact.outputs.detach().to(outputs.dtype)
    out = call.known["given"].out
    bench.run(lambda: made["combine"].start(call), out)
    wanted = exact.combined(outputs[exact.slot_of_row].double())
    bench.error("the weighted sum", out, wanted, TOLERANCE[kind_of(case)])


def split(case: Case, bench: Bench, _parameter: int) -> None:
    """All five launches."""
    given = operands_of(case, bench.device)
    out = bench.run(lambda: launches.forward_split(*given.positional, **options_of(case, given)))
    bench.error("the forward", out, Exact(case, given).out, TOLERANCE[kind_of(case)])


def _workspace(case: Case, device: torch.device) -> Workspace:
    made = Workspace.allocate(
        num_tokens=case.tokens,
        hidden=case.hidden,
        intermediate=case.inner,
        num_experts=case.experts,
        top_k=case.top_k,
        dtype=case.dtype,
        device=device,
    )
    made.scratch.fill_(0xFF)  # NaN, and numbers that no table has
    return made


def _watched(case: Case, given: Operands, exact: Exact, bench: Bench, programs: int) -> Workspace:
    """A workspace whose tickets, counters and flags are shown should the kernel hang."""
    workspace = _workspace(case, bench.device)
    options = options_of(case, given) | {"workspace": workspace}
    call = launches.prepare_forward(*given.positional, programs=programs, **options)
    columns = -(-case.inner // call.tiles.columns), -(-case.hidden // call.tiles.second_columns)
    tiles, chunks = len(exact.tiles(call.tiles.rows)), call.layout.num_chunks
    second = sync.FLAGS.value + call.layout.max_tiles
    bench.watch(
        workspace.control,
        {
            "tickets taken": (sync.QUEUES.value, 1, None),
            "chunks counted": (sync.COUNTED.value, 1, chunks),
            "chunks placed": (sync.PLACED.value, 1, chunks),
            "programs out": (sync.LEFT.value, 1, programs),
            "error word": (sync.ERROR.value, 1, 0),
            "first products done": (sync.FLAGS.value, tiles, columns[0]),
            "second products done": (second, tiles, columns[1]),
        },
    )
    return workspace


def fused(case: Case, bench: Bench, programs: int) -> None:
    """The single kernel with so many programs; twice, and its control words afterwards."""
    given = operands_of(case, bench.device)
    exact = Exact(case, given)
    workspace = _watched(case, given, exact, bench, programs)
    options = options_of(case, given) | {"workspace": workspace, "programs": programs}
    outs = [bench.run(lambda: launches.forward_fused(*given.positional, **options))]
    bench.error("the forward", outs[0], exact.out, TOLERANCE[kind_of(case)])
    workspace.scratch.fill_(0xFF)
    outs.append(bench.run(lambda: launches.forward_fused(*given.positional, **options)))
    bench.row("calls with other bits", "calls", not torch.equal(*outs), most=0)
    left = int((workspace.control != 0).sum())
    bench.row("control words not cleared", "words", left, most=0)


def many_launches(case: Case, bench: Bench, count: int) -> None:
    """Launches of two loads in turns without a pause: the same bits every time."""
    given = operands_of(case, bench.device)
    skewed = replace(given, ids=operands_of(replace(case, routing="worst"), bench.device).ids)
    workspace = _watched(case, given, Exact(case, given), bench, 132)
    options = options_of(case, given) | {"workspace": workspace}

    def forward(operands: Operands) -> torch.Tensor:
        return launches.forward_fused(*operands.positional, **options)

    loads = (given, skewed)
    wanted = [bench.run(partial(forward, operands)).clone() for operands in loads]
    bench.error("the forward", wanted[0], Exact(case, given).out, TOLERANCE[kind_of(case)])
    differs = torch.zeros((), dtype=torch.int64, device=bench.device)
    for turn in range(count):
        out = forward(loads[turn % 2])
        differs += (out != wanted[turn % 2]).any()
    bench.row(f"of {count} launches with other bits", "launches", int(differs), most=0)
    left = int((workspace.control != 0).sum())
    bench.row("control words not cleared", "words", left, most=0)


def _right_rows(
    case: Case, given: Operands, exact: Exact, gradient: torch.Tensor
) -> dict[str, Any]:
    """What the backward's kernels hold by rows when they are right, and the gradients."""
    right = exact.gradients(gradient)
    entering = exact.inner.detach()
    if not case.weight_on_input:
        entering = entering * exact.weight
    ends = exact.counts.cumsum(0)
    w13 = given.w13.double()
    d_hidden = right["pre"]
    # dh as the kernel stores it: the weight on the input comes in where dx is added up.
    parts = d_hidden.split(exact.counts.tolist())
    right["rows of dx"] = torch.cat([part @ w13[e] for e, part in enumerate(parts)])
    ranges = torch.stack([ends - exact.counts, ends])
    return right | {"inner": entering, "ranges": ranges, "gradient": gradient.double()}


def backward(case: Case, bench: Bench, which: int) -> None:
    """One launch of the backward with the right inputs; 0 the ranges, and so on to combine."""
    given = operands_of(case, bench.device)
    exact = Exact(case, given)
    generator = torch.Generator(bench.device).manual_seed(1)
    gradient = torch.empty_like(given.x).normal_(generator=generator)
    right = _right_rows(case, given, exact, gradient)
    options = options_of(case, given)
    z = (exact.z if case.weight_on_input else exact.pre).detach().to(case.dtype)
    kept = torch.zeros(given.ids.numel(), z.shape[1], dtype=z.dtype, device=z.device)
    kept[: len(z)] = z
    call = launches.prepare_backward(gradient, *given.positional, hidden=kept, **options)
    leaves = (given.x, given.w13, given.w2, given.weights, given.b13, given.b2)
    found: tuple[Any, ...] = tuple(None if t is None else torch.empty_like(t) for t in leaves)
    _poison(*(t for t in found if t is not None), call.known["inner"], call.known["d_hidden"])
    # Count and place are those of the forward.
    launch = list(launches.backward_launches(call, found, kept=True))[2 + which]
    _set_backward(case, given, exact, call, right)
    if (source := {"d_w2": "gradient", "d_w13": "x"}.get(BACKWARD[which])) is not None:
        gathered = _gathered(case, given, exact, right, source)
        _by_row(call.known["outputs"], *gathered.shape).copy_(gathered)
    checks = list(_outputs_of(launch, case, exact, given, call, right, found))
    for _, tensor, *_ in checks:
        _poison(tensor)
    bench.run(lambda: launch.start(call), checks[0][1])
    for name, tensor, wanted, rows in checks:
        if not tensor.is_floating_point():
            bench.equal(name, tensor.view(wanted.shape), wanted)
        else:
            ours = tensor if rows is None else tensor[rows]
            bench.error(name, ours, wanted, 2 * TOLERANCE[kind_of(case)])


def _set_backward(
    case: Case, given: Operands, exact: Exact, call: launches.Call, right: dict[str, Any]
) -> None:
    """Put what is right into all that the launches hand over."""
    rows, known = len(exact.slot_of_row), call.known
    _set_tables(case, exact, call)
    counts = _right_counts(case, given, call).to(torch.int32)
    known["t"].counts.copy_(counts.view(-1))
    known["ranges"].copy_(right["ranges"].to(torch.int32))
    known["d_hidden"][:rows] = right["pre"].to(case.dtype)
    _by_row(known["inner"], rows, case.inner).copy_(right["inner"])
    slots = exact.slot_of_row
    outputs = _by_row(known["outputs"], case.tokens * case.top_k, case.hidden)
    outputs[slots] = right["rows of dx"].to(case.dtype)
    # All of dw in the first tile of columns; what biases add comes with its launch.
    partial = known["partial"].view(-1, given.ids.numel())
    partial.zero_()
    partial[0][slots] = _share_of_products(case, given, exact, right)[slots].float()


def _gathered(
    case: Case, given: Operands, exact: Exact, right: dict[str, Any], source: str
) -> torch.Tensor:
    """The rows of g or of x, as the weight gradients take them."""
    tokens: torch.Tensor = right["gradient"] if source == "gradient" else given.x.double()
    rows = tokens[exact.token]
    weighted = source == "x" and case.weight_on_input
    return rows * exact.weight if weighted else rows


def _share_of_products(
    case: Case, given: Operands, exact: Exact, right: dict[str, Any]
) -> torch.Tensor:
    """Dw by slot, without what the second bias adds to it."""
    share: torch.Tensor = right["weights"].reshape(-1).clone()
    if given.b2 is not None and not case.weight_on_input:
        gradient = right["gradient"]
        of_bias = (gradient[exact.token] * given.b2.double()[exact.expert_of_row]).sum(1)
        share[exact.slot_of_row] -= of_bias
    return share


def _outputs_of(
    launch: launches.Launch,
    case: Case,
    exact: Exact,
    given: Operands,
    call: launches.Call,
    right: dict[str, Any],
    found: tuple[Any, ...],
) -> Iterator[tuple[str, Any, torch.Tensor, Any]]:
    """What a launch writes: name, where, what is right, and which rows of it."""
    known, rows, slots = call.known, len(exact.slot_of_row), exact.slot_of_row
    kernel = launch.kernel.__name__
    if kernel == "ranges_kernel":
        yield "ranges", known["ranges"], right["ranges"], None
    elif kernel == "hidden_gradient_kernel":
        yield "d_hidden", known["d_hidden"], right["pre"], slice(rows)
        inner = _by_row(known["inner"], rows, case.inner)
        yield "inner values for dW2", inner, right["inner"], None
    elif kernel == "gather_rows_kernel":
        source = "x" if launch.other["source"] is known["given"].x else "gradient"
        gathered = _gathered(case, given, exact, right, source)
        yield f"rows of {source}", _by_row(known["outputs"], *gathered.shape), gathered, None
    elif kernel == "token_gradient_kernel":
        outputs = _by_row(known["outputs"], case.tokens * case.top_k, case.hidden)
        yield "rows of dx", outputs, right["rows of dx"], slots
    elif kernel == "combine_kernel":
        yield "dx", found[0], right["x"], None
    else:
        names = ("x", "w13", "w2", "weights", "b13", "b2")
        place = next(i for i, tensor in enumerate(found) if tensor is launch.other["out"])
        yield f"d_{names[place]}", found[place], right[names[place]], None


def whole_backward(case: Case, bench: Bench, _parameter: int) -> None:
    """All gradients of the operator, twice."""
    given = operands_of(case, bench.device)
    gradient = torch.ones_like(given.x)
    options = options_of(case, given)
    right = Exact(case, given).gradients(gradient)
    found = bench.run(lambda: launches.backward_fused(gradient, *given.positional, **options)[0])
    again = launches.backward_fused(gradient, *given.positional, **options)
    bench.row("calls with other bits", "calls", bool((found != again[0]).any()), most=0)
    for name, tensor in zip(("x", "w13", "w2", "weights", "b13", "b2"), again, strict=True):
        if tensor is not None:
            bench.error(f"d_{name}", tensor, right[name], 2 * TOLERANCE[kind_of(case)])
    bench.error("d_x of the first call", found, right["x"], 2 * TOLERANCE[kind_of(case)])


def group_of(case: Case, ranks: int, device: torch.device) -> OneSidedGroup:
    """Virtual ranks that share a case's experts and tokens."""
    config = OneSidedConfig(
        ranks=ranks, experts=case.experts, hidden=case.hidden, intermediate=case.inner,
        top_k=case.top_k, max_tokens=-(-case.tokens // ranks), dtype=case.dtype,
        activation=case.activation, precision=case.precision, training=True,
    )  # fmt: skip
    heap = VirtualHeap(ranks, nbytes=config.heap_bytes(), device=device)
    return OneSidedGroup(config, heap, timeout_s=8.0)


def exchanged(case: Case, leaves: Operands, group: OneSidedGroup) -> torch.Tensor:
    """Return the forward of virtual ranks, in one launch."""
    return fused_moe(
        *leaves.positional, b13=leaves.b13, b2=leaves.b2, group=group, backend="fused",
        activation=case.activation, precision=case.precision,
    )  # fmt: skip


def exchange(case: Case, bench: Bench, ranks: int) -> None:
    """Virtual ranks in one launch: forward and gradients, twice, so that epochs follow."""
    given = operands_of(case, bench.device)
    exact = Exact(case, given)
    group = group_of(case, ranks, bench.device)
    control = group._control  # noqa: SLF001 - to be shown should it hang
    queues = {f"tickets of phase {n}": (32 * n, 1, None) for n in range(6)}
    words = {"programs out": (sync.LEFT.value, 1, None), "error word": (sync.ERROR.value, 1, 0)}
    bench.watch(control, queues | words | {"epoch": (sync.EPOCH.value, 1, None)})
    leaves = given.leaves()
    for turn in range(2):
        try:
            out = bench.run(lambda: exchanged(case, leaves, group))
            group.check()
        except CommunicationError:
            say(event="control", step=bench.step, words=bench.seen())
            raise
        bench.error(f"the forward of epoch {turn}", out, exact.out, TOLERANCE[kind_of(case)])
    gradient = torch.ones_like(out)
    torch.autograd.backward(out, gradient)
    assert leaves.x.grad is not None
    right = exact.gradients(gradient)["x"]
    bench.error("d_x", leaves.x.grad, right, 2 * TOLERANCE[kind_of(case)])


RUNGS = {
    "count and place": count_and_place,
    "first product": first_product,
    "second product": second_product,
    "combine": combination,
    "split": split,
    "fused": fused,
    "launches": many_launches,
    "backward": backward,
    "whole backward": whole_backward,
    "exchange": exchange,
}
