"""What each co-design buys: all sixteen combinations over many seeds, against B0 and B1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fivefold.codesign._arbiter import PlanningOptions, objective_s
from fivefold.codesign._codesigns import CoDesigns
from fivefold.codesign._compile import run_plan
from fivefold.codesign._coordinator import plan_cluster
from fivefold.codesign._jobs import JobSpec
from fivefold.codesign._modules import best_alone_plan
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Topology

FloatArray = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
_DRAWS = 2000


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    """One combination over all seeds.

    Ratios are of weighted mean completion times on the same jobs, placement and hash; below 1 is
    better.

    Attributes:
        label: The co-designs, ``"B1"`` for every layer at its best alone, or ``"B1+..."`` for
            co-designs on top of that.
        to_null: Mean over seeds of the ratio to B0.
        to_null_interval: Its 95 % bootstrap interval over seeds.
        to_best: The same against B1.
        to_best_interval: Its interval.
        tail_to_null: Mean ratio of the 95th percentile of completion times to that of B0.
        jobs_worse: Jobs that end later than under B0, over all seeds.
        jobs_worse_than_best: The same against B1.
        jobs: Jobs over all seeds.
        seeds: Number of seeds.
    """

    label: str
    to_null: float
    to_null_interval: tuple[float, float]
    to_best: float
    to_best_interval: tuple[float, float]
    tail_to_null: float
    jobs_worse: int
    jobs_worse_than_best: int
    jobs: int
    seeds: int


def ablate(
    topology: Topology,
    make_jobs: Callable[[int], Sequence[JobSpec]],
    *,
    seeds: Iterable[int],
    combinations: Iterable[CoDesigns] | None = None,
    options: PlanningOptions | None = None,
    progress: Progress | None = None,
) -> list[AblationRow]:
    """Plan the same jobs with every combination of co-designs.

    Args:
        topology: The cluster.
        make_jobs: Jobs of a seed.
        seeds: Seeds of the jobs, their placement and the hash of paths.
        combinations: Which ones; None for all sixteen.
        options: How hard the coordinator tries.
        progress: Called with how many plans are made, and how many there are.

    Returns:
        A row per combination on top of the null modules, one for B1, and one for all four on top
        of B1.

    Raises:
        ConfigurationError: There is no seed.

    Examples:
        >>> from fivefold.codesign import synthetic_jobs
        >>> from fivefold.network.topology import fat_tree
        >>> cluster = fat_tree(4)
        >>> def jobs(seed):
        ...     return synthetic_jobs(cluster, number=2, seed=seed, sizes=(4,), iterations=3)
        >>> rows = ablate(cluster, jobs, seeds=[0], combinations=[CoDesigns.none()])
        >>> [(row.label, row.to_null) for row in rows if row.label == "none"]
        [('none', 1.0)]
    """
    chosen = list(CoDesigns.combinations() if combinations is None else combinations)
    numbers = list(seeds)
    if not numbers:
        message = "an ablation needs a seed or more"
        raise ConfigurationError(message, hint="such as seeds=range(10)")
    found: dict[str, list[_Sample]] = {}
    total = len(numbers) * (len(chosen) + 1)
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    for seed in numbers:
        samples = _of_seed(topology, list(make_jobs(seed)), chosen, seed, (options, tell))
        for label, sample in samples.items():
            found.setdefault(label, []).append(sample)
    return [_row(label, samples) for label, samples in found.items()]


def _of_seed(
    topology: Topology,
    jobs: list[JobSpec],
    chosen: Sequence[CoDesigns],
    seed: int,
    how: tuple[PlanningOptions | None, Callable[[], None]],
) -> dict[str, _Sample]:
    """Return all combinations, B1, and all four on top of it, for the jobs of one seed."""
    options, tell = how
    best = dict(run_plan(topology, jobs, best_alone_plan(topology, jobs, seed=seed)).completion_s)
    found: dict[str, _Sample] = {}
    null: dict[str, float] = {}
    for flags in chosen:
        planned = plan_cluster(topology, jobs, flags, seed=seed, options=options)
        null = dict(planned.baseline_outcome.completion_s)
        found[flags.label] = _sample(jobs, dict(planned.outcome.completion_s), null, best)
        tell()
    found["B1"] = _sample(jobs, best, null, best)
    on_best = plan_cluster(topology, jobs, start="best", seed=seed, options=options)
    after = dict(on_best.outcome.completion_s)
    found[f"B1+{CoDesigns.all().label}"] = _sample(jobs, after, null, best)
    tell()
    return found


@dataclass(frozen=True)
class _Sample:
    to_null: float
    to_best: float
    tail: float
    worse: int
    worse_than_best: int
    jobs: int


def _sample(
    jobs: Sequence[JobSpec],
    after: dict[str, float],
    null: dict[str, float],
    best: dict[str, float],
) -> _Sample:
    ours = objective_s(jobs, after)
    return _Sample(
        ours / objective_s(jobs, null),
        ours / objective_s(jobs, best),
        float(np.percentile([*after.values()], 95) / np.percentile([*null.values()], 95)),
        sum(after[name] > null[name] * (1 + 1e-6) for name in after),
        sum(after[name] > best[name] * (1 + 1e-6) for name in after),
        len(jobs),
    )


def _row(label: str, samples: Sequence[_Sample]) -> AblationRow:
    to_null = np.array([sample.to_null for sample in samples])
    to_best = np.array([sample.to_best for sample in samples])
    return AblationRow(
        label=label,
        to_null=float(to_null.mean()),
        to_null_interval=_interval(to_null),
        to_best=float(to_best.mean()),
        to_best_interval=_interval(to_best),
        tail_to_null=float(np.mean([sample.tail for sample in samples])),
        jobs_worse=sum(sample.worse for sample in samples),
        jobs_worse_than_best=sum(sample.worse_than_best for sample in samples),
        jobs=sum(sample.jobs for sample in samples),
        seeds=len(samples),
    )


def _interval(values: FloatArray) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    draw = np.random.default_rng(0)
    means = draw.choice(values, (_DRAWS, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
