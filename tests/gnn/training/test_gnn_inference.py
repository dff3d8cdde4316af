"""Layer-wise inference out of core equals one forward pass over the whole graph in memory."""

import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from fivefold.errors import ConfigurationError, DataError, InfeasibleError, UnsupportedError
from fivefold.gnn.storage import Container
from fivefold.gnn.training import GraphSAGE, infer_layers
from fivefold.gnn.training._inference_layers import (
    fill_keys,
    ranges,
    reading_cost,
    share_memory,
    take_apart,
)
from fivefold.gnn.training.models import make_model
from helpers.training_graphs import Disk, edge_index, make_dataset

MODELS = ["sage", "gat", "gcn"]


def whole_graph(model, dataset):
    x = torch.from_numpy(dataset.features.read("x"))
    with torch.no_grad():
        return model.eval()(x, torch.from_numpy(edge_index(dataset))).numpy()


def outputs_of(result):
    with Container.open(result.path, verify="full") as container:
        return container.read("x")


@pytest.fixture
def model_of():
    def make(name, dataset, *, layers=2, hidden=8):
        torch.manual_seed(1)
        return make_model(name, dataset.dim, hidden, 4, num_layers=layers, heads=2)

    return make


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("memory_bytes", [60_000, 400_000, 50_000_000])
def test_equals_the_forward_pass_whatever_the_budget(name, memory_bytes, tmp_path, model_of):
    with make_dataset(tmp_path / "g") as dataset:
        model = model_of(name, dataset, layers=3)
        expected = whole_graph(model, dataset)
        result = infer_layers(
            model, dataset, tmp_path / "out", memory_bytes=memory_bytes, profile=Disk()
        )
    np.testing.assert_allclose(outputs_of(result), expected, rtol=2e-4, atol=2e-5)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["output.fvf"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(1, np.float32), (3, np.float16), (100, np.float64), (1025, np.float32), (7, np.int8)],
)
def test_any_row_size_and_type(name, dim, dtype, tmp_path, model_of):
    with make_dataset(tmp_path / "g", nodes=60, edges=300, dim=dim, dtype=dtype) as dataset:
        model = model_of(name, dataset)
        expected = whole_graph(model, dataset)
        result = infer_layers(
            model, dataset, tmp_path / "out", memory_bytes=500_000, profile=Disk()
        )
    np.testing.assert_allclose(outputs_of(result), expected, rtol=5e-4, atol=5e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (40, 0), (2, 3)])
def test_graphs_with_hardly_anything_in_them(name, nodes, edges, tmp_path, model_of):
    with make_dataset(tmp_path / "g", nodes=nodes, edges=edges) as dataset:
        model = model_of(name, dataset)
        expected = whole_graph(model, dataset)
        result = infer_layers(model, dataset, tmp_path / "out", profile=Disk())
    np.testing.assert_allclose(outputs_of(result), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gat", "sage"])
def test_a_hub_whose_neighbours_do_not_fit(name, tmp_path, model_of):
    with make_dataset(tmp_path / "g", nodes=900, edges=9000, dim=16) as dataset:
        topology, model = dataset.topology(), model_of(name, dataset)
        parts = take_apart(model)[0][0]
        shares = share_memory(
            50_000, parts, row_bytes=64, num_nodes=900, num_edges=topology.num_edges
        )
        assert shares.rows < 200
        assert shares.edges < int(np.diff(topology.indptr).max())
        result = infer_layers(model, dataset, tmp_path / "out", memory_bytes=50_000, profile=Disk())
        np.testing.assert_allclose(
            outputs_of(result), whole_graph(model, dataset), rtol=2e-4, atol=2e-5
        )


def test_the_disk_decides_whether_rows_are_gathered_or_swept(tmp_path, model_of):
    with make_dataset(tmp_path / "g", nodes=3000, edges=3000, dim=512) as dataset:
        model = model_of("sage", dataset, layers=1)
        expected = whole_graph(model, dataset)
        found = {}
        for way, disk in (("gather", Disk(1e-9, 1e-9)), ("sweep", Disk(1e-3, 1e-12))):
            result = infer_layers(
                model, dataset, tmp_path / way, memory_bytes=400_000, profile=disk
            )
            found[way] = result.layers[0]
            np.testing.assert_allclose(outputs_of(result), expected, rtol=2e-4, atol=2e-5)
    assert found["gather"].swept == found["sweep"].gathered == 0
    assert "by gathering" in found["gather"].line()
    assert "by sequential passes" in found["sweep"].line()
    assert found["gather"].bytes_read < found["sweep"].bytes_read
    assert found["gather"].requests > found["sweep"].requests


def test_with_enough_memory_every_row_is_read_once_per_layer(tmp_path, model_of):
    with make_dataset(tmp_path / "g", nodes=2000, edges=30_000, dim=64) as dataset:
        model = model_of("gcn", dataset)
        result = infer_layers(model, dataset, tmp_path / "out", memory_bytes=10**8, profile=Disk())
        rows = dataset.num_nodes * dataset.row_bytes
    first = result.layers[0]
    assert first.ranges == 1
    # Once as sources, once as the targets' own rows.
    assert first.bytes_read <= 2 * rows + 8192


def test_ranges_cover_all_nodes_and_keep_to_the_shares():
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 9, 500)
    degrees[7] = 3000
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    parts = take_apart(GraphSAGE(16, 8, 3, num_layers=1))[0][0]
    shares = share_memory(30_000, parts, row_bytes=64, num_nodes=500, num_edges=int(indptr[-1]))
    found = list(ranges(indptr, shares))
    assert [piece.start for piece in found] == [0, *(piece.stop for piece in found[:-1])]
    assert found[-1].stop == 500
    for piece in found:
        edges = indptr[piece.stop] - indptr[piece.start]
        assert 0 < len(piece) <= shares.targets
        assert edges <= shares.edges or len(piece) == 1


def test_reading_cost_counts_pages_as_a_set_does():
    rng = np.random.default_rng(1)
    for row_bytes in (4, 100, 4096, 5000, 9000):
        sources = np.sort(rng.integers(0, 400, 120))
        keys = sources << 3
        pages = set()
        for source in set(sources.tolist()):
            first, last = source * row_bytes // 4096, ((source + 1) * row_bytes - 1) // 4096
            pages |= set(range(first, last + 1))
        rows, requests, size = reading_cost(keys, 3, row_bytes, 4096, 0)
        assert (rows, size) == (len(set(sources.tolist())), 4096 * len(pages))
        assert requests == sum(page - 1 not in pages for page in pages)
        assert reading_cost(keys, 3, row_bytes, 4096, 1 << 30)[1] == 1


def test_keys_of_a_part_of_the_edges_hold_source_and_target():
    indptr = np.array([0, 2, 2, 5, 6])
    indices = np.array([3, 0, 2, 1, 3, 0], np.int32)
    keys = np.empty(4, np.int64)
    options = {"shift": 2, "drops_loops": True, "keys": keys}
    count = fill_keys(indptr, indices[1:5], (0, 0), (1, 5), **options)
    assert [(key >> 2, key & 3) for key in keys[:count].tolist()] == [(1, 2), (3, 2)]


def test_too_little_memory_is_refused_with_what_would_do(tmp_path, model_of):
    with make_dataset(tmp_path / "g", dim=1000) as dataset:
        model = model_of("sage", dataset)
        with pytest.raises(InfeasibleError, match="hold no row") as caught:
            infer_layers(model, dataset, tmp_path / "out", memory_bytes=5000, profile=Disk())
    assert "give at least" in caught.value.hint


def test_another_model_does_not_go_on_from_these_layers(tmp_path, model_of):
    with make_dataset(tmp_path / "g") as dataset:
        model = model_of("sage", dataset)
        infer_layers(model, dataset, tmp_path / "out", profile=Disk(), keep_layers=True)
        assert (tmp_path / "out" / "layer-01.fvf").exists()
        again = infer_layers(model, dataset, tmp_path / "out", profile=Disk())
        assert [layer.line() for layer in again.layers][1] == "layer 2: was done before"
        with torch.no_grad():
            model.convs[0].lin_l.bias += 1
        with pytest.raises(DataError, match="another model"):
            infer_layers(model, dataset, tmp_path / "out", profile=Disk())


def test_unfit_models_are_refused(tmp_path):
    class Other(GraphSAGE):
        """A model that nobody told the inference about."""

    with make_dataset(tmp_path / "g") as dataset:
        with pytest.raises(ConfigurationError, match="takes rows of 9"):
            infer_layers(GraphSAGE(9, 4, 2), dataset, tmp_path / "out", profile=Disk())
        with pytest.raises(UnsupportedError, match="knows no Other"):
            infer_layers(Other(5, 4, 2), dataset, tmp_path / "out", profile=Disk())


@pytest.mark.nightly
@pytest.mark.distributed
def test_killed_at_random_moments_it_goes_on_to_the_same_bytes(tmp_path, model_of):
    options = {"memory_bytes": 60_000, "profile": Disk(), "backend": "threads"}
    with make_dataset(tmp_path / "g", nodes=2000, edges=12_000) as dataset:
        model = model_of("gat", dataset)
        whole = infer_layers(model, dataset, tmp_path / "whole", **options)
        rng = random.Random(3)  # noqa: S311 - moments, not secrets
        kills = 0
        while not (tmp_path / "killed" / "output.fvf").exists():
            pid = os.fork()
            if not pid:
                try:
                    infer_layers(model, dataset, tmp_path / "killed", **options)
                finally:
                    os._exit(0)
            time.sleep(rng.uniform(0.05, 0.3) + 0.02 * kills)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            kills += 1
        again = infer_layers(model, dataset, tmp_path / "killed", **options)
    assert kills > 1
    np.testing.assert_array_equal(outputs_of(again), outputs_of(whole))
