"""The outer state as parts of whole tensors, for other numbers of shards and of workers.

Every buffer is a DTensor where the outer state is sharded, so that a checkpoint's loader gives each
rank the rows that it has now. A loader asks for what its own names say: on another number of
workers or shard ranks it does not find the parts of single workers and ranks, and what takes their
place is said in ``collect``. Nothing is sent but a few sums within the worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fivefold.optim._fragment import Fragment
from fivefold.optim._shards import WorkerGroup, local_tensor
from fivefold.optim._state import is_shared
from fivefold.optim.transport import Transport

_NORMS = ("last_move", "last_delta")


@dataclass(frozen=True)
class StateForm:
    """The form in which checkpoints of several ranks hold a rank's state.

    "shared" is equal on all workers: anchors, momenta, the sum in flight. "worker-W-of-N" is one
    worker's own: what it sent, where its round began. "worker-W-of-N-rank-P-of-S" is one rank's
    own: counters, norms, residuals of a codec.
    """

    fragments: list[Fragment]
    worker: WorkerGroup | None
    transport: Transport

    def spread(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a rank's ``state_dict()`` in this form; tensors are views of the live ones."""
        plain = {key: value for key, value in state.items() if key != "transport"}
        plain["fragments"] = {
            index: {key: value for key, value in part.items() if key != "tensors"}
            for index, part in state["fragments"].items()
        }
        plain = copy.deepcopy(plain)  # counters go on
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for fragment in self.fragments:
            entries = state["fragments"][str(fragment.index)]["tensors"]
            for tensor, (name, buffers) in zip(fragment.tensors(), entries.items(), strict=True):
                for key, value in buffers.items():
                    whose = shared if is_shared(key) else own
                    whose.setdefault(name, {})[key] = self._wrap(tensor, value)
        of_all = {key: value for key, value in plain.items() if key not in ("rank", "place")}
        totals = {"num_shards": self._num_shards, "state": self._totals(of_all), "tensors": shared}
        numbers = {i: self._own_numbers(part) for i, part in plain["fragments"].items()}
        return {
            "shared": totals,
            self._worker_key: {"numbers": numbers, "tensors": own},
            self._rank_key: {"state": plain, "transport": state["transport"]},
        }

    def collect(self, saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
        """Return a rank's ``state_dict()`` from what ``spread`` gave and a loader filled."""
        # On another number of shards the norms are this rank's share of the whole model's, and
        # residuals of a codec stay. On another number of workers only the shared part counts.
        shared, worker = saved["shared"], saved[self._worker_key]
        same_workers = shared["state"]["world_size"] == self.transport.world_size
        state: dict[str, Any]
        if same_workers and shared["num_shards"] == self._num_shards:
            rank = saved[self._rank_key]
            state = copy.deepcopy(rank["state"]) | {"transport": rank["transport"]}
        else:
            state = self._shares(copy.deepcopy(shared["state"]))
            state["transport"] = current["transport"]
            for index, numbers in worker["numbers"].items() if same_workers else ():
                self._take_numbers(state["fragments"][index], numbers)
        state |= {key: current[key] for key in ("rank", "place")}
        for index, part in current["fragments"].items():
            tensors = state["fragments"][index]["tensors"] = {}
            for name, buffers in part["tensors"].items():
                tensors[name] = {
                    key: _unwrapped(entries[name][key], like=value)
                    for key, value in buffers.items()
                    if key in (entries := (shared if is_shared(key) else worker)["tensors"])[name]
                }
        return state

    def _wrap(self, tensor: torch.Tensor, value: Any) -> Any:
        """Return this rank's part of a buffer like the tensor as a part of the whole."""
        part = local_tensor(tensor) if self.worker is None else self.worker.share.part(tensor)
        if not isinstance(value, torch.Tensor) or value.shape != part.shape:
            return value  # a number of an outer optimizer
        if isinstance(tensor, DTensor):
            return _sharded_like(value, tensor.device_mesh, tensor.placements, tensor.shape)
        whole = value.view(1) if value.dim() == 0 else value
        if self.worker is None or not self.worker.splits:
            return whole
        shape = tensor.shape if tensor.dim() else torch.Size([1])
        return _sharded_like(whole, self.worker.mesh, self.worker.placements, shape)

    # -- numbers ----------------------------------------------------------------------------------

    @property
    def _num_shards(self) -> int:
        return 1 if self.worker is None else self.worker.size

    @property
    def _worker_key(self) -> str:
        return f"worker-{self.transport.rank}-of-{self.transport.world_size}"

    @property
    def _rank_key(self) -> str:
        place = 0 if self.worker is None else self.worker.place
        return f"{self._worker_key}-rank-{place}-of-{self._num_shards}"

    def _totals(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers with norms of the whole model instead of this rank's part."""

        def total(values: list[float]) -> list[float]:
            if self.worker is None:
                return values
            return [square**0.5 for square in self.worker.sum([v * v for v in values])]

        return _with_norms(copy.deepcopy(plain), total)

    def _shares(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the reverse: equal shares, whose sum over the ranks is the whole again."""
        factor = self._num_shards**-0.5
        return _with_norms(state, lambda values: [value * factor for value in values])

    def _own_numbers(self, part: dict[str, Any]) -> dict[str, Any]:
        weight = part["scalars"]["weight"]
        if self.worker is not None and weight is not None:
            (weight,) = self.worker.sum([weight])
        own = {"weight": weight, "own_share": part["scalars"]["own_share"]}
        return own | {"all_reduce_weight": part["in_flight"]["weight"]}

    def _take_numbers(self, part: dict[str, Any], numbers: dict[str, Any]) -> None:
        weight = numbers["weight"]
        part["scalars"]["weight"] = None if weight is None else weight / self._num_shards
        part["scalars"]["own_share"] = numbers["own_share"]
        part["in_flight"]["weight"] = numbers["all_reduce_weight"]


def _sharded_like(view: torch.Tensor, mesh: Any, placements: Any, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(view, mesh, placements, run_check=False, shape=shape, stride=stride)


def _unwrapped(value: Any, *, like: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    local = local_tensor(value)
    return local.view_as(like) if local.numel() == like.numel() else local


def _with_norms(
    state: dict[str, Any], change: Callable[[list[float]], list[float]]
) -> dict[str, Any]:
    for part in state["fragments"].values():
        scalars, reading = part["scalars"], part["in_flight"]["reading"]
        changed = change([scalars[name] for name in _NORMS])
        scalars.update(zip(_NORMS, changed, strict=True))
        for name in ("move", "delta"):
            reading[name] = change(reading[name])
    return state
