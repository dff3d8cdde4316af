"""The operator and the layer: the CPU's path, autograd, backends, transformers."""

from fivefold.moe.operator._layer import MoE, MoEConfig
from fivefold.moe.operator._operator import fused_moe
from fivefold.moe.operator._transformers import register_transformers_backend
from fivefold.moe.operator.activations import ACTIVATIONS, Activation, activation_named
from fivefold.moe.operator.backend import backends
from fivefold.moe.operator.groups import ExpertLoad

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ExpertLoad",
    "MoE",
    "MoEConfig",
    "activation_named",
    "backends",
    "fused_moe",
    "register_transformers_backend",
]
