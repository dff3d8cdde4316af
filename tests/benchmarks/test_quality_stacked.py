"""The stacked simulation of ``quality`` equals the engine with a thread for each worker."""

from dataclasses import replace

import pytest
import torch
from benchmarks.optim._stacked import train_ddp_stacked, train_rule_stacked
from benchmarks.optim._workload import BATCH_SIZE, CLIP_NORM, Problem, Worker
from benchmarks.optim.quality import METHODS, CodedTransport

from fivefold.optim import DelayedGradients, OuterSync
from fivefold.optim.codecs import named_codec
from fivefold.testing import run_world

WORKERS = 4
STEPS = 11  # not a multiple of any tau: the drain has open steps


def problem(optimizer="AdamW"):
    return Problem(steps=STEPS, lr=4e-3, seed=3, optimizer=optimizer, width=16, layers=2)


def parameters(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def coded(transport, codec):
    return transport if codec == "fp32" else CodedTransport(transport, named_codec(codec))


def with_engine(given, method, dtype):
    def work(transport):
        clips = not isinstance(method.rule(), DelayedGradients)
        worker = Worker(
            given,
            rank=transport.rank,
            world_size=WORKERS,
            clip_norm=CLIP_NORM if clips else None,
        )
        worker.model.to(dtype)
        sync = OuterSync(
            worker.model,
            worker.optimizer,
            rule=method.rule(),
            transport=coded(transport, method.codec),
        )
        for _ in range(given.steps):
            worker.step()
            sync.step()
        sync.finalize()
        return parameters(worker.model)

    return run_world(WORKERS, work)[0]


def stacked(given, method, dtype):
    model = train_rule_stacked(
        given,
        method.rule(),
        world_size=WORKERS,
        coded=lambda t: coded(t, method.codec),
        dtype=dtype,
    )
    return parameters(model)


EXACT = [name for name, method in METHODS.items() if method.rule and method.codec == "fp32"]


@pytest.mark.parametrize("name", EXACT)
def test_float64_parameters_are_those_of_the_engine(name):
    expected = with_engine(problem(), METHODS[name], torch.float64)
    found = stacked(problem(), METHODS[name], torch.float64)
    assert (found - expected).abs().max() < 1e-10
    start = parameters(Worker(problem(), rank=0, world_size=WORKERS).model)
    assert (expected - start).abs().max() > 1e-3  # it learnt something


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.codec != "fp32"])
def test_with_a_codec_the_difference_is_a_small_part_of_what_was_learnt(name):
    # A rounded value may fall to the other side: a codec's step, not the last bits.
    expected = with_engine(problem(), METHODS[name], torch.float32)
    found = stacked(problem(), METHODS[name], torch.float32)
    start = parameters(Worker(problem(), rank=0, world_size=WORKERS).model)
    assert (found - expected).norm() < 0.02 * (expected - start).norm()


@pytest.mark.parametrize("batch_size", [BATCH_SIZE, 2])
def test_data_parallel_takes_the_mean_gradient(batch_size):
    given = replace(problem(), batch_size=batch_size)
    workers = [Worker(given, rank=rank, world_size=WORKERS) for rank in range(WORKERS)]
    for worker in workers:
        worker.model.double()
    for _ in range(given.steps):
        for worker in workers:
            worker.gradient()
        for copies in zip(*(w.model.parameters() for w in workers), strict=True):
            mean = torch.stack([p.grad for p in copies]).mean(dim=0)
            for copy in copies:
                copy.grad = mean.clone()
        for worker in workers:
            worker.update()
    found = train_ddp_stacked(given, world_size=WORKERS, dtype=torch.float64)
    assert (parameters(found) - parameters(workers[0].model)).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["Local SGD tau 8", "delayed gradients, extrapolated"])
def test_muon_differs_by_the_rounding_of_its_products(name):
    # torch's Newton-Schulz steps are in bfloat16, 2^-8; those of the stack in float32.
    given = problem("Muon")
    expected = with_engine(given, METHODS[name], torch.float32)
    found = stacked(given, METHODS[name], torch.float32)
    start = parameters(Worker(given, rank=0, world_size=WORKERS).model)
    assert (found - expected).norm() < 0.02 * (expected - start).norm()
