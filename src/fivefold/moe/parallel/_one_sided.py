"""Experts on several ranks that write into each other's memory: one launch, with gradients.

``OneSidedGroup`` owns a rank's private memory and uses a heap that all ranks share. There is no
barrier: ranks meet through the words in their heaps only. The kernel does everything in one launch.
Cut in two at its products, what a rank received lies in its heap, a table says for which expert
each row is, and a row has to be made for each. So another backend can compute the experts, and so
does the backward, which sends tokens and gradients out side by side, and brings gradients of tokens
and of routing weights back.

Shapes: T tokens of this process, K experts per token, H width, R rows that a rank has room for, V
ranks of this process, L experts of a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.autograd import Function

from fivefold.errors import (
    CommunicationError,
    ConfigurationError,
    DataError,
    UnsupportedError,
    require_whole,
)
from fivefold.moe.kernels.arguments import (
    Heap,
    Launch,
    Operands,
    Plan,
    Sizes,
    Tables,
    debugging,
    interpreting,
)
from fivefold.moe.kernels.launch import (
    combine_columns_for,
    contiguous,
    descriptor,
    lag_for,
    missing_fused,
    multiprocessors,
    on,
    start,
    unfilled,
)
from fivefold.moe.operator.activations import activation_named
from fivefold.moe.operator.fused import Backend, backend_for
from fivefold.moe.operator.layer import ExpertLoad, LocalExperts, MoEConfig
from fivefold.moe.operator.operands import Precision, check_values, check_weight_on_input
from fivefold.moe.parallel._config import (
    OneSidedConfig,
    check_call,
    check_gate,
    check_layer,
    check_options,
    heap_layout,
    private_layout,
    sizes_of,
)
from fivefold.moe.parallel._heaps import SharedMemoryHeap, SymmetricHeap
from fivefold.moe.routing.router import (
    DropPolicy,
    Router,
    Routing,
    check_capacity,
    counts_of,
    drop_beyond_capacity,
)

_Tensor = torch.Tensor
_Optional = torch.Tensor | None
_NO_TIMEOUT_S = 1e9  # kernels count nanoseconds, in 64 bits
_STATISTICS = ("sent_bytes", "returned_bytes", "sent_signals", "returned_signals")
_MISSING = {  # what a rank waited for, by the kind of its error word
    1: "a task of its own",
    2: "the counts of rank {peer}",
    3: "rows of rank {peer} for its expert {detail}",
    4: "the rows it sent to come back from rank {peer}",
}


class OneSidedGroup:
    """Ranks that share out the experts and reach each other's memory.

    Rank r holds experts r E / P to (r + 1) E / P - 1 and its own tokens. In one launch, tokens go
    straight into the memory of the ranks that have their experts, results straight back, and each
    rank sums up its own in the order of k: the bits are those of ``fused_moe(backend="fused")`` on
    one rank. Use it by ``fused_moe(..., group=group)`` and ``MoE(config, group)``; both have a
    backward. Calls are collective: every rank makes the same ones in the same order, with as many
    tokens as it has, also none.

    Args:
        config: Sizes; the same on all ranks.
        heap: Memory that the ranks share, of ``config.heap_bytes()`` or more, for this alone.
        timeout_s: How long a rank waits for another one.

    Raises:
        ConfigurationError: The heap does not fit the configuration.
        UnsupportedError: The kernel cannot run on the heap's device; says why.

    Examples:
        >>> from fivefold.moe import VirtualHeap
        >>> config = OneSidedConfig(
        ...     ranks=2, experts=4, hidden=8, intermediate=8, top_k=1, max_tokens=3
        ... )
        >>> heap = VirtualHeap(2, nbytes=config.heap_bytes())
        >>> if missing_fused(heap.device) is None:
        ...     group = OneSidedGroup(config, heap)
    """

    def __init__(
        self, config: OneSidedConfig, heap: SymmetricHeap, *, timeout_s: float = 30.0
    ) -> None:
        if (reason := missing_fused(heap.device)) is not None:
            raise UnsupportedError(
                f"a one-sided group cannot work here: {reason}",
                hint="AllToAllGroup needs no kernel, and works over gloo and NCCL",
            )
        if heap.ranks != config.ranks:
            raise ConfigurationError(
                f"the heap has {heap.ranks} ranks, the configuration {config.ranks}",
                hint="make both for the group that shares the experts",
            )
        self.heap_layout, self._private = heap_layout(config), private_layout(config)
        if heap.nbytes < self.heap_layout.nbytes:
            raise ConfigurationError(
                f"the heap has {heap.nbytes} bytes per rank; this group needs "
                f"{self.heap_layout.nbytes}",
                hint="make it with nbytes=config.heap_bytes()",
            )
        if not 0 < timeout_s < _NO_TIMEOUT_S:
            raise ConfigurationError(
                f"timeout_s must be positive and below {_NO_TIMEOUT_S:g}; got {timeout_s}"
            )
        self.config, self.heap, self.timeout_s = config, heap, timeout_s
        here, words, device = heap.num_local, self._private.control_words, heap.device
        self._control = torch.zeros(here, words, dtype=torch.int32, device=device)
        self._scratch = torch.empty(here, self._private.nbytes, dtype=torch.uint8, device=device)
        statistics = (here, len(_STATISTICS), config.ranks)
        self._stats = torch.zeros(statistics, dtype=torch.int64, device=device)
        self._token_first: dict[tuple[int, ...], torch.Tensor] = {}
        self._broken: str | None = None
        self._known = self._fixed_arguments()
        _leave_graphs()

    def _fixed_arguments(self) -> dict[str, Any]:
        config, heap, layout, private = self.config, self.heap, self.heap_layout, self._private
        tables = private.cut(self._scratch[0])
        offsets = {name: first for name, (first, _, _) in layout.sections.items()}
        return {
            "t": Tables(*(tables[name] for name in Tables._fields)),
            "p": Plan(*(tables[name] for name in Plan._fields)),
            "heap": Heap(bases=heap.bases, **offsets),
            "launch": Launch(
                control=self._control,
                stats=self._stats,
                token_first=None,
                scratch_words=private.nbytes // 4,
                control_words=private.control_words,
                max_tiles=private.max_tiles,
                max_rows=config.receive_rows,
                limit_ns=None,
                num_return_counts=layout.sections["return_counts"][1],
            ),
            "inner": tables["inner"],
            "first_rank": heap.first_rank,
            "max_lag": lag_for(config.tiles, config.intermediate, self._programs()),
        }

    @classmethod
    def between_processes(
        cls, config: OneSidedConfig, folder: str | Path, *, rank: int, timeout_s: float = 30.0
    ) -> Self:
        """Open a group of processes of this machine, on the CPU, and wait for them.

        The group owns its heap; ``folder`` is as for ``SharedMemoryHeap``, and ``timeout_s`` is the
        longest wait for the others, now and in calls.
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

    def fused_moe(  # noqa: PLR0913 - the operator's own operands and options
        self,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        activation: str | None = None,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        weight_on_input: bool = False,
        capacity: int | None = None,
        drop_policy: DropPolicy = "position",
        backend: str = "auto",
        precision: str | None = None,
        check: bool | None = None,
        num_tokens: Sequence[int] | None = None,
        programs: int | None = None,
    ) -> torch.Tensor:
        """Send this rank's tokens through experts everywhere, and serve the other ranks' tokens.

        What ``fused_moe(..., group=self)`` calls, whose operands and options these are;
        differentiable. The backend "fused" is one launch; "split" and "reference" compute the
        experts between two. "auto" is "fused" on a GPU and "reference" on the CPU.

        Weights and biases are those of this rank's experts, [E / P, ...], ids are among all E. On
        a virtual heap tokens and weights are those of all ranks, one rank after the other, and
        ``num_tokens`` has the tokens of each (None: as evenly as can be). ``activation`` and
        ``precision`` may be None: the configuration's. ``capacity`` comes besides the
        configuration's. "fused" launches so many ``programs``, by which the result does not change
        (None: one per multiprocessor).

        Returns:
            [T, H]; NaN where rows did not come back, which is an error as well.

        Raises:
            CommunicationError: A rank did not answer in time (on a GPU: raised by ``check``, and
                here in debug mode only); this group is then of no use.
            ConfigurationError: Operands or options do not fit.
            DataError: A rank would get more rows than ``max_rows`` (raised where the above is).
            UnsupportedError: The backend is not available here.
        """
        config = self.config
        self._check_whole()
        if programs is not None:
            require_whole("programs", programs)
        check_options(config, activation=activation, precision=precision, dtype=x.dtype)
        operands, biases = (x, w13, w2, topk_ids, topk_weights), (b13, b2)
        counts = check_call(config, self.heap, operands, biases=biases, num_tokens=num_tokens)
        check_weight_on_input(topk_ids.shape[1], weight_on_input=weight_on_input)
        if check or (check is None and x.device.type == "cpu"):
            check_values(topk_ids, topk_weights, config.experts)
        mosts = (check_capacity(capacity, drop_policy), config.capacity)
        if limits := [most for most in mosts if most is not None]:
            # A rank's tokens compete among themselves.
            room = {"num_experts": config.experts, "capacity": min(limits)}
            sizes = list(counts)
            parts = torch.split(topk_ids, sizes), torch.split(topk_weights, sizes)
            kept = [
                drop_beyond_capacity(ids, weights, policy=drop_policy, **room)
                for ids, weights in zip(*parts, strict=True)
            ]
            topk_ids = topk_ids.masked_fill(~torch.cat(kept), -1)
        if backend == "auto":
            backend = "fused" if x.device.type == "cuda" else "reference"
        floats = (x, w13, w2, topk_weights, b13, b2)
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floats)
        if wanted and not config.training:
            message = "this group has no room for a backward"
            hint = "make it with OneSidedConfig(training=True), or use torch.no_grad()"
            raise ConfigurationError(message, hint=hint)
        how = (self, counts, weight_on_input, programs)
        result: _Tensor = _Recorded.apply(*floats, topk_ids, backend_for(backend, x), how)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        return result

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the same with the router's gate in the launch as well; without a backward.

        Equal to ``route(x.float() @ gate.float().T, router)`` and a call with what it gives; the
        logits are in float32 and are added up in another order, so that near ties may differ.
        ``gate`` is the router's weight [E, H], of all E experts on every rank, in x's data type;
        the router's top_k is the group's; ``selection_bias`` [E] as in ``route``.

        Returns:
            Results [T, H], ids int32 [T, K], weights float32 [T, K].

        Raises:
            CommunicationError: As in ``fused_moe``.
            ConfigurationError: Operands do not fit.
            DataError: As in ``fused_moe``.
            UnsupportedError: A gradient is wanted, or the capacity might drop something.
        """
        config = self.config
        check_gate(config, x, gate, router, selection_bias=selection_bias)
        ids = torch.empty(len(x), config.top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(len(x), config.top_k, dtype=torch.float32, device=x.device)
        operands = (x, w13, w2, ids, weights)
        self._check_whole()
        given = (*operands, gate, selection_bias, b13, b2)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
            message = "a call with the gate in the launch has no backward"
            hint = "route first, and use fused_moe(..., group=group), or torch.no_grad()"
            raise UnsupportedError(message, hint=hint)
        counts = check_call(config, self.heap, operands, biases=(b13, b2), num_tokens=num_tokens)
        call = _Call(x, w13, w2, weights, b13, b2, ids, self, counts)
        return call.in_one_launch(gate, selection_bias, router), ids, weights

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        """Return this group: the ranks of a layer's copy are those of the layer."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse to be saved: addresses mean nothing in another process."""
        message = "a one-sided group cannot be saved"
        raise UnsupportedError(message, hint="save the layer's state_dict()")

    def launch(
        self, kernel: Any, given: dict[str, Any], counts: tuple[int, ...], programs: int | None
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

    def _programs(self) -> int:
        return 1 if interpreting() else multiprocessors(self.heap.device)

    def _offsets(self, counts: tuple[int, ...]) -> torch.Tensor:
        """Return each rank's first token; kept, so that a repeated call copies nothing to a GPU."""
        found = self._token_first.get(counts)
        if found is None:
            if len(self._token_first) >= 1024:
                self._token_first.clear()
            ends = torch.tensor([0, *counts]).cumsum(0)
            found = ends.to(dtype=torch.int32, device=self.heap.device)
            self._token_first[counts] = found
        return found

    def experts_of(self, num_experts: int) -> range:
        """Return the numbers of the experts whose weights this process passes.

        Raises:
            ConfigurationError: The group was made for another number of experts.
        """
        config, heap = self.config, self.heap
        if num_experts != config.experts:
            raise ConfigurationError(
                f"the layer has {num_experts} experts, the group {config.experts}",
                hint="make both with the same number of experts, over all ranks",
            )
        first = heap.first_rank * config.local_experts
        return range(first, first + heap.num_local * config.local_experts)

    @property
    def precision(self) -> Precision:
        """Return the arithmetic for float32 that it computes in."""
        return self.config.precision

    def check_layer(self, config: MoEConfig) -> None:
        """Refuse a layer that it was not made for, or that keeps anything for the backward."""
        self.experts_of(config.experts)
        check_layer(self.config, config)

    def apply(
        self,
        tokens: torch.Tensor,
        routing: Routing,
        ids: torch.Tensor,
        local: LocalExperts,
        *,
        own: Mapping[str, torch.Tensor],  # noqa: ARG002 - peers compare nothing one-sided
    ) -> tuple[torch.Tensor, ExpertLoad]:
        """Compute a layer's experts, and the load: of all ranks where known, else of this one.

        What ``MoE`` calls; ``local`` calls ``fused_moe(..., group=...)``.
        """
        output = local(tokens, ids, routing.weights_TK, group=self)
        # With a capacity, what others' routers wanted is not known: their counts are of rows.
        everywhere = self.loads() if ids is routing.ids_TK else None
        if everywhere is not None:
            return output, ExpertLoad(routed=everywhere, kept=everywhere)
        kept = counts_of(ids, self.config.experts)
        return output, ExpertLoad(routed=routing.load_E, kept=kept)

    def loads(self) -> torch.Tensor | None:
        """Return the rows that each expert got in the last call from all ranks, int64 [E].

        None in the capacity layout; in the compact one every rank gets all counts. Read it before
        the next call; nothing waits for the device.
        """
        from fivefold.moe.kernels.sync import EPOCH  # noqa: PLC0415 - optional

        config = self.config
        if config.capacity is not None:
            return None
        words = self.heap_layout.view("counts", self.heap.own[0])
        by_epoch = words.view(2, config.ranks, config.experts)
        parity = self._control[:1, EPOCH.value].long() % 2
        return by_epoch.index_select(0, parity)[0].sum(0)

    @property
    def epoch(self) -> int:
        """Return how many calls have ended; waits for the device."""
        from fivefold.moe.kernels.sync import EPOCH  # noqa: PLC0415 - optional

        return int(self._control[0, EPOCH.value])

    def statistics(self) -> dict[str, list[list[int]]]:
        """Return what this process's ranks have stored into heaps so far, counted by the kernel.

        Returns:
            By name, a list for every rank of this process with a number for every peer, itself
            included: ``sent_bytes`` (rows to the peer's experts), ``returned_bytes`` (results of
            the peer's rows), ``sent_signals`` and ``returned_signals`` (words that say so).
        """
        return {name: self._stats[:, row].tolist() for row, name in enumerate(_STATISTICS)}

    def check_if_cheap(self) -> None:
        """Do ``check`` where it waits for nothing, or where one is debugging."""
        if interpreting() or debugging():
            self.check()

    def check(self) -> None:
        """Raise what went wrong in calls so far; waits for the device.

        Raises:
            CommunicationError: A rank did not answer in time.
            DataError: Rows were dropped since a rank had no room; the group can go on.
        """
        from fivefold.moe.kernels import sync  # noqa: PLC0415 - optional

        for place, word in enumerate(self._control[:, sync.ERROR.value].tolist()):
            if word == 0:
                continue
            rank, epoch = self.heap.first_rank + place, self.epoch
            kind, peer, detail = word >> 28, word >> 14 & 0x3FFF, word & 0x3FFF
            if kind == sync.OVERFLOW.value:
                self._control[:, sync.ERROR.value] = 0
                raise DataError(
                    f"a rank would get more rows than the {self.config.receive_rows} it has room "
                    f"for (rank {rank}, epoch {epoch}); nothing was sent",
                    hint="raise max_rows, or leave it None for room for whatever may come",
                )
            self._broken = f"rank {rank} wrote a row that rank {peer} had written in epoch {epoch}"
            if kind in _MISSING:
                missing = _MISSING[kind].format(peer=peer, detail=detail)
                self._broken = (
                    f"rank {rank} waited {self.timeout_s:g} s for {missing} in epoch {epoch} and "
                    "gave up"
                )
            raise CommunicationError(
                self._broken, hint="look at that rank's log; set up a new group on all ranks"
            )

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise CommunicationError(
                f"this one-sided group has failed before: {self._broken}",
                hint="close it on all ranks and set up a new one",
            )

    def close(self) -> None:
        """Give the memory back; no rank may be in a call."""
        self._broken = "it is closed"
        self._known = {}
        self.heap.close()
        self._scratch = self._scratch.new_empty(0)


@functools.cache
def _leave_graphs() -> None:
    """Keep calls out of graphs: they reach other processes, so are neither left out nor repeated.

    Not a decorator: it loads torch._dynamo, which takes seconds.
    """
    untraced = torch.compiler.disable(OneSidedGroup.fused_moe)  # type: ignore[no-untyped-call]
    OneSidedGroup.fused_moe = untraced  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Call:
    """One call's operands, checked."""

    x: _Tensor
    w13: _Tensor  # of this process's experts, as w2 and the biases
    w2: _Tensor
    weights: _Tensor
    b13: _Optional
    b2: _Optional
    ids: _Tensor  # among all experts
    group: OneSidedGroup
    counts: tuple[int, ...]  # tokens of each rank of this process
    weight_on_input: bool = False
    programs: int | None = None

    def in_one_launch(
        self, gate: _Optional = None, selection_bias: _Optional = None, router: Router | None = None
    ) -> _Tensor:
        """Return [T, H]; with a gate and its router, ids and weights are results as well."""
        from fivefold.moe.kernels.one_sided import one_sided_kernel  # noqa: PLC0415 - optional

        tiles = self.group.config.tiles
        operands = contiguous(self.x, self.ids, self.weights, self.b13, self.b2)
        out = unfilled(self.x)
        gate, selection_bias = contiguous(gate, selection_bias)
        given = {
            "given": Operands(*operands)._replace(out=out),
            "w13": self._weight(self.w13, tiles.columns),
            "w2": self._weight(self.w2, tiles.second_columns),
            "gate": gate,
            "selection_bias": selection_bias,
            "S": self._sizes(router=router, WEIGHT_ON_INPUT=self.weight_on_input),
        }
        self.group.launch(one_sided_kernel, given, self.counts, self.programs)
        self.group.check_if_cheap()
        return out

    def _weight(self, weight: _Tensor, columns: int) -> Any:
        weight, config = weight.contiguous(), self.group.config
        if not config.by_descriptor:
            return weight
        if weight.data_ptr() % 16:
            weight = weight.clone()
        return descriptor(weight, columns, config.tiles.depth)

    def forward(self, backend: Backend) -> _Tensor:
        """Return [T, H]: in one launch, or by dispatch, this process's experts and combination."""
        if backend.name == "fused":
            return self.in_one_launch()
        rows, experts = self._scatter(self.x, weights=self.weight_on_input)
        results = rows.new_empty(rows.shape)
        for place, here, ids in _by_rank(experts):
            w13, w2, options = self._share(place)
            entering = rows[place][here].contiguous()
            weight = entering.new_ones(len(entering), 1, dtype=torch.float32)
            if self.weight_on_input:
                weight = self._sent_weights(place)[here].unsqueeze(1)
            results[place][here] = backend.forward(
                entering, w13, w2, ids, weight, **options, workspace=None
            )
        return self._gather(results, None)[0]

    def backward(self, gradient: _Tensor, backend: Backend) -> tuple[_Optional, ...]:
        """Return the gradients of x, w13, w2, weights, b13 and b2, by the same way out and back.

        A token's row goes out with the row of its gradient; the experts' ranks compute the first
        product again.
        """
        width = self.group.config.hidden
        both = torch.cat([self.x, gradient.to(self.x.dtype)], dim=1)
        rows, experts = self._scatter(both, weights=True)
        out = rows.new_empty(*rows.shape[:2], width)
        of_weights = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
        parts: list[tuple[_Optional, ...]] = []
        for place, here, ids in _by_rank(experts):
            w13, w2, options = self._share(place)
            entering, incoming = torch.split(rows[place][here], width, dim=1)
            weight = self._sent_weights(place)[here].unsqueeze(1)
            d_x, d_w13, d_w2, d_weight, d_b13, d_b2 = backend.backward(
                incoming.contiguous(), entering.contiguous(), w13, w2, ids, weight, **options
            )
            assert d_x is not None, "a backend gives all gradients"
            assert d_weight is not None, "a backend gives all gradients"
            out[place][here] = d_x
            of_weights[place][here] = d_weight.squeeze(1)
            parts.append((d_w13, d_w2, d_b13, d_b2))
        d_x, d_weights = self._gather(out, of_weights)
        d_w13, d_w2, d_b13, d_b2 = (_stacked(found) for found in zip(*parts, strict=True))
        return d_x, d_w13, d_w2, d_weights, d_b13, d_b2

    def _share(self, place: int) -> tuple[_Tensor, _Tensor, dict[str, Any]]:
        """Return the weights of one rank of this process, and what its backend is told besides."""
        config = self.group.config
        here = slice(place * config.local_experts, (place + 1) * config.local_experts)
        options = {
            "b13": None if self.b13 is None else self.b13[here],
            "b2": None if self.b2 is None else self.b2[here],
            "activation": activation_named(config.activation),
            "weight_on_input": self.weight_on_input,
            "precision": config.precision,
            "hidden": None,
        }
        return self.w13[here], self.w2[here], options

    def _sent_weights(self, place: int) -> _Tensor:
        return self.group.heap_layout.view("weights", self.group.heap.own[place])

    def _scatter(self, rows: _Tensor, *, weights: bool) -> tuple[_Tensor, _Tensor]:
        """Send rows [T, W]; what came [V, R, W], and its local experts [V, R], -1 for no row."""
        from fivefold.moe.kernels import one_sided as kernels  # noqa: PLC0415 - optional

        heap, config = self.group.heap, self.group.config
        width = rows.shape[1]
        experts = torch.full(
            (heap.num_local, config.receive_rows), -1, dtype=torch.int32, device=rows.device
        )
        changes = {
            "given": Operands(*contiguous(rows, self.ids, self.weights)),
            "row_expert": experts,
            "S": self._sizes(H=width, WEIGHT_ON_INPUT=weights),
        }
        self.group.launch(kernels.scatter_kernel, changes, self.counts, None)
        came = self.group.heap_layout.view("receive", heap.own)
        return came[:, : config.receive_rows * width].view(heap.num_local, -1, width), experts

    def _gather(self, rows: _Tensor, scalars: _Optional) -> tuple[_Tensor, _Optional]:
        """Return a row [V, R, H], and a number, for each that came; their sums [T, H], and [T, K].

        Sums are weighted unless there are numbers, or the weights are on the input.
        """
        from fivefold.moe.kernels import one_sided as kernels  # noqa: PLC0415 - optional

        out = unfilled(self.x)
        numbers = torch.empty(self.ids.shape, dtype=torch.float32, device=out.device)
        weights = self.weights.contiguous()
        changes = {
            "given": Operands(self.x, self.ids, weights, out=out),
            "rows": rows,
            "scalars": numbers if scalars is None else scalars,
            "scalars_out": numbers,
            # A row comes back whole: one tile of columns.
            "S": self._sizes(
                WEIGHT_ON_INPUT=self.weight_on_input or scalars is not None,
                SCALARS=scalars is not None,
                SHADOW=False,
                BN2=self.group.config.hidden,
            ),
        }
        self.group.launch(kernels.gather_kernel, changes, self.counts, None)
        self.group.check_if_cheap()
        return out, None if scalars is None else numbers.to(weights.dtype)

    def _sizes(self, **changes: Any) -> Sizes:
        return sizes_of(self.group.config, num_local=self.group.heap.num_local, **changes)


def _stacked(parts: tuple[_Optional, ...]) -> _Optional:
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return found[0] if len(found) == 1 else torch.cat(found)


def _by_rank(experts: _Tensor) -> Iterator[tuple[int, _Tensor | slice, _Tensor]]:
    """Yield place, rows and ids of each rank of this process.

    On the CPU with the rows that came only. Elsewhere with all that there is room for, -1 marking
    those that did not come: to know their number would be to wait for the device.
    """
    for place, of_rank in enumerate(experts):
        here: _Tensor | slice = slice(None)
        if experts.device.type == "cpu":
            here = (of_rank >= 0).nonzero().squeeze(1)
        yield place, here, of_rank[here].unsqueeze(1)


class _Recorded(Function):
    """One call and its gradients."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> _Tensor:
        """Make the call and keep its operands."""
        # The tensors come back from ctx, so that torch sees when one was changed in between.
        ctx.save_for_backward(*given[:7])
        ctx.backend, ctx.how = given[7:]
        return _Call(*given[:7], *ctx.how).forward(ctx.backend)

    @staticmethod
    def backward(ctx: Any, *gradients: _Tensor) -> tuple[Any, ...]:
        """Return the gradients, by another collective call."""
        call = _Call(*ctx.saved_tensors, *ctx.how)
        call.group._check_whole()  # noqa: SLF001 - of this file
        return *call.backward(gradients[0].contiguous(), ctx.backend), None, None, None
