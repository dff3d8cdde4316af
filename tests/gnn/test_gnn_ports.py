"""Ways from a script for PyG's loader to ours, and how many lines of it change: at most five."""

import difflib
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fivefold.cli._gnn import app

Data = pytest.importorskip("torch_geometric.data").Data
NODES, EDGES = 400, 3000
MOST_LINES = 5

NEIGHBOR_LOADER = """
import torch
from torch.nn import functional
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GATConv

torch.manual_seed(0)
model = GATConv(5, 2, edge_dim=3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = NeighborLoader(data, [4], batch_size=16, input_nodes=data.train_mask, shuffle=True)
losses = []
for epoch in range(4):
    for batch in loader:
        out = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
        loss = functional.mse_loss(out, batch.y[: batch.batch_size].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
OWN_LOOP = """
import torch
from torch.nn import functional
from torch_geometric.loader import NeighborLoader

def mean_of_neighbours(h, edges):
    total = torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]])
    return total / torch.bincount(edges[1], minlength=len(h)).clamp(min=1)[:, None]

torch.manual_seed(0)
own, theirs = torch.nn.Linear(5, 2), torch.nn.Linear(5, 2)
optimizer = torch.optim.Adam([*own.parameters(), *theirs.parameters()], lr=0.01)
features = torch.from_numpy(data.x.numpy())
loader = NeighborLoader(data, [4], batch_size=16, input_nodes=data.train_mask, shuffle=True)
losses = []
for epoch in range(4):
    for batch in loader:
        h = features[batch.n_id]
        out = (own(h) + theirs(mean_of_neighbours(h, batch.edge_index)))[: batch.batch_size]
        loss = functional.mse_loss(out, data.y[batch.n_id[: batch.batch_size]].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
LOADER = {
    "torch_geometric.loader import NeighborLoader": "fivefold.gnn.loading import DiskLoader",
    "loader = NeighborLoader(": "loader = DiskLoader.from_dataset(",
}
PORTS = {
    "PyG": (NEIGHBOR_LOADER, LOADER),
    "own loop": (
        OWN_LOOP,
        LOADER
        | {
            "features = torch.from_numpy(data.x.numpy())\n": "",
            "h = features[batch.n_id]": "h = batch.x",
        },
    ),
}


def make_graph():
    random = np.random.default_rng(0)
    return Data(
        x=torch.from_numpy(random.random((NODES, 5)).astype(np.float32)),
        edge_index=torch.from_numpy(random.integers(0, NODES, (2, EDGES))),
        edge_attr=torch.from_numpy(random.random((EDGES, 3)).astype(np.float32)),
        y=torch.from_numpy(random.random((NODES, 2))),  # of no classes
        train_mask=torch.from_numpy(random.random(NODES) < 0.2),
    )


def changed_lines(theirs, ours):
    """Lines of the one that are not in the other, counted on the side that has more of them."""
    marks = [line[0] for line in difflib.ndiff(theirs.splitlines(), ours.splitlines())]
    return max(marks.count("-"), marks.count("+"))


@pytest.mark.parametrize("name", PORTS)
def test_a_script_for_neighbor_loader_trains_from_disk(name, tmp_path, monkeypatch):
    """The script as it stands, but for a few lines."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    theirs, replaced = PORTS[name]
    ours = theirs
    for old, new in replaced.items():
        assert old in ours
        ours = ours.replace(old, new)
    assert 1 <= changed_lines(theirs, ours) <= MOST_LINES
    graph = make_graph()
    ran = {"data": graph}
    exec(compile(ours, "port", "exec"), ran)  # noqa: S102 - the script is the subject
    ran["loader"].close()
    steps = -(-int(graph.train_mask.sum()) // 16)
    assert len(ran["losses"]) == 4 * steps
    assert np.mean(ran["losses"][-steps:]) < np.mean(ran["losses"][:steps])


def test_a_saved_graph_is_trained_on_by_two_commands_and_five_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = make_graph()
    graph.y, graph.val_mask = torch.arange(NODES) % 3, torch.arange(NODES) % 7 == 0
    graph.test_mask = ~graph.val_mask
    torch.save(graph.to_dict(), "graph.pt")
    config = '[data]\npath = "graph"\n[sampling]\nfanouts = [4]\nbatch_size = 16\n'
    assert len(config.splitlines()) <= MOST_LINES
    (tmp_path / "train.toml").write_text(config)
    for command in (
        ["ingest", "graph.pt", "graph"],
        ["train", "train.toml", "--set", "run.epochs=2", "--json"],
    ):
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["epochs"] == 2
