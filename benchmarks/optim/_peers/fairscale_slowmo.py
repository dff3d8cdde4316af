"""SlowMo as fairscale 0.4.13 has it: ``SlowMoDistributedDataParallel`` over Local SGD.

One configuration of it runs on CPU and gloo: memory efficient (its default), with the slow
momentum at every average (``slowmo_frequency == localsgd_frequency``). All others call
``torch.cuda.synchronize`` after an all-reduce. Settings: ``tau``, ``lr``, ``momentum``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fairscale.experimental.nn.data_parallel import (
    SlowMoBaseAlgorithm,
    SlowMoDistributedDataParallel,
)

from benchmarks.optim._peers._case import Attached, Place
from benchmarks.optim._workload import LossModule

__all__ = ["attach"]


def attach(
    settings: Mapping[str, Any],
    model: Any,
    optimizer: torch.optim.Optimizer,
    place: Place,
) -> Attached:
    """Wrap the model; the slow momentum is sharded over all ranks."""
    wrapped = SlowMoDistributedDataParallel(
        LossModule(model),
        nprocs_per_node=1,
        broadcast_buffers=False,  # constant rotary tables, as with DDP
        slowmo_base_algorithm=SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_momentum=settings["momentum"],
        slowmo_lr=settings["lr"],
        slowmo_frequency=settings["tau"],
        localsgd_frequency=settings["tau"],
        slowmo_num_shards=place.world_size,
        global_group=torch.distributed.group.WORLD,  # making a group itself, it calls CUDA
    )
    return Attached(
        loss=wrapped,
        optimizer=optimizer,
        after_step=lambda: wrapped.perform_slowmo(optimizer),
    )
