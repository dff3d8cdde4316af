"""Run folders with values that can be checked by hand.

64 steps of 0.25 s computation and 2048 tokens on 2 ranks, validated every 16 steps for 0.5 s.
DDP waits 0.5 s per step; CO2 (tau 8) launches one all-reduce of 0.5 s per round, has a boundary
of 1/16 s per round, and waits 0.5 s once, when it drains at the end:

=======  ========  ==========  =========  ========  ====  ==========
method   compute   waiting     boundary   validate  wall  tokens/s
=======  ========  ==========  =========  ========  ====  ==========
none     16        0           0          2         18    131072/16
ddp      16        32          0          2         50    131072/48
co2      16        0.5         0.5        2         19    131072/17
=======  ========  ==========  =========  ========  ====  ==========
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 64
TAU = 8
TOKENS_PER_STEP = 2048
PAYLOAD_BYTES = 12_000_000
UNIX_S = 1_790_000_000.0
LABELS = {"none": "no communication", "ddp": "DDP", "co2": "CO2 (tau 8)"}
BITS_PER_BYTE = {
    "none": {16: 3.7, 32: 3.3, 48: 2.9, 64: 2.5},
    "ddp": {16: 3.5, 32: 3.0, 48: 2.5, 64: 2.0},
    "co2": {16: 3.6, 32: 3.1, 48: 2.4, 64: 1.9},
}
LAB = {
    "hosts": 2,
    "rate_bytes_per_s": 25e6,
    "delay_s": 0.005,
    "jitter_s": 0.0,
    "loss": 0.0,
    "shaped": True,
    "means": "tbf",
    "reason": None,
}
MACHINE = {"cpu": "Example CPU", "cores": 2, "memory_bytes": 24 * 10**9, "kernel": "6.18"}


class RunMaker:
    """Plays one run on a virtual clock and writes its folder."""

    def __init__(self, folder: Path, method: str, manifest: dict[str, Any]) -> None:
        self.folder, self.method, self.now_s = folder, method, 0.0
        self.spans: list[tuple[str, str, float, float, dict[str, int]]] = []
        self.metrics: list[dict[str, Any]] = []
        self.manifest = {
            "schema": 1,
            "fivefold": "0.1.0",
            "torch": "2.13.0",
            "python": "3.11.7",
            "method": method,
            "label": LABELS.get(method, method),
            "world_size": 2,
            "hosts": 2,
            "seed": 0,
            "num_parameters": 3_000_000,
            "command": ["fivefold", "train", f"{method}.toml", "--set", "run.seed=0"],
            "started_at": "2026-11-21T10:00:00+00:00",
            "machine": MACHINE,
            "lab": LAB,
        } | manifest

    def passes(self, lane: str, name: str, seconds: float) -> None:
        self.spans.append((lane, name, self.now_s, self.now_s + seconds, {}))
        self.now_s += seconds

    def flies(self, name: str, start_s: float, seconds: float, **details: int) -> None:
        self.spans.append(("in_flight", name, start_s, start_s + seconds, details))

    def play(self) -> None:
        for step in range(1, STEPS + 1):
            start_s = self.now_s
            self.passes("compute", f"step {step}", 0.25)
            if self.method == "ddp":
                self.flies("all-reduce bucket 0", start_s + 0.125, 0.375)
                self.flies("all-reduce bucket 1", start_s + 0.25, 0.5)
                self.passes("wait", "gradients", 0.5)
            if self.method == "co2" and step % TAU == 0:
                self.passes("boundary", f"round {step // TAU}", 0.0625)
                name = f"all-reduce round {step // TAU}"
                details = {"round": step // TAU, "sent_bytes": PAYLOAD_BYTES}
                self.flies(name, self.now_s, 0.5, **details)
                if step == STEPS:
                    self.passes("wait", name, 0.5)
            self._log(step)

    def _log(self, step: int) -> None:
        point = {"step": step, "tokens": step * TOKENS_PER_STEP}
        if step % 4 == 0:
            bits = 2.0 + 3.5 * math.exp(-step / 20) + 0.08 * math.sin(2.1 * step)
            extra = {"loss": bits * math.log(2), "bits_per_byte": bits, "lr": 1e-3}
            self.metrics.append({"event": "train", **point, "wall_s": self.now_s, **extra})
        if step in BITS_PER_BYTE.get(self.method, {}):
            self.passes("validation", f"step {step}", 0.5)
            bits = BITS_PER_BYTE[self.method][step]
            self.metrics.append(
                {"event": "validation", **point, "wall_s": self.now_s, "bits_per_byte": bits}
            )

    def total(self, lane: str) -> float:
        return sum(end - start for name, _, start, end, _ in self.spans if name == lane)

    def result(self) -> dict[str, Any]:
        rounds = {"ddp": STEPS, "co2": STEPS // TAU}.get(self.method, 0)
        in_flight_s, exposed_s = self.total("in_flight"), self.total("wait")
        sent = round(1.05 * PAYLOAD_BYTES * rounds)
        return {
            "schema": 1,
            "method": self.method,
            "label": self.manifest["label"],
            "steps": STEPS,
            "tokens": STEPS * TOKENS_PER_STEP,
            "wall_s": self.now_s,
            "tokens_per_s": STEPS * TOKENS_PER_STEP / self.now_s,
            "bits_per_byte": BITS_PER_BYTE[self.method][STEPS],
            "seconds": {
                "compute": self.total("compute"),
                "exposed_communication": exposed_s,
                "boundary": self.total("boundary"),
                "data": 0.0,
                "checkpoint": 0.0,
                "validation": self.total("validation"),
                "other": 0.0,
            },
            "communication": {
                "in_flight_s": in_flight_s,
                "exposed_wait_s": exposed_s,
                "overlap_fraction": 1 - exposed_s / in_flight_s if in_flight_s else None,
                "payload_bytes": PAYLOAD_BYTES * rounds,
                "collectives": rounds * (2 if self.method == "ddp" else 1),
            },
            "link_bytes": {"interface": "eth0", "sent": sent, "received": sent // 3},
            "sync": None,
        }

    def write(self, *, finished: bool = True) -> Path:
        (self.folder / "ranks").mkdir(parents=True)
        write = lambda name, value: (self.folder / name).write_text(value)  # noqa: E731 - short
        write("manifest.json", json.dumps(self.manifest))
        tau = f"tau = {TAU}\n" if self.method == "co2" else ""
        write(
            "config.toml",
            f'[run]\noutput = "runs/{self.method}"\nsteps = {STEPS}\n\n'
            f'[sync]\nmethod = "{self.method}"\n{tau}',
        )
        if finished:
            end = {"event": "end", "step": STEPS, "tokens": STEPS * TOKENS_PER_STEP}
            self.metrics.append({**end, "wall_s": self.now_s, "reason": "finished"})
            write("result.json", json.dumps(self.result()))
        write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in self.metrics))
        for rank in range(self.manifest["world_size"]):
            perf_s = 1000.0 + 37.0 * rank  # every process has a perf_counter of its own
            lines: list[dict[str, Any]] = [{"event": "clock", "unix_s": UNIX_S, "perf_s": perf_s}]
            for lane, name, start_s, end_s, details in self.spans:
                times = {"start_s": perf_s + start_s, "end_s": perf_s + end_s}
                lines.append({"event": "span", "lane": lane, "name": name, **times, **details})
            if finished:
                lines.append({"event": "rank_end", "link_bytes": self.result()["link_bytes"]})
            write(f"ranks/rank{rank}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        return self.folder


def make_run(folder: Path, method: str, *, finished: bool = True, **manifest: Any) -> Path:
    """Write one run's folder; keyword arguments replace fields of its manifest."""
    maker = RunMaker(folder, method, manifest)
    maker.play()
    return maker.write(finished=finished)


@pytest.fixture(name="make_run")
def _make_run():
    return make_run


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """A folder with a compute-only, a DDP and a CO2 run."""
    for method in ("none", "ddp", "co2"):
        make_run(tmp_path / "demo" / method, method)
    return tmp_path / "demo"
