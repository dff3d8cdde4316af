"""The mixture-of-experts operator: routing, experts and combination as one differentiable call.

A reference that runs on any device, every routing in common use, and the forward as one persistent
kernel for NVIDIA GPUs (after FlashMoE, arXiv 2506.04667), also with the experts spread over ranks
that reach each other's memory.
"""

from fivefold.moe._activations import ACTIVATIONS, Activation, activation_named
from fivefold.moe._backends import backends
from fivefold.moe._capacity import capacity_for, drop_beyond_capacity
from fivefold.moe._checkpoint_files import open_checkpoint
from fivefold.moe._checkpoints import LAYOUTS, convert_checkpoint, export_checkpoint
from fivefold.moe._exchange import ExpertExchange
from fivefold.moe._exchange_layout import ExchangeConfig
from fivefold.moe._expert_group import ExchangeFlight, ExpertGroup, ExpertLoad
from fivefold.moe._heap import (
    SharedMemoryHeap,
    SymmetricHeap,
    TorchSymmetricHeap,
    VirtualHeap,
)
from fivefold.moe._module import MoE, MoEConfig
from fivefold.moe._operator import fused_moe
from fivefold.moe._reference import experts_one_by_one
from fivefold.moe._routing import (
    Router,
    Routing,
    load_balancing_loss,
    route,
    router_z_loss,
    updated_selection_bias,
)
from fivefold.moe._transformers import register_transformers_backend
from fivefold.moe._workspace import Workspace

__all__ = [
    "ACTIVATIONS",
    "LAYOUTS",
    "Activation",
    "ExchangeConfig",
    "ExchangeFlight",
    "ExpertExchange",
    "ExpertGroup",
    "ExpertLoad",
    "MoE",
    "MoEConfig",
    "Router",
    "Routing",
    "SharedMemoryHeap",
    "SymmetricHeap",
    "TorchSymmetricHeap",
    "VirtualHeap",
    "Workspace",
    "activation_named",
    "backends",
    "capacity_for",
    "convert_checkpoint",
    "drop_beyond_capacity",
    "experts_one_by_one",
    "export_checkpoint",
    "fused_moe",
    "load_balancing_loss",
    "open_checkpoint",
    "register_transformers_backend",
    "route",
    "router_z_loss",
    "updated_selection_bias",
]
