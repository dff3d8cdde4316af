"""The host's side of the exchange: experts on several ranks, reached one-sided, in one launch.

``ExpertExchange`` owns a rank's private memory and uses a heap that all ranks share. Every call is
one launch per process and has no barrier: ranks meet through the words in their heaps only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch

from fivefold.errors import CommunicationError, ConfigurationError, DataError, UnsupportedError
from fivefold.moe._capacity import DropPolicy, drop_beyond_capacity
from fivefold.moe._exchange_checks import check_call, check_gate, described
from fivefold.moe._exchange_layout import (
    ExchangeConfig,
    constants_of,
    heap_layout,
    private_layout,
)
from fivefold.moe._fused import (
    OPTIONS,
    _descriptor,
    _lag,
    _multiprocessors,
    missing_fused,
)
from fivefold.moe._heap import SharedMemoryHeap, SymmetricHeap, VirtualHeap
from fivefold.moe._operands import check_ids
from fivefold.moe._routing import Router
from fivefold.moe._tiles import debugging, interpreting

__all__ = ["ExpertExchange"]

_STATISTICS = ("sent_bytes", "returned_bytes", "sent_signals", "returned_signals")


class ExpertExchange:
    """A mixture of experts whose experts are spread over ranks: ``fused_moe`` across a heap.

    Rank r holds experts r E / P to (r + 1) E / P - 1 and its own tokens. In one launch, tokens go
    straight into the memory of the ranks that have their experts, results straight back, and each
    rank sums up its own in the order of k: the bits are those of ``fused_moe(backend="fused")`` on
    one rank. Calls are collective: every rank makes the same ones in the same order, with as many
    tokens as it has, also none. There is no backward.

    Args:
        config: Sizes; the same on all ranks.
        heap: Memory that the ranks share, of ``config.heap_bytes()`` or more, for this alone.
        timeout_s: How long a rank waits for another one.

    Raises:
        ConfigurationError: The heap does not fit the configuration.
        UnsupportedError: The kernel cannot run on the heap's device; says why.

    Example:
        >>> config = ExchangeConfig(
        ...     ranks=2, experts=4, hidden=8, intermediate=8, top_k=1, max_tokens=3
        ... )
        >>> heap = VirtualHeap(2, nbytes=config.heap_bytes())
        >>> if missing_fused(heap.device) is None:
        ...     exchange = ExpertExchange(config, heap)
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

    @classmethod
    def between_processes(
        cls,
        config: ExchangeConfig,
        folder: str | Path,
        *,
        rank: int,
        timeout_s: float = 30.0,
    ) -> Self:
        """Open an exchange between processes of this machine, on the CPU, and wait for them.

        Args:
            config: Sizes.
            folder: As for ``SharedMemoryHeap``.
            rank: Of this process.
            timeout_s: Longest wait for the others, now and in calls.

        Returns:
            The exchange, which owns its heap.
        """
        heap = SharedMemoryHeap(
            folder,
            rank=rank,
            ranks=config.ranks,
            nbytes=config.heap_bytes(),
            tag=config.tag,
            timeout_s=timeout_s,
        )
        return cls(config, heap, timeout_s=timeout_s)

    def _fixed_arguments(self, sections: dict[str, tuple[int, int, torch.dtype]]) -> dict[str, Any]:
        config, heap = self.config, self.heap
        tiles = config.tiles
        return {
            **{name: first for name, (first, _, _) in sections.items()},
            **self._private.cut(self._scratch[0]),
            "bases": heap.bases,
            "control": self._control,
            "stats": self._stats,
            "scratch_words": self._private.scratch_bytes // 4,
            "control_words": self._private.control_words,
            "first_rank": heap.first_rank,
            "max_tiles": self._private.max_tiles,
            "max_rows": config.room_rows,
            "limit_ns": int(self.timeout_s * 1e9),
            "num_return_counts": sections["at_return_counts"][1],
            "max_lag": _lag(tiles, config.intermediate, self._programs()),
        }

    def _programs(self) -> int:
        return 1 if interpreting() else _multiprocessors(self.heap.device)

    def __call__(  # noqa: PLR0913 - the operator's own operands
        self,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        weight_on_input: bool = False,
        drop_policy: DropPolicy = "position",
        num_tokens: Sequence[int] | None = None,
        programs: int | None = None,
        check: bool | None = None,
    ) -> torch.Tensor:
        """Send this rank's tokens through experts everywhere, and serve the other ranks' tokens.

        Args:
            x: This rank's tokens [T, H]; on a virtual heap all ranks', one rank after the other.
            w13: Weights of this rank's experts, [E / P, 2I or I, H]; on a virtual heap [E, ..].
            w2: [E / P, H, I], or [E, H, I].
            topk_ids: Experts among all E, [T, K]; -1 for none.
            topk_weights: [T, K].
            b13: Biases of this rank's experts, or None.
            b2: Likewise.
            weight_on_input: As in ``fused_moe``.
            drop_policy: Who is dropped where a rank has more than ``capacity`` rows for an expert.
            num_tokens: On a virtual heap: tokens of each rank; None: the same for all.
            programs: How many to launch; None: one per multiprocessor. Not for the result.
            check: Look at the ids' values; None: on the CPU only, since it waits for the device.

        Returns:
            [T, H]; NaN where rows did not come back, which is an error as well.

        Raises:
            CommunicationError: A rank did not answer in time (on a GPU: raised by ``check``, and
                here in debug mode only); this exchange is then of no use.
            ConfigurationError: Operands do not fit.
            DataError: A rank would get more rows than ``max_rows`` (raised where the above is).
            UnsupportedError: A gradient is wanted.
        """
        operands = (x, w13, w2, topk_ids, topk_weights)
        self._check_usable((*operands, b13, b2))
        counts = check_call(
            self.config, self.heap, operands, biases=(b13, b2), num_tokens=num_tokens
        )
        if weight_on_input and topk_ids.shape[1] != 1:
            raise ConfigurationError(f"weight_on_input needs top_k 1; got {topk_ids.shape[1]}")
        if check or (check is None and x.device.type == "cpu"):
            check_ids(topk_ids, self.config.experts)
        if self.config.capacity is not None:
            topk_ids = self._dropped(topk_ids, topk_weights, counts, drop_policy)
            operands = (x, w13, w2, topk_ids, topk_weights)
        return self._launch(
            operands, (b13, b2), counts, weight_on_input=weight_on_input, programs=programs
        )

    def routed(  # noqa: PLR0913 - the operator's own operands
        self,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        gate: torch.Tensor,
        router: Router,
        *,
        selection_bias: torch.Tensor | None = None,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        num_tokens: Sequence[int] | None = None,
        programs: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same with the router's gate in the launch as well.

        Equal to ``route(x.float() @ gate.float().T, router)`` and a call with what it gives; the
        logits are in float32 and are added up in another order, so that near ties may differ.

        Args:
            x: As in a call.
            w13: As in a call.
            w2: As in a call.
            gate: The router's weight [E, H], of all E experts on every rank, in x's data type.
            router: How logits become a routing; its top_k is the exchange's.
            selection_bias: As in ``route``, [E].
            b13: As in a call.
            b2: As in a call.
            num_tokens: As in a call.
            programs: As in a call.

        Returns:
            Results [T, H], ids int32 [T, K], weights float32 [T, K].

        Raises:
            CommunicationError: As in a call.
            ConfigurationError: Operands do not fit.
            DataError: As in a call.
            UnsupportedError: As in a call, or the capacity might drop something.
        """
        config = self.config
        check_gate(config, x, gate, router, selection_bias=selection_bias)
        ids = torch.empty(len(x), config.top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(len(x), config.top_k, dtype=torch.float32, device=x.device)
        operands = (x, w13, w2, ids, weights)
        self._check_usable((*operands, gate, selection_bias, b13, b2))
        counts = check_call(
            self.config, self.heap, operands, biases=(b13, b2), num_tokens=num_tokens
        )
        out = self._launch(
            operands, (b13, b2), counts, programs=programs, routing=(gate, selection_bias, router)
        )
        return out, ids, weights

    def _check_usable(self, operands: tuple[torch.Tensor | None, ...]) -> None:
        if self._broken is not None:
            raise CommunicationError(
                f"this exchange has failed before: {self._broken}",
                hint="close it on all ranks and set up a new one",
            )
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
            message = "the exchange has no backward"
            raise UnsupportedError(message, hint="call it under torch.no_grad()")

    def _dropped(
        self, ids: torch.Tensor, weights: torch.Tensor, counts: tuple[int, ...], policy: DropPolicy
    ) -> torch.Tensor:
        capacity = self.config.capacity
        assert capacity is not None, "called for the capacity layout only"
        kept = [
            drop_beyond_capacity(
                part, weight, num_experts=self.config.experts, capacity=capacity, policy=policy
            )
            for part, weight in zip(
                torch.split(ids, list(counts)), torch.split(weights, list(counts)), strict=True
            )
        ]
        return ids.masked_fill(~torch.cat(kept), -1)

    def _launch(
        self,
        operands: tuple[torch.Tensor, ...],
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        counts: tuple[int, ...],
        *,
        weight_on_input: bool = False,
        programs: int | None,
        routing: tuple[torch.Tensor, torch.Tensor | None, Router] | None = None,
    ) -> torch.Tensor:
        from fivefold.moe._exchange_kernel_triton import exchange_kernel  # noqa: PLC0415 - optional

        config = self.config
        tiles = config.tiles
        x, w13, w2, ids, weights = (operand.contiguous() for operand in operands)
        b13, b2 = (None if bias is None else bias.contiguous() for bias in biases)
        programs = self._programs() if programs is None else programs
        out = torch.empty_like(x)
        gate, selection_bias, router = routing or (None, None, None)
        known = self._known | {
            "x": x,
            "w13": self._weights(w13, tiles.columns),
            "w2": self._weights(w2, tiles.second_columns),
            "ids": ids,
            "weights": weights,
            "b13": b13,
            "b2": b2,
            "gate": None if gate is None else gate.contiguous(),
            "selection_bias": None if selection_bias is None else selection_bias.contiguous(),
            "out": out,
            "token_first": self._offsets(counts),
            "combine_columns": self._combine_columns(max(counts), programs),
            **constants_of(
                config,
                num_local=self.heap.num_local,
                weight_on_input=weight_on_input,
                router=router,
            ),
        }
        arguments = {name: known[name] for name in exchange_kernel.arg_names}
        with torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext():
            exchange_kernel[programs,](**arguments, **OPTIONS, num_warps=tiles.warps)
        if interpreting() or debugging():
            self.check()
        return out

    def _weights(self, weight: torch.Tensor, columns: int) -> Any:
        if not self.config.by_descriptor:
            return weight
        if weight.data_ptr() % 16:
            weight = weight.clone()
        return _descriptor(weight, columns, self.config.tiles.depth)

    def _combine_columns(self, num_tokens: int, programs: int) -> int:
        tiles = self.config.tiles
        blocks = -(-num_tokens // tiles.combine_tokens) * self.heap.num_local
        steps = -(-self.config.hidden // tiles.combine_columns)
        return min(steps, max(1, steps * blocks // (4 * programs))) * tiles.combine_columns

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

    @property
    def epoch(self) -> int:
        """Calls that have ended; waits for the device."""
        from fivefold.moe._exchange_sync_triton import EPOCH  # noqa: PLC0415 - optional

        return int(self._control[0, EPOCH.value])

    def statistics(self) -> dict[str, list[list[int]]]:
        """What this process's ranks have stored into heaps so far, counted by the kernel.

        Returns:
            By name, a list for every rank of this process with a number for every peer, itself
            included: ``sent_bytes`` (rows to the peer's experts), ``returned_bytes`` (results of
            the peer's rows), ``sent_signals`` and ``returned_signals`` (words that say so).
        """
        values = self._stats.tolist()
        return {
            name: [of_rank[place] for of_rank in values] for place, name in enumerate(_STATISTICS)
        }

    def check(self) -> None:
        """Raise what went wrong in calls so far; waits for the device.

        Raises:
            CommunicationError: A rank did not answer in time.
            DataError: Rows were dropped since a rank had no room; the exchange can go on.
        """
        from fivefold.moe import _exchange_sync_triton as sync  # noqa: PLC0415 - optional

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
            self._broken = described(
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


_ = VirtualHeap  # for the example above
