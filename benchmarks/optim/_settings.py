"""What the ablations try: one training setting per method, and equal budgets for the tuning.

A setting is a method with its inner learning rate, its outer settings and its codec, and nothing
else: model, text, number of steps and workers are the same for all (``_workload``, ``_runner``).
``CANDIDATES`` gives every method the same number of settings. Which of them was best is read from
the tuning's results file, so that no hand chooses.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import fivefold.optim
from benchmarks.results_file import read_results
from fivefold.errors import DataError
from fivefold.optim import OuterRule

__all__ = [
    "CANDIDATES",
    "DDP",
    "LOSS_METRIC",
    "METHODS",
    "TUNING_RESULTS",
    "TUNING_TAU",
    "Setting",
    "best_setting",
]

TUNING_TAU = 8
TUNING_RESULTS = Path(__file__).parents[1] / "results" / "optim" / "ablations_tuning.json"
LOSS_METRIC = "final validation loss"
DDP = "DDP"

Option = float | int | str | None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of training.

    Attributes:
        method: "DDP", or the name of a rule of ``fivefold.optim``.
        lr: Peak of the inner learning rate.
        tau: Local steps per round; not used by DDP.
        options: The rule's other settings, as pairs.
        codec: How payloads are sent.

    Example:
        >>> Setting(method="CO2", lr=4e-3, options=(("outer_lr", 0.5),)).label
        'CO2 tau 8, outer_lr 0.5, lr 0.004'
    """

    method: str
    lr: float
    tau: int = TUNING_TAU
    options: tuple[tuple[str, Option], ...] = ()
    codec: str = "fp32"

    @property
    def label(self) -> str:
        """Everything that distinguishes this setting, for people and as a key."""
        if self.method == DDP:
            return f"DDP, lr {self.lr:g}"
        outer = "".join(f", {name} {_text(value)}" for name, value in self.options)
        codec = "" if self.codec == "fp32" else f", codec {self.codec}"
        return f"{self.method} tau {self.tau}{outer}, lr {self.lr:g}{codec}"

    @property
    def legend(self) -> str:
        """A short name without tau and codec: what a curve over either of them is of."""
        words = [f"{_SHORT.get(name, name)} {_text(value)}" for name, value in self.options]
        return ", ".join([self.method, *words, f"lr {self.lr:g}"])

    def rule(self) -> OuterRule:
        """The outer rule; DDP has none."""
        made: OuterRule = getattr(fivefold.optim, self.method)(tau=self.tau, **dict(self.options))
        return made

    def at_tau(self, tau: int) -> Setting:
        """The same with other rounds; a round has at most as many fragments as steps."""
        options = dict(self.options)
        fragments = options.get("fragments")
        if isinstance(fragments, int):
            options["fragments"] = min(fragments, tau)
        return replace(self, tau=tau, options=tuple(options.items()))

    def having(self, **options: Option) -> Setting:
        """The same with some of the rule's settings changed or added."""
        return replace(self, options=tuple((dict(self.options) | options).items()))


_SHORT = {
    "outer_lr": "\N{GREEK SMALL LETTER ALPHA}",
    "outer_momentum": "\N{GREEK SMALL LETTER BETA}",
}


def _text(value: Option) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# Methods with outer settings get two of them at three inner learning rates; methods without get
# six inner learning rates.
_LRS = (3e-3, 6e-3, 12e-3)
_LRS_ALONE = (1e-3, 2e-3, 3e-3, 4e-3, 6e-3, 8e-3)
_OUTER: dict[str, list[dict[str, Option]]] = {
    "SlowMo": [
        {"outer_lr": 1.0, "outer_momentum": 0.2},
        {"outer_lr": 1.0, "outer_momentum": 0.5},
    ],
    "DiLoCo": [
        {"outer_lr": 0.7, "outer_momentum": 0.5},
        {"outer_lr": 0.7, "outer_momentum": 0.9},
    ],
    "CO2": [
        {"outer_lr": 0.5, "outer_momentum": 0.0},
        {"outer_lr": 0.7, "outer_momentum": 0.2},
    ],
    "StreamingDiLoCo": [
        {"outer_lr": 0.5, "outer_momentum": 0.3, "fragments": 4},
        {"outer_lr": 0.7, "outer_momentum": 0.5, "fragments": 4},
    ],
    "EagerDiLoCo": [
        {"outer_lr": 0.5, "outer_momentum": 0.3},
        {"outer_lr": 0.7, "outer_momentum": 0.5},
    ],
    "OverlapLocalSGD": [
        {"pull": 0.6, "outer_momentum": 0.7},
        {"pull": 0.6, "outer_momentum": 0.0},
    ],
}
_WITHOUT_OUTER = (DDP, "LocalSGD", "DelayCorrected")


def _candidates(method: str) -> list[Setting]:
    if method in _WITHOUT_OUTER:
        return [Setting(method=method, lr=lr) for lr in _LRS_ALONE]
    return [
        Setting(method=method, lr=lr, options=tuple(outer.items()))
        for lr, outer in itertools.product(_LRS, _OUTER[method])
    ]


METHODS = (*_WITHOUT_OUTER, *_OUTER)
CANDIDATES = {method: _candidates(method) for method in METHODS}


def best_setting(method: str, *, path: Path = TUNING_RESULTS) -> Setting:
    """The candidate with the lowest loss in the tuning's results.

    Args:
        method: One of METHODS.
        path: The tuning's results.

    Raises:
        DataError: The file is missing, or not of these candidates.
    """
    losses = {row.case: row.ours for row in read_results(path).rows if row.metric == LOSS_METRIC}
    missing = [setting.label for setting in CANDIDATES[method] if setting.label not in losses]
    if missing:
        message = f"{path} has no row of {missing[0]!r}"
        raise DataError(message, hint="run: python -m benchmarks.optim.ablations --tune")
    return min(CANDIDATES[method], key=lambda setting: losses[setting.label])
