"""Routers against plain loops, closed forms of the losses, the drop rule."""

import math
from contextlib import nullcontext
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError
from fivefold.moe import (
    Router,
    Routing,
    capacity_for,
    drop_beyond_capacity,
    load_balancing_loss,
    route,
    router_z_loss,
    updated_selection_bias,
)
from fivefold.moe.routing.router import Score


def one_token(logits, router, bias):
    """Ids and weights of one token by plain arithmetic on Python floats."""
    num = len(logits)
    if router.score == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        top = max(logits)
        exps = [math.exp(v - top) for v in logits]
        scores = [v / sum(exps) for v in exps]
    wanted = logits if router.score == "topk_softmax" else scores
    choice = [w + b for w, b in zip(wanted, bias, strict=True)]
    size = num // router.groups
    groups = [choice[g * size : (g + 1) * size] for g in range(router.groups)]
    if router.group_score == "max":
        worth = [max(group) for group in groups]
    else:
        worth = [sum(sorted(group)[-2:]) for group in groups]
    open_groups = sorted(range(router.groups), key=lambda g: (-worth[g], g))[: router.top_groups]
    allowed = [e for e in range(num) if e // size in open_groups]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: router.top_k]
    weights = [wanted[e] for e in ids]
    if router.score == "topk_softmax":
        exps = [math.exp(w - max(weights)) for w in weights]
        weights = [v / sum(exps) for v in exps]
    elif router.normalize:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * router.scale for w in weights]


ROUTERS = [
    Router(top_k=2),
    Router(top_k=1, normalize=False),
    Router(top_k=8, score="topk_softmax"),
    Router(top_k=3, score="topk_softmax", scale=2.5),
    Router(top_k=4, score="sigmoid", scale=2.5),
    Router(top_k=4, score="sigmoid", normalize=False),
    Router(top_k=2, groups=4, top_groups=1),
    Router(top_k=3, score="sigmoid", groups=4, top_groups=2, group_score="top2_sum"),
    Router(top_k=3, score="topk_softmax", groups=2, top_groups=2),
]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("biased", [False, True])
def test_equals_plain_arithmetic(router, biased):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    bias = 0.3 * torch.randn(8, generator=generator, dtype=torch.float64)
    routing = route(logits, router, selection_bias=bias if biased else None)
    for row in range(40):
        values = bias.tolist() if biased else [0.0] * 8
        ids, weights = one_token(logits[row].tolist(), router, values)
        assert routing.ids_TK[row].tolist() == ids
        assert routing.weights_TK[row].tolist() == pytest.approx(weights, rel=1e-12)


def test_ties_go_to_the_lower_expert():
    routing = route(torch.zeros(3, 5), Router(top_k=2))
    assert routing.ids_TK.tolist() == [[0, 1]] * 3
    assert torch.equal(routing.weights_TK, torch.full((3, 2), 0.5))


def test_weights_and_losses_have_gradients_and_the_bias_has_none():
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    routing = route(logits, Router(top_k=2, score="sigmoid"), selection_bias=bias)
    (routing.weights_TK.square().sum() + load_balancing_loss(routing)).backward()
    assert logits.grad.abs().sum() > 0
    assert bias.grad is None
    assert torch.autograd.gradcheck(
        lambda v: route(v, Router(top_k=2)).weights_TK, logits.detach().requires_grad_()
    )
    assert torch.autograd.gradcheck(router_z_loss, logits.detach().requires_grad_())


def test_low_precision_logits_are_routed_in_float32():
    routing = route(torch.randn(4, 4).bfloat16(), Router(top_k=2))
    assert routing.weights_TK.dtype == torch.float32
    assert torch.allclose(routing.weights_TK.sum(-1), torch.ones(4), atol=1e-6)


def routing_of(ids, scores):
    weights = torch.ones(ids.shape, dtype=scores.dtype)
    return Routing(ids_TK=ids, weights_TK=weights, scores_TE=scores)


def test_losses_in_closed_form():
    even = routing_of(torch.tensor([[0], [1], [2], [3]]), torch.full((4, 4), 0.25))
    assert float(load_balancing_loss(even)) == pytest.approx(1.0)
    alone = torch.zeros(5, 4)
    alone[:, 2] = 1.0
    assert float(load_balancing_loss(routing_of(torch.full((5, 1), 2), alone))) == 4.0
    assert float(router_z_loss(torch.zeros(3, 4))) == pytest.approx(math.log(4) ** 2)


def test_selection_bias_balances_a_skewed_router():
    torch.manual_seed(0)
    logits = torch.randn(512, 8) + torch.tensor([2.0, 1, 0, 0, 0, 0, 0, -2])
    router, bias = Router(top_k=2, score="sigmoid"), torch.zeros(8)
    spread = []
    for _ in range(400):
        load = route(logits, router, selection_bias=bias).load_E
        spread.append(float(load.max() - load.min()))
        bias = updated_selection_bias(bias, load, rate=2e-3)
    assert spread[0] > 300
    assert spread[-1] < 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_loads_are_compared_as_whole_numbers_whatever_the_type_of_the_bias(dtype):
    many = 2**25
    for load in ([257, 255, 256], [many + 1, many - 1, many]):
        bias = updated_selection_bias(torch.zeros(3, dtype=dtype), torch.tensor(load), rate=0.5)
        assert bias.tolist() == [-0.5, 0.5, 0.0]
        assert bias.dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 0}, "top_k must be a whole number from 1; got 0"),
        ({"top_k": 2.5}, "top_k must be a whole number from 1; got 2.5"),
        ({"top_k": 1, "groups": 2.0}, "groups must be a whole number from 1; got 2.0"),
        ({"top_k": 1, "score": "argmax"}, "score is 'argmax'"),
        ({"top_k": 1, "groups": 2, "top_groups": 3}, "top_groups must be between 1 and groups=2"),
        ({"top_k": 1, "group_score": "mean"}, "group_score is 'mean'"),
    ],
)
def test_bad_routers(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Router(**arguments)


@pytest.mark.parametrize(
    ("router", "experts", "message"),
    [
        (Router(top_k=3), 2, "can reach 2 experts only"),
        (Router(top_k=1, groups=3), 4, "cannot be cut into 3 equal groups"),
        (Router(top_k=3, groups=4), 8, "can reach 2 experts only"),
        (Router(top_k=1, groups=4, group_score="top2_sum"), 4, "two experts in each group"),
    ],
)
def test_routers_that_do_not_fit(router, experts, message):
    with pytest.raises(ConfigurationError, match=message):
        route(torch.zeros(2, experts), router)


@pytest.mark.parametrize("score", get_args(Score))
def test_weights_that_are_no_numbers_are_refused(score):
    for logits, is_bad in (
        ([0.0, math.nan], True),
        ([-math.inf, math.inf], score not in {"sigmoid", "topk_sigmoid"}),
        ([-math.inf, 1.0], False),  # an expert that is masked out
        ([-math.inf, -math.inf], "softmax" in score),
    ):
        with pytest.raises(DataError, match="token 1 are NaN") if is_bad else nullcontext():
            route(torch.tensor([[0.0, 0.0], logits]), Router(top_k=1, score=score))


@pytest.mark.parametrize(("logits", "bias"), [([1.0, 2.0], math.nan), ([1.0, math.inf], -math.inf)])
def test_a_selection_bias_that_makes_scores_nan_is_refused(logits, bias):
    router = Router(top_k=1, score="topk_sigmoid")
    with pytest.raises(DataError, match="token 0 are NaN"):
        route(torch.tensor([logits]), router, selection_bias=torch.tensor([0.0, bias]))


def test_a_token_does_not_leave_its_groups_for_an_expert_that_is_masked_out():
    router = Router(top_k=2, score="topk_softmax", groups=2)
    routing = route(torch.tensor([[4.0, 3.0, 5.0, -math.inf]]), router)
    assert routing.ids_TK.tolist() == [[2, 3]]
    assert routing.weights_TK.tolist() == [[1.0, 0.0]]


def test_a_score_that_is_zero_has_a_slope_of_zero():
    logits = torch.tensor([[-200.0, 1.0, -300.0]], requires_grad=True)
    routing = route(logits, Router(top_k=2, score="sqrtsoftplus"))
    assert routing.weights_TK.tolist() == [[1.0, 0.0]]
    (routing.weights_TK[0, 1] + load_balancing_loss(routing)).backward()
    assert logits.grad[0, ::2].tolist() == [0.0, 0.0]


def test_bad_logits():
    with pytest.raises(ConfigurationError, match="tokens, experts"):
        route(torch.zeros(3), Router(top_k=1))
    with pytest.raises(ConfigurationError, match="selection_bias must be"):
        route(torch.zeros(3, 4), Router(top_k=1), selection_bias=torch.zeros(3))


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
def test_no_tokens_in_groups(group_score):
    router = Router(top_k=2, groups=2, group_score=group_score, score="sigmoid")
    assert route(torch.zeros(0, 4), router).ids_TK.shape == (0, 2)


def test_no_tokens():
    routing = route(torch.zeros(0, 4), Router(top_k=2))
    assert routing.ids_TK.shape == (0, 2)
    assert routing.load_E.tolist() == [0, 0, 0, 0]
    logits = torch.zeros(0, 4, requires_grad=True)
    losses = load_balancing_loss(route(logits, Router(top_k=2))), router_z_loss(logits)
    for loss in losses:
        assert float(loss.detach()) == 0.0
        loss.backward()
    assert logits.grad.shape == (0, 4)


def kept_by_loop(ids, weights, num_experts, capacity, policy):
    top_k = len(ids[0]) if ids else 0
    order = [(t, k) for k in range(top_k) for t in range(len(ids))]
    if policy == "weight":
        order.sort(key=lambda place: -weights[place[0]][place[1]])
    used = [0] * num_experts
    kept = [[False] * top_k for _ in ids]
    for token, slot in order:
        expert = ids[token][slot]
        if expert >= 0 and used[expert] < capacity:
            used[expert] += 1
            kept[token][slot] = True
    return kept


@given(st.data())
def test_drops_as_a_plain_loop_does(data):
    tokens, top_k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    capacity = data.draw(st.integers(0, 6))
    policy = data.draw(st.sampled_from(["position", "weight"]))
    ids = torch.tensor(
        [data.draw(st.permutations(range(-1, 4)))[:top_k] for _ in range(tokens)]
    ).view(tokens, top_k)
    levels = st.lists(st.integers(0, 3), min_size=tokens * top_k, max_size=tokens * top_k)
    weights = torch.tensor(data.draw(levels), dtype=torch.float32).view(tokens, top_k)
    kept = drop_beyond_capacity(ids, weights, num_experts=4, capacity=capacity, policy=policy)
    assert kept.tolist() == kept_by_loop(ids.tolist(), weights.tolist(), 4, capacity, policy)


def test_capacity_by_formula():
    assert capacity_for(8192, 32, top_k=2) == 512
    assert capacity_for(10, 1, top_k=1, factor=1.1) == 11
    assert capacity_for(0, 4, top_k=2) == 0
    with pytest.raises(ConfigurationError, match=r"factor must be a number, .*; got -1"):
        capacity_for(10, 4, top_k=2, factor=-1.0)
    for wrong in ({"num_tokens": -1}, {"num_tokens": 1.5}, {"top_k": 0}, {"factor": "1"}):
        with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))} must be"):
            capacity_for(**{"num_tokens": 10, "num_experts": 4, "top_k": 2} | wrong)
    with pytest.raises(ConfigurationError, match="whole number from 0; got -1"):
        drop_beyond_capacity(torch.zeros(1, 1).long(), torch.ones(1, 1), num_experts=1, capacity=-1)
    with pytest.raises(ConfigurationError, match="drop policy"):
        drop_beyond_capacity(
            torch.zeros(1, 1).long(), torch.ones(1, 1), num_experts=1, capacity=1, policy="random"
        )
