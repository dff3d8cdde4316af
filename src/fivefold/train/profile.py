"""What this machine needs for the trainer's own step, timed without communication.

The step is that of ``fivefold train``: same model, data, optimizer, precision and threads. All
ranks measure at the same time, as they will train at the same time, and the slowest counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

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


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates of plain kernels on a rank's device, all ranks at work, the slowest counted."""

    product_flops: float
    copy_bytes_per_s: float


class _TimedMethod(Method):
    """No communication; the optimizer's updates are timed."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__(model)
        self._device = device
        self.passes_s: list[float] = []
        self.updates_s: list[float] = []

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
        self.passes_s.append(self.now() - self._began_s)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Do and time the optimizer's step."""
        began_s = self.now()
        super().update(optimizer)
        self.updates_s.append(self.now() - began_s)


def measure_steps(config: TrainConfig, ranks: Ranks) -> StepTimes:
    """Time the trainer's step on every rank at once, without communication.

    Args:
        config: The run's configuration; its method of synchronisation is left out.
        ranks: The ranks.

    Returns:
        Means, as a training feels them, equal on all ranks; of 12 to 60 steps that take 10 seconds
        if they can, because the speed of a shared machine changes from second to second.

    Raises:
        DataError: There is no usable text.
    """
    torch.set_num_threads(config.run.threads)
    tokenizer = load_tokenizer(config.data.tokenizer)
    corpus = load_corpus(config.data, tokenizer)
    experts = share_experts(config, ranks)
    model = Transformer(
        config.model,
        vocab_size=tokenizer.vocab_size,
        sequence_length=config.data.sequence_length,
        seed=config.run.seed,
        group=None if experts is None else experts.for_layers,
    ).to(ranks.device)
    method = _TimedMethod(model, ranks.device)
    optimizer = make_optimizer(model, config)
    parts = TrainedParts(model=model, optimizer=optimizer, method=method, mixtures=model.mixtures)
    runner = StepRunner(config, ranks, parts=parts, tokens=corpus.train)
    for step in range(_WARM_UP):
        began_s = method.now()
        runner.run(step)
    last_s = max(ranks.gather(method.now() - began_s, what="the begin of the measured steps"))
    steps = min(max(math.ceil(_MEASURED_S / last_s), _LEAST_STEPS), _MOST_STEPS)
    method.passes_s.clear()
    method.updates_s.clear()
    meter, wholes_s, exchanges_s = ProcessMeter(), [], []
    _take_exchanges_s(experts)
    for step in range(_WARM_UP, _WARM_UP + steps):
        began_s = method.now()
        runner.run(step)
        exchanges_s.append(_take_exchanges_s(experts))
        wholes_s.append(method.now() - began_s - exchanges_s[-1])
    waited = meter.record()["waited_for_cpu"] or 0.0
    if experts is not None:
        experts.close()
    passes_s = (sum(method.passes_s) - sum(exchanges_s)) / steps
    update_s = sum(method.updates_s) / steps
    own = StepTimes(
        model_s=passes_s,
        optimizer_s=update_s,
        rest_s=max(sum(wholes_s) / steps - passes_s - update_s, 0.0),
        num_parameters=model.num_parameters,
        vocab=tokenizer.vocab_size,
        memory_bytes=float(meter.record()["memory_bytes"]),
        waited_for_cpu=waited,
    )
    found = ranks.gather(asdict(own), what="the times of a step")
    return StepTimes(**{name: max(one[name] for one in found) for name in found[0]})


def _take_exchanges_s(experts: ExpertRanks | None) -> float:
    """Return the seconds in exchanges between the experts' ranks since the last call.

    They lie in the passes, and are the network's time.
    """
    calls = [] if experts is None else experts.take_calls()
    return sum(call.end_s - call.start_s for call in calls)


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
        return min(times_s[1:])

    product_s = fastest_s(lambda: a @ a)
    copy_s = fastest_s(lambda: target.copy_(source))
    own = {"product_flops": product_s / (2.0 * _PRODUCT**3), "copy_bytes_per_s": copy_s}
    slow = ranks.gather(own, what="the device's rates")
    return DeviceRates(
        product_flops=1.0 / max(one["product_flops"] for one in slow),
        copy_bytes_per_s=2.0 * _COPIED_BYTES / max(one["copy_bytes_per_s"] for one in slow),
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
        Seconds of each size on the slowest rank, equal on all ranks.
    """
    timer = _TimedMethod(torch.nn.Module(), ranks.device)
    times_s = []
    for size in sizes_bytes:
        payload = torch.ones(max(1, size // 4), device=ranks.device)
        own = []
        for _ in range(repetitions + 1):
            ranks.gather(None, what="the begin of an all-reduce")
            began_s = timer.now()
            with ranks.guard("an all-reduce that is timed"):
                dist.all_reduce(payload)
            own.append(timer.now() - began_s)
        slow = ranks.gather(statistics.median(own[1:]), what="the times of an all-reduce")
        times_s.append(max(slow))
    return times_s
