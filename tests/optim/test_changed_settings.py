"""A run that goes on with other rounds keeps momentum, sum in flight and local steps."""

import copy
from dataclasses import replace

import pytest
import torch

from fivefold.errors import ConfigurationError
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

pytestmark = pytest.mark.filterwarnings("ignore::fivefold.optim.StabilityWarning")
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "staleness": "none", "clip": None}
STEPS, CUT = 40, 13


def work(transport, before, after, dtype=torch.float64):
    """Every local step moves all elements by the rank's own amount: the end tells what arrived."""
    model = torch.nn.ParameterList(torch.zeros(3, dtype=dtype) for _ in range(4))
    model.register_buffer("seen", torch.zeros(1, dtype=dtype))

    def engine(rule):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return OuterSync(model, optimizer, rule=rule, transport=transport)

    sync = engine(before)
    for step in range(STEPS):
        if step == CUT:
            state = copy.deepcopy([[p.data for p in model], model.seen, sync.state_dict()])
            sync = engine(after)
            for p, value in zip(model, state[0], strict=True):
                p.data.copy_(value)
            model.seen.copy_(state[1])
            sync.load_state_dict(state[2])
        for tensor in [*(p.data for p in model), model.seen]:
            tensor.add_(1.0 + transport.rank)
        sync.step()
    sync.finalize()
    assert sync.statistics().steps == STEPS
    return torch.cat([*(p.detach() for p in model), model.seen])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LocalSGD(tau=4), LocalSGD(tau=3)),
        (CO2(tau=4, **PLAIN), CO2(tau=6, **PLAIN)),
        (CO2(tau=4, **PLAIN), CO2(tau=4, delay_steps=2, **PLAIN)),
        (CO2(tau=4, delay_steps=2, **PLAIN), CO2(tau=4, **PLAIN)),
        (CO2(tau=4, **PLAIN), CO2(tau=4, fragments=2, **PLAIN)),
        (CO2(tau=4, fragments=4, **PLAIN), CO2(tau=5, **PLAIN)),
        (DelayCorrected(tau=4, fragments=2), DelayCorrected(tau=8, fragments=2)),
        (DelayCorrected(tau=8, fragments=4), DelayCorrected(tau=4, fragments=1)),
        (DelayCorrected(tau=4, fragments=1), DelayCorrected(tau=6, fragments=3)),
    ],
    ids=lambda rule: f"{rule.tau}-{rule.num_fragments}-{rule.delay_steps}",
)
def test_no_local_step_is_lost_and_none_counts_twice(before, after, dtype):
    # The mean of 1, 2 and 3. bfloat16 has all whole numbers up to 256, and no part of one there.
    expected = torch.full((13,), 2.0 * STEPS, dtype=torch.float64)
    for found in run_world(3, lambda t: work(t, before, after, dtype)):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-9)


def test_sixteen_bits_carry_on_what_was_rounded_away():
    """A step of one bfloat16 on one rank of four; the rounds get a delay in the middle of one."""
    unit = float(torch.finfo(torch.bfloat16).eps)

    def run(transport):
        model = torch.nn.ParameterList(torch.ones(3, dtype=torch.bfloat16) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=CO2(tau=4, **PLAIN), transport=transport)
        for step in range(24):
            if step == 10:
                state = copy.deepcopy(sync.state_dict())
                live = [p.detach().clone() for p in model]
                rule = CO2(tau=4, fragments=2, **PLAIN)
                sync = OuterSync(model, optimizer, rule=rule, transport=transport)
                for p, value in zip(model, live, strict=True):
                    p.data.copy_(value)
                sync.load_state_dict(state)
            for p in model:
                p.data.add_(unit if transport.rank == 0 else 0.0)
            sync.step()
        sync.finalize()
        return (torch.cat([p.detach().double() for p in model]) - 1.0) / unit

    for found in run_world(4, run):
        assert found.tolist() == [6.0] * 6


def test_a_state_that_one_rank_cannot_load_leaves_all_as_they_are():
    def run(transport):
        model = torch.nn.ParameterList(torch.zeros(3) for _ in range(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=LocalSGD(tau=4), transport=transport)
        state = copy.deepcopy(sync.state_dict())
        if transport.rank == 1:
            state["fragments"]["0"]["tensors"]["3"]["anchor"] = torch.zeros(2)
        for _ in range(5):
            for p in model:
                p.data += 1.0 + transport.rank
            sync.step()
        before = copy.deepcopy(sync.state_dict())
        with pytest.raises(
            ConfigurationError, match=r"saved outer state has \(2,\) for the anchor"
        ):
            sync.load_state_dict(state)
        after = sync.state_dict()
        assert after["steps"] == 5
        for name, entries in after["fragments"]["0"]["tensors"].items():
            for key, value in entries.items():
                assert torch.equal(value, before["fragments"]["0"]["tensors"][name][key])
        return True

    assert run_world(2, run) == [True, True]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SlowMo(tau=4, outer_momentum=0.5), SlowMo(tau=4, outer_momentum=0.5, outer_lr=0.5)),
        (
            StreamingDiLoCo(tau=4, fragments=2, outer_momentum=0.5),
            StreamingDiLoCo(tau=8, fragments=4, outer_momentum=0.5),
        ),
    ],
)
def test_the_momentum_is_kept(before, after):
    """With no local step after the change, what is left moves by the momentum of before."""

    def momenta(sync):
        parts = sync.state_dict()["fragments"].values()
        found = {
            n: e["momentum"] for p in parts for n, e in p["tensors"].items() if "momentum" in e
        }
        return torch.cat([found[name].clone() for name in sorted(found)])

    def run(transport):
        model = torch.nn.ParameterList(torch.zeros(3) for _ in range(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=before, transport=transport)
        for _ in range(12):
            for p in model:
                p.data += 1.0 + transport.rank
            sync.step()
        state = copy.deepcopy(sync.state_dict())
        other = OuterSync(model, optimizer, rule=after, transport=transport)
        other.load_state_dict(state)
        return momenta(sync), momenta(other)

    for kept, found in run_world(2, run):
        assert kept.abs().min() > 0
        # What was in flight may have been merged; a momentum never begins anew.
        assert torch.all(found.abs() >= 0.5 * kept.abs())


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (CO2(tau=4), CO2(tau=4, clip=0.5), r"rule\.clip='1.0', this run has '0.5'"),
        (CO2(tau=4), CO2(tau="auto"), r"rule\.tau="),
        (CO2(tau=4), LocalSGD(tau=4), "rule='CO2', this run has 'Local SGD'"),
    ],
)
def test_what_may_not_change_is_refused_with_the_first_difference(before, after, told):
    with pytest.raises(ConfigurationError, match=told):
        run_world(2, lambda t: work(t, before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LocalSGD(tau=4), LocalSGD(tau=3)),
        (CO2(tau=4, **PLAIN), CO2(tau=6, **PLAIN)),
        (CO2(tau=8, fragments=2, **PLAIN), CO2(tau=4, fragments=2, **PLAIN)),
        (DelayCorrected(tau=8, fragments=2), DelayCorrected(tau=4, fragments=2, delay_steps=3)),
        (DelayCorrected(tau=4), DelayCorrected(tau=12)),
    ],
    ids=lambda rule: f"{rule.tau}-{rule.num_fragments}-{rule.delay_steps}",
)
def test_a_schedule_of_tau_loses_no_step(before, after):
    def run(transport):
        model = torch.nn.ParameterList(torch.zeros(3, dtype=torch.float64) for _ in range(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=before, transport=transport)
        for step in range(STEPS):
            if step == CUT:
                sync.set_rule(after)
            for p in model:
                p.data.add_(1.0 + transport.rank)
            sync.step()
        rounds = sync.statistics()
        assert rounds.tau == after.tau
        sync.finalize()
        return torch.cat([p.detach() for p in model])

    expected = torch.full((12,), 2.0 * STEPS, dtype=torch.float64)
    for found in run_world(3, run):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_schedule_of_the_outer_learning_rate_is_the_recursion_by_hand():
    """SlowMo by hand: m <- b m + D, x <- x - a m; each rank moves by its own amount a round."""
    rates = [1.0, 0.5, 0.25, 0.125]

    def run(transport):
        model = torch.nn.ParameterList([torch.zeros(2, dtype=torch.float64)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rule = SlowMo(tau=2, units="delta", outer_momentum=0.5)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)
        for rate in rates:
            sync.set_rule(replace(rule, outer_lr=rate))
            for _ in range(2):
                model[0].data.add_(1.0 + transport.rank)
                sync.step()
        return model[0].detach().clone()

    x = momentum = 0.0
    for rate in rates:
        momentum = 0.5 * momentum - 3.0  # two steps of 1.5 in the mean
        x -= rate * momentum
    for found in run_world(2, run):
        torch.testing.assert_close(found, torch.full((2,), x, dtype=torch.float64))


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (CO2(tau=4, clip=0.5), r"rule\.clip="),
        (CO2(tau=4, fragments=2), "fragments cannot change in the middle"),
        (CO2(tau=4, delay_steps=2), "delay_steps cannot change in the middle"),
        (LocalSGD(tau=4), r"takes a CO2; got LocalSGD"),
        (CO2(tau="auto"), r"rule\.tau="),
    ],
)
def test_what_no_schedule_may_change_is_refused(after, told):
    def run(transport):
        model = torch.nn.ParameterList(torch.zeros(3) for _ in range(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=CO2(tau=4), transport=transport)
        with pytest.raises(ConfigurationError, match=told):
            sync.set_rule(after)
        return sync.statistics().tau

    assert run_world(2, run) == [4, 4]


@pytest.mark.parametrize("rule", [LocalSGD(tau=4), CO2(tau=4), DelayCorrected(tau=4, fragments=2)])
@pytest.mark.parametrize("late", [None, 3], ids=["not called", "a step later"])
def test_ranks_that_change_the_rule_otherwise_end_together(rule, late):
    """Else rounds of other lengths would be averaged, without a word, until one rank waits."""

    def run(transport):
        model = torch.nn.ParameterList(torch.zeros(3) for _ in range(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)

        def train():
            for step in range(16):
                if step == (late if transport.rank == 1 else 2):
                    sync.set_rule(replace(rule, tau=2))
                sync.step()

        with pytest.raises(ConfigurationError, match="another rule than the others") as caught:
            train()
        return caught.value.message

    first, second = run_world(2, run)
    assert first == second


def test_a_rule_that_changes_nothing_may_be_set_on_one_rank():
    def run(transport):
        model = torch.nn.ParameterList([torch.zeros(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=LocalSGD(tau=2), transport=transport)
        for step in range(6):
            if step == transport.rank:
                sync.set_rule(LocalSGD(tau=2))
            sync.step()
        return sync.statistics().merged_rounds

    assert run_world(2, run) == [3, 3]


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
def test_a_momentum_that_is_left_open_stays_where_rounds_grow_long(kind):
    """Its default is another one from 50 steps a round on."""

    def run(transport):
        model = torch.nn.ParameterList(torch.zeros(3) for _ in range(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=kind(tau=8), transport=transport)
        sync.set_rule(kind(tau=400))
        with pytest.raises(ConfigurationError, match="outer_momentum"):
            sync.set_rule(kind(tau=400, outer_momentum=0.9))
        rule = sync.state_dict()["settings"]
        return rule["rule.tau"], rule["rule.outer_momentum"]

    assert run_world(2, run) == [("400.0", "0.5")] * 2


def test_a_schedule_of_tau_warns_of_one_learning_rate_once():
    def run(transport):
        model = torch.nn.ParameterList([torch.zeros(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rule = CO2(tau=2, staleness="none", outer_momentum=0.5)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)
        for step in range(40):
            sync.set_rule(replace(rule, tau=1 + step % 2, outer_lr=0.7 if step < 30 else 0.9))
            model[0].data.add_(1.0)
            sync.step()

    with pytest.warns(StabilityWarning) as caught:
        run_world(2, run)
    told = [str(each.message).split()[0] for each in caught]
    assert sorted(told) == ["outer_lr=0.7", "outer_lr=0.7", "outer_lr=0.9", "outer_lr=0.9"]
