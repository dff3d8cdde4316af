"""Seconds, launches and bytes of a call, and what the machine can do at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Ceilings", "Clock", "ceilings_of"]

Call = Callable[[], object]
_BUSY_CYCLES = 6_000_000  # 3 ms at 2 GHz: longer than a call takes the host


class Clock:
    """Times calls on the device, each after the caches were written over.

    The device is kept busy meanwhile, so that a call's launches are queued before its time begins:
    what the host takes is ``host_seconds``, and hidden where kernels follow each other.

    Args:
        device: A CUDA device, or the CPU for a dry run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        size = 0
        if self.on_gpu:
            size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flood = torch.empty(size, dtype=torch.uint8, device=device)

    def seconds(self, call: Call) -> float:
        """One call, from its first launch to its last."""
        if self.on_gpu:
            _keep_busy()
        self._flood.zero_()
        if not self.on_gpu:
            start_s = time.perf_counter()
            call()
            return time.perf_counter() - start_s
        begin, end = _event(), _event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return elapsed_ms / 1e3

    def in_turns(self, calls: Mapping[str, Call], *, repetitions: int) -> dict[str, list[float]]:
        """Seconds by name; who begins changes from turn to turn. All were called before."""
        names = list(calls)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(repetitions):
            for place in range(len(names)):
                name = names[(place + turn) % len(names)]
                seconds[name].append(self.seconds(calls[name]))
        return seconds

    def host_seconds(self, call: Call, *, repetitions: int = 7) -> float:
        """Return the least time until a call returns, while the device has other work."""
        found = []
        for _ in range(repetitions):
            if self.on_gpu:
                self.settle()
                _keep_busy()
            start_s = time.perf_counter()
            call()
            found.append(time.perf_counter() - start_s)
        self.settle()
        return min(found)

    def launches(self, call: Call) -> int:
        """Kernels, copies and fills on the GPU; 0 on the CPU, which has none."""
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CUDA] if self.on_gpu else [activity.CPU]
        with torch.profiler.profile(activities=kinds) as profile:
            call()
            self.settle()
        # By name: torch does not export the enumeration.
        places = [str(event.device_type) for event in profile.events() or []]
        return sum(place.endswith("CUDA") for place in places)

    def peak_bytes(self, call: Call) -> int | None:
        """Memory above what was in use before; None on the CPU."""
        if not self.on_gpu:
            call()
            return None
        self.settle()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        self.settle()
        return torch.cuda.max_memory_allocated(self.device) - before

    def settle(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What was measured of the machine, as the physical limits of this run.

    Attributes:
        flops_per_s: Of square matrix products, by kind of arithmetic.
        bytes_per_s: Read and written by a copy.
    """

    flops_per_s: dict[str, float]
    bytes_per_s: float


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap


def arithmetic_of(dtype: torch.dtype, precision: str) -> str:
    """The kind of arithmetic that limits a data type."""
    return precision if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def ceilings_of(clock: Clock) -> Ceilings:
    """Measure square products and a copy, the best of five.

    Args:
        clock: Of the device; on the CPU the sizes are tiny.

    Returns:
        The ceilings.
    """
    side, length = (8192, 2**31) if clock.on_gpu else (64, 2**16)
    found = {}
    for dtype, precision in (
        (torch.bfloat16, ""),
        (torch.float16, ""),
        (torch.float32, "tf32"),
        (torch.float32, "ieee"),
    ):
        found[arithmetic_of(dtype, precision)] = _products(clock, side, dtype, precision)
    source = torch.zeros(length, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    best_s = min(clock.seconds(lambda: target.copy_(source)) for _ in range(5))
    return Ceilings(flops_per_s=found, bytes_per_s=2 * length / best_s)


def _keep_busy() -> None:
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - as torch's own benchmarks do


def _products(clock: Clock, side: int, dtype: torch.dtype, precision: str) -> float:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        left, right = (
            torch.ones(side, side, dtype=dtype, device=clock.device).normal_() for _ in range(2)
        )
        best_s = min(clock.seconds(lambda: left @ right) for _ in range(5))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return 2 * side**3 / best_s
