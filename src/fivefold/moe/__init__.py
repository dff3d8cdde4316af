"""The mixture-of-experts operator: routing, experts and combination as one differentiable call.

A CPU path that runs on any device, every routing in common use, and the forward as one persistent
kernel for NVIDIA GPUs (after FlashMoE, arXiv 2506.04667), also with the experts spread over ranks
that reach each other's memory. All that users need stands here; behind it are ``routing``,
``kernels``, ``operator`` and ``parallel``, each importing only those before it.
"""

from fivefold.moe.checkpoints import convert_checkpoint, export_checkpoint, open_checkpoint
from fivefold.moe.kernels.arguments import Workspace
from fivefold.moe.operator._transformers import register_transformers_backend
from fivefold.moe.operator.activations import ACTIVATIONS
from fivefold.moe.operator.fused import backends, fused_moe
from fivefold.moe.operator.layer import MoE, MoEConfig
from fivefold.moe.parallel._config import OneSidedConfig
from fivefold.moe.parallel._heaps import SharedMemoryHeap, TorchSymmetricHeap, VirtualHeap
from fivefold.moe.parallel._one_sided import OneSidedGroup
from fivefold.moe.parallel.all_to_all import AllToAllGroup
from fivefold.moe.parallel.placement import prepare_experts
from fivefold.moe.routing.router import (
    Router,
    Routing,
    capacity_for,
    drop_beyond_capacity,
    load_balancing_loss,
    route,
    router_z_loss,
    updated_selection_bias,
)

__all__ = [
    "ACTIVATIONS",
    "AllToAllGroup",
    "MoE",
    "MoEConfig",
    "OneSidedConfig",
    "OneSidedGroup",
    "Router",
    "Routing",
    "SharedMemoryHeap",
    "TorchSymmetricHeap",
    "VirtualHeap",
    "Workspace",
    "backends",
    "capacity_for",
    "convert_checkpoint",
    "drop_beyond_capacity",
    "export_checkpoint",
    "fused_moe",
    "load_balancing_loss",
    "open_checkpoint",
    "prepare_experts",
    "register_transformers_backend",
    "route",
    "router_z_loss",
    "updated_selection_bias",
]
