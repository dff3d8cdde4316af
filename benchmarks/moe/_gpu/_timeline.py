# mypy: disable-error-code="no-untyped-call,import-untyped,misc"
"""Tickets of the single kernel as a timeline: its control words, looked at while it runs.

The kernel has no clock; a copy of its words by another stream costs it nothing. So it is seen for
which share of its time it counts and places, multiplies, and adds up.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import torch

from benchmarks.moe._gpu._bench import Bench
from benchmarks.moe._gpu._cases import Case
from benchmarks.moe._gpu._operands import operands_of
from benchmarks.moe._gpu._rungs import options_of
from fivefold.moe import Workspace
from fivefold.moe.kernels import launch as launches
from fivefold.moe.kernels import sync

__all__ = ["time_line"]

_MOST_SAMPLES = 400
_COLUMNS = ("tickets", "chunks counted", "chunks placed", "first products", "second products")


def time_line(case: Case, bench: Bench, _allowed: set[str]) -> None:
    """Say when each phase of one launch was over, as shares of the launch, with raw samples."""
    given = operands_of(case, bench.device)
    workspace = Workspace.allocate(
        num_tokens=case.tokens, hidden=case.hidden, intermediate=case.inner,
        num_experts=case.experts, top_k=case.top_k, dtype=case.dtype, device=bench.device,
    )  # fmt: skip
    options = options_of(case, given) | {"workspace": workspace}
    tiles = launches.prepare_forward(*given.positional, programs=1, **options).layout.max_tiles

    def forward() -> None:
        launches.forward_fused(*given.positional, **options)

    bench.run(forward)
    looked = _looked_at if bench.on_gpu else _looked_at_in_a_thread
    raw, took_s = looked(workspace.control.view(-1)[: sync.FLAGS.value + 2 * tiles], forward)
    samples = [(at_s, *_counts(words, tiles)) for at_s, words in raw]
    tickets = [sample[1] for sample in samples]
    end = max(range(len(tickets)), key=tickets.__getitem__, default=-1) + 1  # then they are cleared
    back = sum(b < a for a, b in itertools.pairwise(tickets[:end]))
    bench.row("tickets that went back", "samples", back, most=0)
    bench.row("time of the launch that was looked at", "s", took_s, columns=_COLUMNS, raw=samples)
    for place, name in enumerate(_COLUMNS, start=1):
        most = max((sample[place] for sample in samples), default=0)
        if most:  # was seen at all
            at_s = next(sample[0] for sample in samples if sample[place] == most)
            bench.row(f"{name}: all seen at", "share of the launch", at_s / took_s, found=most)


def _counts(words: torch.Tensor, tiles: int) -> tuple[int, ...]:
    flags, single = sync.FLAGS.value, (sync.QUEUES, sync.COUNTED, sync.PLACED)
    halves = words[flags:].split(tiles)
    return (*(int(words[each.value]) for each in single), *(int(half.sum()) for half in halves))


_Seen = tuple[list[tuple[float, torch.Tensor]], float]


def _looked_at(control: torch.Tensor, launch: Callable[[], None]) -> _Seen:
    side, over = torch.cuda.Stream(control.device), torch.cuda.Event()
    room = torch.empty(_MOST_SAMPLES, len(control), dtype=control.dtype, pin_memory=True)
    found: list[tuple[float, torch.Tensor]] = []
    torch.cuda.synchronize(control.device)
    began_s = time.perf_counter()
    launch()
    over.record()
    while not over.query() and len(found) < _MOST_SAMPLES:
        with torch.cuda.stream(side):
            room[len(found)].copy_(control, non_blocking=True)
        side.synchronize()
        found.append((time.perf_counter() - began_s, room[len(found)]))
    over.synchronize()
    return found, time.perf_counter() - began_s


def _looked_at_in_a_thread(control: torch.Tensor, launch: Callable[[], None]) -> _Seen:
    """Do the same where kernels are interpreted, in the thread that launches them."""
    found: list[tuple[float, torch.Tensor]] = []
    began_s = time.perf_counter()
    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    while thread.is_alive() and len(found) < _MOST_SAMPLES:
        found.append((time.perf_counter() - began_s, control.clone()))
        thread.join(timeout=0.002)
    thread.join()
    return found, time.perf_counter() - began_s
