"""The relay's network model against closed forms and an independent recursion, in virtual time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.lab import LabSpec
from fivefold.lab._relay import Fabric, Link, build_fabric

_RATE = 1000.0  # bytes per second

# (gap before the packet in s, source, destination, size)
_traffic = st.lists(
    st.tuples(st.floats(0.0, 0.5), st.integers(0, 2), st.integers(0, 2), st.integers(1, 200)),
    max_size=60,
)


def _fabric(
    *, hosts: int = 3, rate: float | None = _RATE, queue_bytes: int = 10**9, **conditions: float
) -> Fabric:
    up = [Link(rate, queue_bytes=queue_bytes) for _ in range(hosts)]
    down = [Link(rate, queue_bytes=queue_bytes) for _ in range(hosts)]
    return Fabric(up, down, **conditions)


def _play(
    fabric: Fabric, packets: list[tuple[float, int, int, int]]
) -> list[tuple[float, int, int]]:
    """Send packets at their times; return (arrival time, number, destination) in order."""
    arrivals: list[tuple[float, int, int]] = []

    def drain(until_s: float) -> None:
        while (next_s := fabric.next_event_s()) is not None and next_s <= until_s:
            for delivery in fabric.advance(next_s):
                number = int.from_bytes(delivery.packet, "big")
                arrivals.append((next_s, number, delivery.destination))

    for number, (at_s, source, destination, size) in enumerate(packets):
        drain(at_s)
        packet = number.to_bytes(4, "big")
        fabric.send(at_s, source=source, destination=destination, packet=packet, size_bytes=size)
    drain(math.inf)
    return arrivals


def _timed(traffic: list[tuple[float, int, int, int]]) -> list[tuple[float, int, int, int]]:
    now_s, packets = 0.0, []
    for gap_s, source, destination, size in traffic:
        now_s += gap_s
        packets.append((now_s, source, destination, size))
    return packets


@given(sizes=st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 200)), max_size=50))
def test_one_path_is_lindleys_recursion(sizes: list[tuple[float, int]]) -> None:
    packets = _timed([(gap_s, 0, 1, size) for gap_s, size in sizes])
    arrivals = _play(_fabric(delay_s=0.25), packets)
    finished_s, expected = -math.inf, []
    for at_s, _, _, size in packets:
        finished_s = max(finished_s, at_s) + size / _RATE
        expected.append(finished_s + 0.25)
    assert [at_s for at_s, _, _ in arrivals] == pytest.approx(expected)


@given(traffic=_traffic, jitter_s=st.floats(0.0, 0.2), burst_s=st.sampled_from([0.0, 0.05]))
def test_every_packet_arrives_in_order_and_never_early(
    traffic: list[tuple[float, int, int, int]], jitter_s: float, burst_s: float
) -> None:
    packets = _timed(traffic)
    fabric = _fabric(delay_s=0.2, jitter_s=jitter_s, burst_s=burst_s)
    arrivals = _play(fabric, packets)
    assert sorted(number for _, number, _ in arrivals) == list(range(len(packets)))
    last: dict[tuple[int, int], int] = {}
    for at_s, number, destination in arrivals:
        sent_s, source, wanted, _ = packets[number]
        assert destination == wanted
        assert at_s >= sent_s + 0.2 - jitter_s - 1e-9
        assert last.get((source, destination), -1) < number
        last[source, destination] = number


@given(traffic=_traffic)
def test_no_receiver_gets_more_than_its_rate(
    traffic: list[tuple[float, int, int, int]],
) -> None:
    packets = _timed(traffic)
    arrivals = _play(_fabric(), packets)
    for host in range(3):
        mine = [(at_s, packets[number][3]) for at_s, number, to in arrivals if to == host]
        for first in range(len(mine)):
            carried = 0
            for at_s, size in mine[first + 1 :]:
                carried += size
                assert carried <= _RATE * (at_s - mine[first][0]) + 1e-6


def test_many_to_one_shares_the_downlink() -> None:
    packets = [(0.0, source, 2, 100) for source in (0, 1) for _ in range(10)]
    arrivals = _play(_fabric(), packets)
    # 2000 bytes through one downlink of 1000 B/s, and neither sender waits for all of the other.
    assert arrivals[-1][0] == pytest.approx(2.0)
    first_half = [packets[number][1] for _, number, _ in arrivals[:10]]
    assert first_half.count(0) == first_half.count(1) == 5


def test_different_hosts_do_not_slow_one_another() -> None:
    arrivals = _play(_fabric(), [(0.0, 0, 1, 500), (0.0, 1, 2, 500), (0.0, 2, 0, 500)])
    assert [at_s for at_s, _, _ in arrivals] == pytest.approx([0.5, 0.5, 0.5])


def test_a_full_queue_drops_the_newest() -> None:
    fabric = _fabric(queue_bytes=350)
    arrivals = _play(fabric, [(0.0, 0, 1, 100)] * 10)
    # A packet may wait 0.35 s: the ones that start at 0, 0.1, 0.2 and 0.3 s.
    assert [number for _, number, _ in arrivals] == [0, 1, 2, 3]
    assert fabric.counts.dropped_at_queue == 6
    assert fabric.counts.delivered_bytes == 400


def test_loss_is_bernoulli_and_seeded() -> None:
    packets = [(float(i), 0, 1, 1) for i in range(20_000)]
    runs = [_play(fabric := _fabric(loss=0.1, seed=seed), packets) for seed in (0, 0, 1)]
    assert fabric.counts.lost + fabric.counts.delivered == 20_000
    # Five standard deviations of a binomial: 5 * sqrt(20000 * 0.1 * 0.9) = 212.
    assert abs(fabric.counts.lost - 2000) < 212
    assert runs[0] == runs[1] != runs[2]


def test_jitter_spreads_uniformly() -> None:
    packets = [(float(i), 0, 1, 1) for i in range(5000)]
    arrivals = _play(_fabric(rate=None, delay_s=0.4, jitter_s=0.1), packets)
    delays_s = sorted(at_s - packets[number][0] for at_s, number, _ in arrivals)
    assert 0.3 <= delays_s[0] < 0.301
    assert 0.499 < delays_s[-1] <= 0.5 + 1e-9
    # Quartiles of a uniform distribution, to five standard errors (0.2 * sqrt(3/16/5000) each).
    assert delays_s[1250] == pytest.approx(0.35, abs=0.0061)
    assert delays_s[3750] == pytest.approx(0.45, abs=0.0061)


def test_burst_makes_up_for_a_late_clock_but_not_for_idle_time() -> None:
    # A reader that wakes every 0.4 s, every second time 0.05 s late, finds 400 bytes each time.
    late = [(0.4 * turn + 0.05 * (turn % 2), 0, 1, 100) for turn in range(10) for _ in range(4)]
    kept = _play(_fabric(burst_s=0.05), late)[-1][0]
    lost = _play(_fabric(burst_s=0.0), late)[-1][0]
    assert kept == pytest.approx(4.0, abs=0.051)
    assert lost > kept
    # After a long idle time at most rate * burst bytes go at once.
    arrivals = _play(_fabric(burst_s=0.055), [(100.0, 0, 1, 10)] * 10)
    assert sum(at_s <= 100.0 for at_s, _, _ in arrivals) == 5


def test_the_slow_host_of_a_specification_is_slow_both_ways() -> None:
    spec = LabSpec(hosts=2, rate="80Mbit/s", host_rates={1: "8Mbit/s"}, queue="10s")
    for source, destination in ((0, 1), (1, 0)):
        packets = [(0.0, source, destination, 1000)] * 1000
        arrivals = _play(build_fabric(spec), packets)
        assert arrivals[-1][0] == pytest.approx(1.0, rel=0.01)  # 1 MB at 8 Mbit/s
