"""Closed forms of pipeline schedules: idle time, stored micro-batches, copies of parameters.

Times are of one micro-batch on one whole stage: forward f, backward for inputs i, for weights w.
For uniform stages the forms are exact; where stages differ, every micro-batch but one costs the
slowest stage and one crosses all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """What a schedule needs.

    Args:
        idle_s: Time in which a stage of mean speed waits.
        stored: Micro-batches of a whole stage whose activations are kept at the worst moment.
        parameter_copies: Times that a stage's parameters are held.
        boundary_messages: Messages in each direction per micro-batch and stage.

    Examples:
        >>> shape = pipeline_shape("1f1b", stages=4, micro_batches=8, forward_s=1.0, input_s=1.0,
        ...                        weight_s=1.0)
        >>> shape.idle_s, shape.stored
        (9.0, 4)
    """

    idle_s: float
    stored: float
    parameter_copies: float = 1.0
    boundary_messages: float = 1.0


def pipeline_shape(
    schedule: str, *, stages: int, micro_batches: int, forward_s: float, input_s: float,
    weight_s: float, virtual: int = 1,
) -> PipelineShape:  # fmt: skip
    """Idle time and memory of a schedule on uniform stages.

    Args:
        schedule: One of ``PipelineSchedule``.
        stages: Devices in the pipeline.
        micro_batches: Of one iteration.
        forward_s: Forward of one stage.
        input_s: Backward for inputs of one stage.
        weight_s: Backward for weights of one stage.
        virtual: Chunks of each stage.

    Raises:
        ConfigurationError: The schedule is unknown.

    Examples:
        >>> pipeline_shape("zb_1p", stages=4, micro_batches=8, forward_s=1.0, input_s=1.0,
        ...                weight_s=1.0).idle_s
        3.0

    References:
        GPipe, arXiv 1811.06965; interleaving, arXiv 2104.04473; zero bubble, arXiv 2401.10241;
        V schedules, arXiv 2405.15362; DualPipe, arXiv 2412.19437.
    """
    p, m, whole = stages, micro_batches, forward_s + input_s + weight_s
    full = (p - 1) * whole
    split = (p - 1) * max(forward_s + input_s - weight_s, 0.0)
    none = (p - 1) * max(forward_s + input_s - 2 * weight_s, 0.0)
    dual = max(forward_s + 2 * input_s - weight_s, 0.0)
    if p == 1:
        return PipelineShape(idle_s=0.0, stored=1.0, boundary_messages=0.0)
    forms = {
        "gpipe": PipelineShape(idle_s=full, stored=m),
        "1f1b": PipelineShape(idle_s=full, stored=min(p, m)),
        "interleaved": PipelineShape(
            idle_s=full / virtual, stored=min(p + (p - 1) / virtual, m), boundary_messages=virtual
        ),
        "zb_1p": PipelineShape(idle_s=split, stored=min(p, m)),
        "zb_2p": PipelineShape(idle_s=none, stored=min(2 * p - 1, m)),
        "zb_v": PipelineShape(idle_s=none, stored=min(p, m), boundary_messages=2),
        "v_half": PipelineShape(idle_s=full / 2, stored=min(p / 2, m), boundary_messages=2),
        "v_min": PipelineShape(idle_s=full * 2 / 3, stored=min(p / 3, m), boundary_messages=2),
        "dualpipe": PipelineShape(
            idle_s=max(p / 2 - 1, 0.0) * dual, stored=min(p + 1, m), parameter_copies=2
        ),
        "dualpipe_v": PipelineShape(
            idle_s=(p - 1) / 2 * dual, stored=min(p + 0.5, m), boundary_messages=2
        ),
    }
    if schedule not in forms:
        message = f"schedule {schedule!r} is unknown"
        raise ConfigurationError(message, hint=f"use one of {', '.join(forms)}")
    return forms[schedule]


def stored_at(schedule: str, *, stage: int, stages: int, micro_batches: int, virtual: int) -> float:
    """Micro-batches of a whole stage whose activations ``stage`` keeps at its worst moment.

    Early stages wait longest for the backward of their first micro-batch; V-shaped schedules even
    that out, for each device holds an early and a late chunk.

    Examples:
        >>> stored_at("1f1b", stage=3, stages=4, micro_batches=8, virtual=1)
        1
    """
    p, m, last = stages, micro_batches, stages - 1 - stage
    if p == 1:
        return 1
    if schedule in {"1f1b", "zb_1p"}:
        return min(last + 1, m)
    if schedule == "zb_2p":
        return min(2 * last + 1, m)
    if schedule == "interleaved":
        return min(p + (2 * last - (p - 1)) / virtual, m)
    ones = {"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0}
    return pipeline_shape(schedule, stages=p, micro_batches=m, virtual=virtual, **ones).stored


def stage_layers(num_layers: int, stages: int, *, embedding_layers: bool) -> tuple[int, int, int]:
    """Layers on the first, the fullest middle and the last stage.

    Layers left over go to middle stages first, for the outer ones hold embedding and head.

    Examples:
        >>> stage_layers(126, 8, embedding_layers=True)
        (15, 16, 15)
        >>> stage_layers(10, 4, embedding_layers=False)
        (2, 3, 2)
    """
    if stages == 1:
        return num_layers, num_layers, num_layers
    if embedding_layers:
        each, rest = divmod(num_layers + 2, stages)
        return each - 1 + (rest > stages - 2), each + (rest > 0), each - 1
    each, rest = divmod(num_layers, stages)
    return each + (rest > max(stages - 2, 0)), each + (rest > 0), each
