"""Models: edge_index and blocks agree on the seeds, and both with the equations."""

import numpy as np
import pytest
import torch

from fivefold.errors import ConfigurationError
from fivefold.gnn.loading import Block
from fivefold.gnn.sampling import Adjacency, NeighborSampler
from fivefold.gnn.training import GAT, GCN, GraphSAGE
from fivefold.gnn.training.models import make_model

MODELS = ["sage", "gat", "gcn"]


def random_topology(rng, *, nodes=60, edges=400):
    """A graph with a hub, isolated nodes, self-loops and parallel edges."""
    targets = rng.integers(0, nodes // 2, edges)  # the second half has no in-edges
    targets[:80] = 3
    sources = rng.integers(0, nodes, edges)
    sources[-10:] = targets[-10:]
    order = np.argsort(targets, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(targets, minlength=nodes))])
    return Adjacency(indptr.astype(np.int64), sources[order].astype(np.int64))


def blocks_of(sample):
    """Blocks straight from their definition, one node set per hop."""
    edges = torch.from_numpy(sample.edge_index())
    hop_of = np.repeat(np.arange(len(sample.nodes_per_hop)), sample.nodes_per_hop)
    hops, found = len(sample.nodes_per_hop) - 1, []
    rows = np.arange(sample.num_nodes)  # input rows of the layer, as numbers of the batch
    for layer in range(hops):
        outputs = np.flatnonzero(hop_of <= hops - 1 - layer)[::-1].copy()  # in any order
        if layer == hops - 1:
            outputs = outputs[::-1].copy()  # the seeds in theirs
        place_in, place_out = (
            {r: i for i, r in enumerate(rows)},
            {r: i for i, r in enumerate(outputs)},
        )
        kept = [(place_in[s], place_out[t]) for s, t in edges.T.tolist() if t in place_out]
        found.append(
            Block(
                edge_index=torch.tensor(kept, dtype=torch.int64).reshape(-1, 2).T.contiguous(),
                num_sources=len(rows),
                num_targets=len(outputs),
                target_rows=torch.tensor([place_in[t] for t in outputs]),
            )
        )
        rows = outputs
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fanouts", [(2,), (3, 2), (-1, 4, 2)])
def test_blocks_and_edge_index_agree_on_the_seeds(name, fanouts):
    rng = np.random.default_rng(len(fanouts))
    sampler = NeighborSampler(random_topology(rng), list(fanouts), seed=1)
    sample = sampler.sample(np.array([3, 40, 7, 59]), epoch=0, batch=0)
    torch.manual_seed(0)
    model = make_model(name, 5, 8, 4, num_layers=len(fanouts), heads=2).eval()
    x = torch.randn(sample.num_nodes, 5)
    whole = model(x, torch.from_numpy(sample.edge_index()))[:4]
    layered = model(x, blocks_of(sample))
    assert layered.shape == (4, 4)
    torch.testing.assert_close(layered, whole, rtol=1e-5, atol=1e-6)


def by_hand(model, x, edges):
    """The equations of the docstrings, node by node."""
    for layer, conv in enumerate(model.convs):
        rows = []
        for v in range(len(x)):
            neighbours = [s for s, t in edges if t == v]
            if model.name == "sage":
                mean = x[neighbours].mean(0) if neighbours else torch.zeros(x.shape[1])
                rows.append(conv.lin_l(mean) + conv.lin_r(x[v]))
                continue
            neighbours = [s for s in neighbours if s != v] + [v]
            if model.name == "gcn":
                rows.append(conv.lin(x[neighbours].mean(0)))
                continue
            values = conv.lin(x[neighbours]).view(len(neighbours), model.heads, -1)
            own = conv.lin(x[v]).view(1, model.heads, -1)
            scores = (values * conv.att_src).sum(-1) + (own * conv.att_dst).sum(-1)
            weights = torch.softmax(torch.nn.functional.leaky_relu(scores, 0.2), 0)
            sums = (weights[:, :, None] * values).sum(0)
            rows.append((sums.flatten() if conv.concat else sums.mean(0)) + conv.bias)
        x = torch.stack(rows)
        x = x if layer == model.num_layers - 1 else x.relu()
    return x


@pytest.mark.parametrize("name", MODELS)
def test_models_follow_their_equations(name):
    torch.manual_seed(1)
    model = make_model(name, 3, 4, 2, num_layers=2, heads=2).eval()
    edges = [(1, 0), (2, 0), (0, 2), (3, 3), (2, 3), (2, 3)]  # 1 and 4 have no in-edges
    x = torch.randn(5, 3)
    got = model(x, torch.tensor(edges).T)
    torch.testing.assert_close(got, by_hand(model, x, edges), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_without_edges_and_half_precision_features(name):
    model = make_model(name, 3, 4, 2, num_layers=2, heads=2).eval()
    out = model(torch.ones(4, 3, dtype=torch.float16), torch.empty(2, 0, dtype=torch.int64))
    assert out.shape == (4, 2)
    assert torch.isfinite(out).all()


def test_unfit_sizes_are_refused():
    with pytest.raises(ConfigurationError, match="multiple of heads"):
        GAT(3, 6, 2, heads=4)
    with pytest.raises(ConfigurationError, match="heads must be a whole number from 1; got 0"):
        GAT(3, 8, 2, heads=0)
    for wrong in (-0.1, 1.5, float("nan"), "0"):
        with pytest.raises(ConfigurationError, match="dropout"):
            GCN(3, 6, 2, dropout=wrong)
    with pytest.raises(ConfigurationError, match="num_layers must be a whole number from 1"):
        GCN(3, 6, 2, num_layers=0)
    with pytest.raises(ConfigurationError, match="no model 'gin'"):
        make_model("gin", 3, 6, 2, num_layers=1)
    with pytest.raises(ConfigurationError, match="1 blocks, but the model 2 layers"):
        GraphSAGE(3, 6, 2, num_layers=2)(torch.ones(1, 3), [None])
