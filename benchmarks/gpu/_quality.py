"""Does it learn? Four workers as one batched model: bits per byte at 20 tokens a parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.gpu._stage import Line, Metric, Part, Report, Stage

if TYPE_CHECKING:
    from benchmarks.results_file import BenchmarkRow

__all__ = ["QUALITY"]

_LOSS = "bits per byte on held-out text"
_SECONDS = "seconds of the run"
_METHODS = (
    *("DDP", "delay-corrected tau 8, 8 fragments", "delayed gradients"),
    *("delay-corrected tau 32, 8 fragments", "delayed gradients, extrapolated, int4"),
    *("delay-corrected tau 8, 8 fragments, int4", "Streaming DiLoCo tau 8, 8 fragments"),
    "CO2 tau 8, 8 fragments",
)
_TOKENS_PER_PARAMETER = 20
_WORKERS, _SEQUENCE = 4, 64
_LR = {"AdamW": 3e-3, "Muon": 3e-3}
# Width, layers, millions of parameters, sequences of a worker's step, longest time of a run.
_SHAPES = {"10 M": (384, 6, 10.7, 256, 240.0), "25 M": (512, 8, 25.4, 512, 540.0)}


def _steps(millions: float, batch: int) -> int:
    return round(_TOKENS_PER_PARAMETER * millions * 1e6 / (_WORKERS * _SEQUENCE * batch))


def _real() -> Iterator[Part]:
    """Yield the runs: small before large, AdamW before Muon, all methods before a second seed."""
    order = [("10 M", "AdamW", 0), ("10 M", "Muon", 0), ("10 M", "AdamW", 1), ("25 M", "AdamW", 0)]
    for (shape, optimizer, seed), method in itertools.product(order, _METHODS):
        width, layers, millions, batch, limit_s = _SHAPES[shape]
        yield Part(
            name=f"{shape}, {optimizer}, {method}, seed {seed}",
            limit_s=limit_s,
            sizes={
                "method": method, "optimizer": optimizer, "seed": seed, "width": width,
                "layers": layers, "batch_size": batch, "steps": _steps(millions, batch),
                "warmup_steps": 100, "lr": _LR[optimizer], "device": "cuda",
            },
        )  # fmt: skip


def _tiny() -> Iterator[Part]:
    for method in ("DDP", "delay-corrected tau 8, 8 fragments", "delayed gradients"):
        yield Part(
            name=f"tiny, AdamW, {method}, seed 0",
            limit_s=240.0,
            sizes={
                "method": method, "optimizer": "AdamW", "seed": 0, "width": 16, "layers": 1,
                "batch_size": 2, "steps": 10, "warmup_steps": 2, "lr": 2e-3, "device": "cpu",
            },
        )  # fmt: skip


def _train(report: Report, sizes: Mapping[str, Any]) -> None:
    import time  # noqa: PLC0415 - with what follows

    import torch  # noqa: PLC0415 - not in the parent

    from benchmarks.optim._workload import Problem  # noqa: PLC0415
    from benchmarks.optim.quality import METHODS, train_stacked  # noqa: PLC0415

    torch.set_float32_matmul_precision("high")  # TF32: the simulation is of float32
    names = {"optimizer", "seed", "width", "layers", "batch_size", "steps", "warmup_steps", "lr"}
    problem = Problem(**{name: value for name, value in sizes.items() if name in names})
    began_s = time.perf_counter()
    found = train_stacked(problem, METHODS[sizes["method"]], device=sizes["device"])
    report.row(_LOSS, found, **sizes)
    report.row(_SECONDS, time.perf_counter() - began_s)


def _convert(lines: Sequence[Line]) -> list[BenchmarkRow]:
    """Return each size's methods beside DDP, in the form of ``optim/quality``."""
    from benchmarks.optim.quality import rows_of  # noqa: PLC0415 - torch

    sizes: dict[tuple[int, ...], dict[tuple[str, str, float, int], float]] = {}
    for line in lines:
        if line["event"] == "row" and line["metric"] == _LOSS and line["right"]:
            size = line["width"], line["layers"], line["steps"], line["batch_size"]
            place = line["optimizer"], line["method"], line["lr"], line["seed"]
            sizes.setdefault(size, {})[place] = line["value"]
    rows = []
    for (width, layers, steps, batch), found in sizes.items():
        tokens = steps * batch * _WORKERS * _SEQUENCE
        what = f"width {width}, {layers} layers, {tokens / 1e6:.0f} M tokens, simulated"
        rows += rows_of(found, what=what)
    return rows


QUALITY = Stage(
    key="quality",
    minutes=7.0,
    decides="Do delayed gradients and fragments learn what DDP learns, at 10 and 25 M parameters "
    "and 20 tokens a parameter? (About 1.3e16 FLOP a method at 10 M, 8e16 at 25 M.)",
    topic="gpu/quality",
    run=_train,
    real=tuple(_real()),
    tiny=tuple(_tiny()),
    metrics=[
        Metric(name=_LOSS, unit="bit per byte", right=(0.0, 9.0)),
        Metric(name=_SECONDS, unit="s"),
    ],
    packages=("numpy", "pydantic"),
    convert=_convert,
)
