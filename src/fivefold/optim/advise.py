"""Measure a training job as it is, and say what hiding its communication would bring.

``watch`` times steps as they are and with DDP's all-reduce left out, then all-reduces of the
gradients' size, and ends the process. The times of the slowest rank count.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fivefold.errors import ConfigurationError
from fivefold.files import write_atomically
from fivefold.measured import consistent_times_s
from fivefold.optim._round_choice import (
    CODECS_TO_CHOOSE,
    MARGIN,
    MessageTimes,
    RoundChoice,
    choose_round,
    most_fragments,
)
from fivefold.optim.codecs import named_codec
from fivefold.optim.transport import encoding_s

WARM_UP_STEPS = 3
_REPETITIONS = 5
_SIZES = (64, 8, 1)  # all-reduces of the gradients' size over these
_MOST_ENCODED = 1 << 20  # elements; what more of them take is in proportion
_ROUNDING = 1e-6
_WORTH_HIDING = 0.1  # of a step; less waiting is not worth a rule that learns less per token


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """Measured times of a job, on its slowest rank."""

    ranks: int  # of the default process group
    step_s: float  # one optimizer step as the job is
    compute_s: float | None  # the same with DDP's all-reduce left out; None without DDP
    elements: int  # trainable parameters, counted by their numbers
    tensors: int  # the same, counted as tensors
    sizes_bytes: tuple[int, ...]  # payloads of the measured all-reduces, ascending
    all_reduce_s: tuple[float, ...]  # what each took, alone on the network
    # What a rank computes to encode and decode the gradients once, for each of CODECS_TO_CHOOSE;
    # empty where it was not measured.
    busy_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        times = (self.step_s, self.compute_s or self.step_s, *self.all_reduce_s)
        alike = len(self.sizes_bytes) == len(self.all_reduce_s) >= 2
        ascend = all(0 < before < after for before, after in pairwise(self.sizes_bytes))
        if not (alike and ascend) or not all(t > 0 and math.isfinite(t) for t in times):
            message = f"times {times} of payloads {self.sizes_bytes} are no measurement"
            raise ConfigurationError(
                message, hint="give positive seconds, one for each of sizes that ascend"
            )

    @property
    def most_fragments(self) -> int:
        """Parts that the model can be sent in."""
        return most_fragments(tensors=self.tensors, num_bytes=4 * self.elements)

    @property
    def alone_s(self) -> float:
        """Seconds of a step that waits for nobody, as far as is known."""
        return min(self.compute_s or self.step_s, self.step_s)

    @property
    def messages(self) -> MessageTimes:
        """What messages take, by codec, from a line through the shortest and the longest."""
        first, last = self.sizes_bytes[0], self.sizes_bytes[-1]
        first_s, *_, last_s = consistent_times_s(self.sizes_bytes, self.all_reduce_s)
        rise_s = (last_s - first_s) / (last - first)
        fixed_s = max(first_s - rise_s * first, 0.0)  # below only by rounding
        return MessageTimes(
            fixed_s=dict.fromkeys(CODECS_TO_CHOOSE, fixed_s),
            whole_s={
                codec: rise_s * named_codec(codec).encoded_bytes(self.elements)
                for codec in CODECS_TO_CHOOSE
            },
            busy_s=dict(zip(CODECS_TO_CHOOSE, self.busy_s, strict=False)),
        )


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run the job."""

    rule: str  # as it is written in Python; empty for the job as it is
    codec: str  # how payloads travel
    step_s: float  # predicted seconds of a step; measured for the job as it is
    wait_s: float  # of them waiting
    recommended: bool = False  # the one to begin with


def options_for(times: JobTimes) -> list[Option]:
    """Return ways to run a measured job, the job as it is first, one of them recommended.

    Recommended is what ``tau="auto"`` would take, or none where under a tenth of a step waits.

    Examples:
        >>> times = JobTimes(ranks=2, step_s=0.5, compute_s=0.1, elements=1000,
        ...                  tensors=9, sizes_bytes=(400, 4000),
        ...                  all_reduce_s=(0.04, 0.4))
        >>> [(one.rule, one.codec) for one in options_for(times) if one.recommended]
        [('DelayCorrected(tau=1, fragments=1)', 'int4')]
    """
    now = Option(rule="", codec="", step_s=times.step_s, wait_s=times.step_s - times.alone_s)
    best = _choice(times, times.messages)
    stays = times.compute_s is not None and now.wait_s <= _WORTH_HIDING * now.step_s
    rounds = [_choice(times, times.messages.only(c)) for c in times.messages.worthwhile()]
    found = [replace(now, recommended=stays)]
    for one in rounds:
        chosen = not stays and one.codec == best.codec
        found.append(_option(times, one, rule=one.rule, recommended=chosen))
    gradients = (RoundChoice(delay=1, fragments=1, codec=codec) for codec in CODECS_TO_CHOOSE)
    late = [_option(times, one, rule="DelayedGradients(extrapolation=1)") for one in gradients]
    return [*found, *[one for one in late if one.wait_s == 0.0][:1]]


def _choice(times: JobTimes, messages: MessageTimes) -> RoundChoice:
    shares = {parts: 1 / parts for parts in range(1, times.most_fragments + 1)}
    return choose_round(messages, step_s=times.alone_s, shares=shares)


def _option(
    times: JobTimes, choice: RoundChoice, *, rule: str, recommended: bool = False
) -> Option:
    message_s = times.messages.message_s(choice.codec, 1 / choice.fragments)
    too_long_s = MARGIN * message_s / choice.delay - times.alone_s
    wait_s = too_long_s if too_long_s > _ROUNDING * times.alone_s else 0.0
    busy_s = times.messages.busy_s.get(choice.codec, 0.0) / choice.tau
    return Option(
        rule=rule, codec=choice.codec, step_s=times.alone_s + busy_s + wait_s, wait_s=wait_s,
        recommended=recommended,
    )  # fmt: skip


def watch(path: Path, *, steps: int) -> None:
    """Measure this process' job from now on, then end it on all ranks.

    Rank 0 writes JSON: the fields of ``JobTimes``, or ``error`` and ``hint``. ``steps`` are timed,
    after three to warm up; what the job would write at its end is not written.
    """
    register_optimizer_step_post_hook(_Watch(path, steps))


class _Watch:
    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps = path, steps
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._first: Optimizer | None = None
        self._ends_s: list[float] = []
        self._alone_from: int | None = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self._optimizers.add(optimizer)
        self._first = self._first or optimizer
        if optimizer is not self._first:
            return
        parameters = _trainable(self._optimizers)
        if not self._ends_s and (problem := _problem(parameters)):
            self._end({"error": problem[0], "hint": problem[1]})
        _synchronize(parameters[0].device)
        self._ends_s.append(time.perf_counter())
        count, half = len(self._ends_s), max(self._steps // 2, 1)
        if count == WARM_UP_STEPS + half + 1:
            self._leave_out_all_reduces()
        elif count > WARM_UP_STEPS + 2 * half + 1:
            self._end(self._measured(parameters, half))

    def _leave_out_all_reduces(self) -> None:
        # Replicas part from here on; the process ends before anything is kept of them.
        wrapped = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
        for one in wrapped:
            one.require_backward_grad_sync = False
        if wrapped:
            self._alone_from = len(self._ends_s)

    def _measured(self, parameters: list[torch.Tensor], half: int) -> dict[str, Any]:
        ends_s = self._ends_s[WARM_UP_STEPS:]
        times_s = [after - before for before, after in pairwise(ends_s)]
        as_is_s = times_s[:half] if self._alone_from else times_s
        alone_s = times_s[half + 1 :] if self._alone_from else []
        elements = sum(p.numel() for p in parameters)
        payloads = sorted({max(elements // share, 1) for share in _SIZES} | {elements + 1})
        device = parameters[0].device
        found = [median(as_is_s), median(alone_s) if alone_s else 0.0]
        found += [_all_reduce_s(count, device) for count in payloads]
        found += _busy_of_codecs_s(elements, device)
        slowest = torch.tensor(found, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        step_s, compute_s, *rest = slowest.tolist()
        all_reduce_s, busy_s = rest[: len(payloads)], rest[len(payloads) :]
        return {
            "ranks": dist.get_world_size(), "step_s": step_s, "compute_s": compute_s or None,
            "elements": elements, "tensors": len(parameters),
            "sizes_bytes": [4 * count for count in payloads], "all_reduce_s": all_reduce_s,
            "busy_s": busy_s,
        }  # fmt: skip

    def _end(self, record: dict[str, Any]) -> None:
        grouped = dist.is_initialized()
        if not grouped or dist.get_rank() == 0:
            write_atomically(self._path, json.dumps(record).encode())
        if grouped and "error" not in record:
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # and not an exception: a `finally` of the job may overwrite its checkpoint


def _trainable(optimizers: WeakSet[Optimizer]) -> list[torch.Tensor]:
    parameters: Iterator[torch.Tensor] = (
        p for one in optimizers for group in one.param_groups for p in group["params"]
    )
    return list({id(p): p for p in parameters if p.requires_grad}.values())


_SHARDED = (
    "the job's parameters or their states are sharded: what it sends is no all-reduce of them",
    'see docs/guides/sharded.md: OuterSync(..., tau="auto") measures such a job',
)
# Of a job that has one of these, by the name of its class, whose module need not be there.
_OTHER_WAYS = {
    "FullyShardedDataParallel": _SHARDED,
    "ZeroRedundancyOptimizer": _SHARDED,
    "DeepSpeedEngine": _SHARDED,
    "OuterSync": (
        "the job trains with OuterSync already",
        "print(sync.statistics()) says what to change; DDP in its place can be measured here",
    ),
}


def _problem(parameters: list[torch.Tensor]) -> tuple[str, str] | None:
    """Return why nothing can be measured, and what to do; the same on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return "the job has one rank", "start it with torchrun --nproc-per-node 2, or on two nodes"
    if any(hasattr(p, "placements") for p in parameters):
        return _SHARDED
    if not parameters:
        return "the job's optimizer trains no parameter", "give it the model's parameters"
    kinds = {type(one).__name__ for one in gc.get_objects()}
    return next((why for name, why in _OTHER_WAYS.items() if name in kinds), None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _busy_of_codecs_s(elements: int, device: torch.device) -> list[float]:
    measured = min(elements, _MOST_ENCODED)
    codecs = map(named_codec, CODECS_TO_CHOOSE)
    return [encoding_s(codec, measured, device) * elements / measured for codec in codecs]


def _all_reduce_s(count: int, device: torch.device) -> float:
    buffer = torch.zeros(count, device=device)
    times_s = []
    for _ in range(_REPETITIONS + 1):
        dist.barrier()
        started_s = time.perf_counter()
        dist.all_reduce(buffer)
        _synchronize(device)
        times_s.append(time.perf_counter() - started_s)
    return median(times_s[1:])
