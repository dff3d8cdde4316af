"""Options of a wrong kind are refused with an error of ours, not taken for True or a number."""

import numpy as np
import pytest

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.data import (
    EdgeRules,
    SourceOptions,
    TableColumns,
    array_source,
    find_source,
    generate_graph,
    table_source,
)
from fivefold.gnn.sampling import Adjacency, NeighborSampler, sample_epochs
from fivefold.gnn.sampling.temporal import TemporalSampler
from fivefold.gnn.storage import ContainerWriter, RowReader, probe_disk

WRONG_FLAGS = ("no", 1, 0, None, [])


def topology():
    return Adjacency([0, 2, 2, 3], [1, 2, 0])


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    path = tmp_path_factory.mktemp("container") / "a.fvf"
    with ContainerWriter(path, kind="k", sections={"x": (np.int8, (3,))}, attributes={}) as writer:
        writer.write("x", 0, np.zeros(3, np.int8))
        with writer.commit() as made:
            yield made


@pytest.mark.parametrize("wrong", WRONG_FLAGS)
def test_what_is_neither_true_nor_false_is_refused(tmp_path, container, wrong):
    sampler = NeighborSampler(topology(), [2])
    one = {"sections": {"x": (np.int8, (1,))}, "attributes": {}, "kind": "k"}
    calls = (
        lambda: EdgeRules(add_reverse=wrong),
        lambda: EdgeRules(drop_self_loops=wrong),
        lambda: EdgeRules(drop_duplicates=wrong),
        lambda: generate_graph(tmp_path / "g", nodes=9, dim=2, random_ids=wrong),
        lambda: Adjacency([0, 1], [0], check=wrong),
        lambda: NeighborSampler(topology(), [2], edge_ids=wrong),
        lambda: TemporalSampler(topology(), [2], edge_time=[1, 2, 3], edge_ids=wrong),
        lambda: sample_epochs(sampler, [0], tmp_path / "s", batch_size=1, resume=wrong),
        lambda: RowReader(container, "x", verify=wrong),
        lambda: RowReader(container, "x", direct=wrong),
        lambda: ContainerWriter(tmp_path / "w", resume=wrong, **one),
    )
    for call in calls:
        with pytest.raises(ConfigurationError, match="; use True or False"):
            call()
    if wrong is not None:
        with pytest.raises(ConfigurationError, match=r"names is .*; use True or False"):
            TableColumns(names=wrong)


@pytest.mark.parametrize("wrong", ["no", 1.5, True, []])
def test_what_is_no_whole_number_is_refused(tmp_path, wrong):
    sampler = NeighborSampler(topology(), [2])
    (tmp_path / "e.csv").write_text("a,b\n0,1\n")
    calls = (
        lambda: generate_graph(tmp_path / "g", nodes=9, dim=2, classes=wrong),
        lambda: generate_graph(tmp_path / "g", nodes=wrong, dim=2),
        lambda: array_source([[0], [1]], num_nodes=wrong),
        lambda: table_source([tmp_path / "e.csv"], num_nodes=wrong),
        lambda: Adjacency([0, 1], [0], num_sources=wrong),
        lambda: NeighborSampler(topology(), [2], seed=wrong),
        lambda: TemporalSampler(topology(), [2], edge_time=[1, 2, 3], seed=wrong),
        lambda: sample_epochs(sampler, [0], tmp_path / "s", batch_size=1, seed=wrong),
        lambda: sample_epochs(sampler, [0], tmp_path / "s", batch_size=1, first_epoch=wrong),
        lambda: probe_disk(tmp_path, size_bytes=wrong),
    )
    for call in calls:
        with pytest.raises((ConfigurationError, DataError), match="whole number"):
            call()


@pytest.mark.parametrize("wrong", ["no", None, [], float("nan"), -1.0])
def test_what_is_no_number_in_range_is_refused(tmp_path, wrong):
    for name in ("p_in", "mean_degree", "label_noise", "train", "valid", "test"):
        with pytest.raises(ConfigurationError, match=f"{name} is .*; use a number from 0 to"):
            generate_graph(tmp_path / "g", nodes=9, dim=2, **{name: wrong})
    with pytest.raises(ConfigurationError, match=r"seconds must be .* above 0; got"):
        probe_disk(tmp_path, seconds=wrong)


def test_a_section_that_there_is_not_is_refused_whatever_it_is(container):
    for wrong in ("y", 3, None):
        with pytest.raises(DataError, match=f"has no section {wrong!r}"):
            RowReader(container, wrong)


def test_a_split_that_nothing_has_is_refused(tmp_path):
    (tmp_path / "e.csv").write_text("source,target\n0,1\n")
    with pytest.raises(ConfigurationError, match="split 1 was given, but no array"):
        find_source(tmp_path / "e.csv", SourceOptions(split=1))
