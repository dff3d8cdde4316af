"""The engine on a noise-free quadratic: recursion, stability limit and damping of CO2."""

import itertools
import math
import warnings

import pytest
import torch

from fivefold.optim import (
    CO2,
    DelayCorrected,
    DiLoCo,
    LocalSGD,
    OuterSync,
    SlowMo,
    StabilityWarning,
    StreamingDiLoCo,
)
from fivefold.testing import run_world

TAU = 4
INNER_LR = 0.1


def contraction(curvature):
    """a: by how much tau local gradient steps contract a mode of that curvature."""
    return 1 - (1 - INNER_LR * curvature) ** TAU


def curvature_for(a):
    return (1 - (1 - a) ** (1 / TAU)) / INNER_LR


def mode_trajectory(rule, curvature, rounds, world_size=2):
    """x_{t,0} of one quadratic mode, trained by the engine in float64 from x = 1."""

    def work(transport):
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=INNER_LR)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)
        anchors = [1.0]
        for step in range(rounds * rule.tau):
            model.weight.grad = curvature * model.weight.detach()
            optimizer.step()
            sync.step()
            if (step + 1) % rule.tau == 0:
                anchors.append(model.weight.item())
        return anchors

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StabilityWarning)
        results = run_world(world_size, work)
    assert results[0] == results[1]
    return results[0]


def co2(**settings):
    return CO2(**{"tau": TAU, "staleness": "none", "clip": None, **settings})


@pytest.mark.parametrize(("alpha", "beta"), [(0.7, 0.2), (0.3, 0.5), (1.0, 0.0), (0.1, 0.8)])
@pytest.mark.parametrize("gap", [1.0, 2.5])
def test_co2_follows_the_two_term_recursion(alpha, beta, gap):
    rule = co2(outer_lr=alpha, outer_momentum=beta, staleness=f"constant:{gap}")
    a = contraction(1.3)
    expected, momentum = [1.0, 1.0], 0.0
    for t in range(1, 30):
        momentum = beta * momentum + a / gap * expected[t - 1]
        expected.append(expected[t] - alpha * momentum)
    assert mode_trajectory(rule, 1.3, 30) == pytest.approx(expected, rel=1e-11, abs=1e-12)


@pytest.mark.slow("0.5")
@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 0.6, 0.8])
def test_co2_is_stable_exactly_below_one_minus_beta(beta):
    limit = 1 - beta
    a = 0.999
    inside = mode_trajectory(
        co2(outer_lr=0.97 * limit / a, outer_momentum=beta), curvature_for(a), 800
    )
    outside = mode_trajectory(
        co2(outer_lr=1.03 * limit / a, outer_momentum=beta), curvature_for(a), 800
    )
    assert abs(inside[-1]) < 0.1
    assert max(abs(x) for x in outside[-4:]) > 10


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.97])
def test_a_short_delay_is_stable_as_far_as_its_worst_mode(beta, delay):
    """Of all modes, that whose steps leave u of the error; the limits are the Jury test's."""
    late = delay / TAU
    late_limit = (1 - beta) / (late * (1 - late) ** ((1 - late) / late))
    hardest, limit = 1 - (1 - late) ** (1 / delay), late_limit  # what one step contracts
    if 2 * (1 + beta) < late_limit:
        hardest, limit = 1.0, 2 * (1 + beta)
    growth = []
    for share in (0.9, 1.1):
        rule = co2(outer_lr=share * limit, outer_momentum=beta, delay_steps=delay)
        sizes = [abs(x) for x in mode_trajectory(rule, hardest / INNER_LR, 300)]
        growth.append(max(sizes[-20:]) / max(sizes[130:150]))
    assert growth[0] < 0.9
    assert growth[1] > 1.1


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 0.8])
def test_radius_at_critical_damping_is_one_plus_beta_over_two(beta):
    a = 0.9
    alpha = (1 - beta) ** 2 / 4 / a
    xs = mode_trajectory(co2(outer_lr=alpha, outer_momentum=beta), curvature_for(a), 200)
    radius = (1 + beta) / 2
    # A double root: x_t = (c0 + c1 t) radius**t, so the ratio tends to the radius like 1/t.
    coefficients = [x / radius**t for t, x in enumerate(xs)]
    steps = [b - a_ for a_, b in itertools.pairwise(coefficients[1:61])]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3, abs=1e-9)


def test_penalty_shrinks_the_step_as_the_formula_says():
    plain = mode_trajectory(co2(outer_lr=0.5, outer_momentum=0.0), 1.0, 2)
    damped = mode_trajectory(co2(outer_lr=0.5, outer_momentum=0.0, staleness="constant:4"), 1.0, 2)
    assert (1 - damped[2]) == pytest.approx((1 - plain[2]) / 4, rel=1e-12)


def test_clip_bounds_each_movement_by_alpha_phi():
    rule = co2(outer_lr=0.5, outer_momentum=0.5, clip=0.01)
    xs = mode_trajectory(rule, 1.0, 40)
    moves = [abs(b - a) for a, b in itertools.pairwise(xs)]
    assert max(moves) <= 0.5 * 0.01 * (1 + 1e-12)
    assert moves[5] == pytest.approx(0.005, rel=1e-12)


def test_tau_one_plain_co2_is_delayed_averaging():
    rule = CO2(tau=1, outer_lr=1.0, outer_momentum=0.0, staleness="none", clip=None)
    xs = mode_trajectory(rule, 0.5, 20)
    expected = [1.0, 1.0]
    for t in range(1, 20):
        expected.append(expected[t] - INNER_LR * 0.5 * expected[t - 1])
    assert xs == pytest.approx(expected, rel=1e-12)


def test_local_sgd_contracts_by_one_minus_a_each_round():
    xs = mode_trajectory(LocalSGD(tau=TAU), 0.8, 20)
    a = contraction(0.8)
    assert xs == pytest.approx([(1 - a) ** t for t in range(21)], rel=1e-11)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_synchronous_slowmo_is_stable_where_co2_is_not(beta):
    a = 0.999
    xs = mode_trajectory(SlowMo(tau=TAU, outer_lr=1.0, outer_momentum=beta), curvature_for(a), 400)
    assert max(abs(x) for x in xs[-4:]) < 1e-3
    assert math.isfinite(xs[-1])


@pytest.mark.parametrize("units", ["delta", "lr"])
def test_slowmo_units_agree_at_constant_learning_rate(units):
    xs = mode_trajectory(SlowMo(tau=TAU, outer_momentum=0.4, units=units), 0.7, 20)
    a = contraction(0.7)
    expected, momentum = [1.0], 0.0
    for t in range(20):
        momentum = 0.4 * momentum + a * expected[t]
        expected.append(expected[t] - momentum)
    assert xs == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_diloco_equals_torch_nesterov_on_the_pseudo_gradient():
    xs = mode_trajectory(DiLoCo(tau=TAU, outer_lr=0.7, outer_momentum=0.9), 0.6, 30)
    a = contraction(0.6)
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    outer = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    expected = [1.0]
    for _ in range(30):
        weight.grad = a * weight.detach()
        outer.step()
        expected.append(weight.item())
    assert xs == pytest.approx(expected, rel=1e-11, abs=1e-13)


def test_delay_corrected_equals_local_training_when_workers_agree():
    """Equal workers have nothing to correct: the mode contracts by 1 - a in every round."""
    xs = mode_trajectory(DelayCorrected(tau=TAU, fragments=1), 0.8, 20)
    a = contraction(0.8)
    assert xs == pytest.approx([(1 - a) ** t for t in range(21)], rel=1e-11)


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
def test_the_default_momentum_is_the_papers_in_rounds_as_long_as_the_papers(kind):
    """Its shortest have 50 steps; at tau 8 the same momentum loses 0.38 bits per byte."""
    chosen = {tau: kind(tau=tau).outer_momentum for tau in (1, 8, 49, 50, 500)}
    assert chosen == {1: 0.5, 8: 0.5, 49: 0.5, 50: 0.9, 500: 0.9}
    assert kind(tau=8, outer_momentum=0.9).outer_momentum == 0.9
    assert kind(tau=500, outer_momentum=0.0).outer_momentum == 0.0
