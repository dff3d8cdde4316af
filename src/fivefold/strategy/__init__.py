"""Layer 1: how model, data and states are split over GPUs, at what cost, and which is best."""

from fivefold.strategy._calibration import Fit, MeasuredRun, fit_constants, with_constants
from fivefold.strategy._cluster import Cluster, load_cluster, named_clusters, reached_tiers
from fivefold.strategy._cost import Prediction, TimeUse, evaluate_plan
from fivefold.strategy._demand import Message, PlanDemand, axis_groups, plan_demand
from fivefold.strategy._device import DeviceSpec
from fivefold.strategy._grouping import group_period_s
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
from fivefold.strategy._queue import QueuedJob, QueueResult, run_queue
from fivefold.strategy._search import SearchResult, search_plans
from fivefold.strategy._space import SearchSpace
from fivefold.strategy._table import PlanTable
from fivefold.strategy._table_cost import CostTable, evaluate_table
from fivefold.strategy._torchtitan import torchtitan_config
from fivefold.strategy._trainer import trainer_config

__all__ = [
    "Cluster",
    "ConvolutionStage",
    "CostTable",
    "DeviceSpec",
    "Fit",
    "Job",
    "LatentAttention",
    "MeasuredRun",
    "MemoryUse",
    "Message",
    "MixtureOfExperts",
    "ModelSpec",
    "ParallelPlan",
    "PipelineShape",
    "PlanDemand",
    "PlanTable",
    "Prediction",
    "QueueResult",
    "QueuedJob",
    "SearchResult",
    "SearchSpace",
    "TimeUse",
    "axis_groups",
    "device_mesh",
    "evaluate_plan",
    "evaluate_table",
    "fit_constants",
    "group_period_s",
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
    "run_queue",
    "search_plans",
    "torchtitan_config",
    "trainer_config",
    "with_constants",
]
