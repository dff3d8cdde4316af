"""Generated networks against what is known of them: counts, degrees, distances, cuts."""

from __future__ import annotations

import itertools
import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError
from fivefold.network.topology import (
    HostSpec,
    Port,
    clos,
    dragonfly,
    dual_plane,
    fat_tree,
    fully_connected,
    hypercube,
    leaf_spine,
    line,
    load_lingjun,
    mesh,
    rail_only,
    rail_optimized,
    ring,
    star,
    switch,
    torus,
)


def hops(topology):
    """Number of links between every two ranks, by networkx."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.num_nodes))
    graph.add_edges_from(zip(topology.link_sources, topology.link_targets, strict=True))
    lengths = dict(nx.all_pairs_shortest_path_length(graph))
    ranks = topology.rank_nodes.tolist()
    return np.array([[lengths[a][b] for b in ranks] for a in ranks])


def cut_bytes_per_s(topology, ranks):
    """Least capacity between some ranks and all others, by networkx."""
    graph = nx.DiGraph()
    for index, link in enumerate(topology.links):
        graph.add_edge(link.source, f"link{index}", capacity=link.capacity_bytes_per_s)
        graph.add_edge(f"link{index}", link.target, capacity=link.capacity_bytes_per_s)
    for rank, name in enumerate(topology.ranks):
        ends = ("from", name) if rank in ranks else (name, "to")
        graph.add_edge(*ends)
    return nx.maximum_flow_value(graph, "from", "to")


def is_symmetric(topology):
    there = sorted((x.source, x.target, x.capacity_bytes_per_s) for x in topology.links)
    back = sorted((x.target, x.source, x.capacity_bytes_per_s) for x in topology.links)
    return there == back


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_grids_have_their_distances(shape, wrap):
    grid = (torus if wrap else mesh)(shape)
    found = hops(grid)
    places = list(itertools.product(*map(range, shape)))
    for a, b in itertools.product(range(len(places)), repeat=2):
        apart = [abs(x - y) for x, y in zip(places[a], places[b], strict=True)]
        if wrap:
            apart = [min(x, size - x) for x, size in zip(apart, shape, strict=True)]
        assert found[a, b] == sum(apart)
    around = [size if size > 2 and wrap else size - 1 for size in shape]
    edges = sum(math.prod(shape) // size * count for size, count in zip(shape, around, strict=True))
    assert grid.num_links == 2 * edges
    assert is_symmetric(grid)


def test_grid_distances_in_full():
    apart = hops(torus((3, 4)))
    for a, b in itertools.product(range(12), repeat=2):
        rows, columns = abs(a // 4 - b // 4), abs(a % 4 - b % 4)
        assert apart[a, b] == min(rows, 3 - rows) + min(columns, 4 - columns)


def test_a_dimension_of_two_has_one_link():
    assert [len(torus((4, 2, 3)).out_links(node)) for node in range(24)] == [5] * 24
    assert ring(2).num_links == 2
    assert ring(1).num_links == 0


def test_grids_may_differ_by_dimension():
    grid = mesh((2, 3), bandwidth=["80 GB/s", "35 GB/s"])
    for link in grid.links:
        apart = abs(grid.index(link.source) - grid.index(link.target))
        assert link.bandwidth_bytes_per_s == {3: 80e9, 1: 35e9}[apart]


@pytest.mark.parametrize("dimensions", [0, 1, 3, 5])
def test_hypercube_distance_is_the_number_of_different_bits(dimensions):
    cube = hypercube(dimensions)
    apart = hops(cube)
    for a, b in itertools.product(range(2**dimensions), repeat=2):
        assert apart[a, b] == (a ^ b).bit_count()
    assert cube.num_links == dimensions * 2**dimensions


def test_small_graphs():
    assert hops(fully_connected(5)).max() == 1
    assert hops(star(5))[1:, 1:].max() == 2
    assert hops(line(6))[0, 5] == 5
    assert hops(ring(7)).max() == 3
    assert hops(switch(3)).max() == 2
    for make in (ring, line, fully_connected, star, switch):
        assert make(1).num_ranks == 1


@pytest.mark.parametrize("k", [2, 4, 6])
def test_fat_tree_is_the_published_one(k):
    tree = fat_tree(k)
    kinds = [node.kind for node in tree.nodes]
    assert tree.num_ranks == k**3 // 4
    assert [kinds.count(kind) for kind in ("tor", "agg", "core")] == [
        k * k // 2,
        k * k // 2,
        k * k // 4,
    ]
    for node in range(tree.num_nodes):
        assert len(tree.out_links(node)) == (1 if tree.is_rank[node] else k)
    half = set(range(tree.num_ranks // 2))
    rate = tree.capacities_bytes_per_s[0]
    assert cut_bytes_per_s(tree, half) == len(half) * rate


def test_fat_tree_keeps_full_bisection_with_large_hosts():
    spec = HostSpec(gpus=4, nics=2, nvlink="100 GB/s", pcie="100 GB/s")
    tree = fat_tree(4, host=spec, bandwidth="10 GB/s")
    half = set(range(tree.num_ranks // 2))
    assert cut_bytes_per_s(tree, half) == pytest.approx(8 * 2 * 10e9)
    thin = fat_tree(4, host=spec, bandwidth="10 GB/s", oversubscription=4)
    assert cut_bytes_per_s(thin, half) == pytest.approx(8 * 2 * 10e9 / 4)


def test_leaf_spine_shares_hosts_and_capacity():
    cluster = leaf_spine(7, leaves=3, spines=2, bandwidth=10.0, oversubscription=1.5)
    assert [len(cluster.in_links(f"leaf{leaf}")) - 2 for leaf in range(3)] == [3, 2, 2]
    upward = [x for x in cluster.links if x.source == "leaf1" and x.target.startswith("spine")]
    assert sum(link.capacity_bytes_per_s for link in upward) == pytest.approx(3 * 10.0 / 1.5)
    assert hops(cluster).max() == 4


def test_clos_full_and_split_planes():
    split = clos((2, 2, 2), aggs=2, cores=4)
    full = clos((2, 2, 2), aggs=2, cores=4, planes="full")
    assert len(split.in_links("core0")) == 2
    assert len(full.in_links("core0")) == 4
    half = {0, 1, 2, 3}
    assert cut_bytes_per_s(split, half) == cut_bytes_per_s(full, half) == 4 * 25e9


def test_hosts_hold_their_devices():
    tree = fat_tree(2, host=HostSpec(gpus=8, nics=4))
    in_host = [node for node in tree.nodes if node.host == "host0"]
    kinds = [node.kind for node in in_host]
    assert [kinds.count(kind) for kind in ("gpu", "nvswitch", "pcie", "nic")] == [8, 1, 4, 4]
    names = [tree.nodes[tree.link_targets[i]].name for i in tree.out_links("host0/gpu5")]
    assert names == ["host0/nvswitch", "host0/pcie2"]
    # Through its own NIC: GPU, PCIe switch, NIC, rack switch.
    route = tree.shortest_route(5, 13, through_ranks=False)
    passed = [tree.nodes[tree.link_targets[i]].kind for i in route]
    assert passed[:3] == ["pcie", "nic", "tor"]
    many_nics = fat_tree(2, host=HostSpec(gpus=1, nics=2))
    assert len(many_nics.in_links("pod0/tor0")) == 2 + 1


def test_hosts_without_nvlink_meet_outside():
    tree = fat_tree(2, host=HostSpec(gpus=2, nvlink=None))
    assert [node.kind for node in tree.nodes].count("nvswitch") == 0
    assert len(tree.shortest_route(0, 1)) == 2


def test_rail_only_joins_rails_inside_hosts_only():
    fabric = rail_only(3, host=HostSpec(gpus=4))
    apart = hops(fabric)
    for a, b in itertools.permutations(range(12), 2):
        same_host, same_rail = a // 4 == b // 4, a % 4 == b % 4
        assert apart[a, b] == (2 if same_host or same_rail else 4)


def test_rail_optimized_has_spines_between_pods_and_rails():
    fabric = rail_optimized(5, spines=3, hosts_per_pod=2, host=HostSpec(gpus=4, nvlink=None))
    apart = hops(fabric)
    for a, b in itertools.permutations(range(20), 2):
        same_leaf = a // 8 == b // 8 and a % 4 == b % 4
        assert apart[a, b] == (2 if same_leaf else 4)
    assert cut_bytes_per_s(fabric, set(range(8))) == pytest.approx(8 * 25e9)


def test_dual_plane_splits_each_port():
    fabric = dual_plane(
        4, hosts_per_segment=2, aggs_per_plane=3, host=HostSpec(gpus=2, nvlink=None)
    )
    leaving = fabric.out_links("host0/gpu0")
    assert fabric.capacities_bytes_per_s[leaving].tolist() == [12.5e9, 12.5e9]
    # No route from plane to plane except through a host.
    graph = nx.DiGraph()
    for link in fabric.links:
        if "gpu" not in link.source + link.target:
            graph.add_edge(link.source, link.target)
    assert nx.number_weakly_connected_components(graph) == 2
    assert cut_bytes_per_s(fabric, {0, 1, 2, 3}) == pytest.approx(4 * 25e9)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 13))
@settings(max_examples=40, deadline=None)
def test_every_two_groups_of_a_dragonfly_are_joined_alike(a, p, h, groups):
    if groups > a * h + 1:
        with pytest.raises(ConfigurationError, match=f"at most {a * h + 1} groups"):
            dragonfly(a, ranks_per_router=p, global_links=h, groups=groups)
        return
    network = dragonfly(a, ranks_per_router=p, global_links=h, groups=groups)
    assert network.num_ranks == a * p * groups
    assert network.is_connected()
    between = {}
    for link in network.links:
        ends = link.source.partition("/")[0], link.target.partition("/")[0]
        if ends[0] != ends[1]:
            between[ends] = between.get(ends, 0) + 1
    if groups > 1:
        assert len(between) == groups * (groups - 1)
        assert set(between.values()) == {a * h // (groups - 1)}
    for node in range(network.num_nodes):
        if not network.is_rank[node]:
            assert len(network.out_links(node)) <= p + (a - 1) + h
    assert is_symmetric(network)


def test_a_full_dragonfly_is_three_router_hops_wide():
    # To the router with the global link, across it, and to the destination's router.
    assert hops(dragonfly(4, ranks_per_router=1)).max() == 2 + 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ring(0), "num_ranks|dimension"),
        (lambda: mesh(()), "needs a shape"),
        (lambda: torus((4, 0)), "from 1 to .*; got 0"),
        (lambda: torus((4, 2.0)), "got 2.0"),
        (lambda: mesh((2, 2), bandwidth=[1.0]), r"shape \(2, 2\) got 1 bandwidths"),
        (lambda: hypercube(-1), "from 0 to .*; got -1"),
        (lambda: fully_connected(True), "got True"),
        (lambda: switch(2, bandwidth="fast"), "'fast' is not a rate"),
        (lambda: ring(3, bandwidth=0), "bandwidth of .* got 0"),
        (lambda: ring(3, latency="-1 us"), "not a duration"),
        (lambda: fat_tree(3), "even; got 3"),
        (lambda: fat_tree(4, oversubscription=0), "oversubscription must be a number.* got 0"),
        (lambda: clos((1, 1, 1), aggs=2, cores=3), "3 cores cannot be split evenly among 2"),
        (lambda: clos((1, 1, 1), aggs=1, cores=1, planes="half"), "planes is 'half'"),
        (lambda: leaf_spine(2, leaves=0, spines=1), "leaves"),
        (lambda: rail_only(0), "hosts"),
        (lambda: HostSpec(gpus=0), "gpus"),
        (lambda: HostSpec(nics=0), "nics"),
        (lambda: HostSpec(kind="tor"), "'tor'"),
    ],
)
def test_what_cannot_be_built(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def lingjun_file(folder, rows, header="ip,DSW,PSW,ASW"):
    path = folder / "topo.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_lingjun_racks_are_named_inside_their_pod(tmp_path):
    rows = [f"{index:064x},G6,P{8 + 2 * (index % 2)},S{1 + index % 3}" for index in range(24)]
    cluster = load_lingjun(lingjun_file(tmp_path, rows), host=HostSpec(gpus=2), aggs=2, cores=4)
    racks = [node.name for node in cluster.nodes if node.kind == "tor"]
    assert racks == [f"P{pod}/S{rack}" for pod in (8, 10) for rack in (1, 2, 3)]
    assert cluster.num_ranks == 48
    assert len(cluster.hosts) == 24
    assert cluster.is_connected()
    assert "2 aggregation switches per pod" in cluster.source
    # Rack to rack in a pod over an aggregation switch, pod to pod over a core.
    first = {
        rack: next(r for r in range(48) if cluster.ranks[r].startswith(rack)) for rack in racks
    }
    assert len(cluster.shortest_route(first["P8/S1"], first["P8/S2"])) == 4
    assert len(cluster.shortest_route(first["P8/S1"], first["P10/S1"])) == 6
    only = load_lingjun(tmp_path / "topo.csv", pods=["P10"], port=Port("1 GB/s"))
    assert {name.partition("/")[0] for name in only.ranks} == {"P10"}


def test_a_path_that_cannot_be_a_lingjun_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.csv", "topo.\0csv"):
        with pytest.raises(DataError, match="Lingjun topology"):
            load_lingjun(path)


@pytest.mark.parametrize(
    ("rows", "header", "words"),
    [
        (["a,G6,P8,S1"], "ip,DSW,PSW", "no column ASW"),
        ([], "ip,DSW,PSW,ASW", "holds no host"),
        (["a,G6,P8,"], "ip,DSW,PSW,ASW", "incomplete row in line 2"),
        (["a,G6"], "ip,DSW,PSW,ASW", "incomplete row in line 2"),
        (["a,G6,P8,S1", "a,G6,P8,S2"], "ip,DSW,PSW,ASW", "host a more than once"),
    ],
)
def test_damaged_lingjun_files(tmp_path, rows, header, words):
    with pytest.raises(DataError, match=words):
        load_lingjun(lingjun_file(tmp_path, rows, header))


def test_missing_lingjun_file_and_pod(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_lingjun(tmp_path / "nothing.csv")
    path = lingjun_file(tmp_path, ["a,G6,P8,S1"])
    with pytest.raises(ConfigurationError, match=r"no pod P9.*P8"):
        load_lingjun(path, pods=["P9"])
    with pytest.raises(ConfigurationError, match="none named"):
        load_lingjun(path, pods=[])
