"""Closed forms of in-network aggregation: what limits a sum in switches, and what it costs.

They are the simulator's assumptions written down, for planners that need a number and not a run.
An all-reduce of S bytes on n hosts sends 2 (n - 1) / n S each way around a ring, and S up and S
down through a switch. How systems share a switch makes the difference:

* SwitchML: a job's slots are set aside; its rate is theirs (`aggregation_rate_bytes_per_s`), its
  pool the bandwidth-delay product (`slots_for_line_rate`).
* ATP: slots are taken as they come free; what finds none goes on to the hosts unsummed
  (`best_effort_bytes`, `best_effort_time_s`).
* SHARP: a tree belongs to one job; who is refused uses the hosts' algorithm (`admit_jobs`).
* PANAMA: a job's chunks are spread over several trees, whose rates add up
  (`several_trees_time_s`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fivefold.errors import ConfigurationError


def aggregation_rate_bytes_per_s(
    *,
    line_rate_bytes_per_s: float,
    slots: int,
    payload_bytes: float,
    round_trip_s: float,
    reduce_rate_bytes_per_s: float | None = None,
) -> float:
    """Rate of sums: the least of line rate, slots x payload / round trip, and reduce rate.

    Args:
        line_rate_bytes_per_s: Rate of the slowest link of the tree, less its headers.
        slots: Chunks that the job may have under way.
        payload_bytes: Bytes of a chunk.
        round_trip_s: From a chunk's sending to its sum's arrival; 0 sets no limit.
        reduce_rate_bytes_per_s: Rate of the adders in summed bytes; None is line rate.

    Returns:
        Bytes of result a second.

    Raises:
        ConfigurationError: A value is out of range.

    References:
        SwitchML, arXiv 1903.06701.

    Examples:
        >>> aggregation_rate_bytes_per_s(
        ...     line_rate_bytes_per_s=12.5e9, slots=128, payload_bytes=250, round_trip_s=0.5
        ... )
        64000.0
    """
    _check_positive(line_rate_bytes_per_s=line_rate_bytes_per_s, payload_bytes=payload_bytes)
    _check_positive(slots=slots)
    _check_least(round_trip_s=round_trip_s)
    rates = [line_rate_bytes_per_s]
    if round_trip_s > 0:
        rates.append(slots * payload_bytes / round_trip_s)
    if reduce_rate_bytes_per_s is not None:
        _check_positive(reduce_rate_bytes_per_s=reduce_rate_bytes_per_s)
        rates.append(reduce_rate_bytes_per_s)
    return min(rates)


def aggregation_time_s(
    size_bytes: float,
    *,
    line_rate_bytes_per_s: float,
    slots: int,
    payload_bytes: float,
    round_trip_s: float,
    reduce_rate_bytes_per_s: float | None = None,
) -> float:
    """Time of an all-reduce through switches: the round trip, and the bytes at their rate.

    Args:
        size_bytes: Buffer of each rank.
        line_rate_bytes_per_s: As `aggregation_rate_bytes_per_s`.
        slots: As there.
        payload_bytes: As there.
        round_trip_s: As there.
        reduce_rate_bytes_per_s: As there.

    Returns:
        Seconds; nothing takes no time.

    Raises:
        ConfigurationError: A value is out of range.

    Examples:
        >>> aggregation_time_s(
        ...     1e9, line_rate_bytes_per_s=1e9, slots=512, payload_bytes=1e6, round_trip_s=0.25
        ... )
        1.25
    """
    _check_least(size_bytes=size_bytes)
    rate = aggregation_rate_bytes_per_s(
        line_rate_bytes_per_s=line_rate_bytes_per_s,
        slots=slots,
        payload_bytes=payload_bytes,
        round_trip_s=round_trip_s,
        reduce_rate_bytes_per_s=reduce_rate_bytes_per_s,
    )
    return round_trip_s + size_bytes / rate if size_bytes else 0.0


def slots_for_line_rate(
    *, line_rate_bytes_per_s: float, payload_bytes: float, round_trip_s: float
) -> int:
    """Fewest slots that do not slow the line down: the bandwidth-delay product in chunks.

    Args:
        line_rate_bytes_per_s: Rate of the line.
        payload_bytes: Bytes of a chunk.
        round_trip_s: From a chunk's sending to its sum's arrival.

    Returns:
        The number, at least one.

    Raises:
        ConfigurationError: A value is out of range.

    References:
        SwitchML, arXiv 1903.06701.

    Examples:
        >>> slots_for_line_rate(line_rate_bytes_per_s=1.25e9, payload_bytes=256, round_trip_s=26e-6)
        127
    """
    _check_positive(line_rate_bytes_per_s=line_rate_bytes_per_s, payload_bytes=payload_bytes)
    _check_least(round_trip_s=round_trip_s)
    return max(1, math.ceil(line_rate_bytes_per_s * round_trip_s / payload_bytes))


def best_effort_bytes(size_bytes: float, *, workers: int, hit_share: float) -> float:
    """What the server behind a best-effort switch receives: (f + (1 - f) n) S.

    A share f of the chunks finds a slot and arrives summed, once; the rest comes from each worker.

    Args:
        size_bytes: Buffer of each worker, S.
        workers: Their number, n.
        hit_share: The share f, 0 to 1.

    Returns:
        Bytes.

    Raises:
        ConfigurationError: A value is out of range.

    References:
        ATP, NSDI 2021; the form is inferred from its design.

    Examples:
        >>> best_effort_bytes(100.0, workers=8, hit_share=0.75)
        275.0
    """
    _check_least(size_bytes=size_bytes)
    _check_positive(workers=workers)
    if not 0 <= hit_share <= 1:
        raise ConfigurationError(f"hit_share is {hit_share}", hint="it is a share, 0 to 1")
    return (hit_share + (1 - hit_share) * workers) * size_bytes


def best_effort_time_s(
    size_bytes: float,
    *,
    workers: int,
    hit_share: float,
    line_rate_bytes_per_s: float,
    server_rate_bytes_per_s: float,
    round_trip_s: float = 0.0,
) -> float:
    """Time of an all-reduce through a best-effort switch with a server behind it.

    Workers send S; the server receives (f + (1 - f) n) S. Both go on at the same time, and the
    result comes back by multicast: the slower of the two directions' fullest links sets the time.

    Args:
        size_bytes: Buffer of each worker.
        workers: Their number.
        hit_share: Share of chunks that find a slot.
        line_rate_bytes_per_s: Rate of a worker's link.
        server_rate_bytes_per_s: Rate of the server's link, all of its ports together.
        round_trip_s: From a chunk's sending to its sum's arrival.

    Returns:
        Seconds; nothing takes no time.

    Raises:
        ConfigurationError: A value is out of range.

    References:
        ATP, NSDI 2021.

    Examples:
        >>> best_effort_time_s(
        ...     1e9,
        ...     workers=4,
        ...     hit_share=0.5,
        ...     line_rate_bytes_per_s=1e9,
        ...     server_rate_bytes_per_s=1e9,
        ... )
        2.5
    """
    _check_positive(
        line_rate_bytes_per_s=line_rate_bytes_per_s, server_rate_bytes_per_s=server_rate_bytes_per_s
    )
    _check_least(round_trip_s=round_trip_s)
    arriving = best_effort_bytes(size_bytes, workers=workers, hit_share=hit_share)
    if not size_bytes:
        return 0.0
    return round_trip_s + max(
        size_bytes / line_rate_bytes_per_s, arriving / server_rate_bytes_per_s
    )


def several_trees_time_s(
    size_bytes: float,
    *,
    tree_rates_bytes_per_s: Sequence[float],
    line_rate_bytes_per_s: float,
    round_trip_s: float = 0.0,
) -> float:
    """Time of an all-reduce whose chunks are spread over several trees, each as fast as it can.

    Args:
        size_bytes: Buffer of each worker.
        tree_rates_bytes_per_s: What each tree's links, slots and adders leave to the job; 0 for
            one that is congested to a halt.
        line_rate_bytes_per_s: Rate of a worker's link, which all trees share.
        round_trip_s: Of the slowest tree.

    Returns:
        Seconds; infinite where no tree moves, nothing takes no time.

    Raises:
        ConfigurationError: A value is out of range.

    References:
        PANAMA (Gebara, Costa and Ghobadi), MLSys 2021.

    Examples:
        >>> several_trees_time_s(
        ...     3e9, tree_rates_bytes_per_s=[1e9, 0.5e9], line_rate_bytes_per_s=2e9
        ... )
        2.0
    """
    _check_least(size_bytes=size_bytes, round_trip_s=round_trip_s)
    _check_positive(line_rate_bytes_per_s=line_rate_bytes_per_s)
    for rate in tree_rates_bytes_per_s:
        _check_least(tree_rates_bytes_per_s=rate)
    rate = min(sum(tree_rates_bytes_per_s), line_rate_bytes_per_s)
    if not size_bytes:
        return 0.0
    return round_trip_s + size_bytes / rate if rate else math.inf


def admit_jobs(gains_s: Mapping[str, float], *, trees: int) -> tuple[str, ...]:
    """Which jobs get one of the trees that belong to one job each: those that gain most.

    Args:
        gains_s: Seconds that each job would save against its host algorithm.
        trees: Trees that there are.

    Returns:
        Jobs with a tree, the largest gain first; a job that gains nothing gets none.

    Raises:
        ConfigurationError: There are fewer than no trees, or a gain is no number.

    References:
        SHARP: trees are exclusive by default, NVIDIA's documentation of release 3.

    Examples:
        >>> admit_jobs({"a": 0.1, "b": 0.4, "c": -0.2}, trees=2)
        ('b', 'a')
    """
    _check_least(trees=trees)
    if any(math.isnan(gain) for gain in gains_s.values()):
        raise ConfigurationError(f"gains_s has a gain that is no number: {dict(gains_s)!r:.80}")
    ranked = sorted((-gain, job) for job, gain in gains_s.items() if gain > 0)
    return tuple(job for _, job in ranked[:trees])


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{name} is {value}", hint="use a finite number above 0")


def _check_least(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigurationError(f"{name} is {value}", hint="use a finite number from 0")
