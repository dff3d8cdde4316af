"""How fast one GPU with one software stack computes: a few constants, each with its source.

A matrix product is timed by tiles: its output is cut into tiles, tiles fill waves of
multiprocessors, each tile costs its depth, a fixed start and the writing of its result, which no
multiplication hides. So small, thin and shallow products are slow for their geometry's sake, and
weight gradients that add to 32 bits slower still, not by a fitted curve. Everything else moves
bytes. The module knows no model and no plan. Constants live in one TOML file per pair of GPU and
stack in ``devices/``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from fivefold.errors import ConfigurationError

# Rows, columns, share of the best tile's speed: smaller tiles reuse less of what they load.
_TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (192, 128, 0.98), (128, 192, 0.98), (128, 128, 0.94),
    (256, 64, 0.85), (64, 256, 0.85), (128, 64, 0.8), (64, 64, 0.62),
)  # fmt: skip
_LEAST_DEPTH = 1024
_MATRIX_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp32": 4.0}


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One GPU under one software stack.

    Args:
        name: Of the pair, such as ``"a100-megatron"``.
        peak_flops: Dense peak of 16-bit matrix products.
        peak_flops_fp8: The same of 8-bit products; 0 where there are none.
        memory_bytes: Device memory.
        memory_bandwidth_bytes_per_s: Peak of device memory.
        multiprocessors: How many tiles run at a time.
        gemm_efficiency: Share of the peak that an endless product reaches.
        gemm_efficiency_fp8: The same for 8-bit products, casts included.
        tile_start_s: Fixed time of a tile: first loads, no multiplication yet.
        epilogue_share: Share of writing the results that multiplication does not hide.
        attention_efficiency: Share of the peak inside a fused attention kernel.
        fused_attention: Attention never writes scores to memory (FlashAttention).
        causal_skips: The attention kernel skips what the mask hides.
        recompute_stops_early: Full recomputation of a layer ends with the input of its last
            product, as PyTorch's checkpoints that are not reentrant do; Megatron-LM's repeat all.
        selective_products: Share of the 16-bit products that selective recomputation repeats.
        selective_products_fp8: The same of 8-bit products.
        memory_efficiency: Share of the memory's peak in element-wise kernels.
        kernel_gap_s: Time between two kernels on the device.
        host_kernel_s: Time in which the host can issue one kernel: the floor of small layers.
        overlap_slowdown: Share by which compute slows down while communication runs beside it.
        gradient_bytes: Width of gradients in memory.
        gradient_wire_bytes: Width of gradients when they are reduced.
        parameter_wire_bytes: Width of parameters when they are gathered.
        optimizer_bytes_per_parameter: Memory traffic of one optimizer step per parameter.
        reserved_bytes: What context, buffers and fragmentation take of the memory.
        host_bandwidth_bytes_per_s: To host memory, for offloading.
        shard_gather_share: Share of a ring's rate that gathers of shared parameters reach (ZeRO-3).
        splits_stage_messages: Tensor ranks send a share each to the next stage, gathered there.
        expert_imbalance: Tokens of the fullest rank of an expert group, over the mean.
        slices: Into how many pieces pipelined tensor overlap cuts a product; one stays exposed.
        step_overhead_s: Fixed time of an iteration: data, logging, norms, synchronisation.
        jitter: Share that the slowest of many ranks lags behind the mean, per doubling of nodes.
        sources: Where each constant comes from, by name.

    Raises:
        ConfigurationError: A constant is negative, a share is more than 1.
    """

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    multiprocessors: int
    peak_flops_fp8: float = 0.0
    gemm_efficiency: float = 0.75
    gemm_efficiency_fp8: float = 0.6
    tile_start_s: float = 1e-6
    epilogue_share: float = 1.0
    attention_efficiency: float = 0.5
    fused_attention: bool = False
    causal_skips: bool = False
    recompute_stops_early: bool = False
    selective_products: float = 0.0
    selective_products_fp8: float = 0.0
    memory_efficiency: float = 0.8
    kernel_gap_s: float = 2e-6
    host_kernel_s: float = 1e-5
    overlap_slowdown: float = 0.1
    gradient_bytes: float = 4.0
    gradient_wire_bytes: float = 2.0
    parameter_wire_bytes: float = 2.0
    optimizer_bytes_per_parameter: float = 34.0
    reserved_bytes: float = 2e9
    host_bandwidth_bytes_per_s: float = 25e9
    shard_gather_share: float = 1.0
    splits_stage_messages: bool = True
    expert_imbalance: float = 1.0
    slices: int = 4
    step_overhead_s: float = 0.0
    jitter: float = 0.0
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("peak_flops", "memory_bytes", "memory_bandwidth_bytes_per_s"):
            _check(self, name, low=1.0, high=math.inf)
        for name in ("gemm_efficiency", "attention_efficiency", "memory_efficiency"):
            _check(self, name, low=1e-6, high=1.0)
        for name in ("kernel_gap_s", "host_kernel_s", "step_overhead_s", "jitter"):
            _check(self, name, low=0.0, high=math.inf)

    def matrix_flops(self, *, dtype: str) -> float:
        """Peak times efficiency of an endless matrix product of ``dtype``.

        Raises:
            ConfigurationError: The device has no such products.
        """
        if dtype == "fp8":
            if not self.peak_flops_fp8:
                message = f"{self.name} has no 8-bit matrix products"
                raise ConfigurationError(message, hint="use dtype 'bf16'")
            return self.peak_flops_fp8 * self.gemm_efficiency_fp8
        if dtype not in _MATRIX_BYTES:
            message = f"dtype {dtype!r} is unknown"
            raise ConfigurationError(message, hint=f"use one of {sorted(_MATRIX_BYTES)}")
        return self.peak_flops * self.gemm_efficiency


def _check(device: DeviceSpec, name: str, *, low: float, high: float) -> None:
    value = getattr(device, name)
    if not low <= value <= high or not math.isfinite(value):
        message = f"{name}={value!r} of device {device.name!r} is out of range"
        raise ConfigurationError(message, hint=f"between {low:g} and {high:g}, finite")


@functools.lru_cache(maxsize=200_000)
def gemm_time_s(
    device: DeviceSpec,
    *,
    m: float,
    n: float,
    k: float,
    batch: float = 1.0,
    dtype: str = "bf16",
    output_bytes: float = 2.0,
) -> float:
    """Time of ``batch`` products of m x k with k x n, as waves of tiles or as bytes moved.

    Each tile shape is tried and the fastest taken, as the library's heuristic does. The time is
    that of the fullest multiprocessor, or of reading and writing the matrices where that is more.
    """
    if min(m, n, k, batch) <= 0:
        return 0.0
    rate = device.matrix_flops(dtype=dtype)
    best_s = math.inf
    for rows, columns, speed in _TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
        waves = math.ceil(tiles / device.multiprocessors)
        work = waves * device.multiprocessors * 2.0 * rows * columns
        # Few tiles of a deep product share their depth out, and add the parts up afterwards.
        parts = max(1, min(int(device.multiprocessors // max(tiles, 1)), int(k // _LEAST_DEPTH)))
        added_s = memory_time_s(device, 8.0 * (parts - 1) * batch * m * n)
        deep_s = work * k / (parts * rate * speed) + added_s
        best_s = min(best_s, deep_s + waves * device.tile_start_s)
    written_s = memory_time_s(device, output_bytes * batch * m * n)
    loaded_s = memory_time_s(device, _MATRIX_BYTES[dtype] * batch * (m * k + k * n))
    slow_s = best_s + device.epilogue_share * written_s
    return max(slow_s, loaded_s + written_s) + device.kernel_gap_s


def memory_time_s(device: DeviceSpec, size_bytes: float) -> float:
    """Time in which element-wise kernels move ``size_bytes`` to and from device memory."""
    return size_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
