"""Schedules against hand-solved cases, brute force and bounds."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.tasks import (
    CommunicationTask,
    LayerCost,
    TaskGraph,
    iteration_graph,
    schedule_tasks,
)
from helpers.task_graphs import compute, earliest_end_s, graphs, send

ORDERINGS = ("fifo", "priority", "all_to_all_first", "critical_path")


def check(schedule, chunk_bytes=None):
    """A schedule obeys its graph: dependencies, one at a time, whole durations."""
    graph = schedule.graph
    assert {span.task_id for span in schedule.spans} == set(graph.by_id)
    for task in graph.tasks:
        spans = [span for span in schedule.spans if span.task_id == task.task_id]
        start_s = min(span.start_s for span in spans)
        for name in task.depends_on:
            assert start_s >= schedule.ends_s[name] - 1e-9
        if isinstance(task, CommunicationTask):
            wanted = [task.time_s(size) for size in task.chunks(chunk_bytes)]
        else:
            wanted = [task.duration_s]
        got = [span.duration_s for span in sorted(spans, key=lambda s: s.chunk)]
        assert got == pytest.approx(wanted, abs=1e-9)
    for resource in {task.resource for task in graph.tasks}:
        spans = sorted((s.start_s, s.end_s) for s in schedule.spans if s.resource == resource)
        for (_, end_s), (start_s, _) in itertools.pairwise(spans):
            assert start_s >= end_s - 1e-9


def brute_force(graph):
    """The soonest end over all orders of the tasks, each as early as its order allows."""
    best = math.inf
    for order in itertools.permutations(graph.tasks):
        free, ends = {}, {}
        for task in order:
            if any(name not in ends for name in task.depends_on):
                break
            ready_s = max((ends[name] for name in task.depends_on), default=0.0)
            start_s = max(ready_s, free.get(task.resource, 0.0))
            ends[task.task_id] = free[task.resource] = start_s + task.duration_s
        else:
            best = min(best, max(ends.values()))
    return best


@given(
    graphs(),
    st.sampled_from(ORDERINGS),
    st.sampled_from([None, 1, 2]),
    st.integers(1, 3),
)
def test_every_ordering_gives_a_schedule(graph, ordering, chunk_bytes, credit):
    schedule = schedule_tasks(graph, ordering=ordering, chunk_bytes=chunk_bytes, credit=credit)
    check(schedule, chunk_bytes)
    assert schedule.end_s >= earliest_end_s(graph) - 1e-9 or chunk_bytes is not None
    idle_s = sum(schedule.exposed_s.values())
    assert idle_s <= schedule.end_s * len({t.resource for t in graph.compute}) + 1e-9


@settings(max_examples=25, deadline=None)
@given(graphs(most=5))
def test_no_ordering_ends_sooner_than_the_best_of_all_orders(graph):
    best_s = brute_force(graph)
    for ordering in ORDERINGS:
        assert schedule_tasks(graph, ordering=ordering).end_s >= best_s - 1e-9


def layers(number, forward_s, backward_s, gradient_bytes):
    return [
        LayerCost(forward_s=forward_s, backward_s=backward_s, gradient_bytes=gradient_bytes)
    ] * number


def test_three_layers_by_hand():
    """Whole tensors as they come: 14; slices in order of need: 12."""
    graph = iteration_graph(layers(3, 1.0, 2.0, 3), cost_s_per_byte=1.0)
    # Backward ends at 5, 7, 9; reductions run 5-8, 8-11, 11-14; forward may begin at 14.
    fifo = schedule_tasks(graph)
    assert fifo.iteration_s == 14.0
    assert fifo.ends_s["reduce 0 of 0"] == 14.0
    assert sum(fifo.exposed_s.values()) == 10.0  # 5 in each of the two boundaries
    # Two slices of 2, two of 1, then layer 0 (9-12), the rest of 1 (-13) and of 2 (-14).
    sliced = schedule_tasks(graph, ordering="priority", chunk_bytes=1)
    assert sliced.iteration_s == 12.0
    assert [sliced.ends_s[f"reduce {i} of 0"] for i in range(3)] == [12.0, 13.0, 14.0]
    assert sliced.overlap_ratio == pytest.approx(1 - 6 / 27)


def test_hidden_communication_costs_nothing():
    graph = iteration_graph(layers(4, 1.0, 2.0, 1), cost_s_per_byte=0.5)
    schedule = schedule_tasks(graph, ordering="priority")
    assert schedule.iteration_s == pytest.approx(12.0 + 0.5)  # only the first layer's is exposed
    assert sum(schedule.exposed_s.values()) == pytest.approx(2 * 0.5)


def test_an_all_to_all_overtakes_reductions_that_wait():
    """Two reductions wait when the exchange comes: Lina sends it next, first come first served
    last."""
    tasks = (
        compute("start", 0.0),
        send("reduce 1", 4, ("start",)),
        send("reduce 2", 4, ("start",)),
        compute("gate", 1.0, ("start",)),
        CommunicationTask(
            task_id="exchange", kind="all_to_all", size_bytes=1, cost_s_per_byte=1.0,
            depends_on=("gate",),
        ),
        compute("experts", 2.0, ("exchange",)),
    )  # fmt: skip
    graph = TaskGraph(tasks)
    assert schedule_tasks(graph).ends_s["experts"] == 11.0
    assert schedule_tasks(graph, ordering="all_to_all_first").ends_s["experts"] == 7.0
    sliced = schedule_tasks(graph, ordering="all_to_all_first", chunk_bytes=1)
    assert sliced.ends_s["experts"] == 4.0
    # What was handed over cannot be overtaken: with a window of four, three slices go before.
    window = schedule_tasks(graph, ordering="all_to_all_first", chunk_bytes=1, credit=4)
    assert 4.0 < window.ends_s["experts"] <= 7.0


def test_the_critical_path_sends_first_what_most_work_waits_for():
    tasks = (
        compute("start", 0.0),
        send("short", 2, ("start",)),
        send("long", 2, ("start",)),
        send("none", 2, ("start",)),
        compute("little", 1.0, ("short",), resource="compute 2"),
        compute("much", 9.0, ("long",)),
    )
    schedule = schedule_tasks(TaskGraph(tasks), ordering="critical_path")
    order = sorted(("short", "long", "none"), key=lambda n: schedule.starts_s[n])
    assert order == ["long", "short", "none"]
    assert schedule.end_s == 11.0


def test_latency_decides_the_chunk_size():
    """Small chunks let the first layer overtake; where each costs latency, they cost more."""
    costly, free = (
        iteration_graph(layers(3, 1.0, 2.0, 8), cost_s_per_byte=0.5, latency_s=latency_s)
        for latency_s in (5.0, 0.0)
    )

    def iteration_s(graph, size):
        return schedule_tasks(graph, ordering="priority", chunk_bytes=size).iteration_s

    assert iteration_s(free, 1) < iteration_s(free, None)
    assert iteration_s(costly, 1) > iteration_s(costly, None)


def test_an_empty_graph_ends_at_once():
    schedule = schedule_tasks(TaskGraph(()))
    assert schedule.end_s == schedule.iteration_s == 0.0
    assert schedule.overlap_ratio == 1.0


@pytest.mark.parametrize("change", [{"ordering": "best"}, {"chunk_bytes": 0}, {"credit": 0}])
def test_bad_settings_are_refused(change):
    with pytest.raises(ConfigurationError):
        schedule_tasks(TaskGraph((compute("a"),)), **change)


def test_fifo_is_the_order_of_becoming_ready():
    """Two messages wait for a third; the one that the program names last was ready first."""
    graph = TaskGraph((
        compute("late", 5.0), compute("soon", 2.0, resource="compute 2"), send("first", 10),
        send("a", 1, after=("late",)), send("b", 1, after=("soon",)),
    ))  # fmt: skip
    starts = {span.task_id: span.start_s for span in schedule_tasks(graph, ordering="fifo").spans}
    assert (starts["first"], starts["b"], starts["a"]) == (0.0, 10.0, 11.0)
