"""The ablations' sweeps: which settings each one measures, and how its plot reads them back.

Each sweep starts from what the tuning found best (``_settings.best_setting``) and changes one
thing. A sweep is the same object for measuring and for drawing, so a plot shows what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.optim._figures import Curve, Figure, draw
from benchmarks.optim._settings import DDP, LOSS_METRIC, Setting, best_setting
from benchmarks.results_file import read_results

__all__ = ["SWEEPS", "Series", "Sweep", "draw_all", "settings_of"]

TAUS = (1, 4, 16, 64)
TAU_METHODS = ("LocalSGD", "CO2", "DelayCorrected")
CLIPS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
MOMENTA = (0.0, 0.2, 0.4, 0.6, 0.8)
CODECS = ("fp32", "bf16", "fp16", "int8", "int4")
CODEC_METHODS = ("LocalSGD", "CO2", "DelayCorrected")
PENALTIES = ("none", "gap", "gap-param")
CLIP_OF_PENALTIES = 1e-2
# An outer step beyond the stability limit without a penalty, so that the stabilisers have work.
BOLD = {"outer_lr": 0.7, "outer_momentum": 0.5}


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve: settings that differ in one thing.

    Attributes:
        name: For the legend.
        points: x and the setting.
        dashed: For variants of another curve.
    """

    name: str
    points: tuple[tuple[float | str, Setting], ...]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One ablation.

    Attributes:
        title: What its plot shows.
        x_label: With unit.
        x_scale: As in ``Figure``.
        series: Makes the curves; reads the tuning's results.
    """

    title: str
    x_label: str
    x_scale: str
    series: Callable[[], list[Series]]


def _tau_series() -> list[Series]:
    found = [_over_tau(best_setting(method)) for method in TAU_METHODS]
    return [*found, _over_tau(best_setting("CO2").having(staleness="none"), dashed=True)]


def _over_tau(setting: Setting, *, dashed: bool = False) -> Series:
    points = tuple((tau, setting.at_tau(tau)) for tau in TAUS)
    return Series(name=setting.legend, points=points, dashed=dashed)


def _penalty_series() -> list[Series]:
    best = best_setting("CO2")
    found = []
    for base in (best, best.having(**BOLD)):
        for clip in (None, CLIP_OF_PENALTIES):
            points = tuple((name, base.having(staleness=name, clip=clip)) for name in PENALTIES)
            found.append(
                Series(name=base.having(clip=clip).legend, points=points, dashed=clip is not None)
            )
    return found


def _clip_series() -> list[Series]:
    best = best_setting("CO2")
    bases = [
        best.having(staleness="gap"),
        best.having(**BOLD, staleness="gap"),
        best.having(**BOLD, staleness="none"),
    ]
    return [
        Series(name=base.legend, points=tuple((clip, base.having(clip=clip)) for clip in CLIPS))
        for base in bases
    ]


def _momentum_series() -> list[Series]:
    best, slow = best_setting("CO2"), best_setting("SlowMo")
    variants = [
        ("CO2, gap", best.having(staleness="gap", clip=None)),
        ("CO2, no penalty", best.having(staleness="none", clip=None)),
        ("CO2, no penalty, clip 0.01", best.having(staleness="none", clip=CLIP_OF_PENALTIES)),
        ("SlowMo (waits)", slow),
    ]
    return [
        Series(
            name=f"{name}, outer_lr {dict(base.options)['outer_lr']}, lr {base.lr:g}",
            points=tuple((beta, base.having(outer_momentum=beta)) for beta in MOMENTA),
            dashed=name.startswith("SlowMo"),
        )
        for name, base in variants
    ]


def _codec_series() -> list[Series]:
    return [
        Series(
            name=best_setting(method).legend,
            points=tuple((codec, replace(best_setting(method), codec=codec)) for codec in CODECS),
        )
        for method in CODEC_METHODS
    ]


SWEEPS = {
    "tau": Sweep(
        title="Rarer synchronisation: tau local steps per round, 4 workers",
        x_label="tau, local steps per round",
        x_scale="log2",
        series=_tau_series,
    ),
    "penalty": Sweep(
        title="CO2's staleness penalty, with and without the clip",
        x_label="staleness penalty",
        x_scale="names",
        series=_penalty_series,
    ),
    "clip": Sweep(
        title="CO2's clip threshold",
        x_label="clip of the outer momentum, in units of the parameters",
        x_scale="log10",
        series=_clip_series,
    ),
    "momentum": Sweep(
        title="Outer momentum",
        x_label="outer momentum beta",
        x_scale="linear",
        series=_momentum_series,
    ),
    "codec": Sweep(
        title="Compressed payloads with error feedback",
        x_label="codec",
        x_scale="names",
        series=_codec_series,
    ),
}


def settings_of(names: list[str]) -> list[Setting]:
    """All settings of some sweeps, each once, and DDP's best for comparison."""
    found = [best_setting(DDP)]
    for name in names:
        found += [setting for series in SWEEPS[name].series() for _, setting in series.points]
    return list({setting.label: setting for setting in found}.values())


def draw_all(results: Path, folder: Path) -> list[Path]:
    """Draw every sweep of which the results hold something.

    Args:
        results: The ablations' results file.
        folder: Where the plots go.

    Returns:
        The files written.

    Raises:
        DataError: The results or the tuning's are missing.
    """
    rows = {row.case: row for row in read_results(results).rows if row.metric == LOSS_METRIC}
    losses = {case: (row.ours, row.spread or (row.ours, row.ours)) for case, row in rows.items()}
    ddp = losses[best_setting(DDP).label][0]
    drawn = []
    for name, sweep in SWEEPS.items():
        curves = [
            curve for series in sweep.series() if (curve := _curve(series, losses)) is not None
        ]
        if curves:
            figure = Figure(
                name=name,
                title=sweep.title,
                x_label=sweep.x_label,
                x_scale=sweep.x_scale,
                curves=curves,
                lines={best_setting(DDP).legend: ddp},
                y_max=ddp + _HEADROOM,
            )
            drawn.append(draw(figure, folder))
    return drawn


_HEADROOM = 1.5  # bits per byte above DDP: what lies beyond has diverged for all purposes


def _curve(series: Series, losses: dict[str, tuple[float, tuple[float, float]]]) -> Curve | None:
    known = [(x, losses[setting.label]) for x, setting in series.points if setting.label in losses]
    if not known:
        return None
    return Curve(
        name=series.name,
        x=[x for x, _ in known],  # type: ignore[arg-type]  # one kind per sweep
        y=[y for _, (y, _) in known],
        low=[low for _, (_, (low, _)) in known],
        high=[high for _, (_, (_, high)) in known],
        dashed=series.dashed,
    )
