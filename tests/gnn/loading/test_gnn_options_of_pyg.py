"""Options of PyG's loaders are answered by name before anything is read or written."""

import numpy as np
import pytest
import torch

from fivefold.errors import ConfigurationError
from fivefold.gnn.loading import DiskLoader
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
    ],
)
def test_nothing_is_written_before_a_wrong_option_is_named(tmp_path, star, options, hint):
    with pytest.raises(ConfigurationError) as caught:
        DiskLoader.from_dataset(star, [2], 1, cache=tmp_path / "c", **options)
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
