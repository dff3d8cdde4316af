"""The host's side of the exchange: experts on several ranks, reached one-sided, in one launch.

``ExpertExchange`` owns a rank's private memory and uses a heap that all ranks share. Every call is
one launch per process and has no barrier: ranks meet through the words in their heaps only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe.kernels.launch import missing_fused
from fivefold.moe.operator import MoEConfig
from fivefold.moe.operator.groups import ExpertLoad
from fivefold.moe.operator.operands import Precision, check_ids, check_weight_on_input
from fivefold.moe.parallel._autograd import fused_moe_between
from fivefold.moe.parallel._config import ExchangeConfig, heap_layout
from fivefold.moe.parallel._heaps import SharedMemoryHeap, VirtualHeap
from fivefold.moe.parallel._launch import ExchangeLaunches, check_call, dropped_by_rank
from fivefold.moe.routing.capacity import DropPolicy, counts_of
from fivefold.moe.routing.router import Router

_SCORES = frozenset({"softmax", "topk_softmax", "sigmoid"})  # of the kernel's gate


class ExpertExchange(ExchangeLaunches):
    """A mixture of experts whose experts are spread over ranks: ``fused_moe`` across a heap.

    Rank r holds experts r E / P to (r + 1) E / P - 1 and its own tokens. In one launch, tokens go
    straight into the memory of the ranks that have their experts, results straight back, and each
    rank sums up its own in the order of k: the bits are those of ``fused_moe(backend="fused")`` on
    one rank. Calls are collective: every rank makes the same ones in the same order, with as many
    tokens as it has, also none. A call has no backward; ``fused_moe(..., group=exchange)`` and
    ``MoE(config, exchange)`` have one.

    Args:
        config: Sizes; the same on all ranks.
        heap: Memory that the ranks share, of ``config.heap_bytes()`` or more, for this alone.
        timeout_s: How long a rank waits for another one.

    Raises:
        ConfigurationError: The heap does not fit the configuration.
        UnsupportedError: The kernel cannot run on the heap's device; says why.

    Examples:
        >>> config = ExchangeConfig(
        ...     ranks=2, experts=4, hidden=8, intermediate=8, top_k=1, max_tokens=3
        ... )
        >>> heap = VirtualHeap(2, nbytes=config.heap_bytes())
        >>> if missing_fused(heap.device) is None:
        ...     exchange = ExpertExchange(config, heap)
    """

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
        check_weight_on_input(topk_ids, weight_on_input=weight_on_input)
        if check or (check is None and x.device.type == "cpu"):
            check_ids(topk_ids, self.config.experts)
        if self.config.capacity is not None:
            topk_ids = dropped_by_rank(
                topk_ids,
                topk_weights,
                counts=counts,
                experts=self.config.experts,
                capacity=self.config.capacity,
                policy=drop_policy,
            )
            operands = (x, w13, w2, topk_ids, topk_weights)
        return self.forward(
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
        """Return the same with the router's gate in the launch as well.

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
        _check_gate(config, x, gate, router, selection_bias=selection_bias)
        ids = torch.empty(len(x), config.top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(len(x), config.top_k, dtype=torch.float32, device=x.device)
        operands = (x, w13, w2, ids, weights)
        self._check_usable((*operands, gate, selection_bias, b13, b2))
        counts = check_call(
            self.config, self.heap, operands, biases=(b13, b2), num_tokens=num_tokens
        )
        out = self.forward(
            operands, (b13, b2), counts, programs=programs, routing=(gate, selection_bias, router)
        )
        return out, ids, weights

    def _check_usable(self, operands: tuple[torch.Tensor | None, ...]) -> None:
        self.check_whole()
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
            message = "a call of the exchange itself has no backward"
            raise UnsupportedError(
                message, hint="use fused_moe(..., group=exchange), or call under torch.no_grad()"
            )

    def experts_of(self, num_experts: int) -> range:
        """Experts whose weights this process passes.

        Args:
            num_experts: E of the caller's layer.

        Returns:
            Their numbers.

        Raises:
            ConfigurationError: The exchange was made for another number.
        """
        config, heap = self.config, self.heap
        if num_experts != config.experts:
            raise ConfigurationError(
                f"the layer has {num_experts} experts, the exchange {config.experts}",
                hint="make both with the same number of experts, over all ranks",
            )
        first = heap.first_rank * config.local_experts
        return range(first, first + heap.num_local * config.local_experts)

    @property
    def precision(self) -> Precision:
        """Return the arithmetic for float32 that it computes in."""
        return self.config.precision

    def check_layer(self, config: MoEConfig) -> None:
        """Refuse a layer that it was not made for.

        Raises:
            ConfigurationError: Its sizes differ, or its experts cannot be shared out equally.
            UnsupportedError: ``recompute`` is off: nothing is kept for the backward.
        """
        self.experts_of(config.experts)
        made = self.config
        pairs = {
            "hidden": (config.hidden, made.hidden),
            "intermediate": (config.intermediate, made.intermediate),
            "top_k": (config.router.top_k, made.top_k),
            "activation": (config.activation, made.activation),
        }
        for name, (layer, group) in pairs.items():
            if layer != group:
                raise ConfigurationError(
                    f"{name} of the layer is {layer!r}, of the exchange {group!r}",
                    hint="make MoEConfig and ExchangeConfig with the same sizes",
                )
        if not config.recompute:
            message = "an exchange keeps nothing for the backward"
            raise UnsupportedError(message, hint="use MoEConfig(recompute=True)")

    def fused_moe(self, *operands: torch.Tensor, **options: Any) -> torch.Tensor:
        """Compute ``fused_moe`` between the ranks: what ``fused_moe(..., group=self)`` calls.

        Raises:
            CommunicationError: A rank did not answer in time.
            ConfigurationError: Operands or options do not fit.
            DataError: A rank would get more rows than it has room for.
            UnsupportedError: The backend is not available here.
        """
        found: torch.Tensor = fused_moe_between(self, *operands, **options)
        return found

    def apply(
        self,
        tokens: torch.Tensor,
        routed: torch.Tensor,
        *,
        ids: torch.Tensor,
        weights: torch.Tensor,
        num_experts: int,
        local: Callable[..., torch.Tensor],
    ) -> tuple[torch.Tensor, ExpertLoad]:
        """Compute a layer's experts; what ``MoE`` calls.

        Args:
            tokens: [T, H].
            routed: Experts by the router, [T, K].
            ids: The same, or with -1 for what is dropped.
            weights: [T, K].
            num_experts: E.
            local: Calls ``fused_moe(..., group=...)`` with tokens, ids, weights and ``group``.

        Returns:
            [T, H] and the load: of all ranks where it is known, else of this process.
        """
        output = local(tokens, ids, weights, group=self)
        # With a capacity, what others' routers wanted is not known: their counts are of rows.
        everywhere = self.loads() if ids is routed else None
        if everywhere is not None:
            return output, ExpertLoad(routed=everywhere, kept=everywhere)
        counts = [counts_of(found, num_experts) for found in (routed, ids)]
        return output, ExpertLoad(routed=counts[0], kept=counts[1])

    def loads(self) -> torch.Tensor | None:
        """Rows that each expert got in the last call, from all ranks; None where it is not known.

        It is known in the compact layout, whose counts every rank gets. Read it before the next
        call; nothing waits for the device.

        Returns:
            int64 [E].
        """
        from fivefold.moe.kernels.sync import EPOCH  # noqa: PLC0415 - optional

        config = self.config
        if config.capacity is not None:
            return None
        first, count, kind = heap_layout(config).sections["counts"]
        words = self.heap.own[0, first : first + count * kind.itemsize].view(kind)
        by_epoch = words.view(2, config.ranks, config.experts)
        parity = self._control[:1, EPOCH.value].long() % 2
        return by_epoch.index_select(0, parity)[0].sum(0)


def _check_gate(
    config: ExchangeConfig,
    x: torch.Tensor,
    gate: torch.Tensor,
    router: Router,
    *,
    selection_bias: torch.Tensor | None,
) -> None:
    """Check the operands of a gate in the launch."""
    router.check_experts(config.experts)
    if router.score not in _SCORES or router.epsilon != Router(top_k=1).epsilon:
        raise UnsupportedError(
            f"the gate in the launch has no score {router.score!r} with epsilon {router.epsilon}",
            hint="route first, and give the exchange ids and weights",
        )
    if router.top_k != config.top_k:
        raise ConfigurationError(
            f"the router has top_k {router.top_k}, the exchange {config.top_k}"
        )
    if config.capacity is not None and config.capacity < config.max_tokens:
        raise UnsupportedError(
            f"capacity is {config.capacity}, below max_tokens {config.max_tokens}: who is "
            "dropped is decided before the launch",
            hint="route first, or use the compact layout",
        )
    for name, tensor, shape in (
        ("gate", gate, (config.experts, config.hidden)),
        ("selection_bias", selection_bias, (config.experts,)),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.device != x.device):
            raise ConfigurationError(
                f"{name} is {tuple(tensor.shape)} on {tensor.device}; it must be {shape} on "
                f"{x.device}"
            )
    if gate.dtype != x.dtype:
        raise ConfigurationError(f"gate has dtype {gate.dtype}, x has {x.dtype}")


_ = missing_fused, VirtualHeap  # for the example above
