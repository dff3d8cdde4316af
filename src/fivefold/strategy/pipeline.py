"""Closed forms of pipeline schedules: bubble, stored micro-batches, layers of stages.

Times are of one micro-batch on one whole stage: forward f, backward for inputs i, for weights w.
For uniform stages the forms are exact; where stages differ, every micro-batch but one costs the
slowest stage and one crosses all of them. Numbers may be arrays throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold.errors import require_one_of


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """Bubble of a pipeline schedule, and messages per pair of stages and micro-batch."""

    bubble_s: Any
    p2p_messages: Any


def pipeline_shape(
    schedule: str, *, stages: Any, micro_batches: Any, forward_s: Any, input_s: Any,
    weight_s: Any, virtual: Any = 1,
) -> PipelineShape:  # fmt: skip
    """Return the bubble and the messages of a schedule on uniform stages."""
    p, full = stages, (stages - 1) * (forward_s + input_s + weight_s)

    def filled(idle_s: Any, weights: Any) -> Any:
        # No more backward passes for weights can fill the idle time than there are.
        return np.maximum(idle_s - np.minimum(weights, micro_batches) * weight_s, 0.0)

    def split(times: int) -> Any:
        return filled((p - 1) * (forward_s + input_s), times * (p - 1))

    def dual(passes: Any) -> Any:
        passes = np.maximum(passes, 0.0)
        return filled(passes * (forward_s + 2 * input_s), passes)

    forms = {
        "gpipe": lambda: full,
        "1f1b": lambda: full,
        "interleaved": lambda: full / virtual,
        "zb_1p": lambda: split(1),
        "zb_2p": lambda: split(2),
        "zb_v": lambda: split(2),
        "v_half": lambda: full / 2,
        "v_min": lambda: full * 2 / 3,
        "dualpipe": lambda: dual(p / 2 - 1),
        "dualpipe_v": lambda: dual((p - 1) / 2),
    }
    require_one_of(schedule, forms, f"schedule {schedule!r} is unknown")
    messages = {"interleaved": virtual, "zb_v": 2, "v_half": 2, "v_min": 2, "dualpipe_v": 2}
    return PipelineShape(
        bubble_s=np.where(p == 1, 0.0, forms[schedule]()),
        p2p_messages=np.where(p == 1, 0.0, messages.get(schedule, 1)),
    )  # fmt: skip


def stored_at(schedule: str, *, after: Any, stages: Any, micro_batches: Any, virtual: Any) -> Any:
    """Return the micro-batches that a stage with ``after`` stages behind it keeps at worst.

    Early stages wait longest for the backward of their first micro-batch; V-shaped schedules even
    that out, for each device holds an early and a late chunk.
    """
    p = stages
    stored = {
        "gpipe": lambda: micro_batches,
        "1f1b": lambda: after + 1,
        "zb_1p": lambda: after + 1,
        "zb_2p": lambda: 2 * after + 1,
        "interleaved": lambda: p + (2 * after - (p - 1)) / virtual,
        "zb_v": lambda: p,
        "v_half": lambda: p / 2,
        "v_min": lambda: p / 3,
        "dualpipe": lambda: p + 1,
        "dualpipe_v": lambda: p + 0.5,
    }
    return np.where(p == 1, 1.0, np.minimum(stored[schedule](), micro_batches))


def stage_layers(
    num_layers: int, stages: Any, *, embedding_layers: Any, losses: int = 1
) -> tuple[Any, Any, Any]:
    """Return the layers on the first, the fullest middle and the last stage.

    Layers left over go to middle stages first, for the outer ones hold embedding and head, which
    count as a layer each where ``embedding_layers`` says so. With several ``losses`` the head
    counts twice and the embedding not, as in the layouts of models that predict further tokens.
    """
    p, outer = stages, embedding_layers
    opening, closing = (1, 1) if losses == 1 else (0, 2)
    each, rest = np.divmod(np.where(outer, num_layers + opening + closing, num_layers), p)
    first, last = np.where(outer, each - opening, each), np.where(outer, each - closing, each)
    counts = first + (rest > np.maximum(p - 2, 0)), each + (rest > 0), np.maximum(last, 0)
    first, middle, last = (np.where(p == 1, num_layers, count) for count in counts)
    return first, middle, last
