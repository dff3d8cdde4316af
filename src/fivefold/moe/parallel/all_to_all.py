"""Ranks that share out a layer's experts: tokens travel to them and back by all-to-all.

A token goes once to each rank that has some of its experts, with its expert numbers and weights;
that rank sends back the weighted sum over its own experts. So at most min(K, P) rows travel per
token instead of K. One message of counts goes ahead of each forward, because a receiver must know
how many rows come; it also brings the loads of all ranks' experts, which the balancing loss needs.
Works over every backend of ``torch.distributed`` that has all-to-all: gloo on CPUs, NCCL on GPUs.

The order of all sums is fixed (ranks in order), so results are the same bits every time.

References: expert parallelism, arXiv 2006.16668; loads over all ranks in the balancing loss, arXiv
2501.11873.

Shapes: T tokens of this rank, K experts per token, H width, E experts, P ranks, S rows sent, R rows
received.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.autograd import Function

from fivefold.errors import CommunicationError, ConfigurationError, FivefoldError
from fivefold.moe.operator.layer import ExpertLoad, LocalExperts, MoEConfig
from fivefold.moe.parallel._owned import columns_alike, refuse_replicating, require_own, sample_of
from fivefold.moe.routing.router import Routing, counts_of

Guard = Callable[[str], AbstractContextManager[None]]

_HARMLESS_KEPT = 1024  # samples of experts
_SIZES = ("token width", "experts per token", "experts", "bytes per number", "gradients")


@dataclass(frozen=True, kw_only=True)
class AllToAllCall:
    """One blocking collective call of a rank."""

    name: str
    start_s: float
    end_s: float
    payload_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Rows that go to and come from each rank."""

    tokens: torch.Tensor  # [S], by rank, then by token
    ids: torch.Tensor  # [S, K], numbers among the receiver's experts, -1 for others'
    send: tuple[int, ...]  # rows per rank
    receive: tuple[int, ...]
    num_tokens: int
    row_bytes: int


class AllToAllGroup:
    """A process group whose ranks have an equal share of the experts each, in order.

    Args:
        group: The process group; None for all ranks. Its timeout bounds every wait.
        check_experts: Refuse ranks whose experts become the same bits: something that knows nothing
            of expert groups took them for replicas. False where they are equal on purpose.
        guard: Context around each collective call, given its name; turns a backend's error into one
            that says where it happened. None for a ``CommunicationError`` that names rank and call.

    Raises:
        ConfigurationError: There is no process group, or this rank is not in it.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> group = AllToAllGroup()
        >>> group.experts_of(4)
        range(0, 4)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        check_experts: bool = True,
        guard: Guard | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            message = "an expert group needs a process group"
            raise ConfigurationError(message, hint="call torch.distributed.init_process_group")
        self._group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if self.rank < 0:
            raise ConfigurationError(
                f"rank {dist.get_rank()} is not in this expert group",
                hint="give each rank the group that it belongs to",
            )
        self._members = dist.get_process_group_ranks(self._group)
        self._check_experts = check_experts and self.size > 1
        self._guard = guard or self._default_guard
        self._calls: list[AllToAllCall] = []
        self._agreed: set[tuple[int, ...]] = set()
        self._harmless: set[tuple[tuple[int, ...], ...]] = set()

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        """Return this group: the ranks of a layer's copy are those of the layer."""
        return self

    def experts_of(self, num_experts: int, *, rank: int | None = None) -> range:
        """Return the numbers of the experts that a rank has; None: this rank.

        Raises:
            ConfigurationError: They cannot be shared out equally.
        """
        if num_experts % self.size:
            raise ConfigurationError(
                f"{num_experts} experts cannot be shared out equally over {self.size} ranks",
                hint="choose a number of experts that is a multiple of the number of ranks",
            )
        share = num_experts // self.size
        first = (self.rank if rank is None else rank) * share
        return range(first, first + share)

    def check_layer(self, config: MoEConfig) -> None:
        """Refuse a layer whose experts cannot be shared out equally."""
        self.experts_of(config.experts)

    def apply(
        self,
        tokens: torch.Tensor,
        routing: Routing,
        ids: torch.Tensor,
        local: LocalExperts,
        *,
        own: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, ExpertLoad]:
        """Send tokens to their experts' ranks and add up what comes back; a collective call.

        What ``MoE`` calls. The backward pass is a collective call as well: it must run on all ranks
        of the group, or on none. ``local`` gets tokens [R, H], expert numbers [R, K] counted from
        this rank's first (-1 for others') and weights [R, K]. ``own`` are this rank's parameters:
        the same bits on two ranks are refused.
        """
        if self._check_experts:
            refuse_replicating(own, self._members)
        num_experts = routing.scores_TE.shape[1]
        self._check_alike(tokens, ids, num_experts)
        share = len(self.experts_of(num_experts))
        owner = torch.div(ids, share, rounding_mode="floor")  # -1 stays -1
        ranks = torch.arange(self.size, device=ids.device)
        wanted = (owner.unsqueeze(0) == ranks.view(-1, 1, 1)).any(dim=-1)  # [P, T]
        to_rank, rows = wanted.nonzero(as_tuple=True)
        # Rows per rank first, then the loads, then a sample of the experts: one message brings all.
        counts = [wanted.sum(dim=1), routing.load_E, counts_of(ids, num_experts)]
        sample = sample_of(own) if self._check_experts else counts[0].new_empty(0)
        told = self.gather(torch.cat([*counts, sample]), name="row counts")
        loads_end = self.size + 2 * num_experts
        table = torch.cat([told[:, : self.size], told[:, loads_end:]], dim=1).tolist()
        self._require_own(own, [row[self.size :] for row in table])
        mine = ids[rows] - (to_rank * share).unsqueeze(1)
        plan = _Plan(
            tokens=rows,
            ids=torch.where(owner[rows] == to_rank.unsqueeze(1), mine, -1).to(torch.int32),
            send=tuple(table[self.rank][: self.size]),
            receive=tuple(row[self.rank] for row in table),
            num_tokens=len(tokens),
            row_bytes=tokens.shape[1] * tokens.element_size(),
        )
        came, weights, numbers = _Dispatch.apply(tokens, routing.weights_TK, plan, self)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        partial = local(came, numbers, weights)
        output: torch.Tensor = _Combine.apply(partial, plan, self)  # type: ignore[no-untyped-call]  # as above
        loads = told[:, self.size : loads_end].sum(dim=0)
        return output, ExpertLoad(routed=loads[:num_experts], kept=loads[num_experts:])

    def _require_own(self, own: Mapping[str, torch.Tensor], samples: list[list[int]]) -> None:
        """Compare parameters whose samples are alike, unless the same samples were harmless.

        All ranks have the same samples, so that all of them compare or none.
        """
        alike = columns_alike(samples)
        suspects = tuple((n, *(row[n] for row in samples)) for n in alike)
        if not suspects or suspects in self._harmless:
            return
        name = "checksums of experts"
        require_own(own, alike, gather=lambda numbers: self.gather(numbers, name=name))
        if len(self._harmless) >= _HARMLESS_KEPT:
            self._harmless.clear()
        self._harmless.add(suspects)

    def take_calls(self) -> list[AllToAllCall]:
        """Return the collective calls since this was called last."""
        taken, self._calls = self._calls, []
        return taken

    def gather(self, counts: torch.Tensor, *, name: str) -> torch.Tensor:
        """Return every rank's numbers [P, N], from [N] of each; ``name`` says what they are."""
        told = counts.new_empty((self.size, len(counts)))
        with self._timed(name, payload_bytes=0, sent_bytes=(self.size - 1) * counts.nbytes):
            dist.all_gather(list(told.unbind(0)), counts, group=self._group)
        return told

    def _check_alike(self, tokens: torch.Tensor, ids: torch.Tensor, num_experts: int) -> None:
        """Compare sizes once per kind of call: a wrong length would look like a lost peer."""
        sizes = (tokens.shape[1], ids.shape[1], num_experts, tokens.element_size())
        kind = (*sizes, int(tokens.requires_grad))
        if kind in self._agreed:
            return
        told = self.gather(torch.tensor(kind, device=tokens.device), name="layer sizes")
        for rank, theirs in enumerate(told.tolist()):
            for name, their, our in zip(_SIZES, theirs, kind, strict=True):
                if their != our:
                    raise ConfigurationError(
                        f"{name}: rank {rank} of the expert group has {their}, rank {self.rank} "
                        f"has {our}",
                        hint="build and call the same layer on all ranks of the group",
                    )
        self._agreed.add(kind)

    def send(
        self, parts: list[torch.Tensor], plan: _Plan, *, name: str, back: bool
    ) -> list[torch.Tensor]:
        """Send tensors [S, N] the plan's way, giving [R, N] each, or ``back`` the opposite way.

        They go side by side as rows of bytes: one message instead of several.
        """
        rows = torch.cat([_as_bytes(part) for part in parts], dim=1)
        send, receive = (plan.receive, plan.send) if back else (plan.send, plan.receive)
        received = rows.new_empty((sum(receive), rows.shape[1]))
        away = sum(send) - send[self.rank]
        with self._timed(
            name, payload_bytes=away * plan.row_bytes, sent_bytes=away * rows.shape[1]
        ):
            dist.all_to_all_single(received, rows, list(receive), list(send), group=self._group)
        return _unpacked(received, parts)

    @contextlib.contextmanager
    def _timed(self, name: str, **num_bytes: int) -> Iterator[None]:
        start_s = time.perf_counter()
        with self._guard(f"sending {name} between experts"):
            yield
        call = AllToAllCall(name=name, start_s=start_s, end_s=time.perf_counter(), **num_bytes)
        self._calls.append(call)

    @contextlib.contextmanager
    def _default_guard(self, what: str) -> Iterator[None]:
        try:
            yield
        except FivefoldError:
            raise
        except RuntimeError as error:  # torch's own for a peer that is lost or silent
            reason = " ".join(str(error).split())[:240]
            raise CommunicationError(
                f"rank {self.rank} of {self.size} in the expert group: {what} failed: {reason}",
                hint="a peer died, hangs or cannot be reached; read its log",
            ) from error


class _Dispatch(Function):
    """Tokens, weights and expert numbers to the experts; gradients of the first two back.

    One node for all, so that every rank has its calls in the same order in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, plan: _Plan, group: AllToAllGroup
    ) -> tuple[torch.Tensor, ...]:
        """Send tokens, weights and expert numbers out."""
        ctx.plan, ctx.group = plan, group
        ctx.token_type, ctx.weight_type = tokens.dtype, weights.dtype
        of_others = plan.ids < 0
        sent = [tokens[plan.tokens], weights[plan.tokens].masked_fill(of_others, 0.0), plan.ids]
        received = group.send(sent, plan, name="tokens", back=False)
        ctx.mark_non_differentiable(received[2])
        return tuple(received)

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Bring the gradients of tokens and weights back."""
        plan, sent = ctx.plan, list(gradients[:2])
        rows, weights = ctx.group.send(sent, plan, name="gradients of the tokens", back=True)
        weights = weights.masked_fill(plan.ids < 0, 0.0)
        d_tokens = _summed(rows, plan).to(ctx.token_type)
        return d_tokens, _summed(weights, plan).to(ctx.weight_type), None, None


class _Combine(Function):
    """Sums over a rank's experts back to the tokens; gradients to the experts."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, plan: _Plan, group: AllToAllGroup) -> torch.Tensor:
        """Bring the sums back and add them up by token."""
        ctx.plan, ctx.group = plan, group
        (rows,) = group.send([partial], plan, name="results", back=True)
        return _summed(rows, plan).to(partial.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Send the gradients of the sums out."""
        sent = [gradients[0][ctx.plan.tokens]]
        (rows,) = ctx.group.send(sent, ctx.plan, name="gradients of the results", back=False)
        return rows, None, None


def _as_bytes(part: torch.Tensor) -> torch.Tensor:
    # Written out: torch calls [0, K] and [N, 1] contiguous whatever their strides are, and then
    # refuses to look at them as bytes.
    rows = part.contiguous().as_strided(part.shape, (part.shape[1], 1))
    return rows.view(torch.uint8)


def _unpacked(rows: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    widths = [part.shape[1] * part.element_size() for part in like]
    pieces = torch.split(rows, widths, dim=1)
    # A copy: a view of a wider type must begin at a multiple of its size.
    return [
        piece.clone(memory_format=torch.contiguous_format).view(part.dtype)
        for piece, part in zip(pieces, like, strict=True)
    ]


def _summed(rows: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """Add rows [S, N] to their tokens [T, N], rank after rank, in float32 at least.

    A token is in a rank's rows at most once, so the order of each sum is that of the ranks.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros((plan.num_tokens, rows.shape[1]), dtype=wide, device=rows.device)
    send = list(plan.send)
    for tokens, part in zip(torch.split(plan.tokens, send), torch.split(rows, send), strict=True):
        total.index_add_(0, tokens, part.to(wide))
    return total
