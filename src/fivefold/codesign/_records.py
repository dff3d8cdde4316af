"""The decision log: which layer decided what, from which information."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

Layer = Literal["strategy", "tasks", "collectives", "flows", "network", "coordinator"]


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """One decision.

    Attributes:
        layer: Who decided.
        entity: About which job, or ``"all jobs"``.
        decision: What was decided, in a few words.
        alternatives: Predicted seconds of what was weighed; empty where a rule decided.
        inputs: What was used, as message.field and the layer that owns it.
        co_designs: The co-designs that let those inputs through.
        round: Planning round.
    """

    layer: Layer
    entity: str
    decision: str
    alternatives: Mapping[str, float]
    inputs: tuple[tuple[str, str], ...]
    co_designs: tuple[str, ...]
    round: int = 0


def decisions_to_json(records: Iterable[DecisionRecord]) -> str:
    """Return the log as JSON, one object per line.

    Args:
        records: The decisions in order.

    Examples:
        >>> decisions_to_json([])
        ''
    """
    return "".join(json.dumps(asdict(record)) + "\n" for record in records)
