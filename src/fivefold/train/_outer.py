"""The outer-sync methods: all rules of ``fivefold.optim`` as one trainer method.

Large models: ``sync.shard`` neighbouring ranks are one worker, whose ranks share parameters,
gradients and optimizer states (FSDP2). ``fully_shard`` gathers a block's parameters when they are
needed and averages gradients inside the worker at every step, over its fast links; the outer rule
brings the workers together, each rank sending its share. Checkpoints hold each rank's own shards as
plain tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fivefold.optim import DelayedGradients, OuterSync, SyncStatistics
from fivefold.optim.auto_tau import TauDecision
from fivefold.optim.statistics import AllReduceRecord
from fivefold.runs.ranks import Ranks
from fivefold.train._methods import Method
from fivefold.train._spans import Span, subtract
from fivefold.train.config import SyncConfig, TrainConfig


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


_DETAILS = ("round", "fragment", "payload_bytes", "sent_bytes")  # of an all-reduce, shown with it


class OuterMethod(Method):
    """Local steps, and one all-reduce per round."""

    def __init__(
        self,
        config: SyncConfig,
        model: torch.nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        max_norm: float,
        total_steps: int | None,
        workers: DeviceMesh | None = None,
    ) -> None:
        super().__init__(model)
        self._workers = workers
        self._told_round = -1
        rule = config.rule(total_steps=total_steps)
        self._clips_later = isinstance(rule, DelayedGradients)
        if isinstance(rule, DelayedGradients) and math.isfinite(max_norm):
            rule = dataclasses.replace(rule, max_norm=max_norm)
        with ranks.guard("setting up the outer synchronisation"):
            self._sync = OuterSync(
                model,
                optimizer,
                rule=rule,
                process_group=None if workers is None else workers["replicate"],
                codec=config.codec or "fp32",
                average_states=config.average_states,
                timeout_s=ranks.timeout_s,
                outlier_factor=config.outlier_factor,
                check_every_rounds=config.check_every_rounds or 0,
            )

    def accumulating(self) -> AbstractContextManager[None]:
        """Keep gradients as they are until the last micro-batch."""
        return self._whole_gradients() if self._workers is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _whole_gradients(self) -> Iterator[None]:
        shared = cast("FSDPModule", self._model)
        shared.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            shared.set_requires_gradient_sync(True)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over all shards of the worker.

        Where the mean over the ranks arrives later, it is clipped then.
        """
        norm = super().clip_gradients(math.inf if self._clips_later else max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def after_step(self) -> None:
        """Count the local step; at the end of a round wait, merge and launch."""
        self._timed(self._sync.step, name="outer step")

    def finalize(self) -> None:
        """Drain all that is under way: all replicas are equal afterwards."""
        self._timed(self._sync.finalize, name="drain", which="last ")

    def evaluation(self) -> AbstractContextManager[None]:
        """Return the anchor, which is equal on all ranks; a partial round is not in it."""
        return self._sync.global_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state and the totals."""
        state = {"sync": self._sync.state_dict()}
        self._collect_all_reduces()
        return state | {"totals": self.totals.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.totals.load_state_dict(state["totals"])
        self._sync.load_state_dict(state["sync"])
        self.take_decisions()  # those of before are in the metrics

    def statistics(self) -> SyncStatistics | None:
        """Return the engine's own record."""
        return self._sync.statistics()

    def take_decisions(self) -> list[TauDecision]:
        """Return changes of tau since the last call, or since the checkpoint that was loaded."""
        made = [d for d in self._sync.tau_decisions() if d.round > self._told_round]
        self._told_round = made[-1].round if made else self._told_round
        return made

    def _timed(self, action: Callable[[], None], *, name: str, which: str = "") -> None:
        start_s = time.perf_counter()
        action()
        end_s = time.perf_counter()
        waits = self._collect_all_reduces(which)
        self._spans += [
            Span(lane="boundary", name=name, start_s=begin_s, end_s=stop_s)
            for begin_s, stop_s in subtract(start_s, end_s, holes=waits)
        ]

    def _collect_all_reduces(self, which: str = "") -> list[Span]:
        waits = []
        for all_reduce in self._sync.all_reduces():
            name = f"{which}{_all_reduce_name(all_reduce)}"
            begin_s, end_s = all_reduce.wait_started_at_s, all_reduce.wait_ended_at_s
            waits.append(Span(lane="wait", name=name, start_s=begin_s, end_s=end_s))
            landed_s = all_reduce.completed_at_s
            self._spans.append(
                Span(
                    lane="in_flight",
                    name=name,
                    start_s=all_reduce.launched_at_s,
                    end_s=landed_s,
                    details={key: getattr(all_reduce, key) for key in _DETAILS},
                )
            )
            self.totals.add(
                in_flight_s=landed_s - all_reduce.launched_at_s,
                waited_s=end_s - begin_s,
                payload_bytes=all_reduce.payload_bytes,
                sent_bytes=all_reduce.sent_bytes,
            )
        self._spans += waits
        return waits


def _all_reduce_name(all_reduce: AllReduceRecord) -> str:
    number = all_reduce.fragment
    fragment = f", fragment {number}" if number > 0 else ", optimizer state" if number else ""
    return f"all-reduce round {all_reduce.round}{fragment}{' (lost)' if all_reduce.lost else ''}"
