"""The estimate from counts alone, against sampled graphs, measured runs and published numbers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fivefold.cli._gnn import app
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.gnn.data import generate_graph
from fivefold.gnn.packing import pack
from fivefold.gnn.planning import Budgets, make_plan
from fivefold.gnn.planning.estimate import KNOWN_GRAPHS, GraphSize, estimate
from fivefold.gnn.sampling import NeighborSampler, sample_epochs

RESULTS = Path(__file__).parents[3] / "benchmarks/results/gnn/scale.json"
SIZE = RESULTS.with_name("size.json")
SPEED = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}


def test_counts_and_bytes_are_those_of_a_real_run(tmp_path, disk):
    nodes, dim, batch_size, fanouts = 60_000, 16, 256, [10, 10]
    with generate_graph(tmp_path / "graph", nodes=nodes, dim=dim, seed=0) as dataset:
        graph = GraphSize(
            nodes=nodes, edges=dataset.num_edges, row_bytes=4 * dim, seeds=len(dataset.train)
        )
        sampler = NeighborSampler(dataset.topology(), fanouts, seed=0)
        path = tmp_path / "samples.fvf"
        budgets = Budgets(host_bytes=1_800_000, disk_bytes=10**9)
        with sample_epochs(sampler, dataset.train, path, batch_size=batch_size) as samples:
            real_nodes = np.mean([samples.num_nodes_of(i) for i in range(samples.num_batches)])
            plan = make_plan(samples, dataset.features, budgets, disk)
            sampled_bytes = samples.nbytes
            with pack(
                dataset.features, samples, plan, tmp_path / "store", memory_bytes=32 << 20
            ) as store:
                packed = store.rows.nbytes + store.records.nbytes
    found = estimate(graph, fanouts, batch_size, budgets, **SPEED, packing_bytes=32 << 20)
    stages = {stage.name: stage for stage in found.stages}
    assert found.batches == store.plan.num_batches
    assert found.nodes_per_batch == pytest.approx(real_nodes, rel=0.15)
    assert 1 - found.hit_rate == pytest.approx(plan.predicted.hit_rates["disk"], rel=0.15)
    assert found.read_bytes_per_epoch == pytest.approx(plan.predicted.cold_rows * 4 * dim, rel=0.15)
    assert stages["sample"].disk_bytes == pytest.approx(sampled_bytes, rel=0.15)
    assert stages["pack"].disk_bytes == pytest.approx(packed, rel=0.15)


@pytest.mark.parametrize("millions", [5, 10, 20])
def test_times_are_those_that_were_measured(millions):
    """The prices were fitted to these runs; they hold over a range of sizes and both regimes."""
    rows = {
        row["metric"]: row["ours"]
        for row in json.loads(RESULTS.read_text())["rows"]
        if row["case"].startswith(f"{millions} M nodes, 512 B rows")
    }
    nodes = millions * 10**6
    graph = GraphSize(nodes=nodes, edges=15 * nodes, row_bytes=512, seeds=nodes // 100)
    cache = nodes * 512 // 10
    budgets = Budgets(host_bytes=cache + 3 * 530_000 * 512, disk_bytes=10**13)
    copied = rows["copy: bytes read + written"]
    found = estimate(
        graph, [10, 10, 10], 1024, budgets,
        read_bytes_per_s=copied, write_bytes_per_s=copied, packing_bytes=335 << 20,
    )  # fmt: skip
    seconds = {stage.name: stage.seconds for stage in found.stages}
    assert seconds["sample"] == pytest.approx(rows["sampling: time"], rel=0.15)
    both = rows["planning and packing: time"] + 2.3  # their worker was given the disk's speed
    assert seconds["plan"] + seconds["pack"] == pytest.approx(both, rel=0.15)
    assert seconds["epoch, data path"] == pytest.approx(rows["epoch, data path"], rel=0.15)


@pytest.mark.parametrize("host_kb", [1600, 1900, 2400, 3000])
def test_caches_hold_the_rows_that_are_used_most(tmp_path, disk, host_kb):
    """Few batches of many nodes: which of the rare ones are cached is decided by their counts."""
    nodes, dim, batch_size, fanouts = 60_000, 16, 256, [10, 10]
    budgets = Budgets(host_bytes=host_kb * 1000, disk_bytes=10**9)
    with generate_graph(tmp_path / "graph", nodes=nodes, dim=dim, seed=3) as dataset:
        graph = GraphSize(
            nodes=nodes, edges=dataset.num_edges, row_bytes=4 * dim, seeds=len(dataset.train)
        )
        sampler = NeighborSampler(dataset.topology(), fanouts, seed=0)
        path = tmp_path / "samples.fvf"
        with sample_epochs(sampler, dataset.train, path, batch_size=batch_size) as samples:
            told = estimate(graph, fanouts, batch_size, budgets, **SPEED)
            plan = make_plan(samples, dataset.features, budgets, disk,
                             segment_batches=told.segment_batches)  # fmt: skip
    rows = told.read_bytes_per_epoch / (4 * dim)
    assert rows == pytest.approx(plan.predicted.cold_rows, rel=0.1)
    assert told.packed_rows == pytest.approx(plan.predicted.packed_rows, rel=0.1)


def test_the_estimate_is_true_at_the_size_it_is_for():
    """What was measured at 100 M nodes under a budget of memory, by the commands."""
    rows = {row["metric"]: row for row in json.loads(SIZE.read_text())["rows"]}
    measured = {metric: row["ours"] for metric, row in rows.items()}
    graph = GraphSize(nodes=10**8, edges=16 * 10**8, row_bytes=128, seeds=600_000)
    found = estimate(
        graph, [10, 10, 10], 1024,
        Budgets(host_bytes=int(measured["budgets.host"]), disk_bytes=10**13),
        read_bytes_per_s=measured["disk, as the estimate probed it: reads"],
        write_bytes_per_s=measured["disk, as the estimate probed it: writes"],
    )  # fmt: skip
    stages = {stage.name: stage for stage in found.stages}
    near = {"rel": 0.15}
    assert found.nodes_per_batch == pytest.approx(measured["rows of a batch"], **near)
    assert found.read_bytes_per_epoch == pytest.approx(measured["cold rows of an epoch"], **near)
    assert found.packed_rows * 128 == pytest.approx(measured["packed rows"], **near)
    for run, stage in (("generate", "ingest"), ("train", "epoch, data path"),
                       ("sample", "sample"), ("plan", "plan"), ("pack", "pack")):  # fmt: skip
        memory = measured[f"{run}: memory, without page cache"]
        assert stages[stage].memory_bytes == pytest.approx(memory, **near), run
        if run in {"sample", "plan", "pack"}:
            assert stages[stage].seconds == pytest.approx(measured[f"{run}: time"], **near), run
    disk = sum(stages[name].disk_bytes for name in ("sample", "pack"))
    most = measured["pack: most disk space at a time"]
    assert disk + stages["pack"].scratch_bytes == pytest.approx(most, **near)
    most = measured["generate: most disk space at a time"]
    ingest = stages["ingest"]
    assert ingest.disk_bytes + ingest.scratch_bytes == pytest.approx(most, **near)
    batch = stages["epoch, data path"].seconds / found.batches
    assert batch == pytest.approx(measured["a batch, data path alone"], **near)


def test_device_memory_holds_the_batches_in_flight_before_a_cache():
    graph = KNOWN_GRAPHS["papers100M"]

    def with_device(device_bytes):
        budgets = Budgets(host_bytes=6 * 10**9, disk_bytes=10**12, device_bytes=device_bytes)
        return estimate(graph, [10, 10], 1024, budgets, **SPEED)

    none = with_device(0)
    in_flight_bytes = 3 * none.nodes_per_batch * graph.row_bytes
    assert with_device(int(0.9 * in_flight_bytes)).hit_rate == none.hit_rate
    assert with_device(int(in_flight_bytes) + 10**9).hit_rate > none.hit_rate


def test_more_memory_or_disk_never_costs_more():
    graph = KNOWN_GRAPHS["MAG240M"]
    most = [
        estimate(graph, [10, 15], 1024, Budgets(host_bytes=h * 10**9, disk_bytes=10**13), **SPEED)
        for h in (4, 8, 16, 64)
    ]
    reads = [found.read_bytes_per_epoch for found in most]
    assert reads == sorted(reads, reverse=True)
    assert [found.hit_rate for found in most] == sorted(found.hit_rate for found in most)


def test_a_fan_out_beyond_all_degrees_takes_all_neighbours():
    graph = GraphSize(nodes=100_000, edges=100_000_000, row_bytes=64, seeds=1000)
    budgets = Budgets(host_bytes=10**9, disk_bytes=10**12)
    every = estimate(graph, [-1], 100, budgets, **SPEED).edges_per_batch
    for fanout in (10**7, 10**9):
        found = estimate(graph, [fanout], 100, budgets, **SPEED).edges_per_batch
        assert found == pytest.approx(every)
    mean = every / 100  # degrees are more than half of it
    half = estimate(graph, [int(mean) // 4], 100, budgets, **SPEED).edges_per_batch
    assert half == pytest.approx(100 * (int(mean) // 4), rel=1e-6)


@pytest.mark.parametrize(("nodes", "fanouts"), [(1, [3]), (2, [-1]), (10, [0]), (1000, [3, 0])])
def test_a_batch_of_all_nodes_and_a_hop_of_none(nodes, fanouts):
    graph = GraphSize(nodes=nodes, edges=8 * nodes, row_bytes=16, seeds=nodes)
    budgets = Budgets(host_bytes=10**9, disk_bytes=10**12)
    found = estimate(graph, fanouts, 1024, budgets, **SPEED)
    assert found.nodes_per_batch == pytest.approx(nodes)
    assert (found.edges_per_batch == 0) == (fanouts == [0])


def test_what_it_refuses():
    graph = KNOWN_GRAPHS["papers100M"]
    with pytest.raises(InfeasibleError, match="in flight"):
        estimate(graph, [10, 15, 20], 1024, Budgets(host_bytes=10**8, disk_bytes=10**12), **SPEED)
    with pytest.raises(InfeasibleError, match="disk budget"):
        estimate(graph, [10, 15, 20], 1024, Budgets(host_bytes=10**10, disk_bytes=10**9), **SPEED)
    with pytest.raises(ConfigurationError, match="fanouts"):
        estimate(graph, [], 1024, Budgets(host_bytes=10**10, disk_bytes=10**12), **SPEED)
    for reads, writes in ((0.0, 0.0), (1e9, math.nan), (math.nan, 1e9), (1e9, -1.0)):
        speeds = {"read_bytes_per_s": reads, "write_bytes_per_s": writes}
        with pytest.raises(ConfigurationError, match=f"reads {reads} and writes {writes}"):
            estimate(graph, [10], 1024, Budgets(host_bytes=10**10, disk_bytes=10**12), **speeds)
    with pytest.raises(ConfigurationError, match="seeds"):
        GraphSize(nodes=5, edges=9, row_bytes=4, seeds=6)


def test_the_command_prints_it_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--estimate", "--host-memory", "16 GB", "--disk-speed", "1 GB/s"]
    for graph in ("papers100M", "mag240m", "nodes=1e8,edges=1.6e9,row_bytes=128,seeds=1e6"):
        found = CliRunner().invoke(app, ["plan", graph, *options, "--json"])
        assert found.exit_code == 0, found.output
        facts = json.loads(found.stdout)
        assert [stage["name"] for stage in facts["stages"]][:3] == ["ingest", "sample", "plan"]
        assert facts["disk_bytes"] > facts["graph"]["nodes"] * facts["graph"]["row_bytes"]
    text = CliRunner().invoke(app, ["plan", "IGB-full", *options]).stdout
    assert "most at a time" in text
    assert list(tmp_path.iterdir()) == []
    for graph in ("nodes=1e8", "nodes=many,edges=1"):
        assert CliRunner().invoke(app, ["plan", graph, *options]).exit_code


def test_memory_of_packing_counts_the_checksums_of_all_pages():
    """Ten bytes for each page of rows: of a store of terabytes more than its buffers."""
    budgets = Budgets(host_bytes=6 * 10**9, disk_bytes=10**14)
    graph = KNOWN_GRAPHS["IGB-full"]
    speeds = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}
    found = estimate(graph, [10, 15], 1024, budgets, **speeds)
    pages = found.packed_rows * graph.row_bytes // 4096
    pack_stage = next(stage for stage in found.stages if stage.name == "pack")
    assert pack_stage.memory_bytes > 10 * pages
