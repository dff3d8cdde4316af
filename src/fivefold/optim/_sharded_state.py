"""The outer state by parameter, for ``torch.distributed.checkpoint`` and other numbers of shards.

A rank's own state (``OuterSync.state_dict``) is flat buffers, which mean nothing on another number
of shard ranks. Here every parameter has an entry with its name, as a DTensor where the outer state
is sharded, so that the checkpoint's loader gives each rank the rows that it has now. There are
three parts::

    shared                             equal on all workers: anchors, momenta, the sum in flight
    worker-W-of-N                      one worker's own: what it sent, where its round began
    worker-W-of-N-rank-P-of-S          one rank's own: counters, norms, residuals of a codec

A loader asks for what its own names say, so on another number of workers or shard ranks the last
one or two parts are not found, and what takes their place is said in ``collect``. Only structure is
handled here; nothing is sent but a few sums within the worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fivefold.optim._flat import FlatGroup
from fivefold.optim._fragment import Fragment
from fivefold.optim._shards import WorkerGroup, local_tensor
from fivefold.optim._state import SHARED_BUFFERS

_SHARED = {*SHARED_BUFFERS, "payload"}
_SCRATCH = {"gradient"}
_NORMS = ("last_move", "last_delta")


@dataclass(frozen=True, kw_only=True)
class StateForm:
    """Form of a rank's state by parameter, in which checkpoints hold it."""

    fragments: list[Fragment]
    worker: WorkerGroup | None
    index: int
    num_workers: int

    def spread(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a rank's ``state_dict()`` by parameter; tensors are views of the live ones."""
        plain = _without_tensors(state)
        shared: dict[str, Any] = {"num_shards": self._num_shards, "state": self._totals(plain)}
        own: dict[str, Any] = {"numbers": self._own_numbers(plain)}
        for part, names in ((shared, _SHARED), (own, None)):
            part["tensors"] = {
                name: {
                    key: value
                    for key, value in entries.items()
                    if (key in _SHARED or key.startswith("outer_optimizer.")) == (names is _SHARED)
                }
                for name, entries in self._entries(state).items()
            }
        rank = {"state": plain, "transport": state["transport"]}
        return {"shared": shared, self._worker_key: own, self._rank_key: rank}

    def collect(self, saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
        """Return a rank's ``state_dict()`` from what ``spread`` gave and a loader filled.

        On the same numbers of workers and shards it is what was saved. On another number of
        shards the norms are this rank's share of the whole model's, and residuals of a codec are
        those of ``current``. On another number of workers only the shared part counts.
        """
        shared = saved["shared"]
        same_workers = shared["state"]["world_size"] == self.num_workers
        same_shards = same_workers and shared["num_shards"] == self._num_shards
        if same_shards:
            state: dict[str, Any] = copy.deepcopy(saved[self._rank_key]["state"])
            state["transport"] = saved[self._rank_key]["transport"]
        else:
            state = self._shares(copy.deepcopy(shared["state"]))
            state["transport"] = current["transport"]
            if same_workers:
                for index, numbers in saved[self._worker_key]["numbers"].items():
                    self._take_numbers(state["fragments"][index], numbers)
        tensors = {
            name: entries | saved[self._worker_key]["tensors"].get(name, {})
            for name, entries in shared["tensors"].items()
        }
        for fragment in self.fragments:
            part = state["fragments"][str(fragment.index)]
            part["groups"] = self._flat(fragment.groups, tensors)
            part["averaged"] = self._flat(fragment.averaged, tensors)
            self._collect_optimizer(part, fragment, tensors)
        return state

    # -- tensors ----------------------------------------------------------------------------------

    def _entries(self, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return every tensor's buffers by its name in the model."""
        names = self._names()
        entries: dict[str, dict[str, Any]] = {}
        for fragment in self.fragments:
            for group in [*fragment.groups, *fragment.averaged]:
                for key, buffer in group.buffers().items():
                    if key in _SCRATCH:
                        continue
                    for tensor, view in zip(group.tensors, group.shaped(buffer), strict=True):
                        entries.setdefault(names[id(tensor)], {})[key] = self._wrap(tensor, view)
            optimizer = state["fragments"][str(fragment.index)]["outer_optimizer"]
            for position, tensor in enumerate(_parameters(fragment)):
                values = {} if optimizer is None else optimizer["state"].get(str(position), {})
                shape = self._part_shape(tensor)
                for key, value in values.items():
                    fits = isinstance(value, torch.Tensor) and value.shape == shape
                    wrapped = self._wrap(tensor, value) if fits else value
                    entries[names[id(tensor)]][f"outer_optimizer.{key}"] = wrapped
        return entries

    def _flat(
        self, groups: list[FlatGroup], tensors: dict[str, dict[str, Any]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        names = self._names()
        flat: dict[str, dict[str, torch.Tensor]] = {}
        for index, group in enumerate(groups):
            flat[str(index)] = {
                key: buffer
                if key in _SCRATCH
                else torch.cat(
                    [local_tensor(tensors[names[id(t)]][key]).reshape(-1) for t in group.tensors]
                )
                for key, buffer in group.buffers().items()
            }
        return flat

    def _collect_optimizer(
        self, part: dict[str, Any], fragment: Fragment, tensors: dict[str, dict[str, Any]]
    ) -> None:
        if part["outer_optimizer"] is None:
            return
        names, prefix = self._names(), "outer_optimizer."
        part["outer_optimizer"]["state"] = {
            str(position): {
                key.removeprefix(prefix): _unwrapped(value)
                for key, value in tensors[names[id(tensor)]].items()
                if key.startswith(prefix)
            }
            for position, tensor in enumerate(_parameters(fragment))
        }

    def _wrap(self, tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """Return the view of this rank's part as a part of the whole."""
        if isinstance(tensor, DTensor):
            return _sharded_like(view, tensor.device_mesh, tensor.placements, tensor.shape)
        whole = view.view(1) if view.dim() == 0 else view
        if self.worker is None or not self.worker.splits:
            return whole
        shape = tensor.shape if tensor.dim() else torch.Size([1])
        return _sharded_like(whole, self.worker.mesh, self.worker.placements, shape)

    def _part_shape(self, tensor: torch.Tensor) -> torch.Size:
        part = local_tensor(tensor) if self.worker is None else self.worker.share.part(tensor)
        return part.shape

    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for fragment in self.fragments:
            names |= fragment.tensor_names()
        return names

    # -- numbers ----------------------------------------------------------------------------------

    @property
    def _num_shards(self) -> int:
        return 1 if self.worker is None else self.worker.size

    @property
    def _worker_key(self) -> str:
        return f"worker-{self.index}-of-{self.num_workers}"

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

    def _own_numbers(self, plain: dict[str, Any]) -> dict[str, Any]:
        numbers = {}
        for index, part in plain["fragments"].items():
            weight = part["scalars"]["weight"]
            if self.worker is not None and weight is not None:
                (weight,) = self.worker.sum([weight])
            numbers[index] = {
                "weight": weight,
                "own_share": part["scalars"]["own_share"],
                "all_reduce_weight": part["all_reduce_weight"],
            }
        return numbers

    def _take_numbers(self, part: dict[str, Any], numbers: dict[str, Any]) -> None:
        weight = numbers["weight"]
        part["scalars"]["weight"] = None if weight is None else weight / self._num_shards
        part["scalars"]["own_share"] = numbers["own_share"]
        part["all_reduce_weight"] = numbers["all_reduce_weight"]


def _parameters(fragment: Fragment) -> Iterator[torch.Tensor]:
    for group in fragment.groups:
        yield from group.tensors


def _sharded_like(view: torch.Tensor, mesh: Any, placements: Any, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(view, mesh, placements, run_check=False, shape=shape, stride=stride)


def _unwrapped(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, torch.Tensor) else value


def _without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without buffers and the transport's part; copied, as counters go on."""
    plain = {key: value for key, value in state.items() if key not in {"transport", "fragments"}}
    plain["fragments"] = {}
    for index, part in state["fragments"].items():
        kept = {key: value for key, value in part.items() if key not in {"groups", "averaged"}}
        if kept["outer_optimizer"] is not None:
            kept["outer_optimizer"] = {"steps": kept["outer_optimizer"]["steps"]}
        plain["fragments"][index] = kept
    return copy.deepcopy(plain)


def _with_norms(
    state: dict[str, Any], change: Callable[[list[float]], list[float]]
) -> dict[str, Any]:
    for part in state["fragments"].values():
        scalars, reading = part["scalars"], part["reading"]
        changed = change([scalars[name] for name in _NORMS])
        scalars.update(zip(_NORMS, changed, strict=True))
        for name in ("move", "delta"):
            reading[name] = change(reading[name])
    return state
