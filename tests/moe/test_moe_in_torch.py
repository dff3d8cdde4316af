"""The layer and the operator within torch: compiled, on meta, as fake tensors, under autocast."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fivefold.moe import MoE, MoEConfig, Router, drop_beyond_capacity, fused_moe
from oracles.experts import operands

ROUTERS = {
    "softmax": {},
    "capacity and a shared expert": {"capacity_factor": 0.5, "shared_intermediate": 4},
    "sigmoid, groups and a bias": {
        "selection_bias": True,
        "router": Router(top_k=2, score="sigmoid", groups=2, group_score="top2_sum"),
    },
}


@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_the_layer_compiles_whole_and_once_for_all_numbers_of_tokens(options):
    layer = MoE(MoEConfig(hidden=8, intermediate=4, experts=4, **options))
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (6, 9, 33):
        x = torch.randn(tokens, 8, requires_grad=True)
        y = compiled(x)
        torch.testing.assert_close(y, layer(x))
        y.sum().backward()
    assert len(graphs) == 1
    torch.compiler.reset()


@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_shapes_without_values(options):
    with torch.device("meta"):
        layer = MoE(MoEConfig(hidden=8, intermediate=4, experts=4, **options))
        assert layer(torch.empty(2, 3, 8)).shape == (2, 3, 8)
    with FakeTensorMode():
        layer = MoE(MoEConfig(hidden=8, intermediate=4, experts=4, **options))
        assert layer(torch.empty(2, 3, 8)).shape == (2, 3, 8)


def test_the_operator_follows_autocast():
    given = operands((16, 8, 8, 4, 2), bias=True, dtype=torch.float32)
    given["x"] = given["x"].bfloat16()  # of mixed types, as a layer in the middle of a model gets
    given["w13"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = fused_moe(**given)
    low = {n: v.detach().bfloat16() if n in {"x", "w13", "w2", "b13", "b2"} else v
           for n, v in given.items()}  # fmt: skip
    assert torch.equal(found, fused_moe(**low))
    found.float().sum().backward()
    assert given["w13"].grad.dtype == torch.float32


def test_autocast_leaves_float64_alone_as_it_does_with_torch():
    given = operands((5, 8, 6, 4, 2))
    layer = MoE(MoEConfig(hidden=8, intermediate=4, experts=4, shared_intermediate=3)).double()
    wanted = fused_moe(**given), layer(given["x"])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.linear(given["x"], given["w13"][0]).dtype == torch.float64
        found = fused_moe(**given), layer(given["x"])
    assert all(map(torch.equal, found, wanted))


def dropped_one_by_one(ids, weights, capacity, policy):
    """Who stays: the slots in the order of the rule, one after the other."""
    slots = [(k, t) for k in range(ids.shape[1]) for t in range(ids.shape[0])]
    if policy == "weight":
        slots.sort(key=lambda slot: -float(weights[slot[1], slot[0]]))
    taken: dict[int, int] = {}
    kept = torch.zeros_like(ids, dtype=torch.bool)
    for k, t in slots:
        expert = int(ids[t, k])
        if expert >= 0 and taken.get(expert, 0) < capacity:
            taken[expert] = taken.get(expert, 0) + 1
            kept[t, k] = True
    return kept


@pytest.mark.parametrize("policy", ["position", "weight"])
@pytest.mark.parametrize("capacity", [0, 1, 3, 10**30])
def test_dropping_is_the_stated_rule_also_with_ties(policy, capacity):
    draw = torch.Generator().manual_seed(capacity % 97)
    for tokens, experts, top_k in ((1, 1, 1), (0, 3, 2), (17, 3, 2), (40, 7, 4)):
        ids = torch.rand(tokens, experts, generator=draw).argsort(dim=1)[:, :top_k].int()
        ids[torch.rand(ids.shape, generator=draw) < 0.2] = -1
        weights = torch.randint(0, 4, ids.shape, generator=draw) / 4  # many ties
        found = drop_beyond_capacity(
            ids, weights, num_experts=experts, capacity=capacity, policy=policy
        )
        assert torch.equal(found, dropped_one_by_one(ids, weights, capacity, policy))
