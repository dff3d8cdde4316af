"""Which ranks share out the experts, how tokens get there, and what that asks of gradients.

With ``expert_parallel`` = P, each P consecutive ranks share out every mixture's experts and send
tokens to one another; ranks P apart hold the same experts. Everything else is on all ranks alike.
The loss of the run is the mean over all ranks, so an expert's gradient, which its owner gets from
the tokens of P ranks, is added over the owners and divided by the number of all ranks. This module
knows nothing of models or steps.
"""

from __future__ import annotations

import logging
import math
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.errors import UnsupportedError
from fivefold.moe import AllToAllGroup, OneSidedConfig, OneSidedGroup, TorchSymmetricHeap, backends
from fivefold.moe.parallel.all_to_all import AllToAllCall
from fivefold.runs.ranks import Ranks
from fivefold.train._step import choose_precision
from fivefold.train.config import MixtureConfig, TrainConfig

_LOG = logging.getLogger(__name__)
_SIGNAL_BYTES = 8
_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory is what it is for


def share_experts(config: TrainConfig, ranks: Ranks) -> ExpertRanks | None:
    """Form the groups; a collective call where experts are shared out, else None."""
    model = config.model
    if model.moe is None or model.moe.expert_parallel == 1:
        return None
    share = model.moe.expert_parallel
    everyone = range(ranks.world_size)
    # Every rank takes part in making every group, in the same order.
    with ranks.guard("forming the groups of experts"):
        group = _group_of(
            ranks, [list(everyone[first : first + share]) for first in everyone[::share]]
        )
        replicas = None
        if ranks.world_size > share:
            replicas = _group_of(
                ranks, [list(everyone[first::share]) for first in everyone[:share]]
            )
    return ExpertRanks(
        ranks=ranks,
        group=AllToAllGroup(group, guard=ranks.guard),
        replicas=replicas,
        one_sided=open_exchange(config, ranks, group) if is_one_sided(config, ranks) else None,
    )


def _group_of(ranks: Ranks, members: list[list[int]]) -> dist.ProcessGroup:
    found = None
    for group_ranks in members:
        group = dist.new_group(group_ranks, timeout=ranks.timeout)
        found = group if ranks.rank in group_ranks else found
    assert isinstance(found, dist.ProcessGroup), "every rank is in one of the groups"
    return found


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """The groups of one rank."""

    ranks: Ranks
    group: AllToAllGroup
    replicas: dist.ProcessGroup | None
    one_sided: OneSided | None = None

    @property
    def for_layers(self) -> AllToAllGroup | OneSidedGroup:
        """Return what the layers send their tokens by."""
        return self.group if self.one_sided is None else self.one_sided.exchange

    def take_calls(self) -> list[AllToAllCall]:
        """Return the exchanges since the last call."""
        calls = self.group.take_calls()
        return calls if self.one_sided is None else [*calls, self.one_sided.take_call()]

    def close(self) -> None:
        """Give the memory of the exchange back, when no rank is in a step any more."""
        if self.one_sided is not None:
            self.one_sided.close()

    def reduce(self, gradients: Sequence[torch.Tensor], *, wire: torch.dtype | None) -> int:
        """Turn gradients of this rank's experts into those of the run's loss, in place."""
        for gradient in gradients:
            gradient.div_(self.ranks.world_size)
            if self.replicas is None:
                continue
            sent = gradient if wire is None else gradient.to(wire)
            with self.ranks.guard("the all-reduce of the experts' gradients"):
                dist.all_reduce(sent, group=self.replicas)
            if wire is not None:
                gradient.copy_(sent)
        return 0 if self.replicas is None else sum(g.nbytes for g in gradients)

    def clip(
        self,
        replicated: Sequence[torch.Tensor],
        experts: Sequence[torch.Tensor],
        *,
        max_norm: float,
    ) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient; equal on all ranks, bit for bit."""
        own = torch.nn.utils.get_total_norm(experts).double().square().view(1)
        shares = self.group.gather(own, name="gradient norms")
        common = torch.nn.utils.get_total_norm(replicated).double().square()
        norm = (common + shares.sum()).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in (*replicated, *experts):
            gradient.mul_(factor.to(gradient.dtype))
        return norm


def is_one_sided(config: TrainConfig, ranks: Ranks) -> bool:
    """Settle ``model.moe.exchange``, alike on all ranks; a collective call unless it says so."""
    moe = config.model.moe
    assert moe is not None, "experts are shared out only where there are some"
    wished = moe.exchange
    if wished == "all_to_all" or (wished == "auto" and ranks.device.type != "cuda"):
        return False
    found = ranks.gather(
        (socket.gethostname(), _problem(moe, ranks.device)), what="what the experts' exchange needs"
    )
    reason = _first_problem(found, share=moe.expert_parallel)
    if reason is None:
        return True
    if wished == "one_sided":
        raise UnsupportedError(
            f'model.moe.exchange = "one_sided" cannot work here: {reason}', hint='use "all_to_all"'
        )
    _LOG.info("the experts' ranks exchange by all-to-all: %s", reason)
    return False


def _problem(moe: MixtureConfig, device: torch.device) -> str | None:
    """Say why this rank cannot take part; None where it can."""
    if moe.capacity_factor is not None:
        return "with model.moe.capacity_factor the ranks do not see one another's loads"
    if not moe.recompute:
        return "it keeps nothing for the backward, and model.moe.recompute is false"
    missing = backends(device)["fused"]
    if missing is None and device.type == "cuda":
        missing = TorchSymmetricHeap.missing(device)
    return missing


def _first_problem(found: list[tuple[str, str | None]], *, share: int) -> str | None:
    for rank, (_, problem) in enumerate(found):
        if problem is not None:
            return f"rank {rank}: {problem}"
    for first in range(0, len(found), share):
        hosts = sorted({host for host, _ in found[first : first + share]})
        if len(hosts) > 1:
            return f"ranks {first} to {first + share - 1} are on several hosts: {', '.join(hosts)}"
    return None


def open_exchange(config: TrainConfig, ranks: Ranks, group: dist.ProcessGroup) -> OneSided:
    """Set the exchange of this rank's expert group up; a collective call."""
    sizes = exchange_sizes(config, ranks.device)
    with ranks.guard("setting up the memory that the experts' ranks share"):
        if ranks.device.type == "cuda":
            heap = TorchSymmetricHeap(nbytes=sizes.heap_bytes(), device=ranks.device, group=group)
            return OneSided(OneSidedGroup(sizes, heap, timeout_s=ranks.timeout_s), ranks)
        return OneSided(_between_processes(sizes, ranks), ranks)


def exchange_sizes(config: TrainConfig, device: torch.device) -> OneSidedConfig:
    """Return the sizes that the exchange of a run is made for."""
    moe = config.model.moe
    assert moe is not None, "as above"
    bf16 = choose_precision(config.optim.precision, device) == "bf16"
    tokens = config.optim.batch_size * config.data.sequence_length
    room = None if moe.exchange_room is None else math.ceil(tokens * moe.top_k * moe.exchange_room)
    return OneSidedConfig(
        ranks=moe.expert_parallel,
        experts=moe.experts,
        hidden=config.model.width,
        intermediate=config.model.expert_width,
        top_k=moe.top_k,
        max_tokens=tokens,
        dtype=torch.bfloat16 if bf16 else torch.float32,
        activation=moe.activation,
        max_rows=room,
        training=True,
    )


def _between_processes(sizes: OneSidedConfig, ranks: Ranks) -> OneSidedGroup:
    place, first = ranks.rank % sizes.ranks, ranks.rank - ranks.rank % sizes.ranks
    folder = None
    if place == 0:
        where = _IN_MEMORY if _IN_MEMORY.is_dir() else None
        folder = tempfile.mkdtemp(prefix="fivefold-experts-", dir=where)
    try:
        folders = ranks.gather(folder, what="the folders of the experts' shared memory")
        exchange = OneSidedGroup.between_processes(
            sizes, folders[first], rank=place, timeout_s=ranks.timeout_s
        )
        ranks.gather(None, what="the end of setting up the experts' shared memory")
    finally:
        if folder is not None:  # all ranks have mapped what was in it
            shutil.rmtree(folder, ignore_errors=True)
    return exchange


class OneSided:
    """The exchange of one rank, and what it has sent since it was last asked."""

    def __init__(self, exchange: OneSidedGroup, ranks: Ranks) -> None:
        self.exchange, self._ranks = exchange, ranks
        self._place = ranks.rank % exchange.config.ranks
        self._told = (0, 0)

    def take_call(self) -> AllToAllCall:
        """Return what went to other ranks since the last call; raise the kernels' errors.

        Its times are those of this call: what passes within a kernel has no begin and no end here.
        """
        with self._ranks.guard("the one-sided exchange between experts"):
            self.exchange.check()
        counted = self.exchange.statistics()
        rows = self._to_others(counted["sent_bytes"]) + self._to_others(counted["returned_bytes"])
        signals = self._to_others(counted["sent_signals"])
        signals += self._to_others(counted["returned_signals"])
        now, before = (rows, rows + _SIGNAL_BYTES * signals), self._told
        self._told = now
        now_s = time.perf_counter()
        return AllToAllCall(
            name="tokens and gradients, one-sided",
            start_s=now_s,
            end_s=now_s,
            payload_bytes=now[0] - before[0],
            sent_bytes=now[1] - before[1],
        )

    def _to_others(self, by_peer: list[list[int]]) -> int:
        return sum(by_peer[0]) - by_peer[0][self._place]

    def close(self) -> None:
        """Give the memory back, after the last launch of all ranks."""
        self.exchange.close()
