"""The time-slotted search: published optima, a brute-force reference, proofs, bad input."""

import itertools

import numpy as np
import pytest
from benchmarks.collectives.slotted import SlotModel, SlotTimes, search_slots, slotted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.collectives import schedules
from fivefold.collectives.synthesis._instance import Instance, Orbits
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import (
    Link,
    Node,
    Topology,
    fully_connected,
    line,
    named_topology,
    ring,
    torus,
)

GB = 1e9


def rotated(offset, size, ranks):
    numbers = np.arange(ranks)
    return ((numbers % size + offset) % size + numbers // size * size).astype(np.int32)


@pytest.mark.parametrize(
    ("topology", "slots"),
    [(named_topology("ndv2", boxes=2), 35), (named_topology("dgx2", boxes=2), 31)],
    ids=["ndv2", "dgx2"],
)
def test_two_boxes_do_not_take_a_slot_less_than_published(topology, slots):
    """Section 8.6; the proof is a bound."""
    collective = schedules.all_gather(topology.num_ranks)
    refused = slotted(collective, topology, size_bytes=GB, slots=slots - 1)
    assert refused.status == "infeasible"
    assert f"at least {slots}" in refused.reason


@pytest.mark.nightly
def test_ndv2_two_boxes_take_35_epochs():
    """Section 8.6: TE-CCL's 43.75 ms at 1 GB."""
    topology = named_topology("ndv2", boxes=2)
    model = SlotModel(symmetries=[rotated(8, 16, 16)])
    result = slotted(schedules.all_gather(16), topology, size_bytes=GB, slots=35, model=model)
    schedule = result.schedule
    assert schedule.attributes["slots"] == schedule.attributes["slots_bound"] == 35
    schedules.verify_schedule(schedule, topology=topology, check_times=True)
    latencies_s = 1e-5  # the published figure leaves them out
    assert 0.04375 <= schedule.ends_s.max() <= 0.04375 + latencies_s


@pytest.mark.nightly
def test_dgx2_two_boxes_take_31_epochs():
    """Section 8.6, tight: 31 chunks must enter every odd GPU over one link."""
    topology = named_topology("dgx2", boxes=2)
    model = SlotModel(symmetries=[rotated(2, 16, 32), rotated(16, 32, 32)])
    # A third of the limit goes to each length: on a busy machine 20 s were too few for 31 slots.
    result = slotted(
        schedules.all_gather(32), topology, size_bytes=GB, model=model, time_limit_s=900
    )
    schedule = result.require()
    assert schedule.attributes["slots"] == 31
    assert schedule.attributes["optimal"]
    schedules.verify_schedule(schedule, topology=topology, check_times=True)
    assert 0.00775 <= schedule.ends_s.max() <= 0.00775 + 1e-5


@pytest.mark.slow
def test_the_torus_needs_4_link_times_where_greedy_matching_takes_5():
    topology = torus((4, 4), bandwidth=1e9, latency=0)
    result = slotted(schedules.all_gather(16), topology, size_bytes=16e9)
    assert result.schedule.attributes["slots"] == 4
    assert result.schedule.attributes["optimal"]
    assert result.schedule.ends_s.max() == pytest.approx(4.0)


def brute_force(links, holders, wanted, longest):
    """Fewest slots, by trying every choice of every free link in every slot."""
    goal = {(c, r) for c, ranks in enumerate(wanted) for r in ranks}
    start = (frozenset((c, r) for c, ranks in enumerate(holders) for r in ranks), frozenset())
    states = {start}
    for slot in range(longest + 1):
        states = {arrived(state, slot) for state in states}
        if any(goal <= held for held, _ in states):
            return slot
        states = {after for state in states for after in sends(state, slot, links)}
    return None


def arrived(state, slot):
    held, flying = state
    here = {(c, target) for c, target, _, _, arrival in flying if arrival <= slot}
    return held | here, frozenset(item for item in flying if max(item[3], item[4]) > slot)


def sends(state, slot, links):
    held, flying = state
    options = []
    for number, (source, target, busy, delay) in enumerate(links):
        taken = any(item[2] == number and item[3] > slot for item in flying)
        coming = {(c, t) for c, t, *_ in flying}
        useful = [
            (c, target, number, slot + busy, slot + delay)
            for c, r in held
            if r == source and (c, target) not in held and (c, target) not in coming
        ]
        options.append([None] if taken else [None, *useful])
    for choice in itertools.product(*options):
        yield held, flying | {item for item in choice if item is not None}


@st.composite
def small_instances(draw):
    ranks = draw(st.integers(2, 3))
    pairs = [p for p in itertools.permutations(range(ranks), 2) if draw(st.booleans())]
    links = []
    for source, target in pairs:
        busy = draw(st.integers(1, 2))
        links.append((source, target, busy, busy + draw(st.integers(0, 1))))
    chunks = draw(st.integers(1, 2))
    holders = [{draw(st.integers(0, ranks - 1))} for _ in range(chunks)]
    wanted = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in range(chunks)]
    return ranks, links, holders, wanted


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_instances())
def test_fewest_slots_equal_brute_force(case):
    ranks, links, holders, wanted = case
    longest = 7
    expected = brute_force(links, holders, wanted, longest)
    instance = Instance(
        num_ranks=ranks,
        sources=np.array([link[0] for link in links], np.int32),
        targets=np.array([link[1] for link in links], np.int32),
        resources=tuple((number,) for number in range(len(links))),
        num_resources=len(links),
        holders=tuple(frozenset(h) for h in holders),
        wanted=tuple(frozenset(w - h) for w, h in zip(wanted, holders, strict=True)),
    )
    times = SlotTimes(
        tuple((link[2],) for link in links), np.array([link[3] for link in links], np.int64)
    )
    found = None
    try:
        for slots in range(longest + 1):
            outcome, transfers = search_slots(instance, times, slots=slots)
            if outcome.found:
                found = slots
                assert all(slot + times.delays[link] <= slots for slot, _, link in transfers)
                break
    except InfeasibleError:
        assert expected is None
    assert found == expected


def test_the_bound_never_exceeds_the_optimum():
    """Slots of the proof and of the schedule meet on a ring with one slow edge."""
    names = ["a", "b", "c", "d"]
    links = []
    for first in range(4):
        for second in ((first + 1) % 4, (first - 1) % 4):
            slow = {first, second} == {0, 1}
            rate = 0.5e9 if slow else 1e9
            links.append(Link(names[first], names[second], bandwidth_bytes_per_s=rate))
    topology = Topology("slow-edge", [Node(name, "gpu") for name in names], links)
    result = slotted(schedules.all_gather(4), topology, size_bytes=4e9)
    schedule = result.schedule
    assert schedule.attributes["slots_bound"] <= schedule.attributes["slots"]
    assert (
        schedules.lower_bound(schedules.all_gather(4), topology, 4e9).seconds
        <= schedule.ends_s.max()
    )
    for slots in range(schedule.attributes["slots"]):
        asked = slotted(schedules.all_gather(4), topology, size_bytes=4e9, slots=slots)
        assert asked.status == "infeasible"


@pytest.mark.parametrize(
    "make",
    [schedules.reduce_scatter, schedules.all_reduce, schedules.all_to_all, schedules.broadcast],
)
def test_every_collective_is_verified_with_times(make):
    topology = ring(4, bandwidth=1e9, latency=1e-6)
    result = slotted(make(4), topology, size_bytes=4e3)
    schedules.verify_schedule(result.schedule, topology=topology)
    assert result.schedule.has_times


def test_a_latency_costs_whole_slots_unless_negligible():
    topology = line(2, bandwidth=1e9, latency=2.5)
    careful = slotted(schedules.broadcast(2), topology, size_bytes=1e9)
    assert careful.schedule.attributes["slots"] == 4
    assert careful.schedule.ends_s.max() == pytest.approx(3.5)
    careless = slotted(
        schedules.broadcast(2), topology, size_bytes=1e9, model=SlotModel(negligible_latency=3.0)
    )
    assert careless.schedule.attributes["slots"] == 1
    assert careless.schedule.ends_s.max() == pytest.approx(3.5)


def test_symmetric_refusals_prove_nothing():
    """On a line of 2 doubled by a swap, a symmetric search may say no; that is not a proof."""
    topology = line(2, bandwidth=1e9, latency=0)
    model = SlotModel(symmetries=[np.array([1, 0], np.int32)])
    result = slotted(schedules.all_gather(2), topology, size_bytes=2e9, model=model, slots=1)
    assert result.status == "found"
    with pytest.raises(ConfigurationError, match="no such link"):
        slotted(
            schedules.all_gather(3),
            line(3, bandwidth=1e9),
            size_bytes=3e9,
            model=SlotModel(symmetries=[np.array([1, 2, 0], np.int32)]),
        )


def test_orbits_are_the_classes_of_a_rotation():
    instance = Instance(
        num_ranks=3,
        sources=np.array([0, 1, 2], np.int32),
        targets=np.array([1, 2, 0], np.int32),
        resources=((0,), (1,), (2,)),
        num_resources=3,
        holders=tuple(frozenset([rank]) for rank in range(3)),
        wanted=tuple(frozenset(range(3)) - {rank} for rank in range(3)),
    )
    orbits = Orbits(instance, [np.array([1, 2, 0], np.int32)])
    assert orbits.link_orbits.tolist() == [[0, 1, 2], [2, 0, 1], [1, 2, 0]]
    assert Orbits(instance).link_orbits.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_links_one_way_are_enough_for_a_broadcast():
    nodes = [Node(name, "gpu") for name in "abc"]
    wires = [Link(a, b, bandwidth_bytes_per_s=1e9) for a, b in ("ab", "bc")]
    result = slotted(schedules.broadcast(3, 2), Topology("one-way", nodes, wires), size_bytes=2e9)
    assert result.schedule.attributes["slots"] == 3  # two hops, and the second chunk behind


def test_one_rank_and_nothing_to_do():
    result = slotted(schedules.all_gather(1), fully_connected(1), size_bytes=8.0)
    assert result.schedule.num_transfers == 0
    alone = slotted(
        schedules.custom_collective(2, [(0, 0)], post=[(0, 0)]), line(2), size_bytes=8.0
    )
    assert alone.schedule.num_transfers == 0
    nodes = [Node("a", "gpu"), Node("s", "switch")]
    wires = [Link("a", "s", bandwidth_bytes_per_s=1e9), Link("s", "a", bandwidth_bytes_per_s=1e9)]
    lonely = slotted(schedules.all_gather(1), Topology("lonely", nodes, wires), size_bytes=8.0)
    assert lonely.schedule.num_transfers == 0
    weightless = schedules.custom_collective(
        2, [(0, 0), (1, 0)], post=[(0, 1)], chunk_weights=np.array([0.0, 0.0])
    )
    assert slotted(weightless, line(2), size_bytes=8.0).schedule.num_transfers == 1


@pytest.mark.slow
def test_bad_input_says_what_to_do():
    topology = ring(3, bandwidth=1e9)
    with pytest.raises(ConfigurationError, match="size_bytes"):
        slotted(schedules.all_gather(3), topology, size_bytes=0)
    with pytest.raises(ConfigurationError, match="slots"):
        slotted(schedules.all_gather(3), topology, size_bytes=8, slots=-1)
    with pytest.raises(ConfigurationError, match="slot_s"):
        SlotModel(slot_s=0.0)
    with pytest.raises(ConfigurationError, match="negligible_latency"):
        SlotModel(negligible_latency=-1)
    with pytest.raises(ConfigurationError, match="equal chunks"):
        slotted(schedules.all_to_allv([[0, 1], [2, 0]]), line(2, bandwidth=1e9), size_bytes=8)
    with pytest.raises(ConfigurationError, match="too many"):
        slotted(schedules.all_to_all(48), ring(48, bandwidth=1e9), size_bytes=8e6)
    result = slotted(schedules.all_gather(3), topology, size_bytes=9, time_limit_s=0.0)
    assert result.status in {"unknown", "found"}
