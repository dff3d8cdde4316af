"""Trains one setting with the real engine: one process per worker, gloo, no shaped network.

The loss does not depend on the network, so nothing is timed here. Processes are forked from one
that has torch loaded, since starting one afresh costs more than a tenth of a run.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache

from torch.nn.parallel import DistributedDataParallel

from benchmarks.optim._settings import DDP, Setting
from benchmarks.optim._workload import (
    LossModule,
    Problem,
    Worker,
    corpus,
    make_model,
    make_optimizer,
    validate,
)
from fivefold.optim import OuterSync, StabilityWarning, SyncStatistics
from fivefold.testing import run_processes

__all__ = ["STEPS", "WORLD_SIZE", "Outcome", "train"]

WORLD_SIZE = 4
STEPS = 192  # three whole rounds of the longest tau
_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run came to.

    Attributes:
        bits_per_byte: On held-out text, after the drain; equal on all workers.
        staleness_gap: Mean L_t; None for DDP and for rules that have none.
        clipped_fraction: Share of the momentum's elements that the clip changed.
        sent_bytes_per_step: Bytes that a worker sent per step; None for DDP.
    """

    bits_per_byte: float
    staleness_gap: float | None = None
    clipped_fraction: float | None = None
    sent_bytes_per_step: float | None = None


def train(setting: Setting, *, seed: int, steps: int = STEPS) -> Outcome:
    """Train one setting on ``WORLD_SIZE`` workers and judge the drained model.

    Args:
        setting: The method.
        seed: Seed of the model and of the text's order.
        steps: Optimizer steps per worker.

    Returns:
        The outcome.

    Raises:
        RuntimeError: A worker failed, or the workers ended with different models.
    """
    _prepare()
    problem = Problem(steps=steps, lr=setting.lr, seed=seed)
    found = run_processes(
        WORLD_SIZE, lambda rank: _work(rank, setting, problem), timeout_s=_TIMEOUT_S
    )
    sums = [checksum for _, checksum in found]
    if any(value != sums[0] for value in sums):
        raise RuntimeError(f"{setting.label}: the workers ended with different models: {sums}")
    return found[0][0]


@cache
def _prepare() -> None:
    """Load before the fork what every worker needs: the text, and what optimizers import late."""
    corpus()
    make_optimizer(make_model(0), 1e-3)


def _work(rank: int, setting: Setting, problem: Problem) -> tuple[Outcome, float]:
    """One worker's outcome, and a sum over its parameters that must be the same on all."""
    worker = Worker(problem, rank=rank, world_size=WORLD_SIZE)
    if setting.method == DDP:
        _train_ddp(worker)
        outcome = Outcome(bits_per_byte=0.0)
    else:
        statistics = _train_rule(worker, setting)
        outcome = Outcome(
            bits_per_byte=0.0,
            staleness_gap=statistics.staleness_gap,
            clipped_fraction=statistics.clipped_fraction,
            sent_bytes_per_step=statistics.sent_bytes / problem.steps,
        )
    checksum = sum(float(p.detach().double().sum()) for p in worker.model.parameters())
    if rank == 0:
        outcome = replace(outcome, bits_per_byte=validate(worker.model))
    return outcome, checksum


def _train_ddp(worker: Worker) -> None:
    replica = DistributedDataParallel(LossModule(worker.model), forward_sync_buffers=False)
    for _ in range(worker.problem.steps):
        worker.step(loss=replica)


def _train_rule(worker: Worker, setting: Setting) -> SyncStatistics:
    sync = OuterSync(worker.model, worker.optimizer, rule=setting.rule(), codec=setting.codec)
    with warnings.catch_warnings():
        # Some sweeps go beyond the stability limit on purpose.
        warnings.simplefilter("ignore", StabilityWarning)
        for _ in range(worker.problem.steps):
            worker.step()
            sync.step()
        sync.finalize()
    return sync.statistics()
