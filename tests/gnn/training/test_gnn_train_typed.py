"""Training and inference of graphs of several types, judged by PyTorch Geometric's own layers."""

import json
import signal
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional

from helpers.forked_ranks import wait_for_step
from helpers.night import by_night

with warnings.catch_warnings():  # of deprecations in torch, on import
    warnings.simplefilter("ignore")
    from torch_geometric.data import HeteroData
    from torch_geometric.nn import HeteroConv, SAGEConv


from fivefold.errors import CheckpointError, ConfigurationError, DataError
from fivefold.gnn.data import HeteroDataset, ingest, pyg_source
from fivefold.gnn.loading import DiskLoader
from fivefold.gnn.storage import Container
from fivefold.gnn.training import GnnConfig, infer_run, train_graph
from fivefold.runs.checkpoints import newest_checkpoint, read_checkpoint

CITES, WRITES, BY = (
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "by", "author"),
)
IN, AT = ("author", "in", "place"), ("place", "of", "author")
SIZES = {"paper": 600, "author": 250, "place": 12}
HIDDEN, CLASSES = 16, 4


def make_graph(seed=0):
    """Classes follow from authors as much as from papers; places have no features."""
    rng = np.random.default_rng(seed)
    data = HeteroData()
    home = rng.integers(0, CLASSES, SIZES["author"])
    writers = rng.integers(0, SIZES["author"], SIZES["paper"])
    y = home[writers]
    centres = rng.normal(size=(CLASSES, 6))
    noise = rng.normal(size=(SIZES["paper"], 6))
    data["paper"].x = torch.from_numpy((0.5 * centres[y] + noise).astype(np.float32))
    data["author"].x = torch.from_numpy(
        (np.eye(CLASSES)[home] + 0.5 * rng.normal(size=(SIZES["author"], CLASSES))).astype(
            np.float16
        )
    )
    data["place"].num_nodes = SIZES["place"]
    data["paper"].y = torch.from_numpy(y)
    order = rng.permutation(SIZES["paper"])
    for name, ids in zip(("train", "val", "test"), np.split(order, [360, 480]), strict=True):
        mask = torch.zeros(SIZES["paper"], dtype=torch.bool)
        mask[ids] = True
        data["paper"][f"{name}_mask"] = mask
    own = np.stack([writers, np.arange(SIZES["paper"])])
    others = np.stack([rng.integers(0, 250, 400), rng.integers(0, 600, 400)])
    data[WRITES].edge_index = torch.from_numpy(np.concatenate([own, others], 1))
    data[BY].edge_index = data[WRITES].edge_index.flip(0)
    data[CITES].edge_index = torch.from_numpy(rng.integers(0, 500, (2, 1500)))
    data[CITES].edge_attr = torch.from_numpy(rng.random((1500, 2)).astype(np.float32))
    data[IN].edge_index = torch.from_numpy(np.stack([np.arange(250), rng.integers(0, 12, 250)]))
    data[AT].edge_index = data[IN].edge_index.flip(0)
    return data


@pytest.fixture(scope="module")
def typed_folder(tmp_path_factory):
    """A data set that all tests here share."""
    folder = tmp_path_factory.mktemp("typed")
    ingest(pyg_source(make_graph()), folder).close()
    return folder


@pytest.fixture
def configure(typed_folder, tmp_path):
    """A configuration of a run of some seconds."""

    def make(
        output="run",
        *,
        fanouts=(4, 3),
        host=120_000,
        data=None,
        model=None,
        sampling=None,
        lr=0.01,
        **run,
    ):
        tables = {
            "run": {
                "output": tmp_path / output,
                "epochs": 3,
                "device": "cpu",
                "log_every_steps": 1,
            },
            "data": {"path": typed_folder, "store": str(tmp_path / "store")} | (data or {}),
            "sampling": {"fanouts": fanouts, "batch_size": 60, "threads": 1} | (sampling or {}),
            "budgets": {"host": host, "disk": 10**9},
            "loader": {"backend": "threads", "threads": 1},
            "model": {"hidden_dim": HIDDEN, "dropout": 0.0} | (model or {}),
            "optim": {"lr": lr, "weight_decay": 0.01 if lr > 1e-9 else 0.0},
        }
        tables["run"] |= run
        return GnnConfig(**tables)

    return make


class Geometric(torch.nn.Module):
    """Two layers of PyG's HeteroConv with a map of each type's own rows."""

    def __init__(self):
        super().__init__()
        widths = {"paper": 6, "author": 4, "place": 1}
        deep = [kind for kind in (WRITES, BY, CITES, IN, AT) if kind[2] != "place"]
        self.own, self.convs, self.kinds = torch.nn.ModuleList(), torch.nn.ModuleList(), []
        for out, names, kinds in (
            (HIDDEN, ("paper", "author"), deep),
            (CLASSES, ("paper",), [WRITES, CITES]),
        ):
            self.own.append(
                torch.nn.ModuleDict({name: torch.nn.Linear(widths[name], out) for name in names})
            )
            self.kinds.append(kinds)
            options = {"root_weight": False, "bias": False}
            convs = {
                kind: SAGEConv((widths[kind[0]], widths[kind[2]]), out, **options) for kind in kinds
            }
            with warnings.catch_warnings():  # of places, which nothing is asked of
                warnings.simplefilter("ignore")
                self.convs.append(HeteroConv(convs, aggr="sum"))
            widths = dict.fromkeys(widths, HIDDEN)

    def forward(self, x_dict, edge_index_dict):
        for layer, (own, conv) in enumerate(zip(self.own, self.convs, strict=True)):
            found = conv(x_dict, {kind: edge_index_dict[kind] for kind in self.kinds[layer]})
            x_dict = {name: linear(x_dict[name]) + found[name] for name, linear in own.items()}
            if not layer:
                x_dict = {name: rows.relu() for name, rows in x_dict.items()}
        return x_dict["paper"]

    def load(self, state, data):
        """Take over the parameters of ours, which are numbered in the order of the data set."""
        with HeteroDataset.open(data) as dataset:
            names, kinds = dataset.node_types, dataset.edge_types
        for layer, (own, conv) in enumerate(zip(self.own, self.convs, strict=True)):
            wanted = [name for name in names if name in own]
            for number, name in enumerate(wanted):
                own[name].weight.data.copy_(state[f"layers.{layer}.own.{number}.weight"])
                own[name].bias.data.copy_(state[f"layers.{layer}.own.{number}.bias"])
            into = [kind for kind in kinds if kind[2] in own]
            assert set(into) == set(self.kinds[layer])
            for number, kind in enumerate(into):
                weight = state[f"layers.{layer}.neighbors.{number}.weight"]
                conv.convs[kind].lin_l.weight.data.copy_(weight)
        return self


def whole(data):
    """All rows as PyG's layers take them."""
    x = {name: data[name].x.float() for name in ("paper", "author")}
    return x | {"place": torch.ones(SIZES["place"], 1)}, data.edge_index_dict


def state_of(config):
    return read_checkpoint(newest_checkpoint(config.run.output)[0], rank=0)["model"]


def events(config, kind):
    lines = (config.run.output / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.parametrize("mode", ["disk", "online"])
def test_it_learns_from_authors_and_counts_its_bytes(configure, mode):
    config = configure(mode=mode, epochs=8, host=36_000)
    result = train_graph(config)
    assert (result.reason, result.epochs, result.steps) == ("finished", 8, 8 * 6)
    # Their own rows tell papers' classes badly; the rows of their authors, well.
    assert result.test_accuracy > 0.7
    assert result.data["bytes_read"] > 0
    told = json.loads((config.run.output / "manifest.json").read_text())["dataset"]
    assert (told["node_type"], told["nodes"], told["classes"]) == ("paper", 862, CLASSES)
    assert told["feature_bytes"] == {"paper": 600 * 6 * 4, "author": 250 * 4 * 2}
    if mode == "disk":
        (prepared,) = events(config, "prepare")
        assert result.data["bytes_read"] == 8 * prepared["plan"]["read_bytes_per_epoch"]
        assert set(prepared["plan"]["types"]) == {"paper", "author"}
        text = (config.run.output / "plan.txt").read_text()
        assert text.index("Rows of author") < text.index("Rows of paper")


def test_validations_differ_by_the_parameters_alone(configure, tmp_path):
    config = configure(lr=1e-30, epochs=3)
    train_graph(config)
    found = [(event["loss"], event["accuracy"]) for event in events(config, "validation")]
    assert len(found) == 3
    assert len(set(found)) == 1
    # No model of ours asks for rows of edges, so they are not packed.
    kinds = {path.name.partition("-")[0] for path in (tmp_path / "store").iterdir()}
    assert kinds == {"lock", "samples", "store", "store1"}


def test_new_samples_are_packed_while_it_trains(configure, tmp_path):
    config = configure(epochs=3, sampling={"refresh_every_epochs": 1})
    result = train_graph(config)
    assert result.epochs == 3
    assert len(events(config, "prepare")) == 3
    assert len(list((tmp_path / "store").glob("store-*"))) == 1


@pytest.mark.parametrize("fanouts", [(4, 3), (-1, -1)])
def test_a_run_is_that_of_geometric_on_the_same_batches(configure, tmp_path, fanouts):
    """With all neighbours a batch has the outputs of the whole graph, which judges the sampling."""
    config = configure(fanouts=fanouts, epochs=2)
    told = train_graph(config)
    still = configure("still", fanouts=fanouts, epochs=1, lr=1e-30)
    train_graph(still)  # leaves the parameters as the seed makes them
    model, graph = Geometric().load(state_of(still), config.data.path), make_graph()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    losses = []
    with DiskLoader.from_dataset(
        config.data.path, fanouts, 60, input_nodes="paper", cache=tmp_path / "again",
        seed=0, shuffle=True, budgets="1 MB",
    ) as loader:  # fmt: skip
        for batch in (batch for _ in range(2) for batch in loader):
            seeds = batch["paper"].n_id[: batch["paper"].batch_size]
            if fanouts[0] < 0:
                scores = model(*whole(graph))[seeds]
            else:
                batch["place"].x = torch.ones(batch["place"].num_nodes, 1)
                rows = {name: x.float() for name, x in batch.x_dict.items()}
                scores = model(rows, batch.edge_index_dict)[: len(seeds)]
            loss = functional.cross_entropy(scores, graph["paper"].y[seeds])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    found = [event["loss"] for event in events(config, "train")]
    assert len(found) == told.steps == 12
    np.testing.assert_allclose(found, losses, rtol=1e-3, atol=1e-5)
    reached = Geometric().load(state_of(config), config.data.path)
    for ours, theirs in zip(reached.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", by_night(["disk", "online"], ["disk"]))
def test_killed_and_resumed_it_ends_as_if_nothing_had_been(configure, start_ranks, mode):
    options = {"mode": mode, "epochs": 15, "checkpoint_every_steps": 7}
    whole_run = train_graph(configure("whole", **options))
    config = configure("killed", **options)
    first = start_ranks(config)
    wait_for_step(first, config.run.output, 30)
    first.kill()
    assert first.wait() == {0: -signal.SIGKILL}
    second = start_ranks(config)
    assert second.wait(300) == {0: 0}, second.logs()
    result = json.loads((config.run.output / "result.json").read_text())
    assert result["parameters_sha256"] == whole_run.parameters_sha256
    (resumed,) = events(config, "resume")
    assert 28 <= resumed["step"] < 90
    found = infer_run(config.run.output, memory_bytes=10**6)
    assert found.accuracy["test"] > 0.7


def test_outputs_of_an_earlier_checkpoint_are_not_taken_for_those_of_this_one(configure, tmp_path):
    config = configure(epochs=1)
    train_graph(config)
    infer_run(config.run.output, tmp_path / "out", memory_bytes=10**7)
    train_graph(configure(epochs=2))
    with pytest.raises(DataError, match="another model"):
        infer_run(config.run.output, tmp_path / "out", memory_bytes=10**7)


@pytest.mark.parametrize("memory_bytes", [30_000, 10_000_000])
def test_inference_is_one_pass_of_geometric_over_the_whole_graph(configure, memory_bytes):
    config = configure(epochs=4)
    train_graph(config)
    with torch.no_grad():
        expected = (
            Geometric().load(state_of(config), config.data.path)(*whole(make_graph())).numpy()
        )
    found = infer_run(config.run.output, memory_bytes=memory_bytes, keep_layers=True)
    path = found.outputs.path
    with Container.open(path) as outputs:
        np.testing.assert_allclose(outputs.read("x"), expected, rtol=2e-4, atol=2e-5)
    several = [layer.ranges > 2 for layer in found.outputs.layers]
    assert several == [memory_bytes < 10**6] * 2
    graph = make_graph()
    right = expected.argmax(1) == graph["paper"].y.numpy()
    for split, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        assert found.accuracy[split] == pytest.approx(right[graph["paper"][mask].numpy()].mean())
    path.unlink()
    again = infer_run(config.run.output, memory_bytes=memory_bytes)
    assert [layer.ranges > 0 for layer in again.outputs.layers] == [False, True]
    with Container.open(path) as outputs:
        np.testing.assert_allclose(outputs.read("x"), expected, rtol=2e-4, atol=2e-5)
    assert {file.name for file in path.parent.iterdir()} == {"output.fvf", "inference.json"}


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"data": {"node_type": "poper"}}, "'poper', which does not exist", "there is paper"),
        ({"data": {"node_type": "author"}}, "'author', which has no labels", "there is paper"),
        ({"model": {"name": "gat"}}, 'model.name is "gat", but', "DiskLoader.from_dataset"),
        ({"mode": "memory"}, 'run.mode is "memory", but', '"disk" or "online"'),
    ],
)
def test_what_is_of_one_type_only_is_refused_before_any_work(
    configure, tmp_path, changes, message, hint
):
    with pytest.raises(ConfigurationError) as caught:
        train_graph(configure(**changes))
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert not (tmp_path / "store").exists()


def test_labels_decide_what_is_trained(configure, tmp_path):
    graph = make_graph()
    graph["author"].y = torch.arange(250) % 2
    graph["author"].train_mask = torch.ones(250, dtype=torch.bool)
    ingest(pyg_source(graph), tmp_path / "two").close()
    with pytest.raises(ConfigurationError, match="has labels of author, paper"):
        train_graph(configure(data={"path": tmp_path / "two"}))
    chosen = {"path": tmp_path / "two", "node_type": "author"}
    train_graph(configure(data=chosen, epochs=1))
    with pytest.raises(CheckpointError, match="other data"):
        train_graph(configure(data=chosen | {"node_type": "paper"}, epochs=1))
    for name in ("author", "paper"):
        del graph[name].y
    ingest(pyg_source(graph), tmp_path / "none").close()
    with pytest.raises(DataError, match="no node type"):
        train_graph(configure("other", data={"path": tmp_path / "none"}))


@pytest.mark.distributed
def test_two_ranks_agree_without_edges_of_a_type(configure, start_ranks, tmp_path):
    """Parameters of an edge type that a batch has no edges of are averaged like all others."""
    graph = make_graph()
    graph[AT].edge_index = torch.empty(2, 0, dtype=torch.int64)
    ingest(pyg_source(graph), tmp_path / "sparse").close()
    config = configure(data={"path": tmp_path / "sparse"}, host=60_000)
    world = start_ranks(config, world_size=2)
    assert world.wait() == {0: 0, 1: 0}, world.logs()
    path, manifest = newest_checkpoint(config.run.output)
    assert manifest["world_size"] == 2
    states = [read_checkpoint(path, rank=rank) for rank in range(2)]
    assert states[0]["step"] == 3 * 3  # six batches, three per rank and epoch
    assert all(value.isfinite().all() for value in states[0]["model"].values())


def test_a_graph_of_one_type_has_no_node_type(configure, graph_folder):
    with pytest.raises(ConfigurationError, match="nodes of one type"):
        train_graph(configure(data={"path": graph_folder, "node_type": "paper"}))
