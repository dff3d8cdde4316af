"""Does it train? Two ranks on one GPU, on shaped links: what is left of the compute-only rate."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu._stage import Metric, Part, Report, Stage
from benchmarks.ladder import say

__all__ = ["TRAINING"]

_HERE = "benchmarks.gpu._training"
_RESERVE_S = 25.0  # for the ranks to be ended and what they said to be told
_MTU = 60_000  # as large as the kernel's own: cutting small frames would be what is measured

_REAL = {
    "model": {"layers": 13, "width": 896, "heads": 14},  # 126 M
    "sequence_length": 1024, "batch_size": 16, "device": "cuda", "autocast": True,
    "compiled": True, "repetitions": 3, "warm_up": 1,
}  # fmt: skip
_TINY = {
    "model": {"layers": 1, "width": 16, "heads": 2}, "sequence_length": 16, "batch_size": 2,
    "device": "cpu", "autocast": False, "compiled": False, "repetitions": 1, "warm_up": 0,
}  # fmt: skip

_METRICS = {
    "fraction": Metric(name="fraction of the compute-only rate", unit="ratio", target=0.95),
    "step_s": Metric(name="step", unit="s"),
    "allreduce_s": Metric(name="bare all-reduce of the payload", unit="s"),
    "wait_share": Metric(
        name="exposed wait, share of wall time", unit="ratio", target=0.02, at_least=False
    ),
    "between_steps_s": Metric(
        name="time on the training stream between steps, share of wall time", unit="ratio"
    ),
    "boundary_s": Metric(name="one boundary without the wait", unit="s"),
    "host_waits": Metric(
        name="waits of the host for the GPU in a step", unit="waits", target=1.0, at_least=False
    ),
    "replicas_differ": Metric(
        name="replicas that differ in a bit at the end", unit="replicas", right=(0.0, 0.0)
    ),
    "loss": Metric(name="loss at the window's end", unit="nats", right=(0.0, 7.0)),
}


def _variants() -> list[Any]:
    from benchmarks.optim.hidden_communication import Variant  # noqa: PLC0415 - torch
    from fivefold.optim import DelayCorrected, DelayedGradients  # noqa: PLC0415

    late = DelayedGradients(extrapolation=1.0)
    in_parts, slow = DelayCorrected(tau=8, fragments=8), DelayCorrected(tau=32, fragments=8)
    return [
        Variant("none", 2, 14, hides=False),
        Variant("DDP", 1, 3, hides=False),
        Variant("delayed gradients, int4", 4, 12, rule=late, codec="int4"),
        Variant("delay-corrected tau 8, 8 fragments", 8, 16, rule=in_parts),
        Variant("delay-corrected tau 8, 8 fragments, int4", 8, 16, rule=in_parts, codec="int4"),
        Variant("delay-corrected tau 32, 8 fragments", 32, 32, rule=slow),
    ]


def _train(report: Report, sizes: Mapping[str, Any]) -> None:
    """Run the ranks in the lab; what rank 0 has said so far is kept also where they hang."""
    from fivefold.lab import LabSpec, run_lab  # noqa: PLC0415 - see above

    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.jsonl"
        command = [sys.executable, "-m", _HERE, json.dumps(dict(sizes)), str(samples)]
        spec = LabSpec(hosts=2, rate=sizes["rate"], mtu=_MTU if sizes["rate"] else None)
        timeout_s = sizes["limit_s"] - _RESERVE_S
        logs = Path(folder) / "logs"
        done = run_lab(spec, command, log_folder=logs, grace_s=5.0, timeout_s=timeout_s)
        _say(report, samples)
        if done.exit_code != 0:
            errors = sorted(logs.glob("*.err"))
            ends = "\n".join(path.read_text(errors="replace")[-700:] for path in errors)
            message = f"the ranks ended with exit code {done.exit_code}: {ends}"
            raise RuntimeError(message)


def _say(report: Report, samples: Path) -> None:
    """Say what the samples come to, also of ranks that did not end by themselves."""
    text = samples.read_text(encoding="utf-8") if samples.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    alone_s: dict[int, float] = {
        line["repetition"]: line["step_s"] for line in lines if line["variant"] == "none"
    }
    for line in lines:
        case = f"{report.step}, {line['variant']}"
        if line["variant"] != "none":
            ratio = alone_s[line["repetition"]] / line["step_s"]
            report.row(_METRICS["fraction"].name, ratio, case=case)
        for key, metric in _METRICS.items():
            if key in line:
                report.row(metric.name, line[key], case=case)


def _be_rank(sizes: Mapping[str, Any], samples: Path) -> None:
    """Be one rank in the lab."""
    import torch.distributed as dist  # noqa: PLC0415 - not in the parent

    from benchmarks.optim.hidden_communication import Bench, Workload  # noqa: PLC0415
    from fivefold.train.config import ModelConfig  # noqa: PLC0415

    names = ("sequence_length", "batch_size", "device", "autocast", "compiled")
    work = Workload(model=ModelConfig(**sizes["model"]), **{name: sizes[name] for name in names})
    bench, variants = Bench(work), _variants()
    for _ in range(sizes["warm_up"]):
        bench.sample(variants[0])  # compiles, warms the allocator
    for repetition in range(sizes["repetitions"]):
        for variant in variants:
            found = bench.sample(variant, counts_waits=repetition == 0)
            if variant.name == "none":
                found["allreduce_s"] = bench.allreduce_s()
            if bench.rank == 0:
                line = {"variant": variant.name, "repetition": repetition, **found}
                with samples.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                say(event="sample", rate=sizes["rate"], **line)
    dist.destroy_process_group()


def _part(
    name: str, rate: str | None, limit_s: float, base: Mapping[str, Any], **changes: Any
) -> Part:
    sizes = {**base, "rate": rate, "limit_s": limit_s, **changes}
    return Part(name=name, limit_s=limit_s, sizes=sizes)


TRAINING = Stage(
    key="training",
    minutes=7.0,
    decides="Does the product's main claim hold on a GPU: DDP against delayed gradients and "
    "fragments on slow links, 126 M parameters in bf16, compiled?",
    topic="gpu/training",
    run=_train,
    real=[
        _part("10 Gbit/s", "10Gbit/s", 240.0, _REAL),
        _part("1 Gbit/s", "1Gbit/s", 330.0, _REAL, repetitions=2),
        # Should there be nothing to compile with, or nothing to shape links with.
        _part("10 Gbit/s, not compiled", "10Gbit/s", 240.0, _REAL, compiled=False),
        _part("links as fast as the machine", None, 180.0, _REAL),
    ],
    tiny=[_part("10 Gbit/s", "10Gbit/s", 240.0, _TINY)],
    metrics=[*_METRICS.values()],
    packages=("numpy", "pydantic"),
)


if __name__ == "__main__":
    _be_rank(json.loads(sys.argv[1]), Path(sys.argv[2]))
