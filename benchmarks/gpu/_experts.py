"""The experts' kernels: the steps of ``benchmarks.moe.gpu``, whose child does them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.gpu._stage import Line, Report, Stage
from benchmarks.ladder import Rung

if TYPE_CHECKING:
    from benchmarks.results_file import BenchmarkRow

__all__ = ["EXPERTS"]

# What no run has answered yet comes first; a kernel is checked before it is timed.
_ORDER = (
    *("machine", "whole backward", "training", "fused", "timing", "timeline"),
    *("launches", "exchange", "two ranks"),
)
_LAST = ("sweep", "tuned")
_SHOWN_WHEN_TINY = ("machine", "combine", "timeline", "two ranks", "tuned")


@dataclass(frozen=True, kw_only=True)
class _Experts(Stage):
    def rungs(self, *, tiny: bool) -> Sequence[Rung]:
        """Return the ladder's own steps, as its child knows them."""
        from benchmarks.moe._gpu._steps import steps_of  # noqa: PLC0415 - torch

        return steps_of(tiny=tiny)

    def order(self, rungs: Sequence[Rung], *, tiny: bool) -> list[int]:
        """Return the steps' numbers: what is not known yet first."""
        kept = [n for n, r in enumerate(rungs) if not tiny or r.rung in _SHOWN_WHEN_TINY]
        rank = {name: place for place, name in enumerate(_ORDER)}
        rank |= {name: 100 + place for place, name in enumerate(_LAST)}
        return sorted(kept, key=lambda number: rank.get(rungs[number].rung, 50))

    def command(self, *, tiny: bool) -> list[str]:
        """Return what starts the ladder's child."""
        return [sys.executable, "-m", "benchmarks.moe.gpu", "--work", *["--interpret"] * tiny]

    def rows(self, lines: Sequence[Line]) -> Iterator[BenchmarkRow]:
        """Yield the ladder's own rows."""
        from benchmarks.moe._gpu._convert import rows_of  # noqa: PLC0415 - pydantic

        yield from rows_of(lines)


def _unused(_report: Report, _sizes: Mapping[str, Any]) -> None:
    raise AssertionError


EXPERTS = _Experts(
    key="experts",
    minutes=5.0,
    decides="What does a training step of the experts cost (Mixtral: 27.2 ms predicted, Qwen3: "
    "4.6 ms), is one launch faster than five, what does TF32 reach?",
    topic="gpu/experts",
    run=_unused,
    real=(),
    tiny=(),
    metrics=(),
    packages=("triton",),
)
