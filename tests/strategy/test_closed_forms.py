"""Closed forms against the simulator to 1e-9, ASTRA-sim's rules against its output."""

import dataclasses

import pytest
from benchmarks.strategy import astra_sim as astra

from fivefold.collectives.pricing import FabricSpec, Group, Tier, collective_time_s
from fivefold.network.simulation import Compute, Flow, simulate
from fivefold.network.topology import fat_tree, ring
from fivefold.strategy import ModelSpec, ParallelPlan, evaluate_plan, load_cluster
from fivefold.strategy.pipeline import pipeline_shape

RATE = 10e9


def flat(gpus):
    tier = Tier(
        name="net", gpus=gpus, bandwidth_bytes_per_s=RATE, efficiency=1.0, base_s=0.0, hop_s=0.0
    )
    return FabricSpec(name="flat", tiers=(tier,))


@pytest.mark.parametrize("k", [2, 4, 6])
def test_all_to_all_on_a_fat_tree(k):
    """Paths spread by destination load every link alike: the hosts' ports alone bind."""
    tree, size = fat_tree(k, bandwidth=RATE, latency=0.0), 1e9
    n = tree.num_ranks
    flows = [
        Flow((a, b), tree.ranks[a], tree.ranks[b], size / n, tree.shortest_route(a, b))
        for a in range(n)
        for b in range(n)
        if a != b
    ]
    simulated_s = max(simulate(tree, flows).finish_s)
    ours_s = collective_time_s(flat(n), "all_to_all", size_bytes=size, group=Group(size=n))
    assert ours_s == pytest.approx((n - 1) / n * size / RATE, rel=1e-12)
    assert simulated_s == pytest.approx(ours_s, rel=1e-9)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_ring_all_reduce_on_a_ring(size):
    """2 (n - 1) steps, each after the one before, of a share of the buffer."""
    net, data = ring(size, bandwidth=RATE, latency=0.0), 8e8
    flows = [
        Flow(
            (step, rank), net.ranks[rank], net.ranks[(rank + 1) % size], data / size,
            net.shortest_route(rank, (rank + 1) % size),
            depends_on=[(step - 1, (rank - 1) % size)] if step else [],
        )
        for step in range(2 * (size - 1))
        for rank in range(size)
    ]  # fmt: skip
    simulated_s = max(simulate(net, flows).finish_s)
    # The tree of the closed form is never faster here: it would move as much in two halves.
    ours_s = collective_time_s(flat(size), "all_gather", size_bytes=data, group=Group(size=size))
    assert simulated_s == pytest.approx(2 * ours_s, rel=1e-9)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 9), (8, 24)])
def test_bubble_of_1f1b_by_the_event_engine(stages, micro_batches):
    forward_s, backward_s = 1.3e-3, 2.1e-3
    tasks = []
    for stage in range(stages):
        for order, (kind, i) in enumerate(one_forward_one_backward(stage, stages, micro_batches)):
            before = [("turn", stage, order - 1)] if order else []
            other = stage - 1 if kind == "f" else stage + 1
            if 0 <= other < stages:
                before.append((kind, other, i))
            seconds = forward_s if kind == "f" else backward_s
            tasks.append(Compute((kind, stage, i), seconds, depends_on=before))
            tasks.append(Compute(("turn", stage, order), 0.0, depends_on=[(kind, stage, i)]))
    shape = pipeline_shape(
        "1f1b", stages=stages, micro_batches=micro_batches, forward_s=forward_s,
        input_s=backward_s / 2, weight_s=backward_s / 2,
    )  # fmt: skip
    simulated_s = max(simulate(ring(2), tasks).finish_s)
    ours_s = micro_batches * (forward_s + backward_s) + shape.bubble_s
    assert simulated_s == pytest.approx(ours_s, rel=1e-9)
    assert shape.bubble_s == pytest.approx((stages - 1) * (forward_s + backward_s), rel=1e-12)


def one_forward_one_backward(stage, stages, micro_batches):
    ahead = min(stages - 1 - stage, micro_batches)
    todo = [("f", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        todo += [("f", ahead + i), ("b", i)]
    return todo + [("b", i) for i in range(micro_batches - ahead, micro_batches)]


def test_astra_sim_s_all_reduces():
    machine = astra.Machine(400.0, 936.25e-9, 3350e9, active_chunks=2)
    for mib, nanoseconds, _ in astra.ALL_REDUCES:
        seconds = astra.all_reduce_s(machine, mib * astra.MIB)
        assert seconds == pytest.approx(nanoseconds * 1e-9, rel=2e-3)


def test_astra_sim_s_iteration():
    whole_s, exposed_s = astra.iteration_s()
    assert whole_s == pytest.approx(astra.ITERATION_S, rel=2e-3)
    assert exposed_s == pytest.approx(astra.EXPOSED_S, rel=2e-3)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("accumulated", [1, 4])
def test_sharded_parameters_are_gathered_twice_and_gradients_scattered_once(overlap, accumulated):
    """On a link so slow that it alone counts, each micro-batch costs what ZeRO-3 sends for it."""
    model = ModelSpec(name="m", num_layers=6, hidden=1024, num_heads=16, seq_len=512, vocab=32000)
    device = load_cluster("h100-nemo").device
    plan = ParallelPlan(global_batch=8 * accumulated, data=8, zero=3, data_overlap=overlap)
    slow, half = 2e5, 1e5
    taken = [
        evaluate_plan(
            model, device, dataclasses.replace(flat(8), tiers=(dataclasses.replace(
                flat(8).tiers[0], bandwidth_bytes_per_s=rate),)), plan=plan,
        ).time_s
        for rate in (half, slow)
    ]  # fmt: skip
    sent = 2 * device.parameter_wire_bytes + device.gradient_wire_bytes
    expected = accumulated * sent * model.num_parameters * 7 / 8 / device.shard_gather_share
    assert (taken[0] - taken[1]) / (1 / half - 1 / slow) == pytest.approx(expected, rel=1e-6)
