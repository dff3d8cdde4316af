"""The exchange between virtual ranks on a real GPU. Skipped where there is none."""

import pytest
import torch

from fivefold.errors import CommunicationError
from fivefold.moe import (
    OneSidedConfig,
    OneSidedGroup,
    Router,
    VirtualHeap,
    backends,
    fused_moe,
    route,
)
from oracles.experts import TOLERANCE, expected, operands, relative

missing = backends("cuda")["fused"]
if missing is not None:
    pytest.skip(f"the exchange cannot run here: {missing}", allow_module_level=True)

SHAPES = [  # T, H, I, E, K
    (1, 256, 256, 8, 2),
    (333, 256, 384, 8, 4),
    (1500, 512, 256, 16, 2),
    (130, 130, 70, 4, 3),  # weights without descriptors
]


def on_gpu(given):
    return {name: value.cuda() for name, value in given.items()}


def exchange_for(given, ranks, *, timeout_s=20.0, **options):
    tokens, top_k = given["topk_ids"].shape
    experts, hidden, inner = given["w2"].shape
    config = OneSidedConfig(
        ranks=ranks,
        experts=experts,
        hidden=hidden,
        intermediate=inner,
        top_k=top_k,
        max_tokens=tokens,
        dtype=given["x"].dtype,
        **options,
    )
    heap = VirtualHeap(ranks, nbytes=config.heap_bytes(), device="cuda")
    return OneSidedGroup(config, heap, timeout_s=timeout_s)


def uneven(tokens, ranks):
    counts = [0, *[tokens // ranks] * (ranks - 1)]
    counts[-1] += tokens - sum(counts)
    return counts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("capacity", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_one_by_one_and_all_numbers_of_ranks_agree(shape, capacity, dtype):
    given = operands(shape, bias=True, dtype=dtype)
    wanted, results = expected(given, "swiglu"), []
    for ranks in (1, 2, 4):
        exchange = exchange_for(given, ranks, capacity=shape[0] if capacity else None, debug=True)
        results.append(
            exchange.fused_moe(**on_gpu(given), num_tokens=uneven(shape[0], ranks)).cpu()
        )
        exchange.check()
    assert relative(results[0], wanted) < TOLERANCE[dtype]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("capacity", [None, 700])
def test_a_thousand_skewed_launches_without_a_pause(capacity):
    given = on_gpu(operands((700, 256, 256, 8, 2), dtype=torch.bfloat16))
    exchange = exchange_for(given, 4, capacity=capacity)
    skews = [
        given["topk_ids"],
        torch.tensor([[3, 0]]).repeat(700, 1).cuda(),
        torch.tensor([[7, -1]]).repeat(700, 1).cuda(),
        torch.full((700, 2), -1).cuda(),
    ]
    calls = [given | {"topk_ids": ids} for ids in skews]
    counts = [[175] * 4, [0, 0, 0, 700], [1, 2, 3, 694], [700, 0, 0, 0]]
    first = [exchange.fused_moe(**c, num_tokens=n) for c, n in zip(calls, counts, strict=True)]
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for launch in range(1000):
        which = launch * 7 % 4
        found = exchange.fused_moe(**calls[which], num_tokens=counts[which])
        differs |= (found != first[which]).any()
    exchange.check()
    assert not bool(differs)
    assert exchange.epoch == 1004


def test_in_a_graph():
    given = on_gpu(operands((64, 256, 256, 8, 2), dtype=torch.bfloat16))
    exchange = exchange_for(given, 4)
    wanted = exchange.fused_moe(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = exchange.fused_moe(**given)
    for _ in range(3):  # the epoch goes on by itself
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, wanted)
    assert exchange.epoch == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gate_chooses_as_route_does(dtype):
    given = on_gpu(operands((500, 256, 256, 16, 4), dtype=dtype))
    x = torch.randint(-1, 2, (500, 256)).to(dtype).cuda()
    gate = torch.randint(-1, 2, (16, 256)).to(dtype).cuda()  # exact logits, and many equal
    router = Router(top_k=4, score="topk_softmax")
    exchange = exchange_for(given, 4)
    found, ids, weights = exchange.routed(x, given["w13"], given["w2"], gate, router)
    wanted = route(x.float() @ gate.float().T, router)
    assert torch.equal(ids.long(), wanted.ids_TK)
    assert torch.allclose(weights, wanted.weights_TK, rtol=1e-5, atol=1e-6)
    alone = fused_moe(x, given["w13"], given["w2"], ids, weights, backend="reference")
    assert relative(found, alone.double()) < 2 * TOLERANCE[dtype]


def test_a_wait_ends():
    given = on_gpu(operands((64, 256, 256, 8, 2), dtype=torch.bfloat16))
    exchange = exchange_for(given, 4, timeout_s=0.2)
    exchange._control[1, 0] = 1  # as if someone had taken the first task and died
    exchange.fused_moe(**given)
    with pytest.raises(CommunicationError, match=r"waited 0\.2 s for"):
        exchange.check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["fused", "split"])
def test_forward_and_gradients_over_a_group_are_those_of_one_rank(shape, backend):
    given = on_gpu(operands(shape, bias=True, dtype=torch.bfloat16))

    def outputs(**options):
        leaves = {n: v.clone().requires_grad_() for n, v in given.items() if v.is_floating_point()}
        found = fused_moe(**(given | leaves), backend=backend, **options)
        found.square().sum().backward()
        return [found.detach(), *(leaf.grad for leaf in leaves.values())]

    wanted = outputs()
    for ranks in (1, 2):
        group = exchange_for(given, ranks, training=True, debug=True)
        for _ in range(3):
            found = outputs(group=group)
            group.check()
        for one, other in zip(found, wanted, strict=True):
            assert relative(one, other.double()) < TOLERANCE[torch.bfloat16]
