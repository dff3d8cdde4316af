"""The engine with CUDA tensors: two processes over gloo share one GPU.

Skipped where there is none. The parent never touches CUDA, so that its children may be forked.
"""

import os

import pytest
import torch

from fivefold.optim import (
    CO2,
    DelayCorrected,
    EagerDiLoCo,
    OuterSync,
    OverlapLocalSGD,
    SlowMo,
    StreamingDiLoCo,
)
from fivefold.testing import run_processes
from oracles.outer_updates import reference_run

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs an NVIDIA GPU")

SIZE, STEPS = 4096, 25
RULES = [
    CO2(tau=3),
    CO2(tau=2, clip=0.05, outer_momentum=0.3, outer_lr=0.5, staleness="none"),
    CO2(tau=2, staleness="gap-param"),
    SlowMo(tau=4),
    DelayCorrected(tau=3),
    OverlapLocalSGD(tau=3),
    EagerDiLoCo(tau=3),
    StreamingDiLoCo(tau=4, fragments=1, delay_steps=2, outer_momentum=0.3),
]


def gradient(worker, step, x):
    generator = torch.Generator().manual_seed(1000 * worker + step)
    noise = torch.randn(SIZE, dtype=torch.float64, generator=generator)
    curvature = torch.linspace(0.2, 1.5, SIZE, dtype=torch.float64)
    centre = torch.linspace(-1, 1, SIZE, dtype=torch.float64) * (worker + 1)
    return curvature * (x - centre) + 0.1 * noise


def engine_run(rank, rule, *, codec="fp32", dtype=torch.float64):
    model = torch.nn.Linear(SIZE, 1, bias=False, device="cuda", dtype=dtype)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = OuterSync(model, optimizer, rule=rule, codec=codec, timeout_s=60)
    for step in range(STEPS):
        slope = gradient(rank, step, model.weight.detach().double().cpu().view(-1))
        model.weight.grad = slope.to(model.weight).view_as(model.weight)
        optimizer.step()
        sync.step()
    sync.finalize()
    statistics = sync.statistics()
    return model.weight.detach().cpu().view(-1), statistics.exposed_wait_s, statistics.in_flight_s


@pytest.mark.distributed
def test_cuda_equals_the_reference_on_the_cpu():
    results = run_processes(
        2, lambda rank: [engine_run(rank, rule)[0] for rule in RULES], timeout_s=240.0
    )
    start = torch.ones(SIZE, dtype=torch.float64)
    for index, rule in enumerate(RULES):
        expected = reference_run(
            start,
            lambda worker, step, x: x - 0.05 * gradient(worker, step, x),
            rule=rule,
            world_size=2,
            steps=STEPS,
            inner_lr=lambda _: 0.05,
        ).final
        ours, theirs = results[0][index], results[1][index]
        assert torch.equal(ours, theirs), rule
        assert float((ours - expected).abs().max()) < 1e-10, rule


@pytest.mark.distributed
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_codecs_on_cuda_leave_equal_replicas_close_to_fp32(codec):
    rule = CO2(tau=3)

    def work(rank):
        exact = engine_run(rank, rule, dtype=torch.float32)[0]
        return exact, engine_run(rank, rule, codec=codec, dtype=torch.float32)[0]

    (exact, coded), (_, other) = run_processes(2, work, timeout_s=240.0)
    assert torch.equal(coded, other)
    assert float((coded - exact).abs().max()) < 0.2 * float(exact.abs().max())
