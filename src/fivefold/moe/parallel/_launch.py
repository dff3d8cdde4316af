"""Memory, arguments and launches of an exchange: what kernels need besides a call's operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fivefold.errors import CommunicationError, ConfigurationError, DataError, UnsupportedError
from fivefold.moe.kernels.arguments import (
    Heap,
    Launch,
    Operands,
    Plan,
    Tables,
    debugging,
    interpreting,
)
from fivefold.moe.kernels.launch import (
    combine_columns_for,
    descriptor,
    lag_for,
    missing_fused,
    multiprocessors,
    on,
    start,
)
from fivefold.moe.operator.activations import activation_named
from fivefold.moe.operator.operands import check_operands
from fivefold.moe.parallel._config import (
    ExchangeConfig,
    heap_layout,
    private_layout,
    sizes_of,
)
from fivefold.moe.parallel._heaps import SymmetricHeap
from fivefold.moe.routing.capacity import DropPolicy, drop_beyond_capacity
from fivefold.moe.routing.router import Router

_STATISTICS = ("sent_bytes", "returned_bytes", "sent_signals", "returned_signals")

_KINDS = {
    1: "a task of its own",
    2: "the counts",
    3: "rows",
    4: "the rows it sent to come back",
}


class ExchangeLaunches:
    """A rank's private memory beside a heap, and the kernels that work on both.

    Args:
        config: Sizes; the same on all ranks.
        heap: Memory that the ranks share, of ``config.heap_bytes()`` or more, for this alone.
        timeout_s: How long a rank waits for another one.

    Raises:
        ConfigurationError: The heap does not fit the configuration.
        UnsupportedError: The kernel cannot run on the heap's device; says why.
    """

    def __init__(
        self, config: ExchangeConfig, heap: SymmetricHeap, *, timeout_s: float = 30.0
    ) -> None:
        reason = missing_fused(heap.device)
        if reason is not None:
            raise UnsupportedError(f"the exchange cannot work here: {reason}")
        if heap.ranks != config.ranks:
            raise ConfigurationError(
                f"the heap has {heap.ranks} ranks, the configuration {config.ranks}",
                hint="make both for the group that shares the experts",
            )
        layout = heap_layout(config)
        if heap.nbytes < layout.scratch_bytes:
            raise ConfigurationError(
                f"the heap has {heap.nbytes} bytes per rank; this exchange needs "
                f"{layout.scratch_bytes}",
                hint="make it with nbytes=config.heap_bytes()",
            )
        if not timeout_s > 0:
            raise ConfigurationError(f"timeout_s must be positive; got {timeout_s}")
        self.config = config
        self.heap = heap
        self.timeout_s = timeout_s
        device, num_local = heap.device, heap.num_local
        self._private = private_layout(config)
        self._control = torch.zeros(
            num_local, self._private.control_words, dtype=torch.int32, device=device
        )
        self._scratch = torch.empty(
            num_local, self._private.scratch_bytes, dtype=torch.uint8, device=device
        )
        self._stats = torch.zeros(
            num_local, len(_STATISTICS), config.ranks, dtype=torch.int64, device=device
        )
        self._token_first: dict[tuple[int, ...], torch.Tensor] = {}
        self._broken: str | None = None
        self._known = self._fixed_arguments(layout.sections)

    def _fixed_arguments(self, sections: dict[str, tuple[int, int, torch.dtype]]) -> dict[str, Any]:
        config, heap, private = self.config, self.heap, self._private
        tables = private.cut(self._scratch[0])
        offsets = {name: first for name, (first, _, _) in sections.items()}
        return {
            "t": Tables(*(tables[name] for name in Tables._fields)),
            "p": Plan(*(tables[name] for name in Plan._fields)),
            "heap": Heap(bases=heap.bases, **offsets),
            "launch": Launch(
                control=self._control,
                stats=self._stats,
                token_first=None,
                scratch_words=private.scratch_bytes // 4,
                control_words=private.control_words,
                max_tiles=private.max_tiles,
                max_rows=config.room_rows,
                limit_ns=None,
                num_return_counts=sections["return_counts"][1],
            ),
            "inner": tables["inner"],
            "first_rank": heap.first_rank,
            "max_lag": lag_for(config.tiles, config.intermediate, self._programs()),
        }

    def _programs(self) -> int:
        return 1 if interpreting() else multiprocessors(self.heap.device)

    def forward(
        self,
        operands: tuple[torch.Tensor, ...],
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        counts: tuple[int, ...],
        *,
        weight_on_input: bool = False,
        programs: int | None = None,
        routing: tuple[torch.Tensor, torch.Tensor | None, Router] | None = None,
    ) -> torch.Tensor:
        """Launch a call whose operands x, w13, w2, ids and weights were checked.

        With a ``routing`` (gate, selection bias and router) ids and weights are results.
        """
        from fivefold.moe.kernels.exchange import exchange_kernel  # noqa: PLC0415 - optional

        tiles = self.config.tiles
        x, w13, w2, ids, weights = (operand.contiguous() for operand in operands)
        b13, b2 = (None if bias is None else bias.contiguous() for bias in biases)
        out = torch.empty_like(x)
        gate, selection_bias, router = routing or (None, None, None)
        given = {
            "given": Operands(x, ids, weights, b13, b2, out),
            "w13": self._weights(w13, tiles.columns),
            "w2": self._weights(w2, tiles.second_columns),
            "gate": None if gate is None else gate.contiguous(),
            "selection_bias": None if selection_bias is None else selection_bias.contiguous(),
            "S": sizes_of(
                self.config,
                num_local=self.heap.num_local,
                weight_on_input=weight_on_input,
                router=router,
            ),
        }
        self.launch(exchange_kernel, given, counts, programs=programs)
        self.check_if_cheap()
        return out

    def launch(
        self,
        kernel: Any,
        given: dict[str, Any],
        counts: tuple[int, ...],
        *,
        programs: int | None = None,
    ) -> None:
        """Start a kernel with arguments by name, besides those that this knows."""
        programs = self._programs() if programs is None else programs
        tiles, heap = self.config.tiles, self.heap
        blocks = -(-max(counts) // tiles.combine_tokens) * heap.num_local
        columns = combine_columns_for(tiles, self.config.hidden, blocks, programs)
        shared = self._known["launch"]._replace(
            token_first=self._offsets(counts), limit_ns=int(self.timeout_s * 1e9)
        )
        known = self._known | {"launch": shared, "combine_columns": columns} | given
        with on(heap.device):
            start(kernel, programs, known, tiles.warps)

    def _weights(self, weight: torch.Tensor, columns: int) -> Any:
        if not self.config.by_descriptor:
            return weight
        if weight.data_ptr() % 16:
            weight = weight.clone()
        return descriptor(weight, columns, self.config.tiles.depth)

    def _offsets(self, counts: tuple[int, ...]) -> torch.Tensor:
        """First token of every rank; kept, so that a repeated call copies nothing to the GPU."""
        found = self._token_first.get(counts)
        if found is None:
            if len(self._token_first) >= 1024:
                self._token_first.clear()
            ends = torch.tensor([0, *counts]).cumsum(0)
            found = ends.to(dtype=torch.int32, device=self.heap.device)
            self._token_first[counts] = found
        return found

    def token_counts(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens of each rank of this process, shared out as evenly as can be."""
        each, more = divmod(num_tokens, self.heap.num_local)
        return tuple(each + (place < more) for place in range(self.heap.num_local))

    def check_whole(self) -> None:
        """Refuse to go on after a failure.

        Raises:
            CommunicationError: A call failed, or it is closed.
        """
        if self._broken is not None:
            raise CommunicationError(
                f"this exchange has failed before: {self._broken}",
                hint="close it on all ranks and set up a new one",
            )

    @property
    def epoch(self) -> int:
        """Calls that have ended; waits for the device."""
        from fivefold.moe.kernels.sync import EPOCH  # noqa: PLC0415 - optional

        return int(self._control[0, EPOCH.value])

    def statistics(self) -> dict[str, list[list[int]]]:
        """Return what this process's ranks have stored into heaps so far, counted by the kernel.

        Returns:
            By name, a list for every rank of this process with a number for every peer, itself
            included: ``sent_bytes`` (rows to the peer's experts), ``returned_bytes`` (results of
            the peer's rows), ``sent_signals`` and ``returned_signals`` (words that say so).
        """
        values = self._stats.tolist()
        return {
            name: [of_rank[place] for of_rank in values] for place, name in enumerate(_STATISTICS)
        }

    def check_if_cheap(self) -> None:
        """``check`` where it waits for nothing, or where one is debugging.

        Raises:
            CommunicationError: As in ``check``.
            DataError: As in ``check``.
        """
        if interpreting() or debugging():
            self.check()

    def check(self) -> None:
        """Raise what went wrong in calls so far; waits for the device.

        Raises:
            CommunicationError: A rank did not answer in time.
            DataError: Rows were dropped since a rank had no room; the exchange can go on.
        """
        from fivefold.moe.kernels import sync  # noqa: PLC0415 - optional

        for place, word in enumerate(self._control[:, sync.ERROR.value].tolist()):
            if word == 0:
                continue
            rank = self.heap.first_rank + place
            kind, peer, detail = word >> 28, word >> 14 & 0x3FFF, word & 0x3FFF
            if kind == sync.OVERFLOW.value:
                self._control[:, sync.ERROR.value] = 0
                raise DataError(
                    f"a rank would get more rows than the {self.config.room_rows} it has room for "
                    f"(rank {rank}, epoch {self.epoch}); nothing was sent",
                    hint="raise max_rows, or leave it None for room for whatever may come",
                )
            self._broken = _described(
                rank, kind, peer, detail, timeout_s=self.timeout_s, epoch=self.epoch
            )
            raise CommunicationError(
                self._broken, hint="look at that rank's log; set up a new exchange on all ranks"
            )

    def close(self) -> None:
        """Give the memory back; no rank may be in a call."""
        self._broken = "it is closed"
        self._known = {}
        self.heap.close()
        self._scratch = self._scratch.new_empty(0)


def check_call(
    config: ExchangeConfig,
    heap: SymmetricHeap,
    operands: tuple[torch.Tensor, ...],
    *,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    num_tokens: Sequence[int] | None,
) -> tuple[int, ...]:
    """Check a call's operands against the exchange, without looking at values."""
    b13, b2 = biases
    x, w13, w2, ids, weights = operands
    kind = activation_named(config.activation)
    check_operands(x, w13, w2, ids, weights, activation=kind, b13=b13, b2=b2)
    wanted = (heap.num_local * config.local_experts, config.hidden, config.intermediate)
    if tuple(w2.shape) != wanted or ids.shape[1] != config.top_k or x.dtype != config.dtype:
        raise ConfigurationError(
            f"w2 {tuple(w2.shape)}, top_k {ids.shape[1]} and {x.dtype} are not those of the "
            f"exchange: {wanted}, {config.top_k}, {config.dtype}",
            hint="a rank passes the weights of its own experts, a virtual heap those of all",
        )
    if x.device != heap.device:
        raise ConfigurationError(f"x is on {x.device}, the heap on {heap.device}")
    if num_tokens is None:
        if len(x) % heap.num_local:
            raise ConfigurationError(
                f"{len(x)} tokens cannot be shared out evenly among {heap.num_local} ranks",
                hint="say with num_tokens how many each has",
            )
        num_tokens = [len(x) // heap.num_local] * heap.num_local
    counts = tuple(num_tokens)
    if len(counts) != heap.num_local or sum(counts) != len(x) or min(counts) < 0:
        raise ConfigurationError(
            f"num_tokens is {counts}, for {heap.num_local} ranks and {len(x)} tokens",
            hint="give one count for every rank of this process; they add up to len(x)",
        )
    if max(counts) > config.max_tokens:
        raise ConfigurationError(
            f"a rank has {max(counts)} tokens, the exchange was made for {config.max_tokens}",
            hint="make it with a larger max_tokens, on all ranks",
        )
    return counts


def dropped_by_rank(
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    counts: Sequence[int],
    experts: int,
    capacity: int,
    policy: DropPolicy,
) -> torch.Tensor:
    """Ids with -1 for what is beyond a capacity; a rank's tokens compete among themselves."""
    kept = [
        drop_beyond_capacity(part, weight, num_experts=experts, capacity=capacity, policy=policy)
        for part, weight in zip(
            torch.split(ids, list(counts)), torch.split(weights, list(counts)), strict=True
        )
    ]
    return ids.masked_fill(~torch.cat(kept), -1)


def _described(
    rank: int, kind: int, peer: int, detail: int, *, timeout_s: float, epoch: int
) -> str:
    """Say what an error word of the kernel means."""
    if kind not in _KINDS:
        return f"rank {rank} wrote a row that rank {peer} had written in epoch {epoch}"
    whom = "" if kind == 1 else f" of rank {peer}"
    if kind == 4:
        whom = f" from rank {peer}"
    where = f" for its expert {detail}" if kind == 3 else ""
    return (
        f"rank {rank} waited {timeout_s:g} s for {_KINDS[kind]}{whom}{where} in "
        f"epoch {epoch} and gave up"
    )
