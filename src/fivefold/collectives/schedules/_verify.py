"""The verifier: does a schedule really do its collective? Independent of whatever made it.

It replays the schedule on sets of contributors. Every transfer must send what its source holds by
then, no contribution may be added twice, and at last every rank that must hold a chunk must hold
all of it. With a topology every transfer needs a path; with ``check_times`` the times must respect
latency, capacity and the links' order.

References: collectives as pre- and postconditions, SCCL, arXiv 2008.08708.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fivefold.collectives.schedules._arrays import Floats
from fivefold.collectives.schedules._errors import ScheduleError
from fivefold.collectives.schedules._order_kernels import group_by_key
from fivefold.collectives.schedules._routes import require_topology, route_table
from fivefold.collectives.schedules._schedule import Schedule
from fivefold.collectives.schedules._slots import order_of
from fivefold.collectives.schedules._verify_kernels import (
    DOUBLE_ADD,
    FINE,
    LOST,
    NOT_HELD,
    SELF_TRANSFER,
    replay,
)
from fivefold.collectives.schedules._verify_times import (
    check_times_against_links,
    check_times_against_order,
)

if TYPE_CHECKING:
    from fivefold.network.topology import Topology

SLACK = 1e-9  # of the whole duration: what sums of floats may be off by


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """What the verifier found in a schedule that is right.

    Args:
        num_transfers: Transfers that were replayed.
        num_redundant: Copies to a rank that held the very same value already.
        order: What fixed the order: ``"listed"``, ``"steps"`` or ``"times"``.
        routed: Whether every transfer was found to have a path in a topology.
        timed: Whether times were compared with the links.

    Examples:
        >>> from fivefold.collectives.algorithms import build_algorithm
        >>> from fivefold.collectives.schedules import all_gather
        >>> verify(build_algorithm("ring", all_gather(4))).num_transfers
        12
    """

    num_transfers: int
    num_redundant: int
    order: str
    routed: bool
    timed: bool


def verify(
    schedule: Schedule,
    *,
    topology: Topology | None = None,
    check_times: bool = False,
    size_bytes: float | None = None,
) -> VerificationReport:
    """Prove that a schedule does its collective, or name the first transfer that is wrong.

    The order in which transfers take effect is that of their steps, else that of their times, else
    the listed one, as `Schedule` has it.

    Args:
        schedule: The schedule.
        topology: Network whose links it must keep to; None for the schedule's own, if any.
        check_times: Whether the times must agree with latency and capacity of the links: no
            transfer may be faster than its route allows, and two that overlap on a link must leave
            each other room. Transfers between the same two ranks with equal start and equal end
            count as one message.
        size_bytes: Size of the collective for which the times were made, for ``check_times``;
            None to take ``schedule.attributes["size_bytes"]``.

    Returns:
        What was checked.

    Raises:
        ScheduleError: The schedule is wrong.
        InfeasibleError: Two ranks that a transfer joins have no route in the topology.
        ConfigurationError: Times are to be checked, but there are none, or no topology or size.

    Examples:
        >>> from fivefold.collectives.schedules import broadcast, Transfer
        >>> moves = [Transfer(chunk=0, source=1, target=2)]
        >>> verify(Schedule.from_transfers(moves, collective=broadcast(3)))
        Traceback (most recent call last):
        fivefold.collectives.schedules._errors.ScheduleError: transfer 0 sends chunk 0 from rank 1 \
to rank 2, but rank 1 does not hold it by then; ...
    """
    mode = order_of(schedule)
    redundant = _replayed(schedule, mode=mode)
    network = topology if topology is not None else schedule.topology
    if network is not None or check_times:
        network = require_topology(schedule, topology)
        routes = route_table(schedule, network)
        if check_times:
            check_times_against_order(schedule)
            check_times_against_links(schedule, network, routes, size_bytes=size_bytes)
    return VerificationReport(
        num_transfers=schedule.num_transfers,
        num_redundant=redundant,
        order=("listed", "steps", "times")[mode],
        routed=network is not None,
        timed=check_times,
    )


def _replayed(schedule: Schedule, *, mode: int) -> int:
    """Replay the schedule; returns the number of redundant copies."""
    collective = schedule.collective
    none = np.zeros(0)
    starts_s = none if schedule.starts_s is None else schedule.starts_s
    ends_s = none if schedule.ends_s is None else schedule.ends_s
    _check_finite(starts_s, ends_s)
    contributors = int(np.diff(collective.pre_offsets).max(initial=1))
    words = max(1, -(-contributors // 64)) if collective.reducing else 1
    code, index, chunk, rank, redundant = replay(
        group_by_key(schedule.chunks, collective.num_chunks),
        (schedule.sources, schedule.targets, np.ascontiguousarray(schedule.reduces)),
        (np.ascontiguousarray(schedule.steps), starts_s, ends_s),
        (collective.pre_offsets, collective.pre_ranks),
        (collective.post_offsets, collective.post_ranks),
        (
            collective.num_ranks,
            words,
            mode,
            collective.reducing,
            SLACK * float(ends_s.max(initial=0.0)),
        ),
    )
    if code != FINE:
        _refuse(schedule, int(code), int(index), chunk=int(chunk), rank=int(rank))
    return int(redundant)


def _check_finite(starts_s: Floats, ends_s: Floats) -> None:
    wrong = ~(np.isfinite(starts_s) & np.isfinite(ends_s)) | (starts_s < 0) | (ends_s < starts_s)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ScheduleError(
            f"transfer {at} starts at {starts_s[at]} s and ends at {ends_s[at]} s",
            hint="starts are at least 0 and ends at least starts",
            transfer=at,
        )


def _refuse(schedule: Schedule, code: int, index: int, *, chunk: int, rank: int) -> None:
    if index < 0:
        raise ScheduleError(
            f"chunk {chunk} never arrives whole at rank {rank}",
            hint=f"the postcondition of {schedule.collective.name} asks for it there",
        )
    move = schedule.transfer(index)
    doing = "adds" if move.reduces else "sends"
    what = f"transfer {index} {doing} chunk {chunk} from rank {move.source} to rank {move.target}"
    reasons = {
        NOT_HELD: (
            f"rank {move.source} does not hold it by then",
            "a rank sends what it held at first or has received before",
        ),
        DOUBLE_ADD: (
            "a contribution in it is in the target's sum already",
            "every contribution may be added once",
        ),
        LOST: (
            f"that overwrites contributions which rank {rank} then lacks at last",
            "add where sums are under way, copy only whole sums",
        ),
        SELF_TRANSFER: ("that is the same rank", "leave out what stays where it is"),
    }
    reason, hint = reasons[code]
    raise ScheduleError(f"{what}, but {reason}", hint=hint, transfer=index)
