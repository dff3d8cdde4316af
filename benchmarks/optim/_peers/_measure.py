"""Takes the figures of one case, in the process of one rank.

Three measurements, each in processes of its own. ``timing``: paced steps over the shaped link,
windows of whole rounds in the stationary state. ``learning``: the same steps unpaced, because a
loss depends neither on the link nor on the pace; at each point the mean of the ranks' parameters
is kept and judged after the run, so that validation takes no part in anything. ``memory``: a
larger model, so that the method's buffers and not the interpreter are seen.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.optim._peers._case import Attached, Case, Place, attach
from benchmarks.optim._peers._pace import Pacer
from benchmarks.optim._workload import CLIP_NORM, Problem, Worker, make_optimizer, validate
from fivefold.train import Transformer
from fivefold.train.config import ModelConfig

__all__ = ["learning", "memory", "timing"]

_WINDOW_STEPS = 16
_ROUNDS_WARM_UP_STEPS = 8
_EVERY_STEP_WARM_UP = 4  # PowerSGD starts at its third step
_EVERY_STEP_WINDOW = 8
_MEMORY_MODEL = ModelConfig(layers=4, width=512, heads=8)
_MEMORY_TOKENS = 16
_MEMORY_ROUNDS = 3


def timing(case: Case, place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds, bytes and waits per step.

    Args:
        case: What runs.
        place: Where.
        request: ``step_s``, the padded time of a step.
    """
    rss_bytes = _reset_peak_rss()
    problem = Problem(steps=10_000, optimizer=case.optimizer)
    worker = _worker(case, place, problem)
    pacer = Pacer(request["step_s"], worker.model, worker.optimizer)
    attached = attach(case, worker.model, worker.optimizer, place)
    worker.optimizer = attached.optimizer
    warm_up_steps, window_steps = _window(case)
    dist.barrier()
    _run(worker, attached, pacer, warm_up_steps)
    before = _totals(attached, pacer)
    _run(worker, attached, pacer, window_steps)
    after = _totals(attached, pacer)
    found: dict[str, Any] = {name: after[name] - before[name] for name in after}
    found |= {"steps": window_steps, "peak_bytes": _peak_rss_bytes() - rss_bytes}
    found["chosen"] = attached.chosen()
    started_s = time.perf_counter()
    attached.finalize()
    found["drain_s"] = time.perf_counter() - started_s
    if case.kind == "alone":
        found["allreduce_s"] = _allreduce_s(worker.model)
    dist.barrier()
    attached.close()
    return found


def learning(case: Case, place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """Validation bits per byte along a run; this rank judges every ``world_size``-th point.

    Args:
        case: What runs.
        place: Where.
        request: ``problem``, the fields of a ``Problem``, and ``every``, the steps between two
            points.
    """
    problem = Problem(**request["problem"], optimizer=case.optimizer)
    worker = _worker(case, place, problem)
    attached = attach(case, worker.model, worker.optimizer, place)
    worker.optimizer = attached.optimizer
    judged = copy.deepcopy(worker.model) if case.adapter != "ddp" else worker.model
    pacer = Pacer(0.0, worker.model, worker.optimizer)
    points: list[tuple[int, torch.Tensor]] = []
    for done in range(0, problem.steps, request["every"]):
        _run(worker, attached, pacer, min(request["every"], problem.steps - done))
        if worker.steps_done == problem.steps:
            attached.finalize()
        points.append((worker.steps_done, _mean_parameters(worker.model, place.world_size)))
    dist.barrier()
    attached.close()
    curve = []
    for steps, flat in points[::-1][place.rank :: place.world_size]:  # rank 0 judges the last
        torch.nn.utils.vector_to_parameters(flat, judged.parameters())
        curve.append((steps, validate(judged)))
    return {"problem": asdict(problem), "curve": curve[::-1]}


def memory(case: Case, place: Place, _request: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes per parameter that the method adds to plain training, at its peak.

    Args:
        case: What runs.
        place: Where.
    """
    model = Transformer(_MEMORY_MODEL, vocab_size=256, sequence_length=_MEMORY_TOKENS, seed=0)
    optimizer: torch.optim.Optimizer = make_optimizer(model, lr=1e-3)
    tokens = torch.zeros(1, _MEMORY_TOKENS, dtype=torch.int64)

    def step(method: Attached) -> None:
        torch.autograd.backward(method.loss(tokens, tokens))
        method.optimizer.step()
        method.optimizer.zero_grad()
        method.after_step()

    alone = Attached(loss=model.loss, optimizer=optimizer)
    for _ in range(2):  # the optimizer's state and the allocator's caches are there
        step(alone)
    rss_bytes = _reset_peak_rss()
    step(alone)
    alone_bytes = _peak_rss_bytes() - rss_bytes
    attached = attach(case, model, optimizer, place)
    for _ in range(max(4, _MEMORY_ROUNDS * case.round_steps)):
        step(attached)
    attached.finalize()
    added_bytes = _peak_rss_bytes() - rss_bytes - alone_bytes
    dist.barrier()
    attached.close()
    return {"added_bytes_per_parameter": added_bytes / model.num_parameters}


def _worker(case: Case, place: Place, problem: Problem) -> Worker:
    clip_norm = CLIP_NORM if case.clips else None
    return Worker(problem, rank=place.rank, world_size=place.world_size, clip_norm=clip_norm)


def _window(case: Case) -> tuple[int, int]:
    """Steps of warm-up and of the window: whole rounds, with the pipeline full."""
    if case.round_steps == 1:
        return _EVERY_STEP_WARM_UP, _EVERY_STEP_WINDOW
    # After one round what is launched at its end is under way, as after any later round.
    warm_up_rounds = max(1, _ROUNDS_WARM_UP_STEPS // case.round_steps)
    rounds = max(2, _WINDOW_STEPS // case.round_steps)
    return warm_up_rounds * case.round_steps, rounds * case.round_steps


def _run(worker: Worker, attached: Attached, pacer: Pacer, steps: int) -> None:
    loss = pacer.forward(attached.loss)
    for _ in range(steps):
        worker.gradient(loss=loss)
        pacer.backward_done()
        worker.update()
        attached.after_step()


def _totals(attached: Attached, pacer: Pacer) -> dict[str, float]:
    sent_bytes, received_bytes = _link_bytes()
    return {
        "wall_s": time.perf_counter(),
        "link_sent_bytes": sent_bytes,
        "link_received_bytes": received_bytes,
        "overruns": pacer.overruns,
        "overrun_s": pacer.overrun_s,
        **attached.figures(),
    }


def _mean_parameters(model: torch.nn.Module, world_size: int) -> torch.Tensor:
    with torch.no_grad():
        flat = torch.nn.utils.parameters_to_vector(model.parameters()).clone()
    dist.all_reduce(flat)
    return flat / world_size


def _allreduce_s(model: torch.nn.Module, repetitions: int = 2) -> float:
    """Mean seconds of a bare all-reduce of the model, with nothing beside it."""
    payload = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    dist.all_reduce(payload)
    started_s = time.perf_counter()
    for _ in range(repetitions):
        dist.all_reduce(payload)
    return (time.perf_counter() - started_s) / repetitions


def _link_bytes() -> tuple[int, int]:
    """Bytes that this host sent and received, headers included, over all links but loopback."""
    sent = received = 0
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            columns = numbers.split()
            received += int(columns[0])
            sent += int(columns[8])
    return sent, received


def _reset_peak_rss() -> int:
    """Forget the peak of this process's memory; returns what it holds now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def _peak_rss_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    message = f"/proc/self/status has no {key}"
    raise OSError(message)
