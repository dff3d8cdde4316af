"""All cases with their settings. A peer that has our algorithm has our settings.

``TUNED`` holds, by algorithm, the inner learning rate and the outer settings that equal tuning
budgets found best (``ablations.py --tune``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.optim._peers._case import Case
from benchmarks.optim._peers.ours import CHOSEN
from benchmarks.optim._workload import ADAMW, CLIP_NORM, MUON

__all__ = ["AUTO", "CASES", "choice_text", "find_case", "with_choice"]

AUTO = "auto"

TAU = 8
START_STEPS = 20  # the warm-up of the learning rate, for methods that begin as DDP
DELAY = TAU - 1  # the longest that torchft allows: all that it can hide
_AUTO_WINDOW_STEPS = 48  # it climbs during a warm-up as long as half of its window
# The best of six settings each, at a seed of their own (results/optim/ablations_tuning.md).
TUNED: dict[str, dict[str, Any]] = {
    "DDP": {"lr": 3e-3},
    "LocalSGD": {"lr": 4e-3},
    "DelayCorrected": {"lr": 3e-3},
    # The best of four to seven learning rates (results/optim/tuning_muon.md).
    "DDP, Muon": {"lr": 1.6e-2, "optimizer": MUON},
    "DelayCorrected, Muon": {"lr": 2.4e-2, "optimizer": MUON},
    "DelayedGradients, Muon": {"lr": 8e-3, "optimizer": MUON},
    "SlowMo": {"lr": 3e-3, "outer_lr": 1.0, "outer_momentum": 0.2},
    "DiLoCo": {"lr": 3e-3, "outer_lr": 0.7, "outer_momentum": 0.5},
    "CO2": {"lr": 6e-3, "outer_lr": 0.5, "outer_momentum": 0.0},
    "StreamingDiLoCo": {"lr": 6e-3, "outer_lr": 0.7, "outer_momentum": 0.5, "fragments": 4},
    "EagerDiLoCo": {"lr": 6e-3, "outer_lr": 0.5, "outer_momentum": 0.3},
    "OverlapLocalSGD": {"lr": 3e-3, "pull": 0.6, "outer_momentum": 0.7},
}
_OVERLAPPING = {"CO2", "DelayCorrected", "StreamingDiLoCo", "EagerDiLoCo", "OverlapLocalSGD"}


def _peer(name: str, adapter: str, like: str, /, **settings: Any) -> Case:
    """A peer's case; ``like`` says whose tuned settings it takes."""
    tuned = TUNED[like]
    outer = {"lr": tuned.get("outer_lr"), "momentum": tuned.get("outer_momentum")}
    starts = settings.get("start", 0)
    return Case(
        name=name,
        kind="peer",
        adapter=adapter,
        settings=outer | settings,
        round_steps=settings.get("tau", 1),
        lr=tuned["lr"],
        optimizer=tuned.get("optimizer", ADAMW),
        ddp_steps=starts,
        longer=name != "DDP",
    )


def _torchft(name: str, algorithm: str, **settings: Any) -> Case:
    kind = {"LocalSGD": "local_sgd", "DiLoCo": "diloco"}[algorithm]
    settings = {"algorithm": kind, "tau": TAU, **settings}
    return _peer(f"torchft {name}", "torchft_sync", algorithm, **settings)


def _ours(
    name: str, rule: str, *, codec: str | None = None, like: str | None = None, **options: Any
) -> Case:
    """A case of ours; ``like`` says whose tuned settings it takes, its rule's by default."""
    tuned = TUNED[like or rule]
    outer = {key: value for key, value in tuned.items() if key not in ("lr", "optimizer")}
    tau = options.get("tau", TAU)
    settings: dict[str, Any] = {"rule": rule, "options": {"tau": tau} | outer | options}
    if codec is not None:
        settings["codec"] = codec
    return Case(
        name=name,
        kind="ours",
        adapter="ours",
        settings=settings,
        round_steps=_AUTO_WINDOW_STEPS if tau == AUTO else tau,
        lr=tuned["lr"],
        optimizer=tuned.get("optimizer", ADAMW),
        overlaps=rule in _OVERLAPPING,
        longer=True,
    )


def _delayed_gradients(name: str, codec: str) -> Case:
    """Delayed gradients, which clip the mean and have no round."""
    tuned = TUNED["DelayedGradients, Muon"]
    options = {"extrapolation": 1.0, "max_norm": CLIP_NORM}
    return Case(
        name=name,
        kind="ours",
        adapter="ours",
        settings={"rule": "DelayedGradients", "options": options, "codec": codec},
        lr=tuned["lr"],
        optimizer=tuned["optimizer"],
        clips=False,
        overlaps=True,
        longer=True,
    )


_PEERS = (
    # The fastest of 0.25, 0.5, 1, 25 MB and the default at 200 Mbit/s: the model is small.
    _peer("DDP", "ddp", "DDP", bucket_cap_mb=0.5),
    _peer("DDP fp16", "ddp", "DDP", bucket_cap_mb=0.5, hook="fp16"),
    _peer("DDP, Muon", "ddp", "DDP, Muon", bucket_cap_mb=0.5),
    _peer("DDP fp16, Muon", "ddp", "DDP, Muon", bucket_cap_mb=0.5, hook="fp16"),
    # One bucket: its callbacks start further all-reduces in the order in which buckets arrive,
    # which differs between gloo's ranks; with several buckets it hangs or fails.
    _peer(
        "DDP + PowerSGD rank 4", "ddp", "DDP", hook="powersgd", bucket_cap_mb=1000, rank=4,
        start=START_STEPS,
    ),
    _peer(
        "PostLocalSGDOptimizer tau 8", "ddp", "LocalSGD", hook="post_local_sgd", tau=TAU,
        start=START_STEPS,
    ),
    _peer("fairscale SlowMo tau 8", "fairscale_slowmo", "SlowMo", tau=TAU),
    _torchft("LocalSGD tau 8", "LocalSGD"),
    _torchft("DiLoCo tau 8", "DiLoCo"),
    _torchft("DiLoCo tau 8 delay 7", "DiLoCo", delay=DELAY, alpha=0.0),
    _torchft("DiLoCo tau 8 delay 7 alpha 0.5", "DiLoCo", delay=DELAY, alpha=0.5),
    _torchft("LocalSGD tau 2", "LocalSGD", tau=2),
    _torchft("DiLoCo tau 2 delay 1 alpha 0.5", "DiLoCo", tau=2, delay=1, alpha=0.5),
)  # fmt: skip

_OURS = (
    _ours("Local SGD tau 8", "LocalSGD"),
    _ours("SlowMo tau 8", "SlowMo"),
    _ours("DiLoCo tau 8", "DiLoCo"),
    _ours("CO2 tau 8", "CO2"),
    _ours("delay-corrected tau 8", "DelayCorrected"),
    _ours("delay-corrected tau 2", "DelayCorrected", tau=2),
    _ours("delay-corrected tau auto", "DelayCorrected", tau=AUTO),
    _ours("delay-corrected tau 2 int8", "DelayCorrected", tau=2, codec="int8"),
    _ours("delay-corrected tau 2 int4", "DelayCorrected", tau=2, codec="int4"),
    # The shortest round, made to fit by the codec: a step's work is late by one step only.
    _ours("delay-corrected tau 1 int8", "DelayCorrected", tau=1, codec="int8"),
    _ours("delay-corrected tau 1 int4", "DelayCorrected", tau=1, codec="int4"),
    _ours("delay-corrected auto", "DelayCorrected", tau=AUTO, codec=AUTO),
    _ours(
        "delay-corrected auto, Muon",
        "DelayCorrected",
        tau=AUTO,
        codec=AUTO,
        like="DelayCorrected, Muon",
    ),
    _delayed_gradients("delayed gradients, Muon, int8", "int8"),
    _delayed_gradients("delayed gradients, Muon, int4", "int4"),
    _ours("CO2 tau auto", "CO2", tau=AUTO),
    _ours("CO2 tau 8 int8", "CO2", codec="int8"),
    _ours("CO2 tau 8 int4", "CO2", codec="int4"),
    _ours("Streaming DiLoCo tau 8", "StreamingDiLoCo"),
    _ours("eager DiLoCo tau 8", "EagerDiLoCo"),
    _ours("overlap Local SGD tau 8", "OverlapLocalSGD"),
)

CASES = (Case(name="compute only", kind="alone", adapter="alone"), *_PEERS, *_OURS)


def find_case(name: str) -> Case:
    """The case of a name; "NAME = CHOICE" is case NAME with the round that it chose.

    Args:
        name: Its name in the table.

    Raises:
        KeyError: There is none.
    """
    known, chosen, choice = name.partition(" = ")
    case = {case.name: case for case in CASES}[known]
    return with_choice(case, choice) if chosen else case


def choice_text(choice: Mapping[str, Any]) -> str:
    """Write a round down, as ``with_choice`` reads it: tau/fragments/delay_steps/codec."""
    return "/".join(str(choice[name]) for name in CHOSEN)


def with_choice(case: Case, choice: str) -> Case:
    """A case of ours with a given round in place of its own.

    Args:
        case: The case.
        choice: What ``choice_text`` wrote.
    """
    *steps, codec = choice.split("/")
    chosen = dict(zip(CHOSEN, map(int, steps), strict=False))
    options = case.settings["options"] | chosen
    return replace(
        case,
        name=f"{case.name} = {choice}",
        settings={**case.settings, "options": options, "codec": codec},
        round_steps=chosen["tau"],
    )
