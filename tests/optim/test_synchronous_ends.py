"""Synchronous first and last steps: Local SGD at every step there, the rule between."""

import dataclasses

import pytest
import torch

from fivefold import optim
from fivefold.errors import ConfigurationError
from fivefold.testing import run_world

RULES = {
    "local-sgd": optim.LocalSGD(tau=3),
    "diloco": optim.DiLoCo(tau=3, outer_momentum=0.5),
    "co2": optim.CO2(tau=3),
    "co2-elements": optim.CO2(tau=3, staleness="gap-param", bootstrap="sync"),
    "delay-corrected": optim.DelayCorrected(tau=3, fragments=1),
    "delay-corrected-parts": optim.DelayCorrected(tau=4, fragments=2),
    "overlap": optim.OverlapLocalSGD(tau=3, outer_momentum=0.3),
    "eager": optim.EagerDiLoCo(tau=3),
    "streaming": optim.StreamingDiLoCo(tau=4, fragments=2, outer_momentum=0.3),
    "adam": optim.OuterOptimizer(
        tau=3, optimizer=torch.optim.Adam, options={"lr": 0.01}, hidden=True
    ),
}
PHASES = (5, 11, 4)  # steps of each phase; the middle one ends inside a round


class Problem:
    """One worker's model, inner AdamW and seeded gradients."""

    def __init__(self, rank):
        generator = torch.Generator().manual_seed(3)
        self.rank, self.done = rank, 0
        self.model = torch.nn.ParameterList(
            torch.randn(size, generator=generator, dtype=torch.float64) for size in (6, 4, 5)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def train(self, sync, steps):
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 * self.rank + self.done)
            for p in self.model:
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.grad = 0.5 * (p.detach() - self.rank) + 0.1 * noise
            self.optimizer.step()
            sync.step()
            self.done += 1

    def flat(self):
        return torch.cat([p.detach().clone() for p in self.model])


@pytest.mark.parametrize("name", RULES)
def test_three_phases_equal_three_engines(name):
    first, middle, last = PHASES
    rule = dataclasses.replace(
        RULES[name], synchronous_start=first, synchronous_end=last, total_steps=sum(PHASES)
    )

    def one(transport):
        problem = Problem(transport.rank)
        sync = optim.OuterSync(
            problem.model, problem.optimizer, rule=rule, transport=transport, check_every_rounds=1
        )
        seen = []
        for steps in PHASES:
            problem.train(sync, steps)
            seen.append(problem.flat())
        sync.finalize()
        return [*seen, problem.flat()]

    def three(transport):
        problem, seen = Problem(transport.rank), []
        for each, steps in (
            (optim.LocalSGD(tau=1), first),
            (RULES[name], middle),
            (optim.LocalSGD(tau=1), last),
        ):
            sync = optim.OuterSync(problem.model, problem.optimizer, rule=each, transport=transport)
            problem.train(sync, steps)
            sync.finalize()
            seen.append(problem.flat())
        return [*seen, problem.flat()]

    ours, expected = run_world(3, one), run_world(3, three)
    for rank in range(3):
        for mine, theirs in zip(ours[rank], expected[rank], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
        assert torch.equal(ours[rank][-1], ours[0][-1])


def test_an_automatic_tau_measures_during_the_synchronous_start():
    rule = optim.CO2(tau=optim.AutoTau(initial=4), synchronous_start=5)

    def work(transport):
        problem = Problem(transport.rank)
        sync = optim.OuterSync(problem.model, problem.optimizer, rule=rule, transport=transport)
        problem.train(sync, 9)
        sync.finalize()
        return problem.flat(), sync.statistics().merged_rounds

    (left, rounds), (right, _) = run_world(2, work)
    assert torch.equal(left, right)
    assert rounds >= 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optim.CO2(tau=2, synchronous_start=-1),
            "synchronous_start must be a whole number",
        ),
        (lambda: optim.CO2(tau=2, synchronous_end=3), "synchronous_end=3 needs total_steps"),
        (
            lambda: optim.CO2(tau=2, synchronous_start=6, synchronous_end=5, total_steps=10),
            "total_steps must be a whole number from 11; got 10",
        ),
        (
            lambda: optim.CO2(tau=optim.AutoTau(balance=True), synchronous_start=1),
            "different steps",
        ),
        (lambda: optim.DelayedGradients(synchronous_start=2), "no local steps"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
