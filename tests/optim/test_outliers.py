"""Payloads far from the usual size are left out, alike on all ranks, counted and named."""

import copy
import logging

import pytest
import torch

from fivefold.errors import ConfigurationError
from fivefold.optim import DelayCorrected, DelayedGradients, LocalSGD, OuterSync
from fivefold.testing import run_world

RULES = [LocalSGD(tau=2), DelayCorrected(tau=4, fragments=2), DelayedGradients()]


def train(transport, rule, *, wild=(), steps=40, scale=None, **settings):
    """Gradients of size 1, but for the wild (rank, step), whose are 1000 times that."""
    model = torch.nn.ParameterList([torch.zeros(6), torch.zeros(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = OuterSync(model, optimizer, rule=rule, transport=transport, **settings)
    for step in range(steps):
        size = (1.0 if scale is None else scale(step)) * (
            1000.0 if (transport.rank, step) in wild else 1.0
        )
        for p in model:
            p.grad = torch.full_like(p, size)
        optimizer.step()
        sync.step()
    sync.finalize()
    flat = torch.cat([p.detach() for p in model])
    return flat, sync.statistics().left_out_payloads


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_wild_step_of_one_rank_is_left_out_counted_and_named(rule, caplog):
    with caplog.at_level(logging.WARNING, logger="fivefold.optim"):
        found = run_world(
            3, lambda t: train(t, rule, wild={(1, 45)}, steps=60, outlier_factor=10.0)
        )
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][0], found[2][0])
    # All fragments go on from the anchor, so the second one's payload is usual again.
    assert {left_out for _, left_out in found} == {1}
    assert float(found[0][0].abs().max()) < 6.01  # 60 steps of 0.1
    messages = {record.getMessage() for record in caplog.records}
    # That all ranks have the same gradients here is told as well.
    told = {message for message in messages if message.startswith("outlying")}
    assert len(told) == 1
    assert all("rank 1's is " in message for message in told)
    without = run_world(3, lambda t: train(t, rule, wild={(1, 45)}, steps=60))
    assert float(without[0][0].abs().max()) > 30  # the same step, where nobody looks


def test_an_honest_change_of_scale_is_followed():
    found = run_world(
        2,
        lambda t: train(
            t, LocalSGD(tau=1), steps=60, scale=lambda step: 1.0 if step < 20 else 30.0,
            outlier_factor=10.0,
        ),
    )  # fmt: skip
    left_out = found[0][1] // 2
    assert 1 <= left_out < 10
    expected = 0.1 * (20 + 30 * (40 - left_out))
    torch.testing.assert_close(found[0][0], torch.full((10,), -expected))


def test_resume_knows_the_usual_size():
    rule = LocalSGD(tau=1)

    def first(transport):
        model = torch.nn.ParameterList([torch.zeros(6)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport, outlier_factor=10.0)
        for step in range(24):
            if step == 12:
                saved = copy.deepcopy(sync.state_dict())
                sync = OuterSync(
                    model, optimizer, rule=rule, transport=transport, outlier_factor=10.0
                )
                sync.load_state_dict(saved)
            wild = transport.rank == 0 and step == 13
            model[0].grad = torch.full((6,), 1000.0 if wild else 1.0)
            optimizer.step()
            sync.step()
        return sync.statistics().left_out_payloads

    assert run_world(2, first) == [1, 1]


@pytest.mark.parametrize("factor", [1.0, 0, -3.0, True, float("nan")])
def test_factors_that_make_no_sense_are_refused(factor):
    with pytest.raises(ConfigurationError, match="outlier_factor must be a number above 1"):
        run_world(2, lambda t: train(t, LocalSGD(tau=1), outlier_factor=factor, steps=1))


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),  # has a state before the first step
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("wild", [torch.inf, 1e12], ids=["infinite", "outlying"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_left_out_leaves_nothing_in_the_optimizer(make, wild):
    """The next local step is that of a new optimizer, on all ranks close to the usual one."""

    def work(transport):
        model = torch.nn.ParameterList([torch.ones(6, 2), torch.ones(4)])
        optimizer = make(model.parameters())
        sync = OuterSync(
            model, optimizer, rule=LocalSGD(tau=2), transport=transport, outlier_factor=10.0
        )
        for step in range(25):
            for p in model:
                p.grad = torch.full_like(p, 1.0 + p.dim())
            if (transport.rank, step) == (1, 21):  # also by hand: some optimizers bound their steps
                for p in model:
                    p.grad.mul_(1e12)
                    p.data.mul_(1e12)
                model[0].grad[0, 0] = wild
            if (transport.rank, step) == (1, 22):
                twins = [torch.nn.Parameter(p.detach().clone()) for p in model]
                for twin, p in zip(twins, model, strict=True):
                    twin.grad = p.grad.clone()
                make(twins).step()
            optimizer.step()
            if (transport.rank, step) == (1, 22):
                for twin, p in zip(twins, model, strict=True):
                    torch.testing.assert_close(twin, p)
            sync.step()
        sync.finalize()
        assert sync.statistics().left_out_payloads == 1
        return torch.cat([p.detach().reshape(-1) for p in model])

    first, second = run_world(2, work)
    assert torch.equal(first, second)
    assert float(first.abs().max()) < 100
