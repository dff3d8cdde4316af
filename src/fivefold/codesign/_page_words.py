"""Words that pages about plans share: how a job communicates, who decided what."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.codesign._plans import JobPlan
from fivefold.codesign._records import DecisionRecord
from fivefold.report.page import Decision, DecisionLog
from fivefold.units import format_bytes, format_duration_s

SIMULATED = (
    "Simulated by a fluid model: bandwidth-bound phases, no queues, no packet loss. Nothing was "
    "run for real."
)

_NO_CHANGE = 5e-4


def change(ratio: float) -> str:
    """Return a ratio as a change in percent; none where it would round to none."""
    if abs(ratio - 1) < _NO_CHANGE:
        return "0 %"
    return f"{100 * (ratio - 1):+.1f} %"


def ordering_words(plan: JobPlan) -> str:
    """Layer 2 of a plan."""
    if plan.bucket_bytes is None:
        fused = "layer by layer"
    elif plan.bucket_bytes == 0:
        fused = "one bucket"
    else:
        fused = f"buckets of {format_bytes(plan.bucket_bytes)}"
    waits = "each layer waits for its own" if plan.overlap_forward else "forward waits for all"
    return f"{plan.ordering.replace('_', ' ')}, {fused}; {waits}"


def flow_words(plan: JobPlan, baseline: JobPlan) -> str:
    """Layer 4 of a plan, where it differs from today."""
    words = [f"class {plan.priority}"] if plan.priority else []
    if plan.shift_s:
        words.append(f"{format_duration_s(plan.shift_s)} later")
    moved = sum(path != baseline.paths.get(edge) for edge, path in plan.paths.items())
    if moved:
        words.append(f"{moved} path{'s' if moved != 1 else ''} not as hashed")
    return ", ".join(words) or "as today"


def choice_log(records: Sequence[DecisionRecord]) -> DecisionLog:
    """Return the decision log for a page."""
    return DecisionLog(decisions=tuple(_choice(record) for record in records))


def _choice(record: DecisionRecord) -> Decision:
    taken = not record.decision.startswith("not ")
    alternatives = tuple(sorted(record.alternatives.items(), key=lambda item: item[1]))
    return Decision(
        who=record.layer,
        about=record.entity,
        decision=record.decision.removeprefix("not "),
        taken=taken,
        alternatives=alternatives,
        chosen=_chosen(record, taken=taken),
        inputs=record.inputs,
        allowed_by=record.co_designs,
        round=record.round,
    )


def _chosen(record: DecisionRecord, *, taken: bool) -> str | None:
    """The alternative that was decided for; a name need not be the decision's, word for word."""
    if not taken:
        return "as before" if "as before" in record.alternatives else None
    if record.decision in record.alternatives:
        return record.decision
    fitting = [name for name in record.alternatives if record.decision in name]
    return min(fitting, key=lambda name: record.alternatives[name], default=None)
