"""Memory, arguments and launches of an exchange: what kernels need besides a call's operands."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from fivefold.errors import CommunicationError, ConfigurationError, DataError, UnsupportedError
from fivefold.moe._exchange_checks import described
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
from fivefold.moe._heap import SymmetricHeap
from fivefold.moe._routing import Router
from fivefold.moe._tiles import debugging, interpreting

_STATISTICS = ("sent_bytes", "returned_bytes", "sent_signals", "returned_signals")


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
        config, heap = self.config, self.heap
        tiles = config.tiles
        tables = self._private.cut(self._scratch[0])
        return {
            **{name: first for name, (first, _, _) in sections.items()},
            **tables,
            "scalar_address": tables["shadow_address"],
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
        """The launch of a call whose operands were checked.

        Args:
            operands: x, w13, w2, ids and weights.
            biases: b13 and b2.
            counts: Tokens of each rank of this process.
            weight_on_input: As in a call.
            programs: As in a call.
            routing: Gate, selection bias and router, where ids and weights are results.

        Returns:
            [T, H].

        Raises:
            CommunicationError: As in a call.
            DataError: As in a call.
        """
        from fivefold.moe._exchange_kernel_triton import exchange_kernel  # noqa: PLC0415 - optional

        tiles = self.config.tiles
        x, w13, w2, ids, weights = (operand.contiguous() for operand in operands)
        b13, b2 = (None if bias is None else bias.contiguous() for bias in biases)
        out = torch.empty_like(x)
        gate, selection_bias, router = routing or (None, None, None)
        given = {
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
            **constants_of(
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
        """Start a kernel of the exchange.

        Args:
            kernel: Which.
            given: Arguments by name, besides the tables and places that this knows.
            counts: Tokens of each rank of this process.
            programs: As in a call.
        """
        programs = self._programs() if programs is None else programs
        known = {
            **self._known,
            "token_first": self._offsets(counts),
            "combine_columns": self._combine_columns(max(counts), programs),
            **given,
        }
        arguments = {name: known[name] for name in kernel.arg_names}
        device = self.heap.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[programs,](**arguments, **OPTIONS, num_warps=self.config.tiles.warps)

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
