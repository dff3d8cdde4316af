"""One job on several clusters: the best plan on each, and what the network's rate changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.collectives.pricing import FabricSpec
from fivefold.errors import FivefoldError
from fivefold.strategy._search import search_plans
from fivefold.strategy.cluster import Cluster
from fivefold.strategy.cost import PlanPrediction
from fivefold.strategy.job import Job
from fivefold.strategy.model import ModelSpec

RATES = (0.5, 2.0)
"""Times the rate of the links between nodes at which each cluster is asked again."""


@dataclass(frozen=True, kw_only=True)
class ClusterOutcome:
    """The best plan of a job on one cluster.

    Args:
        cluster: The cluster.
        model: What is trained.
        num_gpus: GPUs that the job takes there.
        best: The fastest plan that fits; None where none does.
        problem: Why there is none; None where there is one.
        at_rate_s: Seconds of an iteration, planned again, with the links between nodes at so many
            times their rate; empty for a single node.
    """

    cluster: Cluster
    model: ModelSpec
    num_gpus: int
    best: PlanPrediction | None
    problem: str | None = None
    at_rate_s: dict[float, float] = dataclasses.field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Return tokens of all GPUs in a second; 0 where nothing fits."""
        return 0.0 if self.best is None else tokens_per_s(self.model, self.best)

    def gpu_hours(self, tokens: float) -> float:
        """Return what a number of tokens takes; infinite where nothing fits."""
        if self.best is None:
            return float("inf")
        return tokens / self.tokens_per_s * self.num_gpus / 3600.0


def tokens_per_s(model: ModelSpec, found: PlanPrediction) -> float:
    """Return the tokens of an iteration over its seconds, of all GPUs together.

    Examples:
        >>> from fivefold.strategy import ParallelPlan, evaluate_plan, load_cluster, load_model
        >>> model, cluster = load_model("gpt3-1.3b"), load_cluster("a100-megatron")
        >>> plan = ParallelPlan(global_batch=8, data=8)
        >>> found = evaluate_plan(model, cluster.device, cluster.fabric, plan=plan)
        >>> tokens_per_s(model, found) == 8 * model.seq_len / found.time_s
        True
    """
    return found.plan.global_batch * model.seq_len / found.time_s


def compare_clusters(pairs: Sequence[tuple[Job, Cluster]]) -> list[ClusterOutcome]:
    """Plan each job on its cluster, and again with slower and faster links between nodes.

    Args:
        pairs: A job for each cluster: GPUs may differ.

    Returns:
        An outcome each, in the same order; where no plan fits it says why.
    """
    return [_outcome(job, cluster) for job, cluster in pairs]


def _outcome(job: Job, cluster: Cluster) -> ClusterOutcome:
    known = {"cluster": cluster, "model": job.model, "num_gpus": job.space.num_gpus}
    try:
        best = _fastest(job, cluster, cluster.fabric)
    except FivefoldError as error:  # of one cluster: the others are still compared
        return ClusterOutcome(**known, best=None, problem=error.message)  # type: ignore[arg-type]
    at_rate_s: dict[float, float] = {}
    if job.space.num_gpus > cluster.fabric.gpus_per_node:
        for rate in RATES:
            at_rate_s[rate] = _fastest(job, cluster, _at_rate(cluster.fabric, rate)).time_s
    return ClusterOutcome(**known, best=best, at_rate_s=at_rate_s)  # type: ignore[arg-type]


def _fastest(job: Job, cluster: Cluster, fabric: FabricSpec) -> PlanPrediction:
    return search_plans(job.model, cluster.device, fabric, space=job.space, top=1).best[0]


def _at_rate(fabric: FabricSpec, rate: float) -> FabricSpec:
    node, *outer = fabric.tiers
    tiers = tuple(
        dataclasses.replace(tier, bandwidth_bytes_per_s=rate * tier.bandwidth_bytes_per_s)
        for tier in outer
    )
    return dataclasses.replace(fabric, tiers=(node, *tiers))
