"""Collectives on tiers: closed forms, measured tables, groups astride of nodes."""

import math

import numpy as np
import pytest

from fivefold.collectives.pricing import FabricSpec, Group, Tier, collective_time_s
from fivefold.errors import ConfigurationError
from fivefold.strategy import load_cluster

PLAIN = {"efficiency": 1.0, "base_s": 0.0, "hop_s": 0.0}


def two_tiers(inner=300e9, outer=25e9, **changed):
    settings = {**PLAIN, **changed}
    return FabricSpec(
        name="two",
        tiers=(
            Tier(name="node", gpus=8, bandwidth_bytes_per_s=inner, **settings),
            Tier(name="cluster", gpus=4096, bandwidth_bytes_per_s=outer, **settings),
        ),
    )


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_ring_times_are_the_textbook_ones(size):
    fabric, group, data = two_tiers(), Group(size=size), 1e9
    gather = collective_time_s(fabric, "all_gather", size_bytes=data, group=group)
    assert gather == pytest.approx(data * (size - 1) / size / 300e9, rel=1e-12)
    scatter = collective_time_s(fabric, "reduce_scatter", size_bytes=data, group=group)
    assert scatter == gather
    reduce = collective_time_s(fabric, "all_reduce", size_bytes=data, group=group)
    assert reduce == pytest.approx(2 * gather, rel=1e-12)


def test_a_group_gets_the_adapters_of_its_own_members():
    """Eight data-parallel rings share a node; one tensor ring over two nodes owns it."""
    fabric, data = two_tiers(), 1e9
    data_parallel = collective_time_s(
        fabric, "all_gather", size_bytes=data, group=Group(size=16, stride=8)
    )
    assert data_parallel == pytest.approx(data * 15 / 16 / 25e9)
    tensor = collective_time_s(fabric, "all_gather", size_bytes=data, group=Group(size=16))
    assert tensor == pytest.approx(data * 15 / 16 / 200e9)


def test_trees_send_each_node_s_data_once_over_two_nodes():
    fabric, data = two_tiers(inner=1e15), 1e9
    time_s = collective_time_s(fabric, "all_reduce", size_bytes=data, group=Group(size=16))
    assert time_s == pytest.approx(data / (8 * 25e9) / 0.92)


def test_all_to_all_is_bound_by_what_leaves_the_node():
    fabric, data = two_tiers(), 64e6
    inside = collective_time_s(fabric, "all_to_all", size_bytes=data, group=Group(size=8))
    assert inside == pytest.approx(data * 7 / 8 / 300e9)
    outside = collective_time_s(fabric, "all_to_all", size_bytes=data, group=Group(size=32))
    assert outside == pytest.approx(data * 24 / 32 / 25e9)


def test_latency_follows_nccl():
    hops = {"efficiency": 1.0, "base_s": 8.4e-6}
    fabric = FabricSpec(
        name="x",
        tiers=(
            Tier(name="node", gpus=8, bandwidth_bytes_per_s=1e15, hop_s=3.4e-6, **hops),
            Tier(name="net", gpus=512, bandwidth_bytes_per_s=1e15, hop_s=14e-6, **hops),
        ),
    )
    nodes, size = 4, 32
    ring = 8.4e-6 + 2 * (size - nodes) * 3.4e-6 + 2 * (nodes - 1) * 14e-6
    tree = 8.4e-6 + 2 * 7 * 3.4e-6 + 2 * math.log2(nodes) * 14e-6
    time_s = collective_time_s(fabric, "all_reduce", size_bytes=1, group=Group(size=size))
    assert time_s == pytest.approx(min(ring, tree), rel=1e-6)


# nccl-tests all-reduce on 8 H100 by an NVSwitch: bytes, microseconds. Three rows fit the constants
# of this test (base, rate, fill), the others judge; NCCL changes protocol below 1 MiB.
H100_ALL_REDUCE = {
    2**16: 19.54, 2**20: 27.37, 2**21: 42.21, 2**22: 54.19, 2**23: 83.04, 2**24: 123.8,
    2**25: 199.3, 2**26: 324.7, 2**27: 586.4, 2**28: 1112.5, 2**29: 2151, 2**30: 4029.4,
    2**32: 15749, 2**34: 62648,
}  # fmt: skip


def test_measured_all_reduce_is_met_from_three_rows():
    rows = (2**16, 2**22, 2**30)
    matrix = np.array([[1.0, size, math.sqrt(size)] for size in rows])
    base, inverse, root = np.linalg.solve(matrix, [H100_ALL_REDUCE[size] * 1e-6 for size in rows])
    rate = 2 * 7 / 8 / inverse
    tier = Tier(
        name="node", gpus=8, bandwidth_bytes_per_s=rate, efficiency=1.0, base_s=base, hop_s=0.0,
        fill_s=(root / 2) ** 2 * rate,
    )  # fmt: skip
    fabric = FabricSpec(name="h100", tiers=(tier,))
    errors = [
        collective_time_s(fabric, "all_reduce", size_bytes=size, group=Group(size=8)) / (t * 1e-6)
        - 1
        for size, t in H100_ALL_REDUCE.items()
        if size not in rows
    ]
    assert np.mean(np.abs(errors)) < 0.06
    assert np.max(np.abs(errors)) < 0.2


def test_measured_a100_all_reduce():
    """Alpha-beta fits of vTrain's table: ranks, microseconds, bus bandwidth."""
    fabric = load_cluster("a100-megatron").fabric
    for ranks, alpha_us, bus in ((2, 46.0, 192.9e9), (4, 54.0, 218.4e9), (8, 78.6, 227.3e9)):
        for size in (2**26, 2**28, 2**30):
            measured_s = alpha_us * 1e-6 + 2 * (ranks - 1) / ranks * size / bus
            ours = collective_time_s(fabric, "all_reduce", size_bytes=size, group=Group(size=ranks))
            assert ours == pytest.approx(measured_s, rel=0.16 if ranks == 2 else 0.06)


def test_nothing_is_free_only_for_one():
    fabric = two_tiers()
    assert collective_time_s(fabric, "all_reduce", size_bytes=1e9, group=Group(size=1)) == 0
    assert collective_time_s(fabric, "all_reduce", size_bytes=0, group=Group(size=8)) == 0


def test_bad_input_is_explained():
    with pytest.raises(ConfigurationError, match="unknown"):
        collective_time_s(two_tiers(), "gossip", size_bytes=1, group=Group(size=2))
    with pytest.raises(ConfigurationError, match="has no tier"):
        FabricSpec(name="x", tiers=())
    with pytest.raises(ConfigurationError, match="multiple of the one below"):
        FabricSpec(name="x", tiers=(
            Tier(name="a", gpus=8, bandwidth_bytes_per_s=1.0),
            Tier(name="b", gpus=12, bandwidth_bytes_per_s=1.0),
            Tier(name="c", gpus=24, bandwidth_bytes_per_s=1.0),
        ))  # fmt: skip
    with pytest.raises(ConfigurationError, match="bandwidth_bytes_per_s of tier 'a'"):
        Tier(name="a", gpus=8, bandwidth_bytes_per_s=0.0)
