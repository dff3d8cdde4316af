"""Is the trainer's step what was predicted? Profiled, planned, then trained, on the same GPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu._stage import Metric, Part, Report, Stage

__all__ = ["TRAINER"]

_STEP_ERROR, _MEMORY_ERROR = "error of the predicted step", "error of the predicted memory"
_STEP, _PREDICTED = "step", "predicted step"
_MEMORY, _PREDICTED_MEMORY = "memory", "predicted memory"
_PLAIN, _RATE = "step of plain PyTorch", "model FLOP in a second"
_SHARE = "model FLOP in a second, share of the device's peak"
_LEARNS = "loss at the end over loss at the begin"
_SMALL = {"layers": 13, "width": 896, "heads": 14}  # 126 M
_LARGE = {"layers": 28, "width": 1024, "heads": 16}  # 353 M
_ON_GPU = {
    "batch_size": 16, "sequence_length": 1024, "steps": 60, "log_every_steps": 10,
    "device": "cuda", "precision": "bf16", "lr": 1e-3,
}  # fmt: skip
_ON_CPU = {
    "batch_size": 16, "sequence_length": 16, "steps": 60, "log_every_steps": 10,
    "device": "cpu", "precision": "fp32", "lr": 1e-2,
}  # fmt: skip


def _config(sizes: Mapping[str, Any], model: Mapping[str, Any], output: Path) -> Any:
    from fivefold.train import TrainConfig  # noqa: PLC0415 - not in the parent
    from fivefold.train.config import (  # noqa: PLC0415
        DataConfig,
        ModelConfig,
        OptimConfig,
        RunConfig,
        SyncConfig,
    )

    return TrainConfig(
        run=RunConfig(
            output=output, device=sizes["device"], steps=sizes["steps"],
            log_every_steps=sizes["log_every_steps"], validate_every_steps=0,
        ),
        data=DataConfig(sequence_length=sizes["sequence_length"]),
        model=ModelConfig(**model),
        optim=OptimConfig(
            lr=sizes["lr"], batch_size=sizes["batch_size"], precision=sizes["precision"],
            warmup_steps=5, validation_batches=1,
        ),
        sync=SyncConfig(method="none"),
    )  # fmt: skip


def _base(device: str) -> Any:
    """Return the known cluster that is nearest: plain PyTorch on this card."""
    import torch  # noqa: PLC0415 - not in the parent

    from benchmarks.strategy.one_gpu import BASES, told  # noqa: PLC0415
    from fivefold.strategy import load_cluster  # noqa: PLC0415

    if device == "cpu":
        return load_cluster("cpu-lab")
    name = torch.cuda.get_device_name()
    known = next((found for mark, found in BASES.items() if mark in name), BASES["H100"])
    return told(known[0], "autocast")


def _predict(sizes: Mapping[str, Any], folder: Path) -> tuple[Any, Any, Any]:
    """Profile one model, and predict the step and memory of the other."""
    from fivefold.cli._plan_files import model_of  # noqa: PLC0415 - not in the parent
    from fivefold.runs.ranks import close_ranks, open_ranks  # noqa: PLC0415
    from fivefold.strategy import ParallelPlan, evaluate_plan  # noqa: PLC0415
    from fivefold.strategy.calibrate import calibrated_device  # noqa: PLC0415
    from fivefold.train.profile import measure_steps  # noqa: PLC0415

    profiled = _config(sizes, sizes["profiled"], folder / "profiled")
    ranks = open_ranks(device=sizes["device"], timeout_s=60.0)
    times = measure_steps(profiled, ranks)
    close_ranks(ranks)
    cluster = _base(sizes["device"])
    plan = ParallelPlan(
        global_batch=sizes["batch_size"], micro_batch=sizes["batch_size"],
        dtype=sizes["precision"],
    )  # fmt: skip
    device = calibrated_device(
        cluster, model_of(profiled, vocab=times.vocab), plan, model_s=times.model_s,
        optimizer_s=times.optimizer_s, rest_s=times.rest_s, memory_bytes=times.memory_bytes,
    )  # fmt: skip
    config = _config(sizes, sizes["trained"], folder / "trained")
    model = model_of(config, vocab=times.vocab)
    return config, model, evaluate_plan(model, device, cluster.fabric, plan=plan)


def _train(report: Report, sizes: Mapping[str, Any]) -> None:
    import torch  # noqa: PLC0415 - not in the parent

    from fivefold.train import train  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        config, model, predicted = _predict(sizes, Path(folder))
        report.row(_PREDICTED, predicted.time_s)
        report.row(_PREDICTED_MEMORY, predicted.memory.total_bytes)
        if sizes["device"] == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        result = train(config)
        lines = (config.run.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    logged = [event for event in events if event["event"] == "train"]
    report.row(_LEARNS, logged[-1]["loss"] / logged[0]["loss"])
    # The first interval compiles, warms and allocates.
    spans = itertools.pairwise(logged[1:])
    steps_s = [(b["wall_s"] - a["wall_s"]) / (b["step"] - a["step"]) for a, b in spans]
    step_s = statistics.median(steps_s)
    for value in steps_s:
        report.row(_STEP, value)
    report.row(_STEP_ERROR, abs(predicted.time_s / step_s - 1))
    assert result.process is not None, "a run that is not resumed has been metered"
    memory_bytes = result.process["memory_bytes"]
    report.row(_MEMORY, memory_bytes)
    report.row(_MEMORY_ERROR, abs(predicted.memory.total_bytes / memory_bytes - 1))
    tokens = sizes["batch_size"] * sizes["sequence_length"]
    flops = 6 * model.num_parameters * tokens
    report.row(_RATE, flops / step_s)
    plain_s = _beside(report, sizes, model)
    peak = _base(sizes["device"]).device.peak_matrix_flops(dtype=sizes["precision"])
    peers = {"plain PyTorch": flops / plain_s / peak} if plain_s else {}
    report.row(_SHARE, flops / step_s / peak, peers=peers)


def _beside(report: Report, sizes: Mapping[str, Any], model: Any) -> float:
    """Time the same shape in plain PyTorch; return the seconds of a step, 0 where it cannot."""
    import torch  # noqa: PLC0415 - not in the parent

    from benchmarks.strategy.one_gpu import Case, try_case  # noqa: PLC0415

    case = Case(
        model=dataclasses.replace(model, name="plain"), batch=sizes["batch_size"],
        states="autocast" if sizes["precision"] == "bf16" else "bf16",
    )  # fmt: skip
    found = try_case(case, torch.device(sizes["device"]))
    steps_s = found.get("steps_s", [])
    for value in steps_s:
        report.row(_PLAIN, value)
    return statistics.median(steps_s) if steps_s else 0.0


def _part(name: str, profiled: Mapping[str, Any], trained: Mapping[str, Any], **more: Any) -> Part:
    return Part(name=name, limit_s=150.0, sizes={"profiled": profiled, "trained": trained, **more})


TRAINER = Stage(
    key="trainer",
    minutes=3.0,
    decides="Are the trainer's step and memory predicted within 5 %, of the profiled model and of "
    "one three times as large, and how far is it from plain PyTorch?",
    topic="gpu/trainer",
    run=_train,
    real=[
        _part("126 M, profiled itself", _SMALL, _SMALL, **_ON_GPU),
        _part("353 M, from the profile of 126 M", _SMALL, _LARGE, **_ON_GPU),
    ],
    tiny=[
        _part(
            "tiny", {"layers": 1, "width": 16, "heads": 2}, {"layers": 2, "width": 16, "heads": 2},
            **_ON_CPU,
        )
    ],
    metrics=[
        Metric(name=_PREDICTED, unit="s"),
        Metric(name=_STEP, unit="s", right=(1e-9, 1e3)),
        Metric(name=_STEP_ERROR, unit="ratio", target=0.05, at_least=False),
        Metric(name=_PREDICTED_MEMORY, unit="bytes"),
        Metric(name=_MEMORY, unit="bytes"),
        Metric(name=_MEMORY_ERROR, unit="ratio", target=0.05, at_least=False),
        Metric(name=_RATE, unit="FLOP/s"),
        Metric(name=_SHARE, unit="ratio", right=(1e-9, 1.0)),
        Metric(name=_PLAIN, unit="s"),
        Metric(name=_LEARNS, unit="ratio", right=(0.0, 1.0)),
    ],
    packages=("numpy", "pydantic", "typer"),
    alone=True,
)  # fmt: skip
