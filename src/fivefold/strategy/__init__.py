"""Layer 1: how model, data and states are split over GPUs, at what cost, and which is best."""

from fivefold.strategy._cost import Prediction, TimeUse, evaluate_plan
from fivefold.strategy._device import DeviceSpec
from fivefold.strategy._fabric import FabricSpec, Group, Tier, collective_time_s
from fivefold.strategy._memory import MemoryUse
from fivefold.strategy._model import (
    ConvolutionStage,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
)
from fivefold.strategy._pipeline import PipelineShape, pipeline_shape
from fivefold.strategy._plan import ParallelPlan, plan_problem
from fivefold.strategy._table import PlanTable
from fivefold.strategy._table_cost import CostTable, evaluate_table

__all__ = [
    "ConvolutionStage",
    "CostTable",
    "DeviceSpec",
    "FabricSpec",
    "Group",
    "LatentAttention",
    "MemoryUse",
    "MixtureOfExperts",
    "ModelSpec",
    "ParallelPlan",
    "PipelineShape",
    "PlanTable",
    "Prediction",
    "Tier",
    "TimeUse",
    "collective_time_s",
    "evaluate_plan",
    "evaluate_table",
    "pipeline_shape",
    "plan_problem",
]
