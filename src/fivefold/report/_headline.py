"""The finding of a report in a sentence or two, and what a reader must know before believing it.

Both are computed from the summaries; neither praises. Where a method is slower, does not reach
the baseline's loss, or the link was not shaped, that is what the sentence says.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.report._format import format_count, format_percent, format_ratio
from fivefold.report._records import Run
from fivefold.report._summary import RunSummary
from fivefold.units import format_duration_s

_BASELINES = ("none", "ddp")
_SAME = 0.02
_KEYS_THAT_MUST_AGREE = ("world_size", "num_parameters", "lab", "machine", "torch")


def headline(summaries: Sequence[RunSummary]) -> str:
    """Say in one or two sentences what the runs show.

    The subject is the fastest CO2 run, else the fastest run of another local-update method, else
    the first run that trained.

    Args:
        summaries: The runs of the report.
    """
    subject = _subject(summaries)
    if subject is None:
        return "There is nothing to report yet."
    ddp = next((run for run in summaries if run.name == subject.ddp), None)
    if ddp is None or ddp is subject or subject.speed_ratio_to_ddp is None:
        return _alone(subject)
    sentence = f"{subject.label} {_speed(subject.speed_ratio_to_ddp)}, {_rates(subject, ddp)}"
    return f"{sentence}{_hidden(subject)}. {_learning(subject, ddp)}".strip()


def caveats(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> list[str]:
    """Say what limits the comparison: unfinished runs, unequal conditions, an unshaped link.

    Args:
        runs: The runs of the report.
        summaries: Their summaries, in the same order.
    """
    found = []
    unshaped = [lab for run in runs if (lab := run.manifest.lab) is not None and not lab.shaped]
    if unshaped:
        known = "; ".join(sorted({lab.reason or "no reason recorded" for lab in unshaped}))
        found.append(
            f"Unshaped: {known}. The ranks talked over this machine's own network, so the figures "
            "say nothing about a slow link."
        )
    unfinished = [run.label for run in summaries if run.status != "finished"]
    if unfinished:
        found.append(f"Not finished: {', '.join(unfinished)}. Figures are of what there is so far.")
    differing = [key for key in _KEYS_THAT_MUST_AGREE if _differs(runs, key)]
    if differing:
        names = ", ".join(key.replace("_", " ") for key in differing)
        found.append(f"The runs differ in {names}: compare them with care.")
    tokens = {run.tokens for run in summaries if run.method != "none" and run.status == "finished"}
    if len(tokens) > 1:
        found.append("The runs did not train on the same number of tokens.")
    return found


def _differs(runs: Sequence[Run], key: str) -> bool:
    values = [getattr(run.manifest, key) for run in runs]
    if key == "lab":  # counted hosts, rate, delay: whether it was shaped is said on its own
        values = [
            value and (value.hosts, value.rate_bytes_per_s, value.delay_s) for value in values
        ]
    return any(value != values[0] for value in values[1:])


def _subject(summaries: Sequence[RunSummary]) -> RunSummary | None:
    trained = [run for run in summaries if run.tokens_per_s]
    tried = [run for run in trained if run.method != "none" and not run.is_plain_ddp]
    if tried:
        return max(tried, key=importance)
    return next((run for run in trained if run.is_plain_ddp), trained[0] if trained else None)


def importance(run: RunSummary) -> tuple[bool, bool, float]:
    """What a run is chosen by where a page speaks of one: CO2, local updates, then its rate."""
    return run.method == "co2", run.method not in _BASELINES, run.tokens_per_s or 0.0


def _speed(ratio: float) -> str:
    if ratio > 1 + _SAME:
        return f"trained {format_ratio(ratio)} as fast as DDP"
    if ratio < 1 - _SAME:
        return f"was slower than DDP, at {format_ratio(ratio)} its speed"
    return "was as fast as DDP"


def _rates(subject: RunSummary, ddp: RunSummary) -> str:
    rates = (
        f"{format_count(subject.tokens_per_s)} against {format_count(ddp.tokens_per_s)} tokens/s"
    )
    if subject.fraction_of_compute_only is None:
        return rates
    share = format_percent(subject.fraction_of_compute_only)
    return f"{rates} ({share} of the speed without any communication)"


def _hidden(run: RunSummary) -> str:
    if run.overlap_fraction is None:
        return ""
    hidden = format_percent(run.overlap_fraction)
    return f", and hid {hidden} of its communication behind computation"


def _learning(subject: RunSummary, ddp: RunSummary) -> str:
    if subject.bits_per_byte is None or ddp.bits_per_byte is None:
        return ""
    if "unfinished" in (subject.status, ddp.status):
        so_far = f"{subject.bits_per_byte:.3f} bits per byte, DDP at {ddp.bits_per_byte:.3f}"
        return f"So far it is at {so_far}."
    ends = f"it ended at {subject.bits_per_byte:.3f} bits per byte, DDP at {ddp.bits_per_byte:.3f}"
    if subject.time_to_ddp_s is None:
        return f"It did not reach DDP's final loss: {ends}."
    reached = f"It reached DDP's final loss after {format_duration_s(subject.time_to_ddp_s)}"
    ratio = subject.time_to_ddp_ratio
    if ratio is None:
        return f"{reached}; {ends}."
    pace = f"{ratio:.2f} times sooner" if ratio >= 1 else f"{1 / ratio:.2f} times later"
    return f"{reached}, {pace} than DDP itself; {ends}."


def _alone(run: RunSummary) -> str:
    sentence = f"{run.label} trained at {format_count(run.tokens_per_s)} tokens/s"
    if run.fraction_of_compute_only is not None and run.method != "none":
        share = format_percent(run.fraction_of_compute_only)
        sentence += f", {share} of the speed without any communication"
    sentence += f"{_hidden(run)}."
    if run.bits_per_byte is not None:
        ended = "So far it is" if run.status == "unfinished" else "It ended"
        sentence += f" {ended} at {run.bits_per_byte:.3f} bits per byte."
    missing = "" if run.is_plain_ddp else " There is no DDP run here to compare with."
    return sentence + missing
