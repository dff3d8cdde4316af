"""Damage and failures below the loader: no wrong row is ever delivered, and nothing hangs."""

import gc
import os
import threading
import time

import numpy as np
import pytest

from fivefold.errors import DataError, FivefoldError, StorageError, UnsupportedError
from fivefold.gnn.loading import DiskLoader, StallError
from fivefold.gnn.loading._feature_store import FeatureStore
from fivefold.gnn.packing import PackedStore

pytestmark = pytest.mark.alone

PAGE_BYTES = 4096


@pytest.fixture
def fresh(tmp_path, dataset_of, store_of):
    """A store of its own for each test, since the tests damage it."""

    def make(**options):
        dataset = dataset_of(tmp_path / "data", dim=options.pop("dim", 128))
        features = dataset.features.read("x")
        store = store_of(tmp_path, dataset, **options)
        made.append((dataset, store))
        return features, store

    made = []
    yield make
    for dataset, store in made:
        store.close()
        dataset.close()


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def deliver(loader, features):
    """All batches until the first error, which is returned; every delivered row is right."""
    try:
        for batch in loader:
            assert np.array_equal(batch.x.numpy(), features[batch.n_id.numpy()])
    except FivefoldError as error:
        return error
    return None


@pytest.mark.parametrize("backend", ["threads", "io_uring"])
@pytest.mark.parametrize("where", [0.0, 0.4, 0.99])
def test_a_flipped_bit_in_a_packed_row_stops_the_loop(fresh, backend, where):
    features, store = fresh()
    rows = store.rows.section("rows")
    flip(store.rows.path, rows.offset + int(where * (rows.nbytes - 1)))
    with DiskLoader(store, backend=backend) as loader:
        error = deliver(loader, features)
    assert isinstance(error, DataError)
    assert "stage 'read cold rows' of batch" in str(error)
    assert str(store.rows.path) in str(error)


@pytest.mark.parametrize("level", ["host", "device"])
def test_a_flipped_bit_in_a_cached_row_stops_it_before_the_first_batch(fresh, level):
    features, store = fresh()
    flip(store.rows.path, store.rows.section(level).offset + 5)
    with DiskLoader(store) as loader:
        error = deliver(loader, features)
    assert isinstance(error, DataError)
    assert "stage 'fill the caches'" in str(error)


def test_a_flipped_bit_in_a_record_stops_the_loop(fresh):
    features, store = fresh()
    flip(store.records.path, store.records.section("data").offset + PAGE_BYTES + 100)
    with DiskLoader(store, shuffle=False) as loader:
        error = deliver(loader, features)
    assert isinstance(error, DataError)
    assert "stage 'read record' of batch 1" in str(error)


def test_swapped_pages_stop_the_loop(fresh):
    features, store = fresh()
    rows = store.rows.section("rows")
    with store.rows.path.open("r+b") as file:
        file.seek(rows.offset)
        pages = file.read(2 * PAGE_BYTES)
        file.seek(rows.offset)
        file.write(pages[PAGE_BYTES:] + pages[:PAGE_BYTES])
    with DiskLoader(store) as loader:
        assert isinstance(deliver(loader, features), DataError)


def test_a_file_truncated_while_training_stops_the_loop(fresh):
    features, store = fresh()
    with DiskLoader(store, shuffle=False, prefetch=1, timeout_s=15) as loader:
        iterator = iter(loader)
        next(iterator)
        with store.rows.path.open("r+b") as file:
            file.truncate(store.rows.section("rows").offset)
        error = deliver(iterator, features)
        # The next epoch fails as well, though the first error still holds buffers.
        again = deliver(loader, features)
    for found in (error, again):
        assert isinstance(found, StorageError | DataError)
        assert not isinstance(found, StallError)
        assert "truncated" in str(found)


def test_a_file_of_another_store_is_refused(fresh, tmp_path, dataset_of, store_of):
    _, store = fresh()
    other_data = dataset_of(tmp_path / "other-data", dim=128, seed=9)
    (tmp_path / "other").mkdir()
    other = store_of(tmp_path / "other", other_data)
    other.rows.path.replace(store.rows.path)
    with pytest.raises(DataError, match="belong"):
        PackedStore.open(store.folder)
    other.close()
    other_data.close()


def test_an_error_of_the_reader_reaches_the_loop(fresh, monkeypatch):
    features, store = fresh()
    calls = []
    read = FeatureStore.read_cold

    def failing(self, record, out):
        calls.append(record.number)
        if len(calls) == 3:
            raise StorageError("Input/output error at offset 4096", hint="check the disk")  # noqa: EM101
        return read(self, record, out)

    monkeypatch.setattr(FeatureStore, "read_cold", failing)
    with DiskLoader(store) as loader:
        error = deliver(loader, features)
        assert isinstance(error, StorageError)
        assert f"batch {calls[2]}: Input/output error" in str(error)
        assert error.hint == "check the disk"
        assert deliver(loader, features) is None  # a new epoch starts from a clean state


def test_a_large_cache_may_take_longer_than_a_batch(fresh, monkeypatch):
    features, store = fresh()
    start = FeatureStore.start

    def slow(self, batch):
        time.sleep(3.5)
        start(self, batch)

    monkeypatch.setattr(FeatureStore, "start", slow)
    monkeypatch.setattr(FeatureStore, "fill_patience_s", 30.0)
    with DiskLoader(store, timeout_s=2.5) as loader:
        assert deliver(loader, features) is None


@pytest.mark.parametrize("stage", ["read cold rows", "gather cached rows", "read record"])
def test_a_stalled_stage_is_named_and_close_does_not_hang(fresh, monkeypatch, stage):
    features, store = fresh()
    release = threading.Event()
    owner, name = {
        "read cold rows": (FeatureStore, "read_cold"),
        "gather cached rows": (FeatureStore, "gather_cached"),
        "read record": (type(store), "record"),
    }[stage]
    real = getattr(owner, name)

    def stalling(self, first, *rest):
        if (first if isinstance(first, int) else first.number) == 2:
            release.wait(30)
        return real(self, first, *rest)

    monkeypatch.setattr(owner, name, stalling)
    began = time.monotonic()
    loader = DiskLoader(store, shuffle=False, timeout_s=2.5)
    error = deliver(loader, features)
    with pytest.raises(StallError, match="still hangs"):
        iter(loader)
    loader.close()
    assert time.monotonic() - began < 15
    assert isinstance(error, StallError)
    assert isinstance(error, TimeoutError)
    assert f"{stage!r} of batch 2" in str(error)
    release.set()


def test_a_loader_is_not_used_in_a_forked_child(fresh, monkeypatch):
    features, store = fresh()
    loader = DiskLoader(store)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(UnsupportedError, match="after the fork"):
        iter(loader)
    monkeypatch.undo()
    assert deliver(loader, features) is None
    loader.close()


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_leaving_and_dropping_the_loader_ends_its_threads(fresh, policy):
    features, store = fresh(policy=policy)
    gc.collect()
    before = threading.active_count()
    loader = DiskLoader(store, timeout_s=20)
    for _ in range(4):
        for batch in loader:
            assert np.array_equal(batch.x.numpy(), features[batch.n_id.numpy()])
            break  # in the middle of an epoch, with batches in flight
    with pytest.raises(RuntimeError, match="the model's"):
        fail_in_the_loop(loader)
    assert deliver(loader, features) is None
    iterator = iter(loader)
    kept = next(iterator).x
    content = kept.clone()
    del loader, iterator, batch
    gc.collect()
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
    assert kept.equal(content)


def fail_in_the_loop(loader):
    for _ in loader:
        raise RuntimeError("the model's own error")  # noqa: EM101 - a test
