"""The engine equals the line-by-line reference: float64, all rules, 2 to 4 ranks, many rounds."""

import pytest
import torch

from fivefold import optim
from fivefold.testing import run_processes, run_world
from helpers.night import number_of
from oracles.outer_updates import reference_run

ROUNDS = number_of(16, nightly=50)
SHAPES = [(3, 4), (5,), (2, 2, 2), (1,)]
SIZE = sum(torch.Size(shape).numel() for shape in SHAPES)
# How the engine cuts SHAPES (12, 5, 8 and 1 elements), worked out by hand.
PARTS = {1: [26], 2: [12, 14], 3: [12, 5, 9], 4: [12, 5, 8, 1]}

RULES = {
    "co2": optim.CO2(tau=3),
    "co2-clip-binds": optim.CO2(
        tau=2, clip=0.02, staleness="none", outer_momentum=0.3, outer_lr=0.5
    ),
    "co2-no-momentum": optim.CO2(tau=2, outer_momentum=0.0, clip=None),
    "co2-gap-rms": optim.CO2(tau=2, staleness="gap-rms"),
    "co2-gap-rms-fixed": optim.CO2(tau=2, staleness=optim.GapPenalty(norm="rms", reference=0.05)),
    "co2-gap-fixed": optim.CO2(tau=2, staleness=optim.GapPenalty(reference=0.1)),
    "co2-gap-param": optim.CO2(tau=2, staleness="gap-param", outer_momentum=0.0),
    "co2-gap-param-momentum": optim.CO2(tau=2, staleness="gap-param", outer_momentum=0.4),
    "co2-constant": optim.CO2(tau=2, staleness="constant:2.0", outer_momentum=0.5),
    "co2-sync-bootstrap": optim.CO2(tau=3, bootstrap="sync"),
    "co2-lr-units": optim.CO2(tau=2, units="lr", clip=2.0),
    "co2-tau-1": optim.CO2(tau=1, outer_lr=0.3),
    "co2-parts": optim.CO2(tau=4, fragments=4),
    "co2-parts-late": optim.CO2(
        tau=4, fragments=3, delay_steps=2, staleness="gap-rms", outer_lr=0.9
    ),
    "co2-parts-clip": optim.CO2(tau=4, fragments=2, clip=0.02, outer_momentum=0.5, outer_lr=1.0),
    "co2-parts-gap-param": optim.CO2(tau=4, fragments=2, delay_steps=1, staleness="gap-param"),
    "co2-parts-gap-fixed": optim.CO2(tau=3, fragments=3, staleness=optim.GapPenalty(reference=0.1)),
    "co2-parts-sync-lr": optim.CO2(tau=4, fragments=2, bootstrap="sync", units="lr", clip=2.0),
    "co2-parts-whole-delay": optim.CO2(tau=4, fragments=2, delay_steps=4),
    "co2-short": optim.CO2(tau=3, delay_steps=1),
    "slowmo": optim.SlowMo(tau=3),
    "slowmo-delta-clip": optim.SlowMo(tau=2, units="delta", outer_lr=0.8, clip=0.02),
    "local-sgd": optim.LocalSGD(tau=4),
    "diloco": optim.DiLoCo(tau=3, outer_lr=0.5, outer_momentum=0.6),
    "diloco-no-momentum": optim.DiLoCo(tau=2, outer_momentum=0.0),
    "overlap": optim.OverlapLocalSGD(tau=3),
    "overlap-no-momentum": optim.OverlapLocalSGD(tau=2, pull=0.3, outer_momentum=0.0),
    "overlap-tau-1": optim.OverlapLocalSGD(tau=1),
    "streaming": optim.StreamingDiLoCo(tau=4, outer_lr=0.5, outer_momentum=0.4),
    "streaming-delay-1": optim.StreamingDiLoCo(
        tau=4, fragments=3, delay_steps=1, outer_lr=0.6, outer_momentum=0.3, keep=0.3
    ),
    "streaming-one": optim.StreamingDiLoCo(
        tau=3, fragments=1, delay_steps=2, outer_lr=0.6, outer_momentum=0.0, keep=0.7
    ),
    "streaming-delay-tau": optim.StreamingDiLoCo(
        tau=3, fragments=2, delay_steps=3, outer_momentum=0.2
    ),
    "eager": optim.EagerDiLoCo(tau=3),
    "eager-no-momentum": optim.EagerDiLoCo(tau=2, outer_lr=0.9, outer_momentum=0.0),
    "eager-tau-1": optim.EagerDiLoCo(tau=1),
    "adamw": optim.OuterOptimizer(tau=3, optimizer=torch.optim.AdamW, options={"lr": 0.01}),
    "adam-hidden": optim.OuterOptimizer(
        tau=2, optimizer=torch.optim.Adam, options={"lr": 0.01}, hidden=True
    ),
    "sgd-nesterov": optim.OuterOptimizer(
        tau=3,
        optimizer=torch.optim.SGD,
        options={"lr": 0.5, "momentum": 0.6, "nesterov": True},
    ),
    "delay-corrected": optim.DelayCorrected(tau=3, fragments=1),
    "delay-corrected-tau-1": optim.DelayCorrected(tau=1, fragments=1),
    "delay-corrected-parts": optim.DelayCorrected(tau=4, fragments=3),
    "delay-corrected-each-step": optim.DelayCorrected(tau=4, fragments=4),
    "delay-corrected-late": optim.DelayCorrected(tau=3, fragments=2, delay_steps=2),
    "delay-corrected-short": optim.DelayCorrected(tau=3, delay_steps=1),
}


class Pieces(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for index, shape in enumerate(SHAPES):
            value = torch.randn(shape, dtype=torch.float64, generator=generator)
            self.register_parameter(f"p{index}", torch.nn.Parameter(value))

    def flat(self):
        return torch.cat([p.detach().reshape(-1) for p in self.parameters()])


def gradient(worker, step, x):
    """A quadratic whose minimum differs by worker, with seeded noise: any order, same values."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    curvature = torch.linspace(0.2, 1.5, SIZE, dtype=torch.float64)
    centre = torch.linspace(-1, 1, SIZE, dtype=torch.float64) * (worker + 1)
    noise = torch.randn(SIZE, dtype=torch.float64, generator=generator)
    return curvature * (x - centre) + 0.1 * noise


def learning_rate(step):
    return 0.05 / (1 + 0.01 * step)


def engine_run(rank, rule, steps, transport=None, *, check_every_rounds=16):
    """Train with torch.optim.SGD and the engine; parameters at the boundaries and at the end."""
    model = Pieces()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate(0))
    sync = optim.OuterSync(
        model, optimizer, rule=rule, transport=transport, check_every_rounds=check_every_rounds
    )
    anchors = [model.flat()]
    for step in range(steps):
        slope = gradient(rank, step, model.flat())
        for p, g in zip(
            model.parameters(), slope.split([p.numel() for p in model.parameters()]), strict=True
        ):
            p.grad = g.view_as(p)
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = learning_rate(step + 1)
        sync.step()
        if (step + 1) % rule.tau == 0:
            anchors.append(model.flat())
    sync.finalize()
    return anchors, model.flat(), sync.statistics()


def reference(rule, world_size, steps):
    start = Pieces().flat()

    def local_step(worker, step, x):
        return x - learning_rate(step) * gradient(worker, step, x)

    return reference_run(
        start,
        local_step,
        rule=rule,
        world_size=world_size,
        steps=steps,
        inner_lr=learning_rate,
        parts=PARTS[rule.num_fragments],
    )


def largest_difference(ours, theirs):
    scale = max(1.0, float(theirs.abs().max()))
    return float((ours - theirs).abs().max()) / scale


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", RULES)
def test_parameters_equal_reference_to_1e_12(name, world_size):
    rule = RULES[name]
    steps = ROUNDS * rule.tau + (rule.tau - 1)  # ends inside a round, so that the drain counts
    expected = reference(rule, world_size, steps)
    results = run_world(world_size, lambda t: engine_run(t.rank, rule, steps, t))
    for rank, (boundaries, final, statistics) in enumerate(results):
        assert len(boundaries) == ROUNDS + 1
        for ours, theirs in zip(boundaries, expected.workers, strict=True):
            assert largest_difference(ours, theirs[rank]) < 1e-12
        assert largest_difference(final, expected.final) < 1e-12
        assert statistics.clipped_fraction == pytest.approx(
            sum(expected.clipped) / (expected.elements or SIZE * len(expected.clipped)), abs=1e-12
        )
        mean_gap = sum(float(gap.mean()) for gap in expected.gaps) / len(expected.gaps)
        assert statistics.staleness_gap == pytest.approx(mean_gap, rel=1e-10)
    finals = [final for _, final, _ in results]
    assert all(torch.equal(finals[0], other) for other in finals[1:])


def test_binding_clip_is_really_exercised():
    expected = reference(RULES["co2-clip-binds"], 2, 100)
    assert sum(expected.clipped) > 50


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gloo_processes_equal_reference(world_size):
    names = [
        "co2",
        "co2-clip-binds",
        "co2-gap-param",
        "slowmo",
        "local-sgd",
        "delay-corrected",
        "eager",
    ]
    names += ["overlap", "streaming", "streaming-delay-1", "delay-corrected-parts", "adam-hidden"]
    rules = [RULES[name] for name in names]

    def work(rank):
        return [engine_run(rank, rule, ROUNDS * rule.tau + 1)[:2] for rule in rules]

    results = run_processes(world_size, work, timeout_s=120.0)
    for index, rule in enumerate(rules):
        expected = reference(rule, world_size, ROUNDS * rule.tau + 1)
        for rank in range(world_size):
            boundaries, final = results[rank][index]
            for ours, theirs in zip(boundaries, expected.workers, strict=True):
                assert largest_difference(ours, theirs[rank]) < 1e-12
            assert largest_difference(final, expected.final) < 1e-12
            assert torch.equal(final, results[0][index][1])
