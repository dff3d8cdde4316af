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

RULES = [
    CO2(tau=2),
    DiLoCo(tau=2),
    DelayCorrected(tau=3),
    EagerDiLoCo(tau=2),
    StreamingDiLoCo(tau=3, fragments=2, delay_steps=1),
    OuterOptimizer(tau=2, optimizer=torch.optim.AdamW, options={"lr": 0.01}, hidden=True),
]


def train(transport, rule, *, outer_device):
    # The linear layer's weight is larger than a piece. Ranks are threads: no global generator.
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600))
    start = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=start))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = OuterSync(model, optimizer, rule=rule, transport=transport, outer_device=outer_device)
    for step in range(7):
        generator = torch.Generator().manual_seed(100 * transport.rank + step)
        model(torch.randn(8, 600, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    with sync.global_parameters():
        before = [value.clone() for value in model.state_dict().values()]
    sync.finalize()
    return before, list(model.state_dict().values())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_staged_outer_state_gives_the_same_bits(monkeypatch, rule):
    beside = run_world(2, lambda t: train(t, rule, outer_device="same"))
    copies = []
    plain_to = torch.Tensor.to

    def counted(self, *args, **kwargs):
        copies.append(self.numel())
        return plain_to(self, *args, **kwargs)

    monkeypatch.setattr(_flat, "_STAGE_ALWAYS", True)
    monkeypatch.setattr(torch.Tensor, "to", counted)
    staged = run_world(2, lambda t: train(t, rule, outer_device="cpu"))
    assert max(copies) == _flat._CPU_PIECE_ELEMENTS  # the stage was really taken, in pieces
    for (anchors, finals), (other_anchors, other_finals) in zip(beside, staged, strict=True):
        for ours, theirs in zip(anchors + finals, other_anchors + other_finals, strict=True):
            assert torch.equal(ours, theirs)


def test_an_unknown_outer_device_is_refused():
    def work(transport):
        with pytest.raises(ConfigurationError, match="'same' or 'cpu'; got 'gpu'"):
            train(transport, CO2(tau=2), outer_device="gpu")

    run_world(2, work)
