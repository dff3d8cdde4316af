"""Options of PyG's loaders are answered by name before anything is read or written."""

import inspect

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fivefold.errors import ConfigurationError
from fivefold.gnn.loading import DiskLoader, LinkLoader, OnlineLoader
from fivefold.gnn.loading.batch import import_geometric


@pytest.fixture
def star():
    """Node 0 hears from four others, of which two have the weight 0."""
    data = import_geometric("data")
    ends = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
    return data.Data(x=torch.eye(5), edge_index=ends, w=torch.tensor([0.0, 1.0, 0.0, 3.0]))


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"num_workers": 4}, "prefetch"),
        ({"replace": True}, "without replacement"),
        ({"time_attr": "time"}, "node_time"),
        ({"drop_last": True}, "leave seeds out"),
        ({"subgraph_type": "induced"}, "drawn"),
        ({"transform": print}, "in the loop"),
        ({"num_neighbors": [2]}, "fanouts"),
        ({"threds": 2}, "is threads meant"),
        ({"weight_attr": "speed"}, "weight_attr"),
        ({"device": "nowhere"}, "cpu"),
        ({"threads": 0}, ""),
        ({"sampled_epochs": 0}, ""),
        ({"input_nodes": [0, 0]}, "node once"),
        ({"input_nodes": [5]}, "from 0"),
        ({"input_nodes": torch.tensor([True])}, "per node"),
        ({"fanouts": [-2]}, "one number per hop"),
        ({"batch_size": torch.tensor([True] * 5)}, ""),  # PyG's third argument: input_nodes
    ],
)
def test_nothing_is_written_before_a_wrong_option_is_named(tmp_path, star, options, hint):
    with pytest.raises(ConfigurationError) as caught:
        DiskLoader.from_dataset(
            star, **{"fanouts": [2], "batch_size": 1, "cache": tmp_path / "c", **options}
        )
    assert hint in (caught.value.hint or "")
    assert not list(tmp_path.rglob("*.fvf*"))


@pytest.mark.slow
def test_what_changes_nothing_is_taken_and_weights_draw(tmp_path, star):
    options = {"num_workers": 0, "replace": False, "pin_memory": False, "directed": True}
    with DiskLoader.from_dataset(
        star, [1], 1, input_nodes=[0], sampled_epochs=40, weight_attr="w", cache=tmp_path, **options
    ) as loader:
        seen = np.bincount([int(batch.n_id[-1]) for _ in range(40) for batch in loader])
    assert seen[1] == seen[3] == 0
    assert seen[4] > seen[2] > 0


@pytest.fixture(scope="module")
def small(tmp_path_factory, dataset_of):
    folder = tmp_path_factory.mktemp("small")
    with dataset_of(folder, nodes=20, edges=40, train=2) as dataset:
        yield dataset


LOADERS = import_geometric("loader")
OF_PYG = {
    name: parameter.default
    for kind in (
        LOADERS.NeighborLoader,
        LOADERS.LinkNeighborLoader,
        LOADERS.NodeLoader,
        LOADERS.LinkLoader,
        DataLoader,
    )
    for name, parameter in inspect.signature(kind.__init__).parameters.items()
    if name not in {"self", "kwargs", "link_sampler", "node_sampler", "dataset"}
}
OWN = {  # of the same name here
    "disk": {"batch_size", "shuffle", "input_nodes", "weight_attr"},
    "online": {"batch_size", "shuffle", "input_time", "temporal_strategy"},
    "links": {"batch_size", "shuffle", "temporal_strategy", "edge_label_index", "edge_label"}
    | {"edge_label_time"},
}
NOT_DEFAULTS = {"pin_memory_device": "cuda", "in_order": False, "subgraph_type": "induced"}
NOT_DEFAULTS |= {"temporal_strategy": "last", "is_sorted": None}


def other_than(name):
    """A value that is not the default of one of PyG's options."""
    default = OF_PYG[name]
    if name in NOT_DEFAULTS:
        return NOT_DEFAULTS[name]
    return not default if isinstance(default, bool) else 3


def loaders(dataset, star, folder):
    """Each loader, by a call with more options."""
    few = {"fanouts": [2], "batch_size": 1}
    return {
        "disk": lambda **more: DiskLoader.from_dataset(star, [2], 1, cache=folder, **more),
        "online": lambda **more: OnlineLoader(dataset, [0], **few, **more),
        "links": lambda **more: LinkLoader(dataset, [[0], [1]], **few, **more),
    }


@pytest.mark.parametrize("kind", ["disk", "online", "links"])
def test_every_option_of_the_installed_pyg_is_taken_or_refused_by_name(tmp_path, star, small, kind):
    make = loaders(small, star, tmp_path / "c")[kind]
    for name in sorted(set(OF_PYG) - OWN[kind]):
        if name in {"is_sorted", "filter_per_worker"}:  # they change nothing here
            continue
        with pytest.raises(ConfigurationError, match=name) as caught:
            make(**{name: other_than(name)})
        assert caught.value.hint
        assert "use backend" not in caught.value.hint, name  # a list of all names is no answer
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["online", "links"])
def test_defaults_of_pyg_are_taken(tmp_path, star, small, kind):
    make = loaders(small, star, tmp_path)[kind]
    given = {
        name: value
        for name, value in OF_PYG.items()
        if value is not inspect.Parameter.empty
        and not name.startswith(("edge_label", "neg_sampling"))
        and name not in {"input_nodes", "batch_size", "shuffle"}
    }
    if kind == "links":
        given.pop("input_time")
        for name in ("neg_sampling", "neg_sampling_ratio"):  # None is no default of ours
            with pytest.raises(ConfigurationError, match="negatives"):
                make(**{name: None})
    with make(**given) as loader:
        assert next(iter(loader)).num_nodes
