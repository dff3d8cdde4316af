"""Outer state away from the parameters: the way over a stage changes no bit."""

import pytest
import torch

from fivefold.errors import ConfigurationError
from fivefold.optim import (
    CO2,
    DelayCorrected,
    DiLoCo,
    EagerDiLoCo,
    OuterOptimizer,
    OuterSync,
    StreamingDiLoCo,
    _flat,
)
from fivefold.testing import run_world

GAP = CO2(tau=2)
RULES = {
    "co2": CO2(tau=2, staleness="none"),
    "diloco": DiLoCo(tau=2),
    "delay-corrected": DelayCorrected(tau=3, fragments=1),
    "eager": EagerDiLoCo(tau=2),
    "streaming": StreamingDiLoCo(tau=3, fragments=2, delay_steps=1),
    "adamw": OuterOptimizer(tau=2, optimizer=torch.optim.AdamW, options={"lr": 0.01}, hidden=True),
}


def train(transport, rule, *, outer_device):
    # The first weight is larger than a piece. The local steps are sums of two numbers: a matrix
    # product rounds by the alignment of its operands and by how many threads are free.
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600))
    noise = torch.Generator().manual_seed(transport.rank)
    start = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=start))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = OuterSync(model, optimizer, rule=rule, transport=transport, outer_device=outer_device)
    for _ in range(7):
        with torch.no_grad():
            for tensor in [*model.parameters(), model[1].running_mean]:
                tensor.sub_(0.01 * torch.randn(tensor.shape, generator=noise))
        sync.step()
    with sync.global_parameters():
        before = [value.clone() for value in model.state_dict().values()]
    sync.finalize()
    return before + list(model.state_dict().values())


def both_ways(monkeypatch, rule):
    """What rank 0 and rank 1 have, with the outer state beside the parameters and staged."""
    beside = run_world(2, lambda t: train(t, rule, outer_device="same"))
    staged = []
    plain_copy = torch._foreach_copy_

    def counted(to, *args, **kwargs):
        staged.append(sum(view.numel() for view in to))
        return plain_copy(to, *args, **kwargs)

    monkeypatch.setattr(_flat, "_STAGE_ALWAYS", True)
    monkeypatch.setattr(_flat, "_DEVICE_PIECE_ELEMENTS", 300_000)
    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    apart = run_world(2, lambda t: train(t, rule, outer_device="cpu"))
    assert staged.count(300_000) > 20  # the stage was really taken, of the weight in two parts
    assert max(staged) == 300_000
    return [pair for ranks in zip(beside, apart, strict=True) for pair in zip(*ranks, strict=True)]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_staged_outer_state_gives_the_same_bits(monkeypatch, rule):
    assert all(torch.equal(ours, theirs) for ours, theirs in both_ways(monkeypatch, rule))


def test_the_gap_of_a_staged_outer_state_is_the_same_up_to_the_rounding_of_a_norm(monkeypatch):
    # The gap divides by norms, whose sums run over other pieces: 2^-24 of each is float32's
    # rounding, and a few rounds of it move no parameter by more than a few units in the last place.
    for ours, theirs in both_ways(monkeypatch, GAP):
        torch.testing.assert_close(ours, theirs, rtol=4e-7, atol=4e-7)


def test_an_unknown_outer_device_is_refused():
    def work(transport):
        with pytest.raises(ConfigurationError, match="'same' or 'cpu'; got 'gpu'"):
            train(transport, GAP, outer_device="gpu")

    run_world(2, work)
