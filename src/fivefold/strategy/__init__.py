"""Layer 1: how model, data and states are split over GPUs, at what cost, and which is best."""

from fivefold.strategy._cluster import Cluster, load_cluster, named_clusters, reached_tiers
from fivefold.strategy._cost import (
    CostTable,
    Prediction,
    TimeUse,
    evaluate_plan,
    evaluate_table,
)
from fivefold.strategy._demand import axis_groups, plan_demand
from fivefold.strategy._device import DeviceSpec
from fivefold.strategy._job import Job, job_from_table, load_job, plan_to_toml
from fivefold.strategy._launch import device_mesh, megatron_flags
from fivefold.strategy._memory import MemoryUse
from fivefold.strategy._model import (
    ConvolutionStage,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
)
from fivefold.strategy._pipeline import PipelineShape, pipeline_shape
from fivefold.strategy._plan import ParallelPlan, plan_problem
from fivefold.strategy._presets import (
    load_model,
    model_from_hugging_face,
    named_model,
    named_models,
)
from fivefold.strategy._search import SearchResult, search_plans
from fivefold.strategy._space import SearchSpace
from fivefold.strategy._table import PlanTable
from fivefold.strategy._torchtitan import torchtitan_config
from fivefold.strategy._trainer import trainer_config

__all__ = [
    "Cluster",
    "ConvolutionStage",
    "CostTable",
    "DeviceSpec",
    "Job",
    "LatentAttention",
    "MemoryUse",
    "MixtureOfExperts",
    "ModelSpec",
    "ParallelPlan",
    "PipelineShape",
    "PlanTable",
    "Prediction",
    "SearchResult",
    "SearchSpace",
    "TimeUse",
    "axis_groups",
    "device_mesh",
    "evaluate_plan",
    "evaluate_table",
    "job_from_table",
    "load_cluster",
    "load_job",
    "load_model",
    "megatron_flags",
    "model_from_hugging_face",
    "named_clusters",
    "named_model",
    "named_models",
    "pipeline_shape",
    "plan_demand",
    "plan_problem",
    "plan_to_toml",
    "reached_tiers",
    "search_plans",
    "torchtitan_config",
    "trainer_config",
]
