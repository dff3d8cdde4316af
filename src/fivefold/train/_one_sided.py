"""The one-sided exchange between a run's experts: whether it can be used, its memory, its bytes.

All mixtures of a model have the same sizes and run one after the other, so one exchange serves all
of them. On GPUs its memory is torch's symmetric memory; on the CPU it is shared between processes
and the kernels are interpreted, which is for tests.
"""

from __future__ import annotations

import logging
import math
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fivefold.errors import UnsupportedError
from fivefold.moe import (
    ExchangeConfig,
    ExchangeFlight,
    ExpertExchange,
    TorchSymmetricHeap,
    backends,
)
from fivefold.train._mixture import expert_width
from fivefold.train._precision import choose_precision

if TYPE_CHECKING:
    import torch.distributed as dist

    from fivefold.runs.ranks import Ranks
    from fivefold.train._config import TrainConfig
    from fivefold.train._moe_config import MixtureConfig

_LOG = logging.getLogger(__name__)
_SIGNAL_BYTES = 8
_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory is what it is for


def is_one_sided(config: TrainConfig, ranks: Ranks) -> bool:
    """Settle ``model.moe.exchange``, alike on all ranks; a collective call unless it says so.

    Raises:
        CommunicationError: A peer died or did not answer in time.
        UnsupportedError: It is asked for and cannot work here; says why.
    """
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
    """Why this rank cannot take part, or None where it can."""
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
    """Set the exchange of this rank's expert group up; a collective call.

    Raises:
        CommunicationError: A peer died or did not answer in time.
        ConfigurationError: A size is out of range.
    """
    sizes = exchange_sizes(config, ranks.device)
    with ranks.guard("setting up the memory that the experts' ranks share"):
        if ranks.device.type == "cuda":
            heap = TorchSymmetricHeap(nbytes=sizes.heap_bytes(), device=ranks.device, group=group)
            return OneSided(ExpertExchange(sizes, heap, timeout_s=ranks.timeout_s), ranks)
        return OneSided(_between_processes(sizes, ranks), ranks)


def exchange_sizes(config: TrainConfig, device: torch.device) -> ExchangeConfig:
    """What the exchange of a run is made for."""
    moe = config.model.moe
    assert moe is not None, "as above"
    bf16 = choose_precision(config.optim.precision, device) == "bf16"
    tokens = config.optim.batch_size * config.data.sequence_length
    room = None if moe.exchange_room is None else math.ceil(tokens * moe.top_k * moe.exchange_room)
    return ExchangeConfig(
        ranks=moe.expert_parallel,
        experts=moe.experts,
        hidden=config.model.width,
        intermediate=expert_width(moe, config.model.width),
        top_k=moe.top_k,
        max_tokens=tokens,
        dtype=torch.bfloat16 if bf16 else torch.float32,
        activation=moe.activation,
        max_rows=room,
        training=True,
    )


def _between_processes(sizes: ExchangeConfig, ranks: Ranks) -> ExpertExchange:
    place, first = ranks.rank % sizes.ranks, ranks.rank - ranks.rank % sizes.ranks
    folder = None
    if place == 0:
        where = _IN_MEMORY if _IN_MEMORY.is_dir() else None
        folder = tempfile.mkdtemp(prefix="fivefold-experts-", dir=where)
    try:
        folders = ranks.gather(folder, what="the folders of the experts' shared memory")
        exchange = ExpertExchange.between_processes(
            sizes, folders[first], rank=place, timeout_s=ranks.timeout_s
        )
        ranks.gather(None, what="the end of setting up the experts' shared memory")
    finally:
        if folder is not None:  # all ranks have mapped what was in it
            shutil.rmtree(folder, ignore_errors=True)
    return exchange


class OneSided:
    """The exchange of one rank, and what it has sent since it was last asked.

    Args:
        exchange: Between the ranks that share the experts out.
        ranks: All ranks.
    """

    def __init__(self, exchange: ExpertExchange, ranks: Ranks) -> None:
        self.exchange, self._ranks = exchange, ranks
        self._place = ranks.rank % exchange.config.ranks
        self._told = (0, 0)

    def take_flight(self) -> ExchangeFlight:
        """What went to other ranks since the last call; raises what went wrong in the kernels.

        Its times are those of this call: what passes within a kernel has no begin and no end here.

        Raises:
            CommunicationError: A peer died or did not answer in time.
            DataError: A rank would have got more rows than it has room for.
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
        return ExchangeFlight(
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
