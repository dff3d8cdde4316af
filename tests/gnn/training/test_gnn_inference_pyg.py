"""Inference out of core with PyTorch Geometric's own models equals their forward pass."""

import warnings

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses what newer torch deprecates
    from torch_geometric import nn

from fivefold.errors import UnsupportedError
from fivefold.gnn.storage import Container
from fivefold.gnn.training import infer_layers
from helpers.training_graphs import Disk, edge_index, make_dataset


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.GraphSAGE, {"num_layers": 3, "dropout": 0.5, "out_channels": 4}),
        (nn.GraphSAGE, {"num_layers": 1}),
        (nn.GAT, {"num_layers": 2, "heads": 2, "dropout": 0.5, "out_channels": 4}),
        (nn.GAT, {"num_layers": 2}),
    ],
)
@pytest.mark.parametrize("memory_bytes", [80_000, 50_000_000])
def test_equals_their_forward_pass(kind, options, memory_bytes, tmp_path):
    torch.manual_seed(0)
    model = kind(5, 8, **options)
    model.train()  # used as if in evaluation mode
    with make_dataset(tmp_path / "g", nodes=120, edges=700) as dataset:
        result = infer_layers(
            model, dataset, tmp_path / "out", memory_bytes=memory_bytes, profile=Disk()
        )
        x = torch.from_numpy(dataset.features.read("x"))
        with torch.no_grad():
            expected = model.eval()(x, torch.from_numpy(edge_index(dataset))).numpy()
    with Container.open(result.path) as container:
        np.testing.assert_allclose(container.read("x"), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (nn.GraphSAGE, {"aggr": "max"}, "GraphSAGE with aggr='max'"),
        (nn.GraphSAGE, {"normalize": True}, "normalize=True"),
        (nn.GraphSAGE, {"norm": "batch_norm"}, "norm"),
        (nn.GraphSAGE, {"jk": "cat"}, "jk='cat'"),
        (nn.GraphSAGE, {"act": "elu"}, "act ELU"),
        (nn.GraphSAGE, {"bias": False}, "bias=False"),
        (nn.GAT, {"add_self_loops": False}, "add_self_loops=False"),
        (nn.GAT, {"v2": True}, "GATv2Conv"),
        (nn.GAT, {"residual": True}, "residual=True"),
    ],
)
def test_other_equations_are_refused(kind, options, message, tmp_path):
    model = kind(5, 8, num_layers=2, **options)
    with (
        make_dataset(tmp_path / "g", nodes=20, edges=50) as dataset,
        pytest.raises(UnsupportedError, match=message),
    ):
        infer_layers(model, dataset, tmp_path / "out", profile=Disk())
    assert not (tmp_path / "out").exists()
