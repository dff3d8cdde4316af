"""All-reduces through a software aggregation switch, for groups that were given one.

A group of gloo's own carries the hosts' half: the agreement on which chunks all ranks have, and
the sums that the switch did not make. It is apart from the inner group, whose messages may be under
way at the same time.
"""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import torch

from fivefold.collectives.execution._calls import c10d, dist, inner_method
from fivefold.collectives.execution._settings import Settings
from fivefold.network.aggregation import AggregationClient
from fivefold.network.aggregation.client import AggregationOutcome
from fivefold.network.aggregation.wire import ordered_sum

_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
}
_TAG = (1 << 29) - 1  # the user's own messages on the same group have smaller ones
_PIECE_BYTES = 1 << 20
_SUMS = (dist.ReduceOp.RedOpType.SUM, dist.ReduceOp.RedOpType.AVG)


class GlooHosts:
    """Minima and sums by the hosts, over a gloo group: what a switch falls back to.

    A sum is cut into one share for each rank: the shares are exchanged, each rank adds its own in
    the order of ranks, and the sums are gathered. Every rank sends 2 (n - 1) / n of the buffer, as
    in a ring, and the bits are those of the switch.

    Args:
        group: ``dist.ProcessGroupGloo``, or a process group whose CPU backend it is.
    """

    def __init__(self, group: Any) -> None:
        has_backends = hasattr(group, "_get_backend") and not isinstance(
            group, dist.ProcessGroupGloo
        )
        self._group = group._get_backend(torch.device("cpu")) if has_backends else group  # noqa: SLF001 - torch's way
        self._size, self._rank = int(group.size()), int(group.rank())

    def minimum(self, flags: np.ndarray) -> np.ndarray:
        """Return the element-wise minimum over all ranks."""
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        least = torch.from_numpy(flags.copy())
        self._group.allreduce([least], options).wait()
        return least.numpy()

    def sum(self, values: np.ndarray, dtype: str) -> np.ndarray:
        """Return the sum over all ranks, added in their order."""
        width = -(-values.size // self._size)
        own = np.zeros(width * self._size, values.dtype)
        own[: values.size] = values
        parts, sums = np.empty_like(own), np.empty_like(own)
        self._exchange(_bytes(parts), _bytes(own))
        share = ordered_sum(list(parts.reshape(self._size, width)), dtype)
        gather = inner_method(self._group, "_allgather_base", "all_gather_single")
        gather(_bytes(sums), _bytes(share), c10d.AllgatherOptions()).wait()
        return sums[: values.size]

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Exchange in pieces: gloo moves long messages one direction at a time for a while."""
        arriving = received.view(self._size, -1)
        leaving = sent.view(self._size, -1)
        works = []
        for first in range(0, leaving.shape[1], _PIECE_BYTES):
            piece = slice(first, first + _PIECE_BYTES)
            for step in range(1, self._size):
                target, source = (self._rank + step) % self._size, (self._rank - step) % self._size
                works.append(self._group.send([leaving[target, piece]], target, _TAG))
                works.append(self._group.recv([arriving[source, piece]], source, _TAG))
        arriving[self._rank] = leaving[self._rank]
        for work in works:
            work.wait()


class SwitchRoute:
    """One group's way through the switch."""

    def __init__(
        self, store: Any, *, rank: int, size: int, timeout: Any, settings: Settings
    ) -> None:
        assert settings.aggregation is not None, "the engine asks only where there is a switch"
        if rank == 0:  # jobs that share a switch need names that no other has
            store.set("aggregation job", uuid.uuid4().hex)
        job = store.get("aggregation job").decode()
        self.group = dist.ProcessGroupGloo(
            dist.PrefixStore("aggregation", store), rank, size, timeout=timeout
        )
        self._least_bytes = settings.aggregation_min_bytes
        self.client = AggregationClient(
            settings.aggregation,
            job=job,
            rank=rank,
            size=size,
            fallback=GlooHosts(self.group),
            options=settings.aggregation_options,
        )

    def takes(self, name: str, tensor: torch.Tensor, operation: Any) -> bool:
        """Return whether such a collective goes through the switch: the same on all ranks."""
        return (
            name == "all_reduce"
            and operation in _SUMS
            and tensor.device.type == "cpu"
            and tensor.dtype in _NAMES
            and tensor.nbytes >= self._least_bytes
        )

    def all_reduce(self, tensor: torch.Tensor, label: int) -> AggregationOutcome:
        """Sum a flat, contiguous tensor over the group, in place; the label stands for the call."""
        if tensor.dtype is torch.bfloat16:  # numpy has none
            return self.client.all_reduce(
                tensor.view(torch.int16).numpy().view(np.uint16), dtype="bfloat16", label=label
            )
        return self.client.all_reduce(tensor, label=label)

    def close(self) -> None:
        """Leave the switch."""
        self.client.close()


def _bytes(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.uint8))
