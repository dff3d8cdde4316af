"""What this machine needs for the trainer's own step, alone and beside an all-reduce.

The step is that of ``fivefold train``: same model, data, optimizer, precision and threads. All
ranks measure at the same time, as they will train at the same time, and the slowest counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import require_number
from fivefold.measured import NOISE, consistent_times_s
from fivefold.runs.machine import ProcessMeter
from fivefold.runs.ranks import Ranks
from fivefold.train._corpus import load_corpus, load_tokenizer
from fivefold.train._expert_ranks import ExpertRanks, share_experts
from fivefold.train._loop import make_optimizer
from fivefold.train._methods import Method
from fivefold.train._model import Transformer
from fivefold.train._step import StepRunner, TrainedParts
from fivefold.train.config import TrainConfig

_PRODUCT = 1024  # rows and columns of the matrix products that are timed
_COPIED_BYTES = 64_000_000
_REPETITIONS = 5
_WARM_UP = 3  # steps
_LEAST_STEPS, _MOST_STEPS, _MEASURED_S = 12, 60, 10.0
_TURNS = 4  # of steps alone and steps beside an all-reduce
_FIRST_BYTES = 2**16
_AGAIN = "measure again, on a machine that is not busy"
_TICK_S = 1e-9  # of the clock: what took none of them took one
_BESIDE_S = 0.5  # of the longest all-reduce beside steps, so that there are many


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Mean seconds of one optimizer step's parts, of the slowest rank."""

    model_s: float  # forward and backward passes
    optimizer_s: float  # the optimizer's update
    rest_s: float  # reading the batch, clipping, setting the rate
    num_parameters: int  # of the model
    vocab: int  # tokens of its vocabulary
    memory_bytes: float  # most memory that a rank held
    # Share of the time in which the rank was ready and had no processor: more than a few percent
    # tells that other programs were running.
    waited_for_cpu: float
    # Seconds by which steps take longer for each second of all-reduces (their time alone) that
    # runs beside them; None where that was not measured.
    overlap_slowdown: float | None = None

    def __post_init__(self) -> None:
        for name in ("model_s", "optimizer_s"):
            require_number(f"the measured {name}", getattr(self, name), positive=True, hint=_AGAIN)
        for name in ("rest_s", "memory_bytes", "waited_for_cpu"):
            require_number(f"the measured {name}", getattr(self, name), hint=_AGAIN)


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates of plain kernels on a rank's device, all ranks at work, the slowest counted."""

    product_flops: float
    copy_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("product_flops", "copy_bytes_per_s"):
            require_number(f"the measured {name}", getattr(self, name), positive=True, hint=_AGAIN)


class _TimedMethod(Method):
    """No communication; the optimizer's updates are timed."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__(model)
        self._device = device
        self.passes_s = self.updates_s = 0.0  # of all since they were last set to 0

    def now(self) -> float:
        """Return the time when all that was issued is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run the forward pass; the clock of a pass starts."""
        self._began_s = self.now()
        return super().loss(inputs, targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass; the clock stops."""
        super().backward(loss)
        self.passes_s += self.now() - self._began_s

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Do and time the optimizer's step."""
        began_s = self.now()
        super().update(optimizer)
        self.updates_s += self.now() - began_s


def measure_steps(config: TrainConfig, ranks: Ranks) -> StepTimes:
    """Time the trainer's step on every rank at once, without communication and beside it.

    On processors, where a message in the background takes time from the passes, as many steps are
    timed beside all-reduces as alone, in turns; not with experts on several ranks, whose exchanges
    would share the link.

    Args:
        config: The run's configuration; its method of synchronisation is left out.
        ranks: The ranks.

    Returns:
        Means, as a training feels them, equal on all ranks; of 12 to 60 steps that take 10 seconds
        if they can, because the speed of a shared machine changes from second to second.

    Raises:
        DataError: There is no usable text.
    """
    steps = _TimedSteps(config, ranks)
    last_s = max(ranks.gather(steps.warm_up(), what="the begin of the measured steps"))
    count = min(max(math.ceil(_MEASURED_S / last_s), _LEAST_STEPS), _MOST_STEPS)
    if ranks.world_size > 1 and steps.experts is None and ranks.device.type == "cpu":
        slowdown = _measure_overlap(steps, ranks, count)
    else:
        slowdown = None
        steps.run(count)
    found = ranks.gather(steps.means(), what="the times of a step")
    steps.close()
    slowest = {name: max(one[name] for one in found) for name in found[0]}
    return StepTimes(**slowest, overlap_slowdown=slowdown)


class _TimedSteps:
    """The trainer's steps without synchronisation; those of ``run`` are counted."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        torch.set_num_threads(config.run.threads)
        tokenizer = load_tokenizer(config.data.tokenizer)
        corpus = load_corpus(config.data, tokenizer)
        self.experts = share_experts(config, ranks)
        model = Transformer(
            config.model,
            vocab_size=tokenizer.vocab_size,
            sequence_length=config.data.sequence_length,
            seed=config.run.seed,
            group=None if self.experts is None else self.experts.for_layers,
        ).to(ranks.device)
        self._method = _TimedMethod(model, ranks.device)
        optimizer = make_optimizer(model, config)
        parts = TrainedParts(
            model=model, optimizer=optimizer, method=self._method, mixtures=model.mixtures
        )
        self._runner = StepRunner(config, ranks, parts=parts, tokens=corpus.train)
        self.num_parameters, self._vocab = model.num_parameters, tokenizer.vocab_size
        self._next = self._counted = 0
        self._passes_s = self._updates_s = self._wholes_s = 0.0
        self._machine: dict[str, Any] | None = None
        self._memory_bytes = 0.0

    def warm_up(self) -> float:
        """Run the first steps; return the seconds of the last."""
        self.run_uncounted(_WARM_UP - 1)
        last_s = self.run_uncounted(1)
        # Later the payloads of all-reduces lie in memory too.
        self._memory_bytes = float(ProcessMeter().record()["memory_bytes"])
        return last_s

    def run(self, count: int) -> float:
        """Run and count some steps; return their seconds, those of experts' exchanges left out."""
        self._method.passes_s = self._method.updates_s = 0.0
        _take_exchanges_s(self.experts)
        meter = ProcessMeter(self._machine)
        whole_s = self.run_uncounted(count)
        self._machine = meter.record()
        exchanges_s = _take_exchanges_s(self.experts)
        self._counted += count
        self._passes_s += self._method.passes_s - exchanges_s
        self._updates_s += self._method.updates_s
        self._wholes_s += whole_s - exchanges_s
        return whole_s - exchanges_s

    def run_uncounted(self, count: int) -> float:
        """Run some steps; return their seconds."""
        began_s = self._method.now()
        for _ in range(count):
            self._runner.run(self._next)
            self._next += 1
        return self._method.now() - began_s

    def means(self) -> dict[str, Any]:
        """Return this rank's ``StepTimes``, by name."""
        rest_s = self._wholes_s - self._passes_s - self._updates_s
        machine = self._machine or {}
        return {
            "model_s": self._passes_s / self._counted,
            "optimizer_s": self._updates_s / self._counted,
            "rest_s": max(rest_s, 0.0) / self._counted,
            "num_parameters": self.num_parameters,
            "vocab": self._vocab,
            "memory_bytes": self._memory_bytes,
            "waited_for_cpu": machine.get("waited_for_cpu") or 0.0,
        }

    def close(self) -> None:
        """Give back what the experts' exchange holds."""
        if self.experts is not None:
            self.experts.close()


def _take_exchanges_s(experts: ExpertRanks | None) -> float:
    """Return the seconds in exchanges between the experts' ranks since the last call.

    They lie in the passes, and are the network's time.
    """
    calls = [] if experts is None else experts.take_calls()
    return sum(call.end_s - call.start_s for call in calls)


def _measure_overlap(steps: _TimedSteps, ranks: Ranks, count: int) -> float:
    """Return by how much steps slow down beside all-reduces, per second of all-reduces alone."""
    whole = 4 * steps.num_parameters
    size = min(whole, _FIRST_BYTES)
    while size < whole and 4 * measure_all_reduce(ranks, [size], repetitions=1)[0] < _BESIDE_S:
        size = min(whole, 4 * size)
    group = dist.new_group(backend="gloo", timeout=ranks.timeout)
    each, lost_s, sent_s = math.ceil(count / _TURNS), 0.0, 0.0
    for _ in range(_TURNS):
        alone_s = steps.run(each)
        (message_s,) = measure_all_reduce(ranks, [size], repetitions=3)
        ranks.gather(None, what="the begin of steps beside all-reduces")
        messages = _BackgroundAllReduces(group, size)
        with ranks.guard("an all-reduce beside steps"), messages:
            lost_s += steps.run_uncounted(each) - alone_s
        sent_s += messages.number * message_s
    dist.destroy_process_group(group)
    slowest: float = max(ranks.gather(lost_s / sent_s, what="the slow-down beside all-reduces"))
    return min(max(slowest, 0.0), 1.0)


class _BackgroundAllReduces:
    """All-reduces one after another in a thread, until a rank leaves the context.

    Attributes:
        number: How many ran within the context, the last in part.
    """

    number: float

    def __init__(self, group: dist.ProcessGroup, size_bytes: int) -> None:
        self._group = group
        self._payload = torch.zeros(1 + size_bytes // 4)
        self._is_over = False
        self._done, self._spent_s = 0, 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fivefold-all-reduces")

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()
        self._work = self._thread.submit(self._run)

    def __exit__(self, *_: object) -> None:
        within_s = time.perf_counter() - self._began_s
        self._is_over = True
        self._thread.shutdown()
        self._work.result()
        self.number = self._done * min(1.0, within_s / self._spent_s)

    def _run(self) -> None:
        while self._payload[-1] == 0:  # the sum of the flags: all ranks stop after the same one
            self._payload[-1] = float(self._is_over)
            dist.all_reduce(self._payload, group=self._group)
            self._done += 1
        self._spent_s = time.perf_counter() - self._began_s


def measure_device(ranks: Ranks, *, threads: int = 1) -> DeviceRates:
    """Time plain matrix products and copies on every rank at once.

    Args:
        ranks: The ranks.
        threads: Processor threads of a rank.
    """
    torch.set_num_threads(threads)
    device = ranks.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.randn(_PRODUCT, _PRODUCT, device=device).to(dtype)
    source = torch.ones(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    timer = _TimedMethod(torch.nn.Module(), device)

    def fastest_s(work: Any) -> float:
        times_s = []
        for _ in range(_REPETITIONS + 1):
            ranks.gather(None, what="the begin of a measurement")
            began_s = timer.now()
            work()
            times_s.append(timer.now() - began_s)
        return max(min(times_s[1:]), _TICK_S)

    product_s = fastest_s(lambda: a @ a)
    copy_s = fastest_s(lambda: target.copy_(source))
    slow = ranks.gather((product_s, copy_s), what="the device's rates")
    slowest_product_s, slowest_copy_s = map(max, zip(*slow, strict=True))
    return DeviceRates(
        product_flops=2.0 * _PRODUCT**3 / slowest_product_s,
        copy_bytes_per_s=2.0 * _COPIED_BYTES / slowest_copy_s,
    )


def measure_all_reduce(
    ranks: Ranks, sizes_bytes: Sequence[int], *, repetitions: int = 5
) -> list[float]:
    """Time an all-reduce of float32 over all ranks; a collective call.

    Args:
        ranks: At least two.
        sizes_bytes: Payloads.
        repetitions: All-reduces of each size, of which the median counts.

    Returns:
        Seconds of each size on the slowest rank, equal on all ranks. They rise with the size, by
        1 % where noise hides it, and never per byte (``fivefold.measured``).
    """
    timer = _TimedMethod(torch.nn.Module(), ranks.device)
    found = {}
    for size in sorted(sizes_bytes):
        payload = torch.ones(max(1, size // 4), device=ranks.device)
        own = []
        for _ in range(repetitions + 1):
            ranks.gather(None, what="the begin of an all-reduce")
            began_s = timer.now()
            with ranks.guard("an all-reduce that is timed"):
                dist.all_reduce(payload)
            own.append(timer.now() - began_s)
        slow = ranks.gather(statistics.median(own[1:]), what="the times of an all-reduce")
        found[size] = max(*slow, _TICK_S)
    times_s = consistent_times_s([*found], [*found.values()], least_rise=NOISE)
    risen = dict(zip(found, times_s, strict=True))
    return [risen[size] for size in sizes_bytes]
