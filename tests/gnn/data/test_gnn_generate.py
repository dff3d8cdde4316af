"""The generator: its random numbers, its statistics, its independence of how it is run."""

import math
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from scipy import stats

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.data import Dataset, generate_graph
from fivefold.gnn.data._generate import WeightLaw, permute

KEY = np.uint64(2024)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 1025])
def test_permutation_is_one_and_has_its_inverse(size):
    images = permute(np.arange(size), size, KEY, False)
    assert sorted(images) == list(range(size))
    assert permute(images, size, KEY, True).tolist() == list(range(size))


def test_permutation_mixes():
    images = permute(np.arange(10_000), 10_000, KEY, False)
    assert abs(np.corrcoef(np.arange(10_000), images)[0, 1]) < 0.05
    assert np.count_nonzero(np.abs(np.diff(images)) < 10) < 60  # 20 expected


def test_features_are_normal_and_independent_between_groups(tmp_path):
    with generate_graph(tmp_path, nodes=4000, dim=500, signal=0.0) as dataset:
        rows = dataset.features.read("x")
    assert stats.kstest(rows.ravel()[:200_000], "norm").pvalue > 1e-3
    assert np.unique(rows[:, 0]).size > 3900  # no group repeats another
    assert abs(rows.mean()) < 5 / math.sqrt(rows.size)


def test_weight_prefix_sum_is_the_integral_and_has_its_inverse():
    law = WeightLaw.of(4_000_000)
    shares = np.array([1e-7, 1e-6, 1e-5, 1e-3, 0.1, 1.0])
    for share in shares:
        # The integral of the clipped Pareto quantile function, in steps of equal ratio.
        grid = np.concatenate([[0], np.geomspace(share * 1e-9, share, 200_001)])
        middle = (grid[1:] + grid[:-1]) / 2
        expected = np.sum(np.minimum(middle ** (-1 / 1.1), law.cap) * np.diff(grid))
        total = law.below(share)
        assert total == pytest.approx(expected, rel=1e-4)
        assert law.share(total) == pytest.approx(share, rel=1e-9)
    np.testing.assert_allclose(law.share(law.below(shares)), shares, rtol=1e-9)


def test_statistics_of_four_million_nodes_match_the_published_ones():
    """Closed form: no edge is drawn. 60.0 M edges, hubs of 35.8 k, 48 % at the top 1 %."""
    law = WeightLaw.of(4_000_000)
    total = law.below(1.0)
    assert law.below(0.01) / total == pytest.approx(0.48, abs=0.01)
    assert law.below(0.10) / total == pytest.approx(0.72, abs=0.015)
    hub = 15 * law.cap / total
    assert hub + 3 * math.sqrt(hub) == pytest.approx(35_844, rel=0.02)


def test_statistics_of_a_drawn_graph(tmp_path):
    with generate_graph(tmp_path, nodes=200_000, dim=1, seed=5, train=0.02) as dataset:
        edges = dataset.num_edges
        assert edges == pytest.approx(15 * 200_000, rel=0.02)
        topology = dataset.topology()
        drawn = np.sort(np.bincount(topology.indices, minlength=200_000))[::-1]
        law = WeightLaw.of(200_000)
        for share in (0.01, 0.1):
            expected = law.below(share) / law.below(1.0)
            assert drawn[: int(share * 200_000)].sum() / edges == pytest.approx(expected, abs=0.02)
        assert np.diff(topology.indptr).min() >= 1  # every node draws at least one
        labels = dataset.labels
        targets = np.repeat(np.arange(200_000), np.diff(topology.indptr))
        same = np.mean(labels[targets] == labels[topology.indices])
        inside = 0.6 + 0.4 / 32  # of the true classes; each end is mislabelled with 5 %
        expected = inside * 0.95**2 + (1 - inside) * 2 * 0.05 * 0.95 / 31
        assert same == pytest.approx(expected, abs=0.01)
        assert dataset.train.size == 4000
        splits = np.concatenate([dataset.train, dataset.valid, dataset.test])
        assert np.unique(splits).size == splits.size


def test_features_are_centres_with_noise(tmp_path):
    with generate_graph(
        tmp_path, nodes=20_000, dim=16, seed=2, classes=4, label_noise=0.0
    ) as dataset:
        rows, labels = dataset.features.read("x"), dataset.labels
        centres = np.stack([rows[labels == own].mean(axis=0) for own in range(4)])
        assert np.std(rows - centres[labels]) == pytest.approx(1.0, abs=0.01)
        assert 0.1 < np.std(centres) < 0.5
        assert np.bincount(labels).tolist() == [5000] * 4


def test_label_noise_is_the_share_of_wrong_labels(tmp_path):
    clean = generate_graph(tmp_path / "a", nodes=20_000, dim=1, label_noise=0.0)
    noisy = generate_graph(tmp_path / "b", nodes=20_000, dim=1)
    assert np.mean(clean.labels != noisy.labels) == pytest.approx(0.05, abs=0.006)
    clean.close()
    noisy.close()


def test_result_depends_neither_on_threads_nor_on_memory(tmp_path):
    prints = set()
    for index, (threads, memory) in enumerate([(1, 16 << 20), (3, 1 << 30), (2, 40 << 20)]):
        with generate_graph(
            tmp_path / str(index),
            nodes=70_000,
            dim=3,
            seed=9,
            neighbors="both",
            threads=threads,
            memory_bytes=memory,
        ) as dataset:
            prints.add(dataset.fingerprint)
    assert len(prints) == 1


def test_other_seed_other_graph(tmp_path):
    first = generate_graph(tmp_path / "a", nodes=500, dim=2, seed=1)
    second = generate_graph(tmp_path / "b", nodes=500, dim=2, seed=2)
    assert not np.array_equal(first.features.read("x"), second.features.read("x"))
    assert not np.array_equal(first.topology().indptr, second.topology().indptr)
    first.close()
    second.close()


def test_drawing_is_the_transpose_of_drawn_and_both_is_their_sum(tmp_path, as_edges):
    edges = {}
    for neighbors in ("drawn", "drawing", "both"):
        with generate_graph(tmp_path / neighbors, nodes=800, dim=1, neighbors=neighbors) as dataset:
            sources, targets = as_edges(dataset.topology())
            edges[neighbors] = sorted(zip(sources.tolist(), targets.tolist(), strict=True))
    reverse = sorted((target, source) for source, target in edges["drawn"])
    assert edges["drawing"] == reverse
    assert edges["both"] == sorted(edges["drawn"] + reverse)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dim", [1, 3, 1025])
def test_dtypes_and_dims(tmp_path, dtype, dim):
    with generate_graph(tmp_path, nodes=40, dim=dim, dtype=dtype) as dataset:
        assert dataset.dtype == np.dtype(dtype)
        assert dataset.row_bytes == dim * np.dtype(dtype).itemsize
        rows = dataset.features.read("x")
        assert rows.shape == (40, dim)
        assert np.isfinite(rows).all()


@pytest.mark.parametrize("nodes", [0, 1, 2, 31])
def test_tiny_graphs(tmp_path, nodes):
    with generate_graph(tmp_path, nodes=nodes, dim=2) as dataset:
        assert dataset.num_nodes == nodes
        assert dataset.topology().num_nodes == nodes
        assert dataset.labels.shape == (nodes,)
        assert dataset.num_edges >= nodes
        assert dataset.num_classes == 32  # whether a node has it or not


def test_sorted_ids_group_classes(tmp_path):
    with generate_graph(tmp_path, nodes=320, dim=1, random_ids=False, label_noise=0.0) as dataset:
        assert np.all(np.diff(dataset.labels) >= 0)


@pytest.mark.parametrize(
    "extreme",
    [
        {"seed": 2**64 - 1},
        {"mean_degree": 0},
        {"p_in": 1, "label_noise": 0},
        {"p_in": 0, "label_noise": 0},
        {"train": 1.0, "valid": 0, "test": 0},
        {"classes": 1},
        {"classes": 5000},
    ],
)
def test_extreme_values(tmp_path, extreme):
    with generate_graph(tmp_path, nodes=1000, dim=1, **extreme) as dataset:
        topology, labels = dataset.topology(), dataset.labels
        targets = np.repeat(np.arange(1000), np.diff(topology.indptr))
        same = np.mean(labels[targets] == labels[topology.indices])
        if "label_noise" in extreme:
            assert same == 1.0 if extreme["p_in"] == 1 else same < 0.1
        assert dataset.num_edges == 1000 or "mean_degree" not in extreme


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": -1},
        {"dim": 0},
        {"dtype": "int8"},
        {"p_in": 1.5},
        {"classes": 0},
        {"train": 0.9, "valid": 0.2},
        {"neighbors": "none"},
        {"threads": 0},
        {"memory_bytes": 1000},
    ],
)
def test_wrong_values_are_refused(tmp_path, wrong):
    options = {"nodes": 10, "dim": 2} | wrong
    with pytest.raises(ConfigurationError):
        generate_graph(tmp_path, **options)


def test_folder_of_another_recipe_is_refused(tmp_path):
    generate_graph(tmp_path, nodes=10, dim=2).close()
    with pytest.raises(DataError, match="differs in seed"):
        generate_graph(tmp_path, nodes=10, dim=2, seed=3)
    generate_graph(tmp_path, nodes=10, dim=2).close()  # the same is kept


def test_cap_grows_with_the_graph():
    beta = 1 - 1 / 1.1
    caps = [WeightLaw.of(nodes).cap for nodes in (1, 100, 10_000, 4_000_000)]
    assert caps[0] == 1.0
    assert caps == sorted(set(caps))
    assert caps[-1] == pytest.approx(2000 * (11 - 10 * 4e6**-beta))


SCRIPT = """
    import os, signal, sys
    from fivefold.gnn.data import _ingest, _write_graph, generate_graph
    _ingest._MARK_EVERY_BYTES = 1 << 20
    _write_graph._MARK_EVERY_EDGES = 1 << 14
    kill_at = int(sys.argv[2])
    calls = 0

    def progress(stage, done, total):
        global calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    generate_graph(sys.argv[1], nodes=30_000, dim=100, seed=4, neighbors=sys.argv[3],
                   memory_bytes=16 << 20, progress=progress, threads=1).close()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("neighbors", ["drawn", "both"])
def test_killed_at_any_time_it_goes_on(tmp_path, neighbors):
    whole = tmp_path / "whole"
    with generate_graph(
        whole, nodes=30_000, dim=100, seed=4, neighbors=neighbors, memory_bytes=16 << 20
    ) as dataset:
        expected = dataset.fingerprint
    folder = tmp_path / "killed"
    for kill_at in (3, 8):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), str(kill_at), neighbors],
            check=False,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == -signal.SIGKILL
        with pytest.raises(DataError, match="holds no data set"):  # it is not complete
            Dataset.open(folder)
    with generate_graph(
        folder, nodes=30_000, dim=100, seed=4, neighbors=neighbors, memory_bytes=16 << 20
    ) as dataset:
        assert dataset.fingerprint == expected
        for container in dataset.containers.values():
            container.verify()
    left = [path.name for path in folder.iterdir() if not path.name.endswith(".fvf")]
    assert left == []
