"""DistributedDataParallel, plain or with a communication hook of torch's own.

Settings: ``bucket_cap_mb`` (None for DDP's default); ``hook`` None, "fp16", "powersgd" (with
``rank`` and ``start``, the steps of plain all-reduce before it) or "post_local_sgd" (with ``tau``
and ``start``: DDP for that many steps, then one average of the parameters every ``tau`` steps).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as post_local
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.optim._peers._case import Attached, Place
from benchmarks.optim._workload import LossModule

__all__ = ["attach"]

_POWERSGD_EARLIEST = 2  # DDP rebuilds its buckets in the first step; the hook keeps tensors


def attach(
    settings: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    place: Place,
) -> Attached:
    """Wrap the model; DDP broadcasts rank 0's parameters."""
    replica = _data_parallel(model, settings.get("bucket_cap_mb"))
    hook = settings.get("hook")
    start = settings.get("start", 0)
    if hook == "fp16":
        replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        start = _POWERSGD_EARLIEST if place.stationary else start
        state = power.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=settings["rank"],
            start_powerSGD_iter=start,
            random_seed=0,
        )
        replica.register_comm_hook(state, power.powerSGD_hook)
    elif hook == "post_local_sgd":
        start = 0 if place.stationary else start
        optimizer = _post_local(replica, optimizer, tau=settings["tau"], start=start)
    return Attached(loss=replica, optimizer=optimizer)


def _data_parallel(model: Any, bucket_cap_mb: float | None) -> DistributedDataParallel:
    """DDP as it comes, but without sending the constant rotary tables in every forward pass."""
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {name: False}
    if bucket_cap_mb is not None:
        options["bucket_cap_mb"] = bucket_cap_mb
    return DistributedDataParallel(LossModule(model), **options)


def _post_local(
    replica: DistributedDataParallel, optimizer: torch.optim.Optimizer, *, tau: int, start: int
) -> torch.optim.Optimizer:
    """As torch documents it; one rank per host, so no gradients are reduced inside a host."""
    state = post_local.PostLocalSGDState(  # type: ignore[no-untyped-call]
        process_group=None,
        subgroup=None,
        start_localSGD_iter=start,
        post_local_gradient_allreduce=False,
    )
    replica.register_comm_hook(state, post_local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=tau, warmup_steps=start)
    return PostLocalSGDOptimizer(optimizer, averager)
