"""A clean key-value store for every start of the ranks.

torchrun restarts ranks without a new store: a rank then finds there the addresses of the dead
ranks before it and hangs. Nothing in the environment tells one attempt from the next on all
hosts alike (the restart count grows only where a rank failed), so the ranks agree on a fresh name
for the attempt and keep all keys under it. Rank 0 makes up the name. Each other rank makes up a
token of its own, and takes the name only from an answer that holds this token: an answer to a
dead rank cannot be taken for one to the living.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # hidden

STORE_VARIABLE = "FIVEFOLD_STORE"
"""host:port of the launcher's store; set by ``fivefold train --nproc``."""
_POLL_S = 0.02


def attempt_store(*, rank: int, world_size: int, timeout_s: float) -> Store | None:
    """The store for this start of the ranks, where a launcher shares one among all starts.

    Args:
        rank: This process.
        world_size: Number of processes.
        timeout_s: Longest wait for the others, in seconds.

    Returns:
        A store with no keys of earlier starts; None where torch makes a new one itself.

    Raises:
        RuntimeError: The others did not come in time, or the store cannot be reached.
    """
    address = os.environ.get(STORE_VARIABLE)
    if address is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    shared = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(_agree(shared, rank, world_size, timeout_s=timeout_s), shared)


def _agree(store: Store, rank: int, world_size: int, *, timeout_s: float) -> str:
    """The name of this attempt, the same on all ranks and never used before."""
    deadline_s = time.monotonic() + timeout_s
    own = uuid.uuid4().hex
    waiting = set(range(1, world_size)) if rank == 0 else {rank}
    while time.monotonic() < deadline_s:
        if rank == 0:
            waiting = {other for other in waiting if not _welcomed(store, other, own)}
            if not waiting:
                return own
        else:
            name = _welcome(store, rank, own)
            if name is not None:
                return name
        time.sleep(_POLL_S)
    missing = sorted(waiting) if rank == 0 else [0]
    raise RuntimeError(f"ranks {missing} did not come within {timeout_s:g} s")


def _welcomed(store: Store, other: int, name: str) -> bool:
    """Rank 0: answer the newest token of a rank; whether the rank has taken the name."""
    token = _read(store, f"token/{other}")
    if token is not None:
        store.set(f"answer/{other}", f"{token} {name}")
    return _read(store, f"taken/{other}") == name


def _welcome(store: Store, rank: int, token: str) -> str | None:
    """Another rank: show the token; the name, once rank 0 has answered it."""
    store.set(f"token/{rank}", token)
    answered, _, name = (_read(store, f"answer/{rank}") or "").partition(" ")
    if answered != token:
        return None
    store.set(f"taken/{rank}", name)
    return name


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
