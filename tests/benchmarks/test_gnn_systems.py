"""The conformance table: every system hands out exactly the rows of an in-memory gather."""

import numpy as np
import pytest
from benchmarks.gnn.systems import (
    DiskGnnSystem,
    GinexSystem,
    InMemorySystem,
    MappedSystem,
    MariusSystem,
    OnlineSystem,
    PackedLoaderSystem,
    PygMappedSystem,
    Workload,
    source_counts,
)

from fivefold.errors import ConfigurationError, StorageError
from fivefold.gnn.sampling import Adjacency, NeighborSampler, sample_epochs
from fivefold.gnn.storage import ContainerWriter, DiskProfile

NODES, FANOUTS, BATCH = 700, [4, 3], 24
SHAPES = [
    (1, "float32"),
    (3, "float32"),
    (100, "float32"),
    (128, "float32"),
    (768, "float16"),
    (1024, "float32"),
    (1025, "float32"),
    (5, "uint8"),
    (130, "float64"),
]
PROFILE = DiskProfile(
    sequential_read_bytes_per_s=1e9,
    sequential_write_bytes_per_s=1e9,
    random_read_iops=50_000.0,
    request_latency_s=1e-4,
    bytes_per_s_by_request_bytes={4096: 2e8, 1 << 20: 1e9},
    backend="threads",
    direct=True,
)


def make_topology(seed=0, nodes=NODES):
    draw = np.random.default_rng(seed)
    degrees = draw.poisson(6.0, nodes)
    degrees[::17] = 0
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    popular = draw.zipf(1.4, int(indptr[-1])) % nodes
    return Adjacency(indptr, popular.astype(np.int32))


def write_features(path, values):
    sections = {"x": (values.dtype, values.shape)}
    with ContainerWriter(path, kind="features", sections=sections, attributes={}) as writer:
        writer.write("x", 0, values)
        return writer.commit()


def random_rows(dim, dtype, seed=1, nodes=NODES):
    draw = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "u":
        return draw.integers(0, 255, (nodes, dim), dtype)
    return draw.standard_normal((nodes, dim)).astype(dtype)


@pytest.fixture(scope="module")
def topology():
    return make_topology()


@pytest.fixture(scope="module")
def samples(topology, tmp_path_factory):
    train = np.random.default_rng(2).choice(NODES, 200, replace=False).astype(np.int64)
    sampler = NeighborSampler(topology, FANOUTS, seed=3)
    path = tmp_path_factory.mktemp("samples") / "samples.fvf"
    return sample_epochs(sampler, train, path, batch_size=BATCH, seed=4)


SYSTEMS = {
    "in memory": lambda w, _t: InMemorySystem(w),
    "mmap": lambda w, _t: MappedSystem(w),
    "mmap plain": lambda w, _t: MappedSystem(w, advice="normal"),
    "mmap + degree cache": lambda w, t: MappedSystem(w, scores=source_counts(t)),
    "PyG mmap": lambda w, _t: PygMappedSystem(w),
    "online LRU": lambda w, _t: OnlineSystem(w),
    "online SIEVE": lambda w, _t: OnlineSystem(w, policy="sieve"),
    "Ginex": lambda w, _t: GinexSystem(w, super_batch=4),
    "Ginex, inspected in every epoch": lambda w, _t: GinexSystem(
        w, super_batch=3, inspect_every_epoch=True
    ),
    "DiskGNN": lambda w, _t: DiskGnnSystem(w, PROFILE, disk_rows=NODES // 3),
    "DiskGNN, packing alone": lambda w, _t: DiskGnnSystem(w, PROFILE),
    "ours static": lambda w, _t: PackedLoaderSystem(w, PROFILE),
    "ours belady": lambda w, _t: PackedLoaderSystem(w, PROFILE, policy="belady"),
}
MARIUS = {
    "MariusGNN sequential": lambda w, t: MariusSystem(w, t, num_partitions=10),
    "MariusGNN dispersed": lambda w, t: MariusSystem(
        w, t, policy="dispersed", num_partitions=9, shuffle=False
    ),
}


def workload_of(features, samples, folder, share):
    # What a cache needs for its bookkeeping comes on top, or small rows would have no cache.
    row_bytes = features.sections["x"].row_bytes + 17
    cache_bytes = int(share * NODES) * row_bytes + (4 * NODES if share else 0)
    return Workload(
        features=features, samples=samples, cache_bytes=cache_bytes, folder=folder, threads=3
    )


def check_epoch(system, values, epoch, samples):
    seen = []
    for batch in system.epoch(epoch):
        expected = samples.batch(batch.number)
        assert batch.node_ids[: batch.batch_size].tolist() == expected.seeds.tolist()
        assert sorted(batch.node_ids.tolist()) == sorted(expected.node_ids.tolist())
        assert batch.x.dtype == values.dtype
        assert np.array_equal(batch.x, values[batch.node_ids])
        edges = batch.node_ids[batch.edge_index()]
        reference = expected.node_ids[expected.edge_index()]
        assert sorted(map(tuple, edges.T.tolist())) == sorted(map(tuple, reference.T.tolist()))
        seen.append(batch.number)
    assert sorted(seen) == list(range(samples.num_batches))


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(("dim", "dtype"), SHAPES)
def test_rows_are_those_of_a_gather(name, dim, dtype, topology, samples, tmp_path):
    values = random_rows(dim, dtype)
    with write_features(tmp_path / "features.fvf", values) as features:
        system = SYSTEMS[name](workload_of(features, samples, tmp_path, 0.1), topology)
        system.prepare()
        for epoch in (0, 1):
            check_epoch(system, values, epoch, samples)
        total = sum(len(samples.node_ids(i)) for i in range(samples.num_batches))
        assert system.statistics().rows_requested == 2 * total
        assert system.work(0, samples.num_batches) >= 0
        system.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("name", SYSTEMS)
def test_no_cache_and_a_cache_of_everything(name, share, topology, samples, tmp_path):
    values = random_rows(7, "float32")
    with write_features(tmp_path / "features.fvf", values) as features:
        system = SYSTEMS[name](workload_of(features, samples, tmp_path, share), topology)
        system.prepare()
        check_epoch(system, values, 0, samples)
        system.close()


@pytest.mark.parametrize(
    "name", ["mmap", "PyG mmap", "online LRU", "online SIEVE", "Ginex", "DiskGNN"]
)
def test_a_stretch_after_seek_is_as_in_the_whole_epoch(name, topology, samples, tmp_path):
    values = random_rows(33, "float32")
    with write_features(tmp_path / "features.fvf", values) as features:
        system = SYSTEMS[name](workload_of(features, samples, tmp_path, 0.1), topology)
        system.prepare()
        first = system.statistics().copy()
        for _ in system.epoch(0):
            pass
        whole = system.statistics() - first
        parts = []
        for start, stop in ((0, 5), (5, 6), (6, samples.num_batches)):
            before = system.statistics().copy()
            system.seek(start)
            got = list(system.epoch(0, start=start, stop=stop))
            assert [batch.number for batch in got] == list(range(start, stop))
            assert all(np.array_equal(batch.x, values[batch.node_ids]) for batch in got)
            parts.append(system.statistics() - before)
        if name != "mmap":  # its seek gathers a batch
            assert sum(p.rows_cached for p in parts) == whole.rows_cached
        system.close()


@pytest.mark.parametrize("name", MARIUS)
@pytest.mark.parametrize(("dim", "dtype"), [(1, "float32"), (100, "float32"), (768, "float16")])
def test_marius_hands_out_right_rows_of_its_own_samples(
    name, dim, dtype, topology, samples, tmp_path
):
    values = random_rows(dim, dtype)
    with write_features(tmp_path / "features.fvf", values) as features:
        row_bytes = features.sections["x"].row_bytes
        workload = Workload(
            features=features, samples=samples, folder=tmp_path, cache_bytes=6 * 80 * row_bytes
        )
        system = MARIUS[name](workload, topology)
        system.prepare()
        for epoch in (0, 1):
            check_marius_epoch(system, values, epoch, topology, samples)
        system.close()


def check_marius_epoch(system, values, epoch, topology, samples):
    new_of = np.argsort(system.order)
    states, seeds = system.states(epoch), []
    of_batch = [s for s, found in zip(states, system.batches(epoch), strict=True) for _ in found]
    edges_in_all = {
        (int(topology.indices[e]), v)
        for v in range(topology.num_nodes)
        for e in range(topology.indptr[v], topology.indptr[v + 1])
    }
    for batch in system.epoch(epoch):
        assert np.array_equal(batch.x, values[batch.node_ids])
        inside = set(of_batch[batch.number].tolist())
        assert set((new_of[batch.node_ids] // system.rows).tolist()) <= inside
        edges = batch.node_ids[batch.edge_index()]
        assert set(map(tuple, edges.T.tolist())) <= edges_in_all
        seeds += batch.node_ids[: batch.batch_size].tolist()
    assert sorted(seeds) == sorted(samples.train_ids.tolist())


def test_marius_with_a_buffer_of_everything_loses_no_edge(topology, samples, tmp_path):
    values = random_rows(2, "float32")
    with write_features(tmp_path / "features.fvf", values) as features:
        workload = Workload(
            features=features, samples=samples, folder=tmp_path, cache_bytes=2 * values.nbytes
        )
        system = MariusSystem(workload, topology, num_partitions=7)
        system.prepare()
        induced = system._buckets.induced(system.states(0)[0])
        assert induced.num_edges == topology.num_edges
        system.close()


def test_marius_reads_its_buffer_once_per_epoch_in_bulk(topology, samples, tmp_path):
    values = random_rows(64, "float32")
    with write_features(tmp_path / "features.fvf", values) as features:
        workload = Workload(
            features=features, samples=samples, folder=tmp_path, cache_bytes=5 * 70 * 256
        )
        system = MariusSystem(workload, topology, num_partitions=10)
        system.prepare()
        for _ in system.epoch(0):
            pass
        read = system.statistics()
        assert 5 * 70 * 256 <= read.bytes_read <= 5 * (70 * 256 + 2 * 4096)
        assert read.requests <= 5
        system.close()


def test_ginex_reads_a_page_per_miss_and_two_where_a_row_crosses(samples, tmp_path):
    values = random_rows(100, "float32")
    with write_features(tmp_path / "features.fvf", values) as features:
        system = GinexSystem(workload_of(features, samples, tmp_path, 0.1), super_batch=4)
        prepared = system.prepare()
        for _ in system.epoch(0):
            pass
        read = system.statistics()
        assert read.requests == system.work(0, samples.num_batches)
        assert read.rows_requested - read.rows_cached == prepared.details["misses"]
        assert 4096 * read.requests <= read.bytes_read <= 8192 * read.requests
        assert read.bytes_read > 4096 * read.requests
        system.close()


def test_a_file_that_shrinks_under_ginex_is_noticed(samples, tmp_path):
    values = random_rows(1024, "float32")
    with write_features(tmp_path / "features.fvf", values) as features:
        system = GinexSystem(workload_of(features, samples, tmp_path, 0.0))
        system.prepare()
        with (tmp_path / "features.fvf").open("r+b") as file:
            file.truncate(200_000)
        with pytest.raises(StorageError, match=r"shorter.*make the file again"):
            list(system.epoch(0))
        system.close()


def test_predicted_bytes_of_the_packed_systems_are_the_bytes_read(samples, tmp_path):
    values = random_rows(100, "float32")
    with write_features(tmp_path / "features.fvf", values) as features:
        for policy in ("static", "belady"):
            workload = workload_of(features, samples, tmp_path, 0.1)
            system = PackedLoaderSystem(workload, PROFILE, policy=policy)
            predicted = system.prepare().details["predicted bytes"]
            for _ in system.epoch(0):
                pass
            assert system.statistics().bytes_read == predicted
            system.close()


def test_diskgnn_reads_single_pages_of_shared_rows_and_whole_chunks(samples, tmp_path):
    values = random_rows(128, "float32")
    with write_features(tmp_path / "features.fvf", values) as features:
        workload = workload_of(features, samples, tmp_path, 0.1)
        system = DiskGnnSystem(workload, PROFILE, disk_rows=NODES // 3)
        prepared = system.prepare()
        assert prepared.details["segment batches"] > 1
        for _ in system.epoch(0):
            pass
        pages = chunks = 0
        for i in range(samples.num_batches):
            record = system.store.record(i)
            rows = record.cold_rows
            shared, private = np.split(rows, [len(rows) - record.num_private])
            pages += len(np.unique(shared // 8))
            chunks += int(len(private) > 0)
        read = system.statistics()
        assert pages <= read.requests <= pages + chunks
        system.close()


def test_what_is_not_allowed_is_refused(topology, samples, tmp_path):
    with write_features(tmp_path / "features.fvf", random_rows(4, "float32")) as features:
        workload = workload_of(features, samples, tmp_path, 0.0)
        with pytest.raises(ConfigurationError, match="partitions"):
            MariusSystem(workload, topology, num_partitions=4)
        with pytest.raises(ConfigurationError, match="advice"):
            MappedSystem(workload, advice="sequential")
        with pytest.raises(ConfigurationError, match="one per node"):
            MappedSystem(workload, scores=np.zeros(3))
        with pytest.raises(ConfigurationError, match="super_batch"):
            GinexSystem(workload, super_batch=0)
        with pytest.raises(ConfigurationError, match="negative"):
            Workload(features=features, samples=samples, cache_bytes=-1, folder=tmp_path)
