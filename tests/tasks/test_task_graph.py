"""Task graphs: validity, longest chains, iterations."""

import itertools

import pytest
from hypothesis import given

from fivefold.errors import ConfigurationError
from fivefold.tasks import LayerCost, TaskGraph, iteration_graph
from helpers.task_graphs import compute, graphs, send


def longest_chain(graph):
    """By trying every chain."""
    best = 0.0
    names = [task.task_id for task in graph.tasks]
    for length in range(1, len(names) + 1):
        for chain in itertools.permutations(names, length):
            pairs = itertools.pairwise(chain)
            if all(a in graph.by_id[b].depends_on for a, b in pairs):
                end_s = 0.0
                for name in chain:
                    end_s += graph.by_id[name].duration_s
                best = max(best, end_s)
    return best


@given(graphs(most=5))
def test_the_longest_tail_is_the_longest_chain(graph):
    assert max(graph.tails_s.values()) == longest_chain(graph)


def test_tails_begin_at_the_task_itself():
    graph = TaskGraph((compute("a", 1), compute("b", 2, ("a",)), compute("c", 5, ("a",))))
    assert graph.tails_s == {"a": 6.0, "b": 2.0, "c": 5.0}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((compute("a"), compute("a")), "two tasks are called 'a'"),
        ((compute("a", after=("b",)),), "waits for 'b', which does not exist"),
        ((compute("a", after=("b",)), compute("b", after=("a",))), "in a circle that 'a'"),
        ((compute("a", after=("a",)),), "in a circle"),
    ],
)
def test_what_is_no_graph_is_refused(tasks, message):
    with pytest.raises(ConfigurationError, match=message):
        TaskGraph(tasks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compute(""), "needs a name"),
        (lambda: compute("a", -1), "duration_s of task 'a'"),
        (lambda: compute("a", float("nan")), "duration_s of task 'a'"),
        (lambda: compute("a", resource=""), "names no resource"),
        (lambda: compute("a", after="b"), "depends_on of task 'a' must be names"),
        (lambda: send("a", -1), "size_bytes of task 'a'"),
        (lambda: send("a", cost_s_per_byte=float("inf")), "cost_s_per_byte of task 'a'"),
        (lambda: send("a", 10).chunks(0), "chunk_bytes must be a whole number from 1; got 0"),
        (lambda: send("a", 10).chunks(2.5), "chunk_bytes must be a whole number from 1; got 2.5"),
        (lambda: TaskGraph((compute("a"),), marks=("b",)), "mark 'b'"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_chunks_cover_the_task():
    task = send("a", 10)
    assert task.chunks(4) == (4, 4, 2)
    assert task.chunks(5) == (5, 5)
    assert task.chunks(None) == task.chunks(10) == task.chunks(11) == (10,)
    assert send("a", 0).chunks(4) == (0,)


def test_buckets_fill_in_the_order_of_the_backward_pass():
    layers = [LayerCost(forward_s=1, backward_s=1, gradient_bytes=size) for size in (0, 5, 1, 3, 4)]
    graph = iteration_graph(layers, cost_s_per_byte=1.0, bucket_bytes=6, iterations=2)
    found = [(task.task_id, task.size_bytes) for task in graph.communication]
    assert found == [
        ("reduce 4-3 of 0", 7), ("reduce 2-1 of 0", 6),
        ("reduce 4-3 of 1", 7), ("reduce 2-1 of 1", 6),
    ]  # fmt: skip
    assert "reduce 4-3 of 0" in graph.by_id["forward 3 of 1"].depends_on
    assert graph.by_id["forward 0 of 1"].depends_on == ("backward 0 of 0",)
    assert graph.marks == ("backward 0 of 0", "backward 0 of 1")


def test_a_last_bucket_that_is_not_full_is_reduced_too():
    layers = [LayerCost(forward_s=1, backward_s=1, gradient_bytes=size) for size in (0, 2, 9)]
    graph = iteration_graph(layers, cost_s_per_byte=1.0, bucket_bytes=9, iterations=1)
    assert [task.size_bytes for task in graph.communication] == [9, 2]


def test_an_expert_layer_exchanges_twice_per_pass():
    layer = LayerCost(forward_s=4, backward_s=8, all_to_all_bytes=3)
    graph = iteration_graph([layer], cost_s_per_byte=1.0, iterations=1)
    assert [task.kind for task in graph.communication] == ["all_to_all"] * 4
    assert sum(task.duration_s for task in graph.compute) == 12
    # Experts wait for their tokens, and what follows for the results: one chain.
    assert [task.depends_on for task in graph.tasks[1:]] == [
        (task.task_id,) for task in graph.tasks[:-1]
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"iterations": 0},
        {"iterations": "2"},
        {"bucket_bytes": 0},
        {"layers": []},
        {"cost_s_per_byte": -1.0},
        {"cost_s_per_byte": "1"},
    ],
)
def test_bad_iterations_are_refused(change):
    values = {"layers": [LayerCost(forward_s=1, backward_s=1, gradient_bytes=1)]}
    values |= {"cost_s_per_byte": 1.0} | change
    with pytest.raises(ConfigurationError):
        iteration_graph(values.pop("layers"), **values)
