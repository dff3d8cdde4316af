"""Large models: a worker's ranks share parameters, gradients and optimizer states (FSDP2).

``sync.shard`` neighbouring ranks are one worker: ``fully_shard`` gathers a block's parameters when
they are needed and averages gradients inside the worker at every step, over its fast links; the
outer rule brings the workers together, each rank sending its share. Checkpoints hold each rank's
own shards as plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fivefold.errors import ConfigurationError
from fivefold.runs.ranks import Ranks
from fivefold.train.config import TrainConfig


def require_workers(config: TrainConfig, *, world_size: int) -> None:
    """Refuse shards that do not divide the ranks into at least two workers.

    Raises:
        ConfigurationError: They do not.
    """
    count = config.sync.shard or 1
    if count == 1:
        return
    if world_size % count or world_size // count < 2:
        message = f"sync.shard {count} does not divide {world_size} ranks into two workers or more"
        hint = "a worker is the ranks of a node: start twice as many ranks, or lower sync.shard"
        raise ConfigurationError(message, hint=hint)
    if config.model.moe is not None:
        message = f"sync.shard {count} is for dense models; got [model.moe]"
        raise ConfigurationError(message, hint="leave out sync.shard, or [model.moe]")


def share_states(
    model: torch.nn.Module, config: TrainConfig, ranks: Ranks, *, precision: str
) -> DeviceMesh | None:
    """Share a model out among the ranks of each worker; a collective call.

    Args:
        model: The model, equal on all ranks; its parameters become shards.
        config: ``sync.shard`` says over how many ranks.
        ranks: The ranks; neighbours are a worker.
        precision: "fp32" or "bf16", of what is gathered.

    Returns:
        The mesh of workers ("replicate") and their ranks ("shard"); None where every rank is a
        worker with a model of its own.
    """
    count = config.sync.shard or 1
    if count == 1:
        return None
    with ranks.guard("setting up the groups of workers"):
        mesh = init_device_mesh(
            ranks.device.type,
            (ranks.world_size // count, count),
            mesh_dim_names=("replicate", "shard"),
        )
        policy = MixedPrecisionPolicy()
        if precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh["shard"], mp_policy=policy)
        fully_shard(model, mesh=mesh["shard"], mp_policy=policy)
    return mesh


def own_shards(state: Any) -> Any:
    """Return a state with this rank's shard in place of each shared tensor."""
    if isinstance(state, DTensor):
        return state.to_local()
    if isinstance(state, dict):
        return {key: own_shards(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(own_shards(value) for value in state)
    return state


def load_own_shards(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Put what ``own_shards`` kept back into a model that is shared out and its optimizer."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own_shards(parameter).copy_(state["model"][name])
    saved = state["optimizer"]
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    moments = {
        number: {key: _like(value, parameters[number]) for key, value in values.items()}
        for number, values in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": moments})


def _like(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
