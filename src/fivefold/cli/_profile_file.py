"""The cluster file of ``fivefold profile``: measured links, and constants of the device at hand."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from fivefold.cli._later import later
from fivefold.cli._plan_job import model_of, precision_of
from fivefold.units import format_bytes, format_duration_s

with later():
    from fivefold.collectives.pricing import fabric_from_topology
    from fivefold.network.profiling import Profile
    from fivefold.runs import format_toml
    from fivefold.runs.ranks import Ranks
    from fivefold.strategy import Cluster, ParallelPlan
    from fivefold.strategy.calibrate import calibrated_device, calibrated_fabric
    from fivefold.strategy.cluster import DeviceSpec, reached_tiers
    from fivefold.train.config import TrainConfig
    from fivefold.train.profile import DeviceRates, StepTimes, measure_all_reduce, measure_steps

_DEVICE_KEYS = (
    *("peak_flops", "gemm_efficiency", "attention_efficiency", "memory_efficiency"),
    *("tile_start_s", "optimizer_bytes_per_parameter"),
)
_DEVICE_TEXTS = {
    "memory": ("memory_bytes", "B"), "memory_bandwidth": ("memory_bandwidth_bytes_per_s", "B/s"),
    "kernel_gap": ("kernel_gap_s", "s"), "host_kernel": ("host_kernel_s", "s"),
    "reserved": ("reserved_bytes", "B"), "step_overhead": ("step_overhead_s", "s"),
}  # fmt: skip
_BUSY = 0.05  # share of the time without a processor that spoils a measurement


@dataclass(frozen=True, kw_only=True)
class MeasuredJob:
    """What the trainer's step and its all-reduces took."""

    config: TrainConfig
    times: StepTimes
    sizes_bytes: tuple[int, ...]
    all_reduces_s: tuple[float, ...]


def measure_job(config: TrainConfig, ranks: Ranks) -> MeasuredJob:
    """Time the step of a configuration, and all-reduces of its gradients; a collective call."""
    times = measure_steps(config, ranks)
    whole = 4 * times.num_parameters
    sizes = (max(whole // 4, 4), whole)
    found = measure_all_reduce(ranks, sizes) if ranks.world_size > 1 else []
    return MeasuredJob(config=config, times=times, sizes_bytes=sizes, all_reduces_s=tuple(found))


@dataclass(frozen=True, kw_only=True)
class MeasuredCluster:
    """All that one profile found.

    Args:
        profile: The links.
        rates: What plain kernels reach.
        base: The known cluster whose constants stand where nothing was measured.
        step: The trainer's step; None where no job was given.
    """

    profile: Profile
    rates: DeviceRates
    base: Cluster
    step: MeasuredJob | None

    @property
    def is_busy(self) -> bool:
        """Return whether other programs took processors from the measurement."""
        return self.step is not None and self.step.times.waited_for_cpu > _BUSY

    def device(self) -> DeviceSpec:
        """Return the device: measured kernels, then the trainer's step where it was measured."""
        known = self.base.device
        is_processor = known.name == "cpu-lab"
        device = dataclasses.replace(
            known,
            memory_bytes=_memory_bytes(self.profile) if is_processor else known.memory_bytes,
            memory_bandwidth_bytes_per_s=max(
                self.rates.copy_bytes_per_s, known.memory_bandwidth_bytes_per_s * (not is_processor)
            ),
            peak_flops=self.rates.product_flops if is_processor else known.peak_flops,
        )
        if self.step is None:
            return device
        config, times = self.step.config, self.step.times
        model = model_of(config, vocab=times.vocab)
        cluster = dataclasses.replace(self.base, device=device)
        plan = ParallelPlan(
            global_batch=config.optim.batch_size * config.optim.accumulation,
            micro_batch=config.optim.batch_size,
            dtype=precision_of(config, cluster),
        )
        return calibrated_device(
            cluster, model, plan, model_s=times.model_s, optimizer_s=times.optimizer_s,
            rest_s=times.rest_s, memory_bytes=times.memory_bytes,
        )  # fmt: skip

    def cluster(self) -> Cluster:
        """Return the cluster without what its all-reduces took."""
        topology = self.profile.to_topology()
        fabric = reached_tiers(fabric_from_topology(topology), self.base.fabric)
        return dataclasses.replace(
            self.base, device=self.device(), fabric=fabric, topology=topology,
            num_gpus=topology.num_ranks,
        )  # fmt: skip

    def to_toml(self) -> str:
        """Return the cluster file."""
        device = self.device()
        table = {key: getattr(device, key) for key in _DEVICE_KEYS} | {
            key: f"{getattr(device, name)!r} {unit}" for key, (name, unit) in _DEVICE_TEXTS.items()
        }
        lines = [f'base = "{self.base.name}"', ""]
        sources = {"peak_flops": "measured: a matrix product, all ranks at once"}
        text = ""
        if self.profile.num_ranks > 1:
            lines.append(self.profile.to_topology().to_toml())
        else:
            lines.append("gpus = 1\n")
        if self.step is not None:
            what = f"measured: steps of {self.step.config.run.output.name}, all ranks at once"
            if self.is_busy:
                what += "; other programs were running"
            sources |= dict.fromkeys(("peak_flops", "memory_bandwidth", "step_overhead"), what)
        if self.step is not None and self.step.all_reduces_s:
            outer = calibrated_fabric(
                self.cluster(), ranks=self.profile.num_ranks,
                sizes_bytes=self.step.sizes_bytes, times_s=self.step.all_reduces_s,
            ).tiers[-1]  # fmt: skip
            text = (
                f'\n[[tier]]\nname = "{outer.name}"\nefficiency = {outer.efficiency!r}\n'
                f'base = "{outer.base_s!r} s"\n'
            )
            sources[f"{outer.name}.efficiency"] = "measured: all-reduces of the job's gradients"
        return "\n".join(lines) + "\n" + format_toml({"device": table, "sources": sources}) + text

    def facts(self) -> dict[str, Any]:
        """Return what was measured beside the links, as JSON can hold it."""
        found: dict[str, Any] = {"device": dataclasses.asdict(self.rates)}
        if self.step is not None:
            found["step"] = dataclasses.asdict(self.step.times)
            found["all_reduces"] = dict(
                zip(map(str, self.step.sizes_bytes), self.step.all_reduces_s, strict=False)
            )
        return found

    def lines(self) -> list[str]:
        """Return what was measured beside the links, for people."""
        rates = self.rates
        lines = [""]
        lines.append(
            f"a rank, all at work     {rates.product_flops / 1e9:.3g} GFLOP/s in products, "
            f"{format_bytes(rates.copy_bytes_per_s)}/s in copies"
        )
        if self.step is not None:
            times = self.step.times
            lines.append(
                f"a step of the job       passes {format_duration_s(times.model_s)}, optimizer "
                f"{format_duration_s(times.optimizer_s)}, rest {format_duration_s(times.rest_s)}"
            )
            lines += [
                f"all-reduce of {format_bytes(size):<9} {format_duration_s(time_s)}"
                for size, time_s in zip(
                    self.step.sizes_bytes, self.step.all_reduces_s, strict=False
                )
            ]
        if self.is_busy:
            share = self.step.times.waited_for_cpu if self.step is not None else 0.0
            lines.append(
                f"busy: ranks were ready and without a processor for {share:.0%} of the time; end "
                "other programs, or start fewer ranks than cores, and measure again"
            )
        return lines


def _memory_bytes(profile: Profile) -> float:
    """Return a rank's share of this host's memory."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    emulated = "FIVEFOLD_LAB" in os.environ  # all hosts are this one
    sharing = profile.num_ranks if emulated else profile.hosts.count(profile.hosts[0])
    return float(whole // sharing)
