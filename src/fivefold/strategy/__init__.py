"""Layer 1: how model, data and states are split over GPUs, at what cost, and which is best."""

from fivefold.strategy._launchers import (
    TARGETS,
    device_mesh,
    megatron_flags,
    megatron_script,
    space_of_target,
    target_problem,
    torchtitan_config,
    trainer_config,
)
from fivefold.strategy._space import SearchSpace
from fivefold.strategy.calibrate import error_bar
from fivefold.strategy.cluster import Cluster, load_cluster, named_clusters, named_stacks
from fivefold.strategy.cost import PlanPrediction, anchored, evaluate_plan
from fivefold.strategy.job import Job, load_job, plan_to_toml
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import ParallelPlan
from fivefold.strategy.presets import load_model, named_models
from fivefold.strategy.search import PlanSearchResult, search_plans

__all__ = [
    "TARGETS",
    "Cluster",
    "Job",
    "ModelSpec",
    "ParallelPlan",
    "PlanPrediction",
    "PlanSearchResult",
    "SearchSpace",
    "anchored",
    "device_mesh",
    "error_bar",
    "evaluate_plan",
    "load_cluster",
    "load_job",
    "load_model",
    "megatron_flags",
    "megatron_script",
    "named_clusters",
    "named_models",
    "named_stacks",
    "plan_to_toml",
    "search_plans",
    "space_of_target",
    "target_problem",
    "torchtitan_config",
    "trainer_config",
]
