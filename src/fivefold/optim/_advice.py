"""What the measured times say should be changed: one sentence each, with the setting to type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from fivefold.optim.codecs import named_codec

_CODECS = ("fp32", "bf16", "int8", "int4")  # each smaller than the one before
_MARGIN = 1.1  # of what must be hidden: the default of AutoTau
_SHARE_WORTH_HIDING = 0.1  # below, waiting learns better than hiding
_SHARE_OF_STALLS = 0.02
_MOST_FRAGMENTS = 8


class Measured(Protocol):
    """The fields of ``SyncStatistics`` that are looked at."""

    rule: str
    tau: int
    fragments: int
    delay_steps: int
    codec: str
    steps: int
    exposed_wait_s: float
    step_s: float | None
    all_reduce_s: float | None
    lost_all_reduces: int
    left_out_payloads: int


def advice(record: Measured) -> list[str]:
    """Return what to change, most urgent first; empty where nothing needs changing."""
    found = list(_about_time(record))
    if record.left_out_payloads:
        found.append(
            f"{record.left_out_payloads} payloads were left out; the log names ranks and parameters"
        )
    if record.lost_all_reduces:
        found.append(f"{record.lost_all_reduces} all-reduces were lost and sent again")
    return found


def _about_time(record: Measured) -> Iterator[str]:
    if not record.step_s or not record.all_reduce_s:
        return
    needed = record.all_reduce_s / record.step_s
    waiting = exposed_share(record)
    if not record.delay_steps:
        if waiting > _SHARE_WORTH_HIDING:
            tau = max(record.tau, _MOST_FRAGMENTS, math.ceil(_MARGIN * needed))
            yield (
                f"{waiting:.0%} of the time is waiting: "
                f"DelayCorrected(tau={tau}, fragments={_MOST_FRAGMENTS}) hides it"
            )
        return
    part = "" if record.fragments == 1 else f" of one of {record.fragments} fragments"
    takes = f"an all-reduce{part} takes {needed:.1f} steps"
    if needed > record.delay_steps:
        ways = [way for way in (_longer(record, needed), _smaller(record, needed)) if way]
        yield f"{takes} and has {record.delay_steps} to hide behind: use {' or '.join(ways)}"
    elif waiting > _SHARE_OF_STALLS:
        how = "fewer fragments" if record.fragments > 1 else "a larger tau"
        yield f"{takes}, but {waiting:.0%} of the time is waiting: it stalls at times; use {how}"
    else:
        yield from _could_be_shorter(record, needed, takes)


def _could_be_shorter(record: Measured, needed: float, takes: str) -> Iterator[str]:
    fits = record.fragments * max(1, math.ceil(_MARGIN * needed))
    if record.rule == "delay-corrected" and record.fragments == 1 and record.tau >= 4:
        fragments = min(_MOST_FRAGMENTS, record.tau)
        yield (
            f"the whole model is merged {record.delay_steps} steps late: fragments={fragments} "
            "sends the same bytes, merged sooner, and learns better"
        )
    elif 2 * fits <= record.tau:
        yield f"{takes}: tau={fits} would hide it too, and a shorter round learns better"


def _longer(record: Measured, needed: float) -> str:
    steps = math.ceil(_MARGIN * needed)
    if record.rule == "delayed gradients":
        return f"gradients accumulated over {steps} batches"
    return f"tau={record.fragments * steps}"


def _smaller(record: Measured, needed: float) -> str:
    """Return the first codec whose smaller messages would fit, or nothing."""
    if record.codec not in _CODECS:
        return ""
    now = _wire_share(record.codec)
    for codec in _CODECS[_CODECS.index(record.codec) + 1 :]:
        if _MARGIN * needed * _wire_share(codec) / now <= record.delay_steps:
            return f'codec="{codec}"'
    return ""


def _wire_share(codec: str) -> float:
    elements = 1 << 16
    return named_codec(codec).encoded_bytes(elements) / (4 * elements)


def exposed_share(record: Measured) -> float:
    """Return the share of training time in which the training thread waited."""
    computing_s = record.steps * (record.step_s or 0.0)
    total_s = computing_s + record.exposed_wait_s
    return record.exposed_wait_s / total_s if computing_s else 0.0
