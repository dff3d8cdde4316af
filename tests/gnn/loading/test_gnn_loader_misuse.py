"""Loaders that are used in ways nobody meant: an error at once, never another batch."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch

from fivefold.errors import CheckpointError, ConfigurationError, UnsupportedError
from fivefold.gnn.loading import DiskLoader, LinkLoader, OnlineLoader
from fivefold.gnn.sampling import Adjacency


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, dataset_of):
    with dataset_of(tmp_path_factory.mktemp("misused"), nodes=200, edges=900) as made:
        yield made


@pytest.fixture
def loader(dataset):
    with OnlineLoader(dataset, dataset.train, fanouts=[2], batch_size=10) as loader:
        yield loader


@pytest.mark.parametrize(
    "change",
    [
        {"position": -1},
        {"position": 10**9},
        {"position": None},
        {"position": "3"},
        {"epoch": -1},
        {"epoch": 1.5},
        {"version": 2},
        {"seed": 9},
    ],
)
def test_states_that_no_loader_gave_are_refused(loader, change):
    state = loader.state_dict()
    with pytest.raises(CheckpointError):
        loader.load_state_dict(state | change)
    del state["position"]
    with pytest.raises(CheckpointError, match="position=None"):
        loader.load_state_dict(state)
    assert len(list(loader)) == len(loader)  # what was refused changed nothing


def test_loaders_are_not_copied(loader):
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="cannot be copied"):
            duplicate(loader)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.5], "dtype float64"),
        ([[1], [2]], "shape"),
        ([1, 1], "twice"),
        ([-1], "ids go from -1"),
        ([10**6], "to 1000000, the graph has"),
        (np.ones(3, bool), "mask of ids has 3 entries"),
    ],
)
def test_ids_are_checked_when_the_loader_is_made(dataset, ids, message):
    with pytest.raises(ConfigurationError, match=message):
        OnlineLoader(dataset, ids, fanouts=[2], batch_size=10)


def test_a_mask_stands_for_its_ids(dataset):
    mask = np.zeros(dataset.num_nodes, bool)
    mask[dataset.train] = True
    with OnlineLoader(dataset, torch.from_numpy(mask), fanouts=[2], batch_size=7) as loader:
        found = torch.cat([batch.n_id[: batch.batch_size] for batch in loader])
    assert sorted(found.tolist()) == sorted(dataset.train.tolist())
    with OnlineLoader(dataset, [], fanouts=[2], batch_size=7) as loader:
        assert list(loader) == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"features": np.zeros((5, 4), np.float32)}, ConfigurationError, r"shape \[5, 4\]"),
        ({"features": "ram"}, ConfigurationError, "features is 'ram'"),
        ({"features": np.ones((200, 4), np.longdouble)}, UnsupportedError, "torch has no dtype"),
        ({"features": [["a"]] * 200}, ConfigurationError, "features have dtype <U1"),
        ({"features": "memory", "cache_bytes": 10**6}, ConfigurationError, "all rows are in mem"),
        ({"features": "dusk", "cache_bytes": 5}, ConfigurationError, "features is 'dusk'"),
        ({"cache_policy": "mru"}, ConfigurationError, "cache_policy is 'mru'"),
        ({"cache_bytes": 1e6}, ConfigurationError, "cache_bytes must be .*; got 1000000.0"),
        ({"shuffle": "yes"}, ConfigurationError, "shuffle is 'yes'"),
        ({"resample": "no"}, ConfigurationError, "resample is 'no'"),
        ({"edge_ids": 1}, ConfigurationError, "edge_ids is 1"),
        ({"verify": "x"}, ConfigurationError, "verify is 'x'"),
        ({"backend": "mmap"}, ConfigurationError, "backend is 'mmap'"),
        ({"features": "memory", "backend": "mmap"}, ConfigurationError, "backend is 'mmap'"),
        ({"timeout_s": "5"}, ConfigurationError, "timeout_s must be .*; got '5'"),
        ({"timeout_s": float("inf")}, ConfigurationError, "timeout_s must be .*; got inf"),
        ({"timeout_s": float("nan")}, ConfigurationError, "timeout_s must be .*; got nan"),
        ({"rank": 0.0, "world_size": 2}, ConfigurationError, "rank must be .*; got 0.0"),
        ({"world_size": "2"}, ConfigurationError, "world_size must be .*; got '2'"),
        ({"prefetch": None}, ConfigurationError, "prefetch must be .*; got None"),
        ({"seed": 1.5}, ConfigurationError, "seed must be a whole number from 0; got 1.5"),
        ({"fanouts": 3}, ConfigurationError, "fanouts is 3"),
        ({"batch_size": 2.5}, ConfigurationError, "batch_size must be .*; got 2.5"),
        ({"topology": Adjacency([0, 0], [])}, ConfigurationError, "1 nodes, the data set 200"),
        ({"device": "gpu"}, ConfigurationError, "no device 'gpu'"),
        ({"device": "meta"}, UnsupportedError, "cannot copy to and from"),
    ],
)
def test_options_are_checked_when_the_loader_is_made(dataset, options, error, message):
    with pytest.raises(error, match=message):
        OnlineLoader(dataset, dataset.train, **{"fanouts": [2], "batch_size": 10} | options)


def test_flags_of_numpy_count_as_those_of_python(dataset):
    yes, no = np.bool_(True), np.bool_(False)
    flags = {"shuffle": yes, "verify": yes, "resample": no, "edge_ids": no}
    with OnlineLoader(dataset, dataset.train, fanouts=[2], batch_size=10, **flags) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["shuffle"], state["resample"]) == (True, False)
        assert next(iter(loader)).e_id is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(dataset):
    with pytest.raises(UnsupportedError, match="torch sees no CUDA device"):
        OnlineLoader(dataset, dataset.train, fanouts=[2], batch_size=10, device="cuda")


def test_features_may_be_any_array_of_rows(dataset):
    columns = torch.arange(400.0).reshape(2, 200).requires_grad_()
    with OnlineLoader(dataset, [3, 5], fanouts=[2], batch_size=2, features=columns.T) as loader:
        batch = next(iter(loader))
    torch.testing.assert_close(batch.x, columns.detach().T[batch.n_id])
    swapped = columns.detach().numpy().T.astype(">f4")
    with OnlineLoader(dataset, [3, 5], fanouts=[2], batch_size=2, features=swapped) as loader:
        batch = next(iter(loader))
    torch.testing.assert_close(batch.x, columns.detach().T[batch.n_id])


def test_a_batch_prints_shapes(dataset):
    with OnlineLoader(dataset, dataset.train, fanouts=[2, 2], batch_size=8, form="blocks") as made:
        batch = next(iter(made))
    text = repr(batch)
    assert f"x={list(batch.x.shape)}" in text
    assert f"blocks={[list(block.size) for block in batch.blocks]}" in text
    assert "batch_size=8" in text
    assert len(text) < 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "lru"}, "policy is 'lru'"),
        ({"edge_ids": "no"}, "edge_ids is 'no'"),
        ({"threads": "two"}, "threads must be .*; got 'two'"),
        ({"memory_bytes": "1 GB"}, "memory_bytes must be .*; got '1 GB'"),
        ({"verify": 0}, "verify is 0"),
    ],
)
def test_options_of_packed_batches_are_checked(dataset, tmp_path, options, message):
    with pytest.raises(ConfigurationError, match=message):
        DiskLoader.from_dataset(
            dataset, [2], 10, form="edge_index", budgets="1 MB", cache=tmp_path, **options
        )


def test_what_is_no_data_set_or_store_is_told(tmp_path):
    with pytest.raises(ConfigurationError, match=r"store is a str; give PackedStore"):
        DiskLoader(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"data set is a PosixPath; open it with"):
        OnlineLoader(tmp_path, [1], fanouts=[2], batch_size=2)
    with pytest.raises(ConfigurationError, match="links are of graphs of one type; got a str"):
        LinkLoader("folder", [[1], [2]], fanouts=[2], batch_size=2)


@pytest.mark.parametrize("epoch", [-1, 1.5, "2", None])
def test_an_epoch_is_a_whole_number(loader, epoch):
    with pytest.raises(ConfigurationError, match="epoch must be a whole number from 0"):
        loader.set_epoch(epoch)
