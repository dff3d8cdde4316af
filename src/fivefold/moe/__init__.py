"""The mixture-of-experts operator: routing, experts and combination as one differentiable call.

A CPU path that runs on any device, every routing in common use, and the forward as one persistent
kernel for NVIDIA GPUs (after FlashMoE, arXiv 2506.04667), also with the experts spread over ranks
that reach each other's memory. The subpackages, each importing only those before it: ``routing``,
``kernels``, ``operator``, ``parallel`` and ``checkpoints``; what most users need stands here.
"""

from fivefold.moe.checkpoints import convert_checkpoint, export_checkpoint, open_checkpoint
from fivefold.moe.kernels import Workspace
from fivefold.moe.operator import (
    MoE,
    MoEConfig,
    backends,
    fused_moe,
    register_transformers_backend,
)
from fivefold.moe.parallel import (
    ExchangeConfig,
    ExpertExchange,
    ExpertGroup,
    TorchSymmetricHeap,
    VirtualHeap,
)
from fivefold.moe.routing import Router, route, updated_selection_bias

__all__ = [
    "ExchangeConfig",
    "ExpertExchange",
    "ExpertGroup",
    "MoE",
    "MoEConfig",
    "Router",
    "TorchSymmetricHeap",
    "VirtualHeap",
    "Workspace",
    "backends",
    "convert_checkpoint",
    "export_checkpoint",
    "fused_moe",
    "open_checkpoint",
    "register_transformers_backend",
    "route",
    "updated_selection_bias",
]
