"""The front: every method, the best of all, deadlines, the cache, bad input."""

import json
import logging
import time

import pytest

from fivefold.collectives.schedules import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_allv,
    broadcast,
    evaluate,
    lower_bound,
    verify_schedule,
)
from fivefold.collectives.schedules.constructors import COLLECTIVES
from fivefold.collectives.synthesis import (
    Sketch,
    SynthesisOptions,
    all_to_all_flow,
    matching,
    synthesize,
    taccl,
)
from fivefold.errors import ConfigurationError, InfeasibleError, StorageError
from fivefold.network.topology import (
    Link,
    Node,
    Topology,
    fully_connected,
    named_topology,
    ring,
    star,
    torus,
)

DGX1 = named_topology("dgx1")


def check(found, topology, size_bytes):
    """Verified again here, timed again here, and never below the bound."""
    verify_schedule(found.schedule, topology=topology, check_times=True)
    timing = evaluate(found.schedule, topology, size_bytes=size_bytes, model="serial")
    assert found.time_s == pytest.approx(timing.total_s)
    bound = lower_bound(found.schedule.collective, topology, size_bytes).seconds
    assert found.time_s >= bound * (1 - 1e-9)
    assert found.gap >= 0


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_by_name(name):
    topology = torus((2, 3), bandwidth=1e9, latency=1e-6)
    found = synthesize(name, topology, size_bytes=6e3, time_limit_s=4)
    assert found.schedule.collective.name == name
    check(found, topology, 6e3)
    library = synthesize(name, topology, size_bytes=6e3, method="library")
    assert found.time_s <= library.time_s * (1 + 1e-9)


@pytest.mark.parametrize("method", ["library", "trees", "matching", "taccl"])
def test_every_method_by_name(method):
    found = synthesize("all_gather", DGX1, size_bytes=8e6, method=method, time_limit_s=6)
    assert found.method == method
    check(found, DGX1, 8e6)


@pytest.mark.slow
def test_dgx1_all_gather_is_proved_optimal():
    """Sections 8.1 and 8.3: 7/6 link times per chunk, by a schedule and by a cut."""
    free = DGX1.scaled(latency=0.0)
    found = synthesize("all_gather", free, size_bytes=8 * 25e9, time_limit_s=60)
    assert found.optimal
    assert found.time_s == pytest.approx(7 / 6)


def test_chunks_are_chosen_for_names_and_kept_for_collectives():
    topology = ring(4, bandwidth=1e9, latency=1e-9)
    free = synthesize("broadcast", topology, size_bytes=1e6, method="taccl", time_limit_s=4)
    kept = synthesize(broadcast(4, 1), topology, size_bytes=1e6, method="taccl", time_limit_s=4)
    assert kept.schedule.collective == broadcast(4, 1)
    assert free.schedule.collective.num_chunks > 1
    assert free.time_s < kept.time_s


def test_uneven_sizes_are_done():
    topology = ring(3, bandwidth=1e9, latency=1e-6)
    found = synthesize(
        all_to_allv([[0, 1, 2], [3, 0, 0], [1, 1, 1]]), topology, size_bytes=3e3, time_limit_s=3
    )
    check(found, topology, 3e3)


@pytest.mark.parametrize("chunks", [1, 3, 6])
def test_trees_of_one_root_do_chunks_that_do_not_divide_among_the_ranks(chunks):
    asked, network = all_reduce(4, chunks), ring(4, bandwidth=1e9, latency=1e-6)
    found = synthesize(asked, network, size_bytes=6e6, method="trees", time_limit_s=5)
    assert found.schedule.collective == asked
    check(found, network, 6e6)


@pytest.mark.parametrize(
    "collective",
    [
        all_gather(4).replaced(chunk_weights=[1.0, 2.0, 3.0, 4.0]),
        all_gather(4).replaced(pre_ranks=[3, 2, 1, 0]),
        broadcast(4, 2).replaced(chunk_weights=[1.0, 2.0]),
        all_reduce(4, 2).replaced(chunk_weights=[1.0, 2.0]),
    ],
)
def test_trees_do_the_chunks_that_are_asked_for_or_none(collective):
    network = ring(4, bandwidth=1e9, latency=1e-6)
    with pytest.raises(ConfigurationError, match="sizes"):
        synthesize(collective, network, size_bytes=1e6, method="trees", time_limit_s=2)
    found = synthesize(collective, network, size_bytes=1e6, time_limit_s=2)
    assert found.schedule.collective == collective
    check(found, network, 1e6)


@pytest.mark.slow
def test_a_sketch_asks_taccl():
    topology = named_topology("ndv2", boxes=2)
    relay = Sketch(name="relay", boxes=2, connections={0: (1,)}, symmetry=((8, 16),))
    found = synthesize(all_gather(16), topology, size_bytes=16e6, sketch=relay, time_limit_s=4)
    assert found.method == "taccl"
    assert found.schedule.name == "taccl:relay"


@pytest.mark.alone
def test_no_time_still_gives_a_verified_schedule_with_its_gap():
    topology = star(5, bandwidth=1e9, latency=1e-6)
    started_s = time.perf_counter()
    found = synthesize("all_reduce", topology, size_bytes=5e6, time_limit_s=0)
    assert time.perf_counter() - started_s < 8
    check(found, topology, 5e6)
    assert found.log[0].method == "library"


def test_the_log_says_what_every_method_came_to():
    lines = []
    options = SynthesisOptions(progress=lines.append)
    topology = ring(3, bandwidth=1e9, latency=1e-6)
    found = synthesize("all_to_all", topology, size_bytes=3e3, time_limit_s=3, options=options)
    notes = {attempt.method: attempt.note for attempt in found.log}
    assert notes.get("trees", "does not do").startswith("does not do")
    assert any(line.startswith("library:") for line in lines)
    best = min(attempt.time_s for attempt in found.log if attempt.time_s is not None)
    assert best == pytest.approx(found.time_s)


@pytest.mark.parametrize("model", ["slotted", "fluid"])
def test_other_cost_models(model):
    topology = ring(4, bandwidth=1e9, latency=1e-6)
    options = SynthesisOptions(model=model)
    found = synthesize("all_gather", topology, size_bytes=4e3, time_limit_s=3, options=options)
    timing = evaluate(found.schedule, topology, size_bytes=4e3, model=model)
    assert found.time_s == pytest.approx(timing.total_s)
    assert found.schedule.attributes["model"] == model


def test_a_gap_that_is_enough_ends_the_search():
    options = SynthesisOptions(gap=0.5)
    topology = named_topology("dgx_a100", boxes=2)
    found = synthesize("all_gather", topology, size_bytes=1e9, time_limit_s=20, options=options)
    assert found.gap <= 0.5
    assert [attempt.method for attempt in found.log if attempt.time_s][:2] == ["library", "paths"]
    with pytest.raises(ConfigurationError, match="gap"):
        SynthesisOptions(gap=-1)


def test_one_rank_two_ranks_and_no_bytes():
    assert synthesize("all_reduce", fully_connected(1), size_bytes=8).time_s == 0.0
    two = fully_connected(2, bandwidth=1e9, latency=1e-6)
    assert synthesize("all_gather", two, size_bytes=2e3, time_limit_s=2).optimal
    empty = synthesize("all_gather", DGX1, size_bytes=0, time_limit_s=2)
    verify_schedule(empty.schedule, topology=DGX1)


def test_a_broadcast_needs_links_one_way_only():
    nodes = [Node(name, "gpu") for name in "abcd"]
    links = [Link(a, b, bandwidth_bytes_per_s=1e9) for a, b in ("ab", "bc", "cd")]
    chain = Topology("chain", nodes, links)
    found = synthesize(broadcast(4), chain, size_bytes=1e6, time_limit_s=3)
    assert found.time_s == pytest.approx(3e-3)
    assert found.bound.kind == "none"
    with pytest.raises(InfeasibleError, match="no route"):
        synthesize(broadcast(4, root=1), chain, size_bytes=1e6, time_limit_s=3)


def test_disconnected_networks_are_named():
    nodes = [Node(name, "gpu") for name in "abcd"]
    links = [Link(a, b, bandwidth_bytes_per_s=1e9) for a, b in ("ab", "ba", "cd", "dc")]
    with pytest.raises(InfeasibleError, match="'a'"):
        synthesize("all_reduce", Topology("two", nodes, links), size_bytes=1e6)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"method": "magic"}, "method 'magic'"),
        ({"size_bytes": -1}, "size_bytes"),
        ({"size_bytes": float("nan")}, "size_bytes"),
        ({"size_bytes": "64 MB"}, "size_bytes is '64 MB'"),
        ({"size_bytes": None}, "size_bytes is None"),
        ({"time_limit_s": -1}, "time_limit_s"),
        ({"time_limit_s": "10 s"}, "got '10 s'"),
        ({"method": "flow"}, "."),
    ],
)
def test_bad_requests_are_refused(arguments, match):
    with pytest.raises(ConfigurationError, match=match):
        synthesize(all_reduce(8), DGX1, **{"size_bytes": 8, **arguments})


def test_bad_names_and_models_are_refused():
    with pytest.raises(ConfigurationError, match="no collective 'gossip'"):
        synthesize("gossip", DGX1, size_bytes=8)
    with pytest.raises(ConfigurationError, match="cost model"):
        SynthesisOptions(model="synchronous")
    with pytest.raises(ConfigurationError, match="trees do not"):
        synthesize("all_to_all", DGX1, size_bytes=8, method="trees")
    for wrong in ({"seed": "0"}, {"seed": 0.5}, {"root": -1}, {"gap": "0.1"}, {"gap": -1.0}):
        with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))} must be a"):
            SynthesisOptions(**wrong)


@pytest.mark.parametrize("find", [matching, taccl, all_to_all_flow])
@pytest.mark.parametrize("wrong", [-1, "10 s", float("nan")])
def test_a_limit_is_a_time(find, wrong):
    collective = all_to_all(2) if find is all_to_all_flow else all_gather(2)
    with pytest.raises(ConfigurationError, match="time_limit_s must be a number"):
        find(collective, ring(2), size_bytes=8.0, time_limit_s=wrong)


def test_known_answers_are_read_and_verified_again(tmp_path):
    options = SynthesisOptions(cache=tmp_path / "cache")
    topology = star(4, bandwidth=1e9, latency=1e-6)
    arguments = {"size_bytes": 4e6, "method": "library", "options": options}
    first = synthesize("all_gather", topology, **arguments)
    second = synthesize("all_gather", topology, **arguments)
    assert (first.cached, second.cached) == (False, True)
    assert second.schedule == first.schedule
    assert second.time_s == first.time_s
    assert second.method == "library"
    others = [
        synthesize("all_gather", topology, **{**arguments, "size_bytes": 5e6}),
        synthesize(all_gather(4), topology, **arguments),
        synthesize("all_gather", topology.scaled(bandwidth=2.0), **arguments),
    ]
    assert not any(other.cached for other in others)
    assert len(list((tmp_path / "cache").glob("*.json"))) == 4


def test_more_time_than_before_asks_again_unless_optimal(tmp_path):
    options = SynthesisOptions(cache=tmp_path)
    topology = named_topology("ndv2", boxes=2)
    arguments = {"size_bytes": 1e6, "method": "library", "options": options}
    poor = synthesize("all_gather", topology, time_limit_s=1, **arguments)
    assert not poor.optimal
    assert not synthesize("all_gather", topology, time_limit_s=2, **arguments).cached
    assert synthesize("all_gather", topology, time_limit_s=1, **arguments).cached


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1}', '{"version": 99}'])
def test_damaged_files_count_as_absent(tmp_path, damage, caplog):
    options = SynthesisOptions(cache=tmp_path)
    topology = ring(3, bandwidth=1e9)
    arguments = {"size_bytes": 3e3, "method": "library", "options": options}
    first = synthesize("all_gather", topology, **arguments)
    file = next(tmp_path.glob("*.json"))
    file.write_text(damage)
    with caplog.at_level(logging.WARNING):
        again = synthesize("all_gather", topology, **arguments)
    assert not again.cached
    assert again.time_s == first.time_s
    assert json.loads(file.read_text())["version"] == 1


def test_a_wrong_schedule_in_the_cache_is_not_believed(tmp_path):
    """The file of another question under this name: read, verified, refused, made anew."""
    options = SynthesisOptions(cache=tmp_path)
    topology = ring(3, bandwidth=1e9)
    arguments = {"size_bytes": 3e3, "method": "library", "options": options}
    synthesize("all_gather", topology, **arguments)
    file = next(tmp_path.glob("*.json"))
    record = json.loads(file.read_text())
    other = synthesize("reduce_scatter", topology, size_bytes=3e3, method="library")
    file.write_text(json.dumps({**record, "schedule": other.schedule.to_json()}))
    again = synthesize("all_gather", topology, **arguments)
    assert not again.cached
    assert again.schedule.collective.name == "all_gather"


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    options = SynthesisOptions(cache=tmp_path / "file")
    with pytest.raises(StorageError, match="cannot be"):
        synthesize("all_gather", ring(3), size_bytes=3, method="library", options=options)
