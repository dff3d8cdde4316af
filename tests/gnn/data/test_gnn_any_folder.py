"""The law of readers over random folders: every file and column has one place, every row is read.

A folder may be refused; then the hint says what to do. What is read must be what was written.
"""

import gzip
import shutil
import warnings
from collections import Counter

import numpy as np
import pyarrow as pa
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fivefold.errors import DataError
from fivefold.gnn.data import SourceOptions, find_source, ingest, pyg_source

with warnings.catch_warnings():  # of deprecations in torch, on import
    warnings.simplefilter("ignore")
    from torch_geometric.data import Data, HeteroData

quiet = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
COUNT = 5  # nodes
FIELDS = {  # columns beside the ends, by kind
    "w": [1.5, 2, 0, 4, 1], "year": [2001, 1999, 2001, 2020, 7], "kind": list("abcab"),
    "when": ["2020-01-02"] * 5, "ok": [True, False, True, True, False], "big": [2**60] * 5,
}  # fmt: skip
OF_NODES = {
    "f": [0.5, 1, 2, 3, 4], "title": list("vwxyz"), "train_mask": [1, 0, 0, 1, 0],
    "val_mask": [0, 1, 0, 0, 0], "venue_id": [3, 3, 1, 1, 1], "label": [0, 2, 10, 2, 0],
    "feat": ["1,2.5", "3,4", "5,6", "7,8", "9,0"], "Unnamed: 0": [1, 2, 3, 4, 5], "bid": [0.5] * 5,
}  # fmt: skip


def table(draw, columns, path):
    """Write columns as one of the kinds of tables."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(columns), path)
        return
    quote = '"' if draw(st.booleans()) else ""
    ends = draw(st.sampled_from(["\n", "\r\n", "\n\n"]))

    def line(values):
        return ",".join(f'"{v}"' if quote or "," in str(v) else str(v) for v in values)

    lines = [line(columns), *(line(row) for row in zip(*columns.values(), strict=True))]
    data = ("\ufeff" * draw(st.booleans()) + ends.join([*lines, ""])).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@st.composite
def folders(draw):
    """Return how to write a folder, and the names that its account must have."""
    kind = draw(st.sampled_from([".csv", ".csv.gz", ".parquet", ".tsv.gz"]))
    kind = ".csv.gz" if kind == ".tsv.gz" else kind
    names = draw(st.sampled_from([("src", "dst"), ("Source", "Target"), ("from_id", "to_id")]))
    more = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=3))
    parts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    nodes = draw(st.none() | st.lists(st.sampled_from(sorted(OF_NODES)), unique=True, min_size=1))
    beside = draw(st.sets(st.sampled_from(["README.txt", "x.bin", ".hidden", "sub/deep/a.csv"])))
    options = {"twin": draw(st.booleans()), "partitions": draw(st.booleans()), "beside": beside}
    ids = draw(st.permutations(range(COUNT)))
    return draw, kind, names, more, parts, nodes, ids, options


@quiet
@given(made=st.data(), seed=st.integers(0, 1000))
def test_every_file_and_column_of_a_folder(tmp_path_factory, made, seed):
    draw, kind, ends, more, parts, nodes, ids, options = made.draw(folders())
    root = tmp_path_factory.mktemp("f") / "in"
    root.mkdir()
    random, expected, known = np.random.default_rng(seed), Counter(), set()
    for number, size in enumerate(parts):
        pairs = random.integers(0, COUNT, (size, 2)).tolist()
        expected.update(map(tuple, pairs))
        columns = dict(zip(ends, map(list, zip(*pairs, strict=True)), strict=True))
        columns |= {name: FIELDS[name][:size] for name in more}
        place = root / f"y={number}" if options["partitions"] else root
        place.mkdir(exist_ok=True)
        path = place / f"part{number}{kind}"
        table(draw, columns, path)
        known.add(str(path.relative_to(root)))
        if options["twin"] and kind == ".csv":
            twin = path.with_name(f"{path.name}.gz")
            twin.write_bytes(gzip.compress(path.read_bytes()))
            known.add(str(twin.relative_to(root)))
    known |= {f"column {name}" for name in (*ends, *more)}
    known |= {"partition y"} if options["partitions"] else set()
    place = tmp_path_factory.mktemp("n") / "nodes.csv"
    if nodes is not None:
        table(draw, {"id": ids, **{name: OF_NODES[name] for name in nodes}}, place)
        known |= {f"nodes.csv: {name}" for name in ("id", *nodes)}
    for name in options["beside"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("0,1\n")
        known.add(f"{name.split('/')[0]}/" if "/" in name else name)
    refused, source = None, None
    try:
        source, _ = find_source(root, SourceOptions(nodes=None if nodes is None else place))
        with ingest(source, root.parent / "out") as dataset:
            topology = dataset.topology()
            targets = np.repeat(np.arange(dataset.num_nodes), np.diff(topology.indptr))
            found = Counter(zip(topology.indices.tolist(), targets.tolist(), strict=True))
            assert found == expected
            if nodes is not None:
                check_nodes(dataset, nodes, ids)
    except DataError as error:
        refused = error
    if refused is not None:  # parts may be copies of one another; one table alone is read
        assert refused.hint
        assert len(parts) > 1, refused
        return
    assert not source.reading.missing(known)
    told = {note.name for note in (*source.reading.read, *source.reading.left_out)}
    assert {name for name in told if "nodes.csv" not in name} <= known
    shutil.rmtree(root)


def check_nodes(dataset, nodes, ids):
    """Rows of features, labels and splits stand at their ids."""
    order = np.argsort(ids)
    columns = []
    for name in nodes:
        if name in {"f", "bid"}:
            columns.append(np.array(OF_NODES[name], np.float32)[order, None])
        if name == "feat":
            rows = [list(map(float, text.split(","))) for text in OF_NODES["feat"]]
            columns.append(np.array(rows, np.float32)[order])
    if columns:
        np.testing.assert_array_equal(dataset.features.read("x"), np.concatenate(columns, 1))
    assert dataset.has_features == bool(columns)
    if "label" in nodes:
        assert dataset.labels.tolist() == np.array(OF_NODES["label"])[order].tolist()
        for mask, split in (("train_mask", dataset.train), ("val_mask", dataset.valid)):
            wanted = np.flatnonzero(np.array(OF_NODES[mask])[order]) if mask in nodes else []
            assert split.tolist() == list(wanted)


ATTRIBUTES = {
    "x": torch.rand(COUNT, 2), "y": torch.arange(COUNT), "train_mask": torch.ones(COUNT) > 0,
    "time": torch.arange(COUNT), "names": list("abcde"), "batch": torch.zeros(COUNT).long(),
    "flag": True, "none": None, "n_id": torch.arange(COUNT),
}  # fmt: skip
OF_EDGES = {
    "edge_attr": torch.rand(3, 2), "edge_weight": torch.rand(3), "edge_time": torch.arange(3),
    "e_id": torch.arange(3), "edge_label_index": torch.zeros(2, 3).long(),
}  # fmt: skip
ENDS = torch.tensor([[0, 1, 2], [1, 2, 4]])


@quiet
@given(
    first=st.sets(st.sampled_from(sorted(ATTRIBUTES))),
    second=st.sets(st.sampled_from(sorted(ATTRIBUTES))),
    edges=st.sets(st.sampled_from(sorted(OF_EDGES))),
    typed=st.booleans(),
    leave_out=st.sets(st.just("edge_attr")),
)
def test_every_attribute_of_a_graph_of_pyg(first, second, edges, typed, leave_out):
    data = HeteroData() if typed else Data(num_nodes=COUNT)
    known = set()
    for kind, names in (("a", first), ("b", second)) if typed else (("", first),):
        store = data[kind] if typed else data
        store.num_nodes = COUNT
        for name in names:
            store[name] = ATTRIBUTES[name]
            if ATTRIBUTES[name] is not None:
                known.add(f"{kind}: {name}" if typed else name)
    store = data["a", "to", "b"] if typed else data
    for name, value in ({name: OF_EDGES[name] for name in edges} | {"edge_index": ENDS}).items():
        store[name] = value
        known.add(f"a to b: {name}" if typed else name)
    source = pyg_source(data, leave_out=leave_out)
    assert not source.reading.missing(known)
    taken = {note.name.split(": ")[-1] for note in source.reading.read}
    part = source.edge_features.get(("a", "to", "b")) if typed else source.edge_features()
    assert ("edge_attr" in taken) == (part is not None)
