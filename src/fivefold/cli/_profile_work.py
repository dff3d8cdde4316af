"""The work of ``fivefold profile``."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from fivefold.cli._options import show, write_json
from fivefold.cli._plan_files import model_of, precision_of
from fivefold.collectives.pricing import fabric_from_topology
from fivefold.network.profiling import Profile
from fivefold.report.page import DataTable
from fivefold.runs import format_toml, write_text
from fivefold.runs.ranks import Ranks
from fivefold.strategy import Cluster, ParallelPlan
from fivefold.strategy.calibrate import calibrated_device, calibrated_fabric
from fivefold.strategy.cluster import DeviceSpec, named_cluster_of, reached_tiers
from fivefold.train.config import TrainConfig
from fivefold.train.profile import DeviceRates, StepTimes, measure_all_reduce, measure_steps
from fivefold.units import format_bytes, format_bytes_per_s, format_duration_s

_DEVICE_KEYS = (
    *("peak_flops", "gemm_efficiency", "attention_efficiency", "memory_efficiency"),
    *("tile_start_s", "optimizer_bytes_per_parameter", "overlap_slowdown"),
)
_DEVICE_TEXTS = {
    "memory": ("memory_bytes", "B"), "memory_bandwidth": ("memory_bandwidth_bytes_per_s", "B/s"),
    "kernel_gap": ("kernel_gap_s", "s"), "host_kernel": ("host_kernel_s", "s"),
    "reserved": ("reserved_bytes", "B"), "step_overhead": ("step_overhead_s", "s"),
}  # fmt: skip
_BUSY = 0.05  # share of the time without a processor that spoils a measurement


@dataclass(frozen=True, kw_only=True)
class MeasuredJob:
    """Times of the trainer's step, and of all-reduces by their bytes."""

    config: TrainConfig
    times: StepTimes
    all_reduces_s: Mapping[int, float]


def measure_job(config: TrainConfig, ranks: Ranks) -> MeasuredJob:
    """Time the step of a configuration, and all-reduces of its gradients; a collective call."""
    times = measure_steps(config, ranks)
    whole = 4 * times.num_parameters
    sizes = (max(whole // 4, 4), whole) if ranks.world_size > 1 else ()
    found = dict(zip(sizes, measure_all_reduce(ranks, sizes), strict=True)) if sizes else {}
    return MeasuredJob(config=config, times=times, all_reduces_s=found)


@dataclass(frozen=True, kw_only=True)
class MeasuredCluster:
    """All that one profile found: the links, what plain kernels reach, the trainer's step.

    Constants of ``base``, the known cluster, stand where nothing was measured.
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
        found = calibrated_device(
            cluster, model, plan, model_s=times.model_s, optimizer_s=times.optimizer_s,
            rest_s=times.rest_s, memory_bytes=times.memory_bytes,
        )  # fmt: skip
        if times.overlap_slowdown is None:
            return found
        return dataclasses.replace(found, overlap_slowdown=times.overlap_slowdown)

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
            if self.step.times.overlap_slowdown is not None:
                sources["overlap_slowdown"] = "measured: the same steps beside all-reduces"
        if self.step is not None and self.step.all_reduces_s:
            outer = calibrated_fabric(
                self.cluster(), ranks=self.profile.num_ranks,
                sizes_bytes=tuple(self.step.all_reduces_s),
                times_s=tuple(self.step.all_reduces_s.values()),
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
            found["all_reduces"] = {str(size): t for size, t in self.step.all_reduces_s.items()}
        return found

    def lines(self) -> list[str]:
        """Return what was measured beside the links, for people."""
        rates = self.rates
        speed = (
            f"{rates.product_flops / 1e9:.3g} GFLOP/s in products, "
            f"{format_bytes(rates.copy_bytes_per_s)}/s in copies"
        )
        lines = ["", f"a rank, all at work     {speed}"]
        if self.step is None:
            return lines
        times = self.step.times
        lines.append(
            f"a step of the job       passes {format_duration_s(times.model_s)}, optimizer "
            f"{format_duration_s(times.optimizer_s)}, rest {format_duration_s(times.rest_s)}"
        )
        if times.overlap_slowdown is not None:
            share = f"{times.overlap_slowdown:.0%} of its time"
            lines.append(f"beside an all-reduce    {share} is added to the steps")
        lines += [
            f"all-reduce of {format_bytes(size):<9} {format_duration_s(time_s)}"
            for size, time_s in self.step.all_reduces_s.items()
        ]
        if self.is_busy:
            lines.append(
                f"busy: ranks were ready and without a processor for {times.waited_for_cpu:.0%} of "
                "the time; end other programs, or start fewer ranks than cores, and measure again"
            )
        return lines


def _memory_bytes(profile: Profile) -> float:
    """Return a rank's share of this host's memory."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    emulated = "FIVEFOLD_LAB" in os.environ  # all hosts are this one
    sharing = profile.num_ranks if emulated else profile.hosts.count(profile.hosts[0])
    return float(whole // sharing)


_SHOWN_PAIRS = 56  # all pairs of eight ranks


def base_of(*, on_gpu: bool) -> str:
    """Return the known device and software that are nearest to this machine's."""
    return named_cluster_of(torch.cuda.get_device_name()) if on_gpu else "cpu-lab"


def hand_on(found: MeasuredCluster, output: Path | None, *, as_json: bool) -> None:
    profile = found.profile
    if output is not None:
        write_text(output, found.to_toml())
    if as_json:
        write_json(profile.to_dict() | found.facts())
        return
    _show(found)
    if output is not None:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"[bold]profile[/]  written: {escape(str(output))}; every command takes it as --cluster"
        )


def _show(found: MeasuredCluster) -> None:
    profile = found.profile
    pairs = list(itertools.permutations(range(profile.num_ranks), 2))
    alphas, rates, residuals = profile.alpha_s, profile.rates_bytes_per_s, profile.residuals
    bounds = profile.usable_rates_bytes_per_s
    rows = tuple(
        (
            f"rank{a} ({profile.hosts[a]})",
            f"rank{b} ({profile.hosts[b]})",
            format_duration_s(alphas[a, b]),
            ("" if rates[a, b] < float("inf") else "over ") + format_bytes_per_s(bounds[a, b]),
            f"{100 * residuals[a, b, -1]:+.1f} %",
            f"{100 * max(residuals[a, b].tolist(), key=abs):+.1f} %",
        )
        for a, b in pairs[:_SHOWN_PAIRS]
    )
    names = ("from", "to", "alpha", "bandwidth", "fit error, largest size", "all sizes")
    table = DataTable.of(names, rows, text_columns=(1,))
    more = len(pairs) - _SHOWN_PAIRS
    lines = [f"and {more} more pairs (--json has all)"] if more > 0 else []
    lines += [*_contention_lines(profile), *found.lines()]
    show(f"links between {profile.num_ranks} ranks", table, *lines)


def _contention_lines(profile: Profile) -> list[str]:
    found, text = profile.contention, format_bytes_per_s
    if found is None:
        return []
    out, into = found.out_bytes_per_s, found.in_bytes_per_s
    lines = [
        "",
        f"to all others at once    {text(out.min())} to {text(out.max())} a rank",
        f"from all others at once  {text(into.min())} to {text(into.max())} a rank",
        f"all to all at once       {text(found.all_bytes_per_s)} a rank",
    ]
    hosts = found.host_out_bytes_per_s
    return [*lines, *(f"all ranks of {host} at once  {text(rate)}" for host, rate in hosts.items())]
