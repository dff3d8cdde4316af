# ruff: noqa: E402 - the environment is looked at first
"""The exchange between virtual ranks in Triton's CPU interpreter: a child of ``test_moe_exchange``.

Prints one line of JSON per case. The interpreter has to be chosen before triton is imported.
"""

import os

assert os.environ["TRITON_INTERPRET"] == "1"

import numpy as np
import torch
from group_cases import CASES as GROUP_CASES
from triton.runtime import interpreter

from fivefold.errors import FivefoldError
from fivefold.moe import (
    ACTIVATIONS,
    OneSidedConfig,
    OneSidedGroup,
    Router,
    VirtualHeap,
    fused_moe,
    route,
)
from fivefold.moe.kernels.launch import forward_fused
from fivefold.moe.kernels.sync import QUEUES
from fivefold.moe.parallel._config import heap_layout
from oracles.children import run_cases
from oracles.experts import expected, operands, relative
from oracles.interpreter import hurry

torch.set_num_threads(1)
hurry()
CASES = {}


class RowByRow:
    """NumPy for the interpreter, with products in which a row's bits do not depend on its place.

    A GPU's do not; those of OpenBLAS do on processors without AVX-512.
    """

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def matmul(left, right, dtype=None):
        return np.einsum("...ik,...kj->...ij", left, right, dtype=dtype)


interpreter.np = RowByRow()


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def poisoned(like, **options):
    value = float("nan") if like.is_floating_point() else 1
    return torch.full(like.shape, value, dtype=options.get("dtype", like.dtype))


def on_one_rank(given, activation="swiglu", **options):
    names = ("x", "w13", "w2", "topk_ids", "topk_weights")
    biases = {name: given.get(name) for name in ("b13", "b2")}
    return forward_fused(
        *(given[name] for name in names), activation=ACTIVATIONS[activation], **biases, **options
    )


def exchange_for(given, ranks, activation="swiglu", *, max_tokens=None, **options):
    tokens, top_k = given["topk_ids"].shape
    experts, hidden, inner = given["w2"].shape
    config = OneSidedConfig(
        ranks=ranks,
        experts=experts,
        hidden=hidden,
        intermediate=inner,
        top_k=top_k,
        max_tokens=max_tokens or max(tokens, 1),
        dtype=given["x"].dtype,
        activation=activation,
        debug=True,
        **options,
    )
    exchange = OneSidedGroup(config, VirtualHeap(ranks, nbytes=config.heap_bytes()), timeout_s=0.05)
    spoil(exchange)
    return exchange


def spoil(exchange):
    """Rows and tables of earlier calls become NaN or nonsense; words that count stay."""
    exchange._scratch.fill_(0xFF)
    sections = heap_layout(exchange.config).sections
    first, last = sections["weights"][0], sections["shadow"][0]
    exchange.heap.own[:, first:last] = 0xFF


def uneven(tokens, ranks):
    """Tokens per rank: all different, the second rank has none."""
    counts = [tokens // ranks] * ranks
    if ranks > 1:
        counts[1] = 0
    counts[0] += tokens - sum(counts)
    return counts


def same_bits(shape, activation="swiglu", *, ranks=(1, 2, 4), layouts=(None, 1), **options):
    """All numbers of ranks and both layouts against one rank, and that against float64."""
    dtype = options.pop("dtype", torch.float32)
    given = operands(shape, activation, bias=options.pop("bias", True), dtype=dtype)
    known = {k: v for k, v in options.items() if k == "weight_on_input"}
    wanted = on_one_rank(given, activation, **known)
    for number in ranks:
        for layout in layouts:
            capacity = None if layout is None else max(shape[0], 1)
            exchange = exchange_for(given, number, activation, capacity=capacity)
            counts = uneven(shape[0], number)
            found = exchange.fused_moe(backend="fused", **given, num_tokens=counts, **known)
            assert torch.equal(found, wanted), (number, layout)
            check_bytes(exchange, given, counts, weight_on_input=bool(known))
    return {"error": relative(wanted, expected(given, activation, **known))}


def check_bytes(exchange, given, counts, *, weight_on_input=False, calls=1):
    """Payload = routed rows x H x bytes of an element, for every pair of ranks."""
    config = exchange.config
    row_bytes = config.hidden * given["x"].dtype.itemsize
    local = config.local_experts
    found = exchange.statistics()
    for rank, ids in enumerate(given["topk_ids"].split(counts)):
        for peer in range(config.ranks):
            routed = int(((ids >= peer * local) & (ids < (peer + 1) * local)).sum()) * calls
            sent = found["sent_bytes"][rank][peer]
            assert sent == routed * (row_bytes + 4 * weight_on_input), (rank, peer)
            assert found["returned_bytes"][peer][rank] == routed * row_bytes, (rank, peer)


SHAPES = {  # T, H, I, E, K; tiles are 16 x 16 x 16, counting tasks 32 assignments
    "one token": (1, 16, 16, 4, 1),
    "every expert": (7, 16, 24, 4, 4),
    "more experts than used": (4, 16, 16, 12, 2),
    "odd sizes without descriptors": (11, 17, 7, 4, 3),
    "all sizes one": (3, 1, 1, 4, 1),
}
for name, shape in SHAPES.items():
    few = {"ranks": (1, 2, 4) if name == "one token" else (4,)}
    CASES[name] = lambda shape=shape, few=few: same_bits(shape, **few)
for kind in ("bfloat16", "float16"):
    CASES[kind] = lambda kind=kind: same_bits(
        (21, 16, 32, 4, 2), dtype=getattr(torch, kind), ranks=(2,)
    )


@case
def several_tiles_per_expert():
    return same_bits((70, 16, 16, 2, 2), ranks=(2,), bias=False)


@case
def a_plain_activation_with_weights_on_the_input():
    return same_bits((9, 16, 16, 4, 1), "gelu", ranks=(2,), weight_on_input=True)


@case
def no_tokens_at_all():
    given = operands((5, 16, 16, 4, 2), dtype=torch.float32)
    given |= {name: given[name][:0] for name in ("x", "topk_ids", "topk_weights")}
    return {"holds": exchange_for(given, 2).fused_moe(backend="fused", **given).shape == (0, 16)}


@case
def dropped_ids():
    given = operands((20, 16, 16, 4, 2), bias=True, dtype=torch.float32)
    given["topk_ids"][::3] = -1
    given["topk_ids"][1, 0] = -1
    given["topk_weights"][1, 0] = float("inf")
    found = exchange_for(given, 2).fused_moe(backend="fused", **given)
    assert torch.equal(found[::3], torch.zeros_like(found[::3]))
    return {"error": relative(found, expected(given, "swiglu"))}


@case
def skewed_calls_one_after_the_other():
    """Every call another routing: all to one expert, none, one rank only; no call sees another."""
    given = operands((12, 16, 16, 4, 2), dtype=torch.float32)
    exchanges = [exchange_for(given, 4), exchange_for(given, 2, capacity=12)]
    generator = torch.Generator().manual_seed(1)
    skews = [
        torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(12)]),
        torch.tensor([[2, -1]]).repeat(12, 1),
        torch.full((12, 2), -1),
        torch.tensor([[0, 3]]).repeat(12, 1),
    ]
    for call, ids in enumerate(skews):
        now = given | {"topk_ids": ids}
        wanted = on_one_rank(now)
        for exchange in exchanges:
            counts = [0, 1, 3, 8] if exchange.config.ranks == 4 else [11, 1]
            found = exchange.fused_moe(
                backend="fused", **now, num_tokens=counts, programs=1 + call % 3
            )
            assert torch.equal(found, wanted), call
            spoil(exchange)
    return {"holds": all(exchange.epoch == 4 for exchange in exchanges)}


@case
def capacity_drops_by_its_rule_on_every_rank():
    given = operands((12, 16, 16, 2, 2), dtype=torch.float32)
    counts = [7, 5]
    for policy in ("position", "weight"):
        found = exchange_for(given, 2, capacity=4).fused_moe(
            backend="fused", **given, num_tokens=counts, drop_policy=policy
        )
        parts = zip(
            *(given[n].split(counts) for n in ("x", "topk_ids", "topk_weights")), strict=True
        )
        weights = {name: given[name] for name in ("w13", "w2")}
        wanted = [
            fused_moe(
                x,
                topk_ids=ids,
                topk_weights=values,
                capacity=4,
                drop_policy=policy,
                backend="fused",
                **weights,
            )
            for x, ids, values in parts
        ]
        assert torch.equal(found, torch.cat(wanted)), policy
    return {"holds": True}


@case
def every_row_has_the_writer_that_its_index_says():
    """Theorem 3.1: a valid index carries its writer, so the map of owners is the index itself."""
    given = operands((24, 16, 24, 8, 3), dtype=torch.float32)
    exchange = exchange_for(given, 4, capacity=20)
    exchange.fused_moe(backend="fused", **given, num_tokens=[4, 9, 8, 3])
    config, sections = exchange.config, heap_layout(exchange.config).sections
    owners = {}
    for name in ("shadow", "return_shadow"):
        first, count, _ = sections[name]
        owners[name] = exchange.heap.own[:, first : first + 4 * count].view(torch.int32)
    cell, local = config.cell_rows, config.local_experts
    ids = given["topk_ids"].split([4, 9, 8, 3])
    for target in range(4):
        # receive[source, local expert, place]
        found = owners["shadow"][target].view(4, local, cell)
        for source in range(4):
            for expert in range(local):
                rows = int((ids[source] == target * local + expert).sum())
                assert bool((found[source, expert, :rows] == 4 + source + 1).all())
                assert not bool(found[source, expert, rows:].any())
        # returned[writer, its local expert, place], one word per column tile
        back = owners["return_shadow"][target].view(4, local, cell, -1)
        for writer in range(4):
            written = back[writer][back[writer] > 0]
            assert bool((written == 4 + writer + 1).all())
            rows = int((ids[target] // local == writer).sum())
            assert written.numel() == rows * back.shape[-1]
    return {"holds": True}


ROUTERS = {
    "softmax": Router(top_k=3),
    "not normalised": Router(top_k=3, normalize=False, scale=2.0),
    "top k, then softmax": Router(top_k=3, score="topk_softmax"),
    "sigmoid in groups by two": Router(
        top_k=3, score="sigmoid", groups=3, top_groups=2, group_score="top2_sum", scale=2.5
    ),
    "softmax in groups by one": Router(top_k=3, groups=6, top_groups=4),
}


def gated(router, *, tokens=18, dtype=torch.float32, ranks=1):
    """Ids as ``route`` chooses them, also among equals; results as of a call with them."""
    given = operands((tokens, 24, 16, 6, 3), dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    # Small whole numbers: logits are exact in any order of addition, and many are equal.
    given["x"] = torch.randint(-2, 3, (tokens, 24), generator=generator).to(dtype)
    gate = torch.randint(-1, 2, (6, 24), generator=generator).to(dtype)
    gate[4] = gate[1]
    bias = torch.randn(6, generator=generator) if router.score == "sigmoid" else None
    counts = uneven(tokens, ranks)
    found, ids, weights = exchange_for(given, ranks).routed(
        given["x"],
        given["w13"],
        given["w2"],
        gate,
        router,
        selection_bias=bias,
        num_tokens=counts,
    )
    wanted = route(given["x"].float() @ gate.float().T, router, selection_bias=bias)
    assert torch.equal(ids.long(), wanted.ids_TK)
    assert torch.allclose(weights, wanted.weights_TK, rtol=1e-5, atol=1e-6)
    given |= {"topk_ids": ids, "topk_weights": weights}
    assert torch.equal(found, on_one_rank(given))
    return {"error": relative(found, expected(given, "swiglu"))}


for title, router in ROUTERS.items():
    CASES[f"gate: {title}"] = lambda router=router: gated(
        router, ranks=1 + (router.score == "sigmoid")
    )
CASES["gate: bfloat16"] = lambda: gated(ROUTERS["softmax"], dtype=torch.bfloat16)


@case
def a_gate_without_numbers():
    """A token of NaN gives a row of NaN, and hurts no other token."""
    given = operands((6, 24, 16, 6, 3), dtype=torch.float32)
    gate = torch.randn(6, 24, generator=torch.Generator().manual_seed(3))
    exchange = exchange_for(given, 2)
    clean, _, _ = exchange.routed(given["x"], given["w13"], given["w2"], gate, ROUTERS["softmax"])
    given["x"][2] = float("nan")
    found, ids, _ = exchange.routed(given["x"], given["w13"], given["w2"], gate, ROUTERS["softmax"])
    others = [0, 1, 3, 4, 5]
    assert ids[2].tolist() == [0, 1, 2]
    assert torch.equal(found[others], clean[others])
    return {"holds": bool(torch.isnan(found[2]).all())}


@case
def a_gate_that_does_not_fit():
    given = operands((6, 24, 16, 6, 3), dtype=torch.float32)
    exchange = exchange_for(given, 2, capacity=5)
    call = (given["x"], given["w13"], given["w2"])
    gate, router = torch.zeros(6, 24), ROUTERS["softmax"]
    assert "below max_tokens 6" in refusal(lambda: exchange.routed(*call, gate, router))
    exchange = exchange_for(given, 2)
    wrong = {
        "the router has top_k 2": (gate, Router(top_k=2)),
        "has no score 'sqrtsoftplus'": (gate, Router(top_k=3, score="sqrtsoftplus")),
        "with epsilon 1e-06": (gate, Router(top_k=3, score="sigmoid", epsilon=1e-6)),
        "gate is (5, 24)": (gate[:5], router),
        "gate has dtype torch.float64": (gate.double(), router),
        "cannot be cut into 5 equal groups": (gate, Router(top_k=3, groups=5)),
    }
    for part, change in wrong.items():
        found = refusal(lambda change=change: exchange.routed(*call, *change))
        assert part in found, found
    return {"holds": True}


@case
def a_second_writer_is_found():
    given = operands((8, 16, 16, 4, 2), dtype=torch.float32)
    exchange = exchange_for(given, 2)
    first, count, _ = heap_layout(exchange.config).sections["shadow"]
    exchange.heap.own[:, first : first + 4 * count].view(torch.int32).fill_(1 * 2 + 1 + 1)
    return {"refused": refusal(lambda: exchange.fused_moe(backend="fused", **given))}


@case
def more_rows_than_room():
    given = operands((20, 16, 16, 4, 2), dtype=torch.float32)
    given["topk_ids"] = torch.tensor([[0, 1]]).repeat(20, 1)
    exchange = exchange_for(given, 2, max_rows=30)
    found = refusal(lambda: exchange.fused_moe(backend="fused", **given))
    even = given | {"topk_ids": torch.tensor([[0, 1], [2, 3]]).repeat(10, 1)[:14].repeat(2, 1)[:20]}
    fits = even | {name: even[name][:14] for name in ("x", "topk_ids", "topk_weights")}
    after = exchange.fused_moe(backend="fused", **fits)  # it can go on
    return {"refused": found, "holds": torch.equal(after, on_one_rank(fits))}


@case
def a_task_that_no_one_does():
    given = operands((8, 16, 16, 4, 2), dtype=torch.float32)
    exchange = exchange_for(given, 2)
    exchange._control[1, QUEUES.value] = 1  # as if a program had taken the first task and died
    found = refusal(lambda: exchange.fused_moe(backend="fused", **given))
    again = refusal(lambda: exchange.fused_moe(backend="fused", **given))
    return {"refused": found, "holds": "has failed before" in again}


@case
def a_call_is_part_of_no_graph():
    """A graph might leave out, or repeat, what other processes wait for."""
    given = operands((8, 16, 16, 4, 2), dtype=torch.float32)
    exchange = exchange_for(given, 2)
    whole = torch.compile(lambda: exchange.fused_moe(**given), fullgraph=True, backend="eager")
    try:
        whole()
    except torch._dynamo.exc.Unsupported as found:
        return {"holds": "OneSidedGroup.fused_moe" in str(found)}
    return {"holds": False}


@case
def operands_that_do_not_fit():
    given = operands((8, 16, 16, 4, 2), dtype=torch.float32)
    exchange = exchange_for(given, 2)
    wrong = {
        "the group was made for 8": {"num_tokens": [9, 0]}
        | {name: torch.cat([given[name], given[name][:1]]) for name in PER_TOKEN},
        "are not those of the group": {name: given[name][:2] for name in ("w13", "w2")},
        "num_tokens is (3, 3)": {"num_tokens": [3, 3]},
        "no room for a backward": {"x": given["x"].clone().requires_grad_()},
        "there are 4 experts": {"topk_ids": given["topk_ids"] + 3},
        "weight_on_input needs top_k 1": {"weight_on_input": True},
    }
    for part, change in wrong.items():
        found = refusal(
            lambda change=change: exchange.fused_moe(backend="fused", **(given | change))
        )
        assert part in found, found
    nothing = refusal(lambda: OneSidedGroup(exchange.config, VirtualHeap(4, nbytes=10**6)))
    small = refusal(lambda: OneSidedGroup(exchange.config, VirtualHeap(2, nbytes=100)))
    assert "the heap has 4 ranks" in nothing, nothing
    assert "nbytes=config.heap_bytes()" in small, small
    exchange.close()
    return {"refused": refusal(lambda: exchange.fused_moe(backend="fused", **given))}


PER_TOKEN = ("x", "topk_ids", "topk_weights")


def refusal(call):
    try:
        call()
    except FivefoldError as found:
        return str(found)
    return "nothing"


if __name__ == "__main__":
    torch.empty_like = poisoned  # an output starts as NaN
    CASES.update(GROUP_CASES)
    run_cases(CASES)
