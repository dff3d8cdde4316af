"""Files of sampled batches: what was sampled comes back, also after a kill and for any width."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling import (
    Adjacency,
    HeteroAdjacency,
    HeteroNeighborSampler,
    NeighborSampler,
    SampleFile,
    sample_epochs,
)
from fivefold.gnn.sampling import _samples as module
from fivefold.gnn.sampling._samples import RecordForm
from fivefold.gnn.sampling.batches import SampledBatch, epoch_batches
from fivefold.gnn.storage import Container

FIELDS = ("node_ids", "nodes_per_hop", "edges_per_hop", "degrees", "sources", "edge_ids")


def random_topology(nodes=400, degree=5, dtype=np.int32):
    rng = np.random.default_rng(3)
    indptr = np.concatenate([[0], np.cumsum(rng.poisson(degree, nodes))])
    return Adjacency(indptr, rng.integers(0, nodes, indptr[-1]).astype(dtype))


def assert_same(found, expected):
    assert (found.number, found.batch_size) == (expected.number, expected.batch_size)
    for name in FIELDS:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype, name
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def expected_batches(sampler, ids, *, batch_size, epochs, first_epoch=0):
    number = 0
    for epoch in range(first_epoch, first_epoch + epochs):
        batches = epoch_batches(ids, batch_size=batch_size, seed=sampler.seed, epoch=epoch)
        for place, seeds in enumerate(batches):
            batch = sampler.sample(seeds, epoch=epoch, batch=place)
            object.__setattr__(batch, "number", number)
            yield batch
            number += 1


@pytest.mark.parametrize("edge_ids", [False, True])
@pytest.mark.parametrize("fanouts", [[4, 3], [-1], [2, -1, 1]])
def test_what_was_sampled_comes_back(tmp_path, fanouts, edge_ids):
    sampler = NeighborSampler(random_topology(), fanouts, seed=4, edge_ids=edge_ids)
    ids = np.random.default_rng(0).permutation(400)[:90]
    sample_epochs(sampler, ids, tmp_path / "s", batch_size=20, epochs=3).close()
    counts = np.zeros(400, np.uint32)
    with SampleFile.open(tmp_path / "s") as samples:
        expected = list(expected_batches(sampler, ids, batch_size=20, epochs=3))
        assert len(samples) == samples.num_batches == len(expected) == 15
        assert (samples.num_epochs, samples.num_batches, samples.batch_size) == (3, 15, 20)
        assert (samples.num_nodes, samples.fanouts, samples.seed) == (400, tuple(fanouts), 4)
        assert samples.topology_fingerprint == sampler.topology.fingerprint
        for batch in expected:
            assert_same(samples.batch(batch.number), batch)
            np.testing.assert_array_equal(samples.node_ids(batch.number), batch.node_ids)
            assert samples.num_nodes_of(batch.number) == batch.num_nodes
            counts[batch.node_ids] += 1
        np.testing.assert_array_equal(samples.counts, counts)
        assert samples.counts.dtype == np.uint32
        np.testing.assert_array_equal(samples.train_ids, ids)
        assert samples.nbytes == (tmp_path / "s").stat().st_size


def test_the_order_may_have_its_own_seed_and_epochs_their_numbers(tmp_path):
    sampler = NeighborSampler(random_topology(), [3], seed=1)
    settings = {"batch_size": np.int64(16), "epochs": np.uint8(2)}
    whole = sample_epochs(sampler, range(50), tmp_path / "a", **settings)
    later = sample_epochs(sampler, range(50), tmp_path / "b", **settings, first_epoch=1)
    other = sample_epochs(sampler, range(50), tmp_path / "c", **settings, seed=np.int32(9))
    with whole, later, other:
        np.testing.assert_array_equal(later.node_ids(1), whole.node_ids(5))
        assert later.first_epoch == 1
        assert whole.batch(0).seeds.tolist() != other.batch(0).seeds.tolist()


def test_contents_do_not_depend_on_threads(tmp_path):
    for threads in (1, 4):
        sampler = NeighborSampler(random_topology(), [4, 4], threads=threads)
        path = tmp_path / str(threads)
        sample_epochs(sampler, range(200), path, batch_size=10, epochs=2).close()
    assert (tmp_path / "1").read_bytes() == (tmp_path / "4").read_bytes()


class InterruptedTestError(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 7, 10, 13, 19])
def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, stop):
    monkeypatch.setattr(module, "_MARK_BYTES", 10_000)
    sampler = NeighborSampler(random_topology(), [4, 4], threads=2)
    settings = {"batch_size": 10, "epochs": 2}
    sample_epochs(sampler, range(100), tmp_path / "whole", **settings).close()

    def interrupt(done, total):
        assert total == 20
        if done == stop:
            raise InterruptedTestError

    with pytest.raises(InterruptedTestError):
        sample_epochs(sampler, range(100), tmp_path / "s", **settings, progress=interrupt)
    assert not (tmp_path / "s").exists()
    numbers = []
    sample_epochs(
        sampler,
        range(100),
        tmp_path / "s",
        **settings,
        progress=lambda done, _: numbers.append(done),
    ).close()
    assert numbers == list(range(numbers[0], 21))
    assert stop - 3 <= numbers[0] <= stop + 1
    assert (tmp_path / "s").read_bytes() == (tmp_path / "whole").read_bytes()


SCRIPT = """
import time, numpy as np
from fivefold.gnn.sampling import NeighborSampler, Adjacency, sample_epochs, _samples

def run(path, pause_s=0.0, show=print):
    rng = np.random.default_rng(0)
    topology = Adjacency(np.arange(0, 20_001, 10), rng.integers(0, 2000, 20_000))
    def slow(done, total):
        show(done, flush=True)
        time.sleep(pause_s)
    sampler = NeighborSampler(topology, [5, 5], threads=2)
    sample_epochs(sampler, range(1000), path, batch_size=10, progress=slow).close()

_samples._MARK_BYTES = 20_000
"""


def run_here(path, monkeypatch):
    """Do in this process what ``SCRIPT`` does; return the number of the first new batch."""
    monkeypatch.setattr(module, "_MARK_BYTES", 20_000)
    names, shown = {}, []
    exec(SCRIPT, names)  # noqa: S102 - the code above
    names["run"](path, show=lambda done, **_: shown.append(done))
    return shown[0]


@pytest.mark.nightly
def test_killed_and_run_again_gives_the_same_file(tmp_path, monkeypatch):
    for _ in range(2):
        code = f"{SCRIPT}\nrun({str(tmp_path / 'killed')!r}, 0.02)"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                if int(line) % 40 == 0:
                    process.send_signal(signal.SIGKILL)
                    break
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "killed").exists()
    assert run_here(tmp_path / "killed", monkeypatch) > 50
    assert run_here(tmp_path / "whole", monkeypatch) == 1
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


LIMITED = """
import resource, sys
from fivefold.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
try:
    run(sys.argv[1])
except StorageError as error:
    print(error)
"""


def test_a_disk_that_refuses_is_named_and_the_rest_is_done_later(tmp_path, monkeypatch):
    command = [sys.executable, "-c", SCRIPT + LIMITED, str(tmp_path / "s")]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert str(tmp_path / "s.partial") in result.stdout.splitlines()[-1]
    assert not (tmp_path / "s").exists()
    assert run_here(tmp_path / "s", monkeypatch) > 1  # it went on
    run_here(tmp_path / "whole", monkeypatch)
    assert (tmp_path / "s").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_finished_file_is_taken_as_it_is_or_replaced(tmp_path):
    sampler = NeighborSampler(random_topology(), [2])
    with sample_epochs(sampler, range(9), tmp_path / "s", batch_size=4) as samples:
        fingerprint = samples.fingerprint
    before = (tmp_path / "s").stat().st_ino
    with sample_epochs(sampler, range(9), tmp_path / "s", batch_size=4) as samples:
        assert samples.fingerprint == fingerprint
    assert (tmp_path / "s").stat().st_ino == before
    with sample_epochs(sampler, range(9), tmp_path / "s", batch_size=4, resume=False) as samples:
        assert samples.fingerprint == fingerprint
    assert (tmp_path / "s").stat().st_ino != before


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"batch_size": 5}, "batch_size"),
        ({"epochs": 2}, "epochs"),
        ({"seed": 8}, "order_seed"),
        ({"train_ids": range(1, 10)}, "train_ids"),
        ({"sampler": NeighborSampler(random_topology(), [3])}, "fanouts"),
        ({"sampler": NeighborSampler(random_topology(degree=4), [2])}, "topology"),
    ],
)
def test_other_settings_are_refused(tmp_path, change, name):
    settings = {
        "sampler": NeighborSampler(random_topology(), [2]),
        "train_ids": range(9),
        "path": tmp_path / "s",
        "batch_size": 4,
    }
    sample_epochs(**settings).close()
    with pytest.raises(DataError, match=f"another {name}.*resume=False"):
        sample_epochs(**settings | change)
    sample_epochs(**settings | change, resume=False).close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_ids": []}, "no training nodes"),
        ({"epochs": 0}, "epochs must be a whole number from 1; got 0"),
        ({"batch_size": 0}, "batch_size"),
        ({"train_ids": [1, 1]}, "more than once"),
        ({"train_ids": [400]}, "out of range"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, change, message):
    settings = {"train_ids": range(9), "batch_size": 4, "path": tmp_path / "s"}
    sampler = NeighborSampler(random_topology(), [2])
    with pytest.raises(ConfigurationError, match=message):
        sample_epochs(sampler, **settings | change)
    assert list(tmp_path.iterdir()) == []


def test_wrong_batch_numbers_and_foreign_files_are_refused(tmp_path):
    sampler = NeighborSampler(random_topology(), [2])
    with sample_epochs(sampler, range(9), tmp_path / "s", batch_size=4) as samples:
        for number in (-1, 3):
            for read in (samples.batch, samples.node_ids, samples.num_nodes_of):
                with pytest.raises(ConfigurationError, match="batches are 0 to 2"):
                    read(number)
    (tmp_path / "foreign").write_bytes(b"x" * 10_000)
    with pytest.raises(DataError):
        SampleFile.open(tmp_path / "foreign")
    with pytest.raises(DataError):
        SampleFile.open(tmp_path / "missing")


def test_a_damaged_page_is_noticed(tmp_path):
    sampler = NeighborSampler(random_topology(), [4, 4])
    with sample_epochs(sampler, range(90), tmp_path / "s", batch_size=30) as samples:
        offset = samples.container.sections["records"].offset
    with (tmp_path / "s").open("r+b") as file:
        file.seek(offset + 50)
        byte = file.read(1)
        file.seek(offset + 50)
        file.write(bytes([byte[0] ^ 1]))
    with SampleFile.open(tmp_path / "s") as samples:
        with pytest.raises(DataError, match="damaged"):
            samples.batch(0)
        assert samples.batch(2).batch_size == 30


def test_only_the_part_asked_for_is_read(tmp_path, monkeypatch):
    sampler = NeighborSampler(random_topology(5000, 20), [20, 20])
    with sample_epochs(sampler, range(64), tmp_path / "s", batch_size=64) as samples:
        spans = []
        read = Container.read

        def spy(container, name, start=0, stop=None):
            spans.append(stop - start)
            return read(container, name, start, stop)

        monkeypatch.setattr(Container, "read", spy)
        nodes = samples.node_ids(0).size
        samples.batch(0)
    assert spans[0] == -(-nodes * 4 // 4096) < spans[1] / 4


@pytest.mark.parametrize(
    ("sizes", "types"),
    [
        ((100, 1000, 9, [10]), ("i4", "u1", "i4")),
        ((2**31, 2**31, 300, [5, -1]), ("i4", "u2", "i4")),
        ((2**31 + 1, 2**31 + 1, 70_000, [-1]), ("i8", "u4", "i8")),
        ((2**31 + 1, 10, 70_000, [300]), ("i8", "u2", "i4")),
    ],
)
def test_records_use_the_narrowest_types(sizes, types):
    nodes, edges, degree, fanouts = sizes
    form = RecordForm.narrowest(
        num_nodes=nodes, num_edges=edges, max_degree=degree, fanouts=fanouts, edge_ids=True
    )
    assert (form.node_dtype, form.degree_dtype, form.edge_dtype) == tuple(map(np.dtype, types))


def test_records_hold_ids_beyond_32_bits():
    sampler = NeighborSampler(random_topology(dtype=np.int64), [3, 3], edge_ids=True)
    batch = sampler.sample(range(10), epoch=0, batch=0)
    form = RecordForm.narrowest(
        num_nodes=2**33, num_edges=2**40, max_degree=70_000, fanouts=[-1, 3], edge_ids=True
    )
    object.__setattr__(batch, "node_ids", batch.node_ids + 2**32)
    object.__setattr__(batch, "edge_ids", batch.edge_ids + 2**39)
    row, pages = form.encode(batch, first_page=0, epoch=0)
    assert len(pages) == form.num_pages(row)
    assert_same(form.decode(pages, row, number=0), batch)


def test_memory_does_not_grow_with_the_number_of_batches(tmp_path):
    import tracemalloc

    sampler = NeighborSampler(random_topology(3000, 10), [10, 10], threads=1)
    peaks = []
    for epochs in (1, 1, 8):  # the first run warms up
        tracemalloc.start()
        path = tmp_path / f"{len(peaks)}"
        start = time.monotonic()
        sample_epochs(sampler, range(1000), path, batch_size=50, epochs=epochs).close()
        assert time.monotonic() - start < 60
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.3 * peaks[1]


def test_heterogeneous_samplers_are_told_what_to_do(tmp_path):
    kind = ("a", "to", "a")
    graph = HeteroAdjacency({"a": 2}, {kind: Adjacency([0, 1, 2], [1, 0])})
    with pytest.raises(ConfigurationError, match=r"HeteroNeighborSampler, .*input_type is None"):
        sample_epochs(HeteroNeighborSampler(graph, [1]), [0], tmp_path / "s", batch_size=1)


@st.composite
def records(draw):
    hops = draw(st.integers(1, 3))
    nodes = draw(st.lists(st.integers(0, 900), min_size=hops + 1, max_size=hops + 1))
    wide = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    degrees = rng.integers(0, 9, sum(nodes[:-1]), dtype=np.int32)
    cuts = np.cumsum(nodes[:-1])
    edges = np.diff(np.concatenate([[0], np.cumsum(degrees)])[[0, *cuts]])
    top = 2**33 if wide else 2**31
    batch = SampledBatch(
        number=draw(st.integers(0, 5)),
        node_ids=rng.integers(0, top, sum(nodes)),
        batch_size=nodes[0],
        nodes_per_hop=np.array(nodes, np.int64),
        edges_per_hop=edges,
        degrees=degrees,
        sources=rng.integers(0, 2**31, degrees.sum(), dtype=np.int32),
        edge_ids=rng.integers(0, 2**40, degrees.sum()) if draw(st.booleans()) else None,
    )
    form = RecordForm.narrowest(
        num_nodes=top,
        num_edges=2**40,
        max_degree=draw(st.sampled_from([9, 300, 70_000])),
        fanouts=[-1] * hops,
        edge_ids=batch.edge_ids is not None,
    )
    return form, batch


@given(records())
def test_any_record_comes_back(case):
    form, batch = case
    row, pages = form.encode(batch, first_page=7, epoch=3)
    assert row.size == form.index_width
    assert row[:2].tolist() == [7, 3]
    assert pages.shape == (form.num_pages(row), 4096)
    assert_same(form.decode(pages, row, number=batch.number), batch)
    front = pages[: form.num_node_pages(row)]
    np.testing.assert_array_equal(form.decode_node_ids(front, row), batch.node_ids)
