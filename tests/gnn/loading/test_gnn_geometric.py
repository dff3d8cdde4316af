"""PyG on our batches: unchanged models, the FeatureStore interface, Data."""

import pickle
import warnings

import numpy as np
import pytest
import torch

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.loading import DiskLoader, FeatureStoreAdapter, OnlineLoader

with warnings.catch_warnings():  # of deprecations in torch, on import
    warnings.simplefilter("ignore")
    from torch_geometric.data import FeatureStore, TensorAttr
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv
    from torch_geometric.utils import trim_to_layer

torch.set_num_threads(1)


class Net(torch.nn.Module):
    """As in PyG's own examples."""

    def __init__(self, conv, dim):
        super().__init__()
        self.first, self.last = conv(dim, 8), conv(8, 5)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


def train(batches, conv, dim):
    torch.manual_seed(0)
    model = Net(conv, dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for x, edge_index, y in batches:
        optimizer.zero_grad()
        out = model(x / 2**15, edge_index)[: len(y)]
        loss = torch.nn.functional.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("conv", [SAGEConv, GATConv, GCNConv])
@pytest.mark.parametrize("policy", ["static", "belady"])
def test_an_unchanged_model_trains_as_on_rows_in_memory(stores, conv, policy):
    dataset, features, store = stores(dim=12, policy=policy)
    x, y = torch.from_numpy(features), torch.from_numpy(dataset.labels)
    with DiskLoader(store, labels=dataset.labels) as loader:
        from_disk = train(((b.x, b.edge_index, b.y) for _ in range(2) for b in loader), conv, 12)
        loader.set_epoch(0)
        structure = [(b.n_id, b.edge_index, b.batch_size) for _ in range(2) for b in loader]
    in_memory = train(((x[n], e, y[n[:b]]) for n, e, b in structure), conv, 12)
    assert from_disk == in_memory  # bit for bit
    assert from_disk[-1] != from_disk[0]


def test_blocks_give_what_the_whole_subgraph_gives(stores):
    dataset, _, store = stores(dim=12)
    torch.manual_seed(0)
    net = Net(SAGEConv, 12)
    with (
        DiskLoader(store, labels=dataset.labels) as whole,
        DiskLoader(store, labels=dataset.labels, form="blocks") as layered,
    ):
        for full, batch in zip(whole, layered, strict=True):
            expected = net(full.x / 2**15, full.edge_index)[: full.batch_size]
            first, last = batch.blocks
            h = batch.x / 2**15
            h = net.first((h, first.targets(h)), first.edge_index).relu()
            out = net.last((h, last.targets(h)), last.edge_index)
            torch.testing.assert_close(out, expected)


def test_batches_by_hop_can_be_trimmed(stores):
    dataset, _, _ = stores(dim=12)
    net = Net(SAGEConv, 12)
    with OnlineLoader(dataset, dataset.train, fanouts=[4, 3], batch_size=9) as loader:
        for batch in loader:
            data = batch.to_data()
            x, edge_index = data.x / 2**15, data.edge_index
            expected = net(x, edge_index)[: data.batch_size]
            nodes, edges = data.num_sampled_nodes, data.num_sampled_edges
            h = net.first(x, edge_index).relu()
            h, edge_index, _ = trim_to_layer(1, nodes, edges, h, edge_index)
            out = net.last(h, edge_index)[: data.batch_size]
            torch.testing.assert_close(out, expected)


def test_data_has_the_same_attributes(stores):
    dataset, _, store = stores(dim=12)
    with DiskLoader(store, labels=dataset.labels) as loader:
        batch = next(iter(loader))
        data = batch.to_data()
        assert data.validate()
        assert torch.equal(data.x, batch.x)
        assert data.num_nodes == batch.num_nodes
        assert data.num_edges == batch.num_edges
        assert (data.batch_size, data.y.shape[0]) == (9, 9)
        assert "num_sampled_nodes" not in data  # its rows do not stand by hop
        copy = batch.clone()
        assert copy.x.data_ptr() != batch.x.data_ptr()
        assert batch.to("meta").x.device.type == "meta"
        assert batch.nbytes == sum(t.nbytes for t in batch.tensors())


def same(a, b):
    """Bit for bit: random bits of half precision have NaNs among them."""
    return a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize(("dim", "dtype"), [(3, np.float32), (768, np.float16)])
def test_the_adapter_serves_rows_through_pygs_own_interface(stores, dim, dtype):
    dataset, features, _ = stores(dim=dim, dtype=dtype)
    store = FeatureStoreAdapter(dataset.features)
    assert isinstance(store, FeatureStore)
    x = torch.from_numpy(features)
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[[5, 77]] = True
    for index in (
        torch.tensor([9, 3, 3, 499, 0]),
        torch.tensor([], dtype=torch.int64),
        mask,
        slice(10, 400, 3),
        None,
    ):  # PyG itself cannot compare an index that is a NumPy array
        expected = x if index is None else x[index]
        assert same(store.get_tensor(None, "x", index=index), expected)
        attr = TensorAttr(None, "x", index)
        assert same(store.multi_get_tensor([attr, attr])[1], expected)
        assert same(store[TensorAttr(None, "x", index)], expected)
    assert same(store[None, "x", 7:9], x[7:9])
    assert same(store.view(TensorAttr(None))["x"][torch.tensor([1])], x[[1]])
    assert store.get_tensor_size(None, "x") == x.shape
    assert [attr.attr_name for attr in store.get_all_tensor_attrs()] == ["x"]
    assert store.get_tensor(None, "z", index=None) is None
    assert store.get_tensor("paper", "x", index=None) is None
    assert not store.put_tensor(x, None, "x", index=None)
    assert not store.remove_tensor(None, "x", None)
    with pytest.raises(DataError, match="there are"):
        store.get_tensor(None, "x", index=torch.tensor([500]))
    with pytest.raises(ConfigurationError, match="mask"):
        store.get_tensor(None, "x", index=mask[1:])
    with pytest.raises(ConfigurationError, match="dtype"):
        store.get_tensor(None, "x", index=torch.tensor([0.5]))
    other = pickle.loads(pickle.dumps(store))  # noqa: S301 - our own bytes
    assert same(other.get_tensor(None, "x", index=torch.tensor([8])), x[[8]])
    assert store.reading.bytes_used > 0
    other.close()
    store.close()


def test_the_adapter_serves_several_node_types(stores):
    (a, x, _), (b, z, _) = stores(dim=3), stores(dim=5)
    store = FeatureStoreAdapter({"paper": a.features, "author": b.features})
    attrs = store.get_all_tensor_attrs()
    for attr in attrs:
        attr.index = torch.tensor([4, 1])
    papers, authors = store.multi_get_tensor(attrs)
    assert np.array_equal(papers, x[[4, 1]])
    assert np.array_equal(authors, z[[4, 1]])
    store.close()
