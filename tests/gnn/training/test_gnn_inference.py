"""Layer-wise inference out of core equals one forward pass over the whole graph in memory."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from training_graphs import Disk, edge_index, make_dataset

from fivefold.gnn.storage import Container
from fivefold.gnn.training import infer_layers, make_model

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
