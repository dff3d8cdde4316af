"""Random tables: every row and column is found again, or named, or the table is refused."""

import contextlib
import csv
import gzip
import io
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.data import SourceOptions, TableColumns, find_source, ingest, table_source
from fivefold.gnn.data._csv import is_number
from fivefold.gnn.data.statistics import describe

quiet = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
WORDS = st.sampled_from(
    ["a", "be", "to", "src", "or not", "id", '"q', 'q"', 'i"n', "#tag", "%p", " b", "b ", "x,y",
     "x;y", "NA", "0", "7", "07", "1.5", "é"]
)  # fmt: skip
NUMBERS = st.integers(0, 40).map(str)
HEADERS = st.sampled_from([None, ("src", "dst"), ("Source", "Target"), ("a", "be"), ("x1", "x2")])


def read(folder, path, **options):
    """Edges by the names of their ends, as often as they stand there."""
    source, _ = find_source(path, SourceOptions(**options))
    with ingest(source, folder / "out") as dataset:
        topology = dataset.topology()
        targets = np.repeat(np.arange(dataset.num_nodes), np.diff(topology.indptr))
        names = [str(number) for number in range(dataset.num_nodes)]
        if (folder / "out" / "names.parquet").exists():
            names = parquet.read_table(folder / "out" / "names.parquet")["name"].to_pylist()
        pairs = zip(topology.indices.tolist(), targets.tolist(), strict=True)
        return source, Counter((names[s], names[t]) for s, t in pairs)


@st.composite
def texts(draw):
    """A table as text, and its rows."""
    field = draw(st.sampled_from([WORDS, NUMBERS]))
    width = draw(st.integers(2, 3))
    rows = draw(st.lists(st.lists(field, min_size=width, max_size=width), min_size=1, max_size=8))
    header, delimiter = draw(HEADERS), draw(st.sampled_from(",\t;|"))
    style = draw(st.sampled_from(["plain", "minimal", "all"]))
    names = [] if header is None else [[*header, "more"][:width]]
    if style == "plain":
        assume(not any(delimiter in value for row in rows for value in row))
        # What begins and ends with a mark says nothing of whether the marks belong to it.
        assume(not any(value == '"' for row in rows for value in row))
        lines = [delimiter.join(row) for row in [*names, *rows]]
    else:
        quoting = csv.QUOTE_ALL if style == "all" else csv.QUOTE_MINIMAL
        out = io.StringIO()
        csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator="\n").writerows(
            [*names, *rows]
        )
        lines = out.getvalue().splitlines()
    head = draw(st.sampled_from([[], ["# made by hand"], ["# src dst", "%"]]))
    gaps = draw(st.sampled_from(["\n", "\r\n", "\n\n"]))
    return gaps.join([*head, *lines, ""]), rows, delimiter


@quiet
@given(table=texts(), packed=st.booleans())
@example(table=("to,be\nbe,or\nor,not\n", [["to", "be"], ["be", "or"], ["or", "not"]], ","),
         packed=False)  # fmt: skip
@example(table=("a,be\nto,0\n", [["a", "be"], ["to", "0"]], ","), packed=False)
@example(table=('a\tb\n"b\tc\nc"\td\n', [["a", "b"], ['"b', "c"], ['c"', "d"]], "\t"), packed=False)
def test_every_row_of_an_edge_table(tmp_path_factory, table, packed):
    text, rows, _ = table
    below = [field for row in rows[1:] for field in row[:2]]  # words above numbers alone are names
    assume(not (below and all(map(is_number, below)) and not any(map(is_number, rows[0][:2]))))
    folder = tmp_path_factory.mktemp("t")
    path = folder / ("e.csv.gz" if packed else "e.csv")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    with contextlib.suppress(DataError):  # refused, with what to say
        source, found = read(folder, path)
        number = not source.text_ids
        clean = (lambda value: str(int(value))) if number else str.strip
        assert found == Counter((clean(row[0]), clean(row[1])) for row in rows)
        assert {note.name for note in source.reading.read} >= {path.name}
        assert not source.reading.missing(
            f"column {name}" for name in source.tables[0].names if name not in source.ends[0]
        )


@quiet
@given(rows=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=9))
def test_plain_tables_are_read(tmp_path_factory, rows):
    """The property above holds of a reader that refuses all: this one must not."""
    # (4, 3) above three rows may count nodes and edges: that is asked.
    assume(int(rows[0][1]) != len(rows) - 1)
    folder = tmp_path_factory.mktemp("t")
    for name, head in (("bare", ""), ("named", "src dst\n"), ("snap", "# From\tTo\n")):
        path = folder / name / "e.txt"
        path.parent.mkdir()
        path.write_text(head + "".join(f"{s} {t}\n" for s, t in rows))
        assert read(path.parent, path)[1] == Counter(rows)


def columns_of_nodes(random, count):
    """Columns of a node table: name, fields, and what they are."""
    split = random.integers(0, 4, count)
    labels = random.choice([0, 2, 10], count)
    marks = [("1", "0"), ("True", "False"), ("true", "false")]
    yes, no = marks[random.integers(len(marks))]
    found = [("label", labels.astype(str), "label")]
    for place, name in enumerate(["train_mask", "val_mask", "test_mask"]):
        found.append((name, np.where(split == place, yes, no), "mask"))
    if random.random() < 0.5:
        found = [found[0], ("split", np.array(["train", "val", "test", ""])[split], "mask")]
    found.append(("f", random.random(count).round(3).astype(str), "feature"))
    found.append(("venue_id", random.integers(0, 3, count).astype(str), "left out"))
    found.append(("title", np.array([f"on {n}" for n in range(count)]), "left out"))
    words = random.random(count).round(3).astype(str)
    if random.random() < 0.2:
        words[random.integers(count)] = "n/a"
    found.append(("g", words, "feature"))
    random.shuffle(found)
    return found, split, labels


@quiet
@given(
    number=st.integers(0, 100_000), id_name=st.sampled_from(["id", "node_id", "paper_id", "nid"])
)
def test_every_column_of_a_node_table(tmp_path_factory, number, id_name):
    random = np.random.default_rng(number)
    count = int(random.integers(4, 9))
    columns, split, labels = columns_of_nodes(random, count)
    order = random.permutation(count)
    columns.insert(0, (id_name, np.arange(count).astype(str), "id"))
    folder = tmp_path_factory.mktemp("n")
    (folder / "e.csv").write_text("src,dst\n" + f"0,{count - 1}\n")
    lines = [",".join(name for name, _, _ in columns)]
    lines += [",".join(values[row] for _, values, _ in columns) for row in order]
    (folder / "n.csv").write_text("\n".join([*lines, ""]))
    options = SourceOptions(nodes=folder / "n.csv")
    broken = any("n/a" in values for _, values, _ in columns)
    if broken:
        with pytest.raises(DataError, match="'n/a' in row") as caught:
            find_source(folder / "e.csv", options)
        assert "--missing 'n/a'" in caught.value.hint
        options = SourceOptions(nodes=folder / "n.csv", columns=TableColumns(missing=("n/a",)))
    source, _ = find_source(folder / "e.csv", options)
    left_out = {note.name for note in source.reading.left_out}
    for name, _, what in columns:
        assert (f"n.csv: {name}" in left_out) == (what == "left out")
    assert not source.reading.missing(f"n.csv: {name}" for name, _, _ in columns)
    with ingest(source, folder / "out") as dataset:
        rows = [values for _, values, what in columns if what == "feature"]
        expected = np.array([np.where(values == "n/a", "0", values) for values in rows], np.float32)
        np.testing.assert_array_equal(dataset.features.read("x"), expected.T)
        assert dataset.labels.tolist() == labels.tolist()
        for place, ids in enumerate((dataset.train, dataset.valid, dataset.test)):
            assert ids.tolist() == np.flatnonzero(split == place).tolist()


EDGES = "src,dst\n0,1\n1,2\n"
NODES = "id,{}\n0,1\n1,1\n2,1\n"
LATE_ZERO = "src,dst\n" + "".join(f"{n},{n + 1}\n" for n in range(1100)) + "007,7\n"

QUOTED_ZERO = (
    "src,kind,dst\n" + "".join(f'{n},"a,b",{n + 1}\n' for n in range(1100)) + '5,"a,b",007\n'
)


def beside(text):
    """A node table beside the edges."""
    return {"e.csv": EDGES, "nodes.csv": text}


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ({"e.csv": "to,be\nbe,or\n"}, "cannot tell whether the first line", "--header"),
        ({"e.csv": "src,dst\nsrc,b\n"}, "cannot tell whether the first line", "--header"),
        ({"e.tsv": 'src\tdst\n"b\tc\nd\te\nf"\tg\n'}, "joins lines", "--quote none"),
        ({"e.tsv": 'src\tdst\n"a" b\tc\n'}, "neither begins nor ends", "--quote none"),
        ({"e.csv": 'src,dst\n"a,b",c\n'}, "a delimiter inside", "--quote"),
        ({"e.csv": "a,b\n#c,d\n", "header": False}, "a comment's mark", "--comment none"),
        ({"e.csv": "src,dst\n0,1\n# odd\n"}, "cannot be read", "--comment"),
        ({"e.csv": "#love,17\n#cat,18\ndog,19\neel,20\n"}, "a comment or a row", "--comment"),
        ({"e.csv": "src,dst\n0,1\nx,1\n", "ids": "number"}, "invalid value 'x'", "--ids text"),
        ({"e.csv": ",a,b\n0,5,7\n1,7,9\n"}, "may be the number of the row", "--column source"),
        ({"train.csv": EDGES, "test.csv": EDGES}, "or a split", "name the file"),
        ({"s=train/a.csv": EDGES, "s=test/a.csv": "src,dst\n"}, "or a split", "name the file"),
        ({"a.csv": EDGES, "b.csv": EDGES}, "is a copy of a.csv", "remove one"),
        ({"e.tsv": "root\t1\n1\t2\n"}, "cannot tell whether the first line", "--header"),
        ({"e.csv": "al,bo,odd\nca,da,3\nal,ca,4\n"}, "cannot tell whether", "--header"),
        ({"e.csv": LATE_ZERO}, "has the id '007'", "--ids text"),
        ({"e.csv": QUOTED_ZERO}, "has the id '007'", "--ids text"),
        ({"e.txt": "4 3\n1 2\n2 3\n3 4\n"}, "the numbers of nodes and edges", "--header no"),
        ({"e.edges": "4 4 2\n1 2 1\n2 4 3\n"}, "the numbers of nodes and edges", "tail"),
        ({"e.tsv": "% bip unweighted\n1\t2\n2\t1\n"}, "nodes of two kinds", "HeteroData"),
        ({"e.csv": "user_id,item_id\n1,2\n2,1\n"}, "nodes of two kinds", "--column source"),
        ({"e.csv": "userId,movieId,rating\n5,2,4.5\n2,5,3\n"}, "nodes of two kinds", "Hetero"),
        ({"e.csv": "day,who\n2020-01-01,4\n", "header": True}, "no ids", "--column"),
        ({"e.csv": "part,who\n0.25,4\n0.5,3\n"}, "no ids of nodes", "--column source"),
        ({"e.csv": "source,target\ntrue,false\nfalse,true\n"}, "no ids of nodes", "--column"),
        ({"g.txt": "<?xml version='1.0'?>\n<graphml>\n"}, "is XML", "source and target"),
        ({"g.txt": "*Vertices 3\n1 a\n2 b\n"}, "Pajek", "source and target"),
        (beside("id;f\n0;0,5\n1;1,25\n2;3\n"), "a comma before the decimals", "0.5"),
        (beside("id;f\n0;0,5\n1;1.250,25\n2;3,0\n"), "a comma before the decimals", "0.5"),
        (beside("id,class_0,class_1\n0,1,0\n1,0,1\n2,1,0\n"), "may be labels", "features="),
        (beside("id,f,y1\n0,1,0\n1,0,1\n2,1,0\n"), "may be labels", "features="),
        (beside("id,f,y\n0,1,-1\n1,0,1\n2,1,-1\n"), "-1 and 1 alone", "0 and 1"),
        ({"e.txt": "1 2\t3\n2 3\t4\n"}, "holds several numbers: '1 2'", "one delimiter"),
        ({"e.csv": "src,dst\nJos\udce9,b\n"}, "UTF8", "iconv"),
        ({"e.csv": EDGES, "e.csv.gz": "src,dst\n2,2\n"}, "one table twice", "name the file"),
        (beside("row,f\n0,1\n2,1\n1,1\n"), "looks like the ids", "--column node"),
        (beside("id,label,y\n0,1,1\n1,1,1\n2,0,0\n"), "both be the label", "label"),
        (beside("id,y,val_mask\n0,1,3\n1,1,1\n2,0,0\n"), "is a mask", "0 or 1"),
        (beside("id,label,f\n0,1,1\n1,?,1\n2,0,0\n"), "'\\?' in row 2", "--missing"),
        (beside('id,f\n0,"1,2"\n1,"1,2,3"\n2,"1,2"\n'), "row 2", "as many"),
        (beside('id,f\n0,"1,200"\n1,"3,400"\n2,"5,600"\n'), "between thousands", "brackets"),
        (beside('id,f\n0,1\n1," "\n2,3\n'), "' ' in row 2", "--missing ' '"),
        (beside("id,label\n0,a\n1,NA\n2,b\n"), "a class of column 'label'.* 'NA'", "--missing"),
        (beside('id,label\n0,"1,0"\n1,"0,1"\n2,"1,1"\n'), "lists of numbers", "one class"),
        ({**beside("id,f\n0,1\n5,2\n2,3\n"), "ids": "number"}, "not 0, 1, 2", "--ids text"),
        ({**beside("id,f\n0,1\n0,2\n1,3\n"), "ids": "number"}, "not 0, 1, 2", "--ids text"),
    ],
)  # fmt: skip
def test_what_is_asked(tmp_path, files, message, hint):
    options = {key: files.pop(key) for key in ("ids", "header") if key in files}
    folder = tmp_path / "in"
    folder.mkdir()
    for name, text in files.items():
        data = text.encode(errors="surrogateescape")
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    columns = TableColumns(names=options.pop("header", None))
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path, folder, columns=columns, **options)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ('src\tdst\n"a\tb\nb\t"c\n', {"quote": "none"}, [('"a', "b"), ("b", '"c')]),
        ('src,dst\n"a,b",c\n', {"quote": '"'}, [("a,b", "c")]),
        ("#a,b\nb,#c\n", {"comment": "none", "names": False}, [("#a", "b"), ("b", "#c")]),
        ("src,dst\n0,1\n# no\n1,2\n", {"comment": "#"}, [("0", "1"), ("1", "2")]),
        ("to,be\nbe,or\n", {"names": False}, [("to", "be"), ("be", "or")]),
        ("src, dst\na, b\nb ,a\n", {}, [("a", "b"), ("b", "a")]),
        ("src,dst\n007,7\n", {}, [("007", "7")]),
        ('\ufeff"src","dst"\r\n"a","b"\r\n', {}, [("a", "b")]),
        ("% 2 3\n1 2\n2 3\n", {}, [("1", "2"), ("2", "3")]),  # as KONECT's
        ("% asym unweighted\n1 2\n2 3\n", {}, [("1", "2"), ("2", "3")]),
        ("2 1\n1 2\n", {"names": False}, [("2", "1"), ("1", "2")]),
        ("sep=;\r\nsrc;dst\r\na;b\r\n", {}, [("a", "b")]),  # as Excel writes it
        ("# c\r0,1\r# d\r1,2\r", {"comment": "#"}, [("0", "1"), ("1", "2")]),
        ("src,dst\r\n0,1\r# d\r1,2\r\n", {"comment": "#"}, [("0", "1"), ("1", "2")]),
    ],
)
def test_what_was_said_is_done(tmp_path, text, columns, expected):
    (tmp_path / "e.csv").write_bytes(text.encode())
    _, found = read(tmp_path, tmp_path / "e.csv", columns=TableColumns(**columns))
    assert found == Counter(expected)


def test_a_folder_says_what_it_read(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    texts = {"e.csv": EDGES, "README.txt": "a, b", "x.bin": "", "nodes.csv": NODES.format("f")}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "e.csv.gz").write_bytes(gzip.compress(EDGES.encode()))
    source, found = read(tmp_path, folder)
    assert found == Counter([("0", "1"), ("1", "2")])
    assert {note.name for note in source.reading.left_out} >= {"README.txt", "x.bin", "e.csv.gz"}
    assert not source.reading.missing(["e.csv", "nodes.csv: id", "nodes.csv: f"])


def test_tables_of_gephi(tmp_path):
    """Type says the direction, Label is a name of each node, and lines end as on old machines."""
    names = [f"n{number}" for number in range(25)]
    edges = ["Source,Target,Type", *(f"n{i},n{i + 1},Undirected" for i in range(24))]
    (tmp_path / "e.csv").write_text("\r".join([*edges, ""]))
    nodes = ["Id,Label,f", *(f"{name},{name.upper()},1" for name in names)]
    (tmp_path / "n.csv").write_text("\n".join([*nodes, ""]))
    source, both = find_source(tmp_path / "e.csv", SourceOptions(nodes=tmp_path / "n.csv"))
    assert both
    with ingest(source, tmp_path / "out") as dataset:
        assert (dataset.num_nodes, dataset.num_edges, dataset.has_labels) == (25, 24, False)
    assert not source.reading.missing(["column Type", "n.csv: Label"])
    (tmp_path / "e.csv").write_text("Source,Target,Type\n0,1,Directed\n1,2,Undirected\n")
    with pytest.raises(DataError, match="directed of some edges"):
        find_source(tmp_path / "e.csv")


def test_truth_values_are_labels(tmp_path):
    (tmp_path / "e.csv").write_text(EDGES)
    (tmp_path / "n.csv").write_text("id,label\n0,true\n1,false\n2,\n")
    source, _ = find_source(tmp_path / "e.csv", SourceOptions(nodes=tmp_path / "n.csv"))
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.labels.tolist() == [1, 0, -1]


def test_categories_keep_their_order(tmp_path):
    (tmp_path / "e.csv").write_text(EDGES)
    sizes = pa.DictionaryArray.from_arrays(pa.array([2, 0, 1]), pa.array(["small", "big", "huge"]))
    parquet.write_table(pa.table({"id": [0, 1, 2], "label": sizes}), tmp_path / "n.parquet")
    source, _ = find_source(tmp_path / "e.csv", SourceOptions(nodes=tmp_path / "n.parquet"))
    with ingest(source, tmp_path / "out") as dataset:
        assert (dataset.labels.tolist(), dataset.class_names) == (
            [2, 0, 1],
            ["small", "big", "huge"],
        )


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "index", "rownames", "row"])
def test_numbers_of_rows_are_no_features(tmp_path, name):
    """What pandas and R write before the columns of a table."""
    (tmp_path / "e.csv").write_text(EDGES)
    (tmp_path / "n.csv").write_text(f"{name},id,f,paid\n1,2,3,.5\n2,0,4,.5\n3,1,5,.5\n")
    source, _ = find_source(tmp_path / "e.csv", SourceOptions(nodes=tmp_path / "n.csv"))
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.features.read("x").tolist() == [[4, 0.5], [5, 0.5], [3, 0.5]]
    assert f"n.csv: {name}" in {note.name for note in source.reading.left_out}


def test_an_index_of_pandas_may_be_ids(tmp_path):
    (tmp_path / "e.csv").write_text(EDGES)
    table = pa.table({"f": [1.0, 2.0, 3.0], "__index_level_0__": [2, 0, 1]})
    parquet.write_table(table, tmp_path / "n.parquet")
    options = SourceOptions(nodes=tmp_path / "n.parquet")
    with pytest.raises(DataError, match=r"__index_level_0__.* looks like the ids"):
        find_source(tmp_path / "e.csv", options)


def test_masks_of_several_splits_are_no_features(tmp_path):
    (tmp_path / "e.csv").write_text(EDGES)
    (tmp_path / "n.csv").write_text(
        "id,label,train_mask_0,train_mask1,f\n0,0,1,0,1\n1,1,0,1,2\n2,1,0,0,3\n"
    )
    source, _ = find_source(tmp_path / "e.csv", SourceOptions(nodes=tmp_path / "n.csv"))
    assert source.features().dim == 1
    assert not source.reading.missing(["n.csv: train_mask_0", "n.csv: train_mask1"])


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["2020-01-02", "2020-01-01", "2020-01-02"], ["2020-01-01", "2020-01-02"]),
        (["", *[""] * 600_000, "dog", "cat"], ["cat", "dog"]),  # a first block without a word
    ],
)
def test_labels_are_classes_whatever_arrow_took_them_for(tmp_path, labels, names):
    (tmp_path / "e.csv").write_text(EDGES)
    rows = "".join(f"{number},{label}\n" for number, label in enumerate(labels))
    (tmp_path / "nodes.csv").write_text(f"id,label\n{rows}")
    source, _ = find_source(tmp_path, SourceOptions())
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.class_names == names
        assert dataset.labels[-1] == names.index(labels[-1])


def test_a_blank_line_of_one_column_is_a_node_without_a_label(tmp_path):
    (tmp_path / "e.csv").write_text(EDGES)
    (tmp_path / "nodes.csv").write_text("label\n0\n\n1\n")
    source, _ = find_source(tmp_path, SourceOptions())
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.labels.tolist() == [0, -1, 1]


def test_a_blank_field_is_no_class(tmp_path):
    (tmp_path / "e.csv").write_text(EDGES)
    (tmp_path / "n.csv").write_text('id,label\n0,10\n1," "\n2,2\n')
    source, _ = find_source(tmp_path / "e.csv", SourceOptions(nodes=tmp_path / "n.csv"))
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.labels.tolist() == [10, -1, 2]


def test_partitions_with_packed_twins(tmp_path):
    for year, text in ((2020, EDGES), (2021, "src,dst\n2,0\n")):
        folder = tmp_path / "in" / f"year={year}"
        folder.mkdir(parents=True)
        (folder / "e.csv").write_text(text)
        (folder / "e.csv.gz").write_bytes(gzip.compress(text.encode()))
        (folder / "notes.json").write_text("{}")
    source, found = read(tmp_path, tmp_path / "in")
    assert found == Counter([("0", "1"), ("1", "2"), ("2", "0")])
    rest = {f"year={y}/{name}" for y in (2020, 2021) for name in ("e.csv.gz", "notes.json")}
    assert {note.name for note in source.reading.left_out} == {"partition year", *rest}


def test_a_packed_twin_of_the_node_table_is_no_edge_table(tmp_path):
    folder, nodes = tmp_path / "in", "id,f\n0,5\n1,6\n2,7\n"
    folder.mkdir()
    (folder / "edges.csv").write_text("id,f\n0,1\n1,2\n")
    (folder / "nodes.csv").write_text(nodes)
    (folder / "nodes.csv.gz").write_bytes(gzip.compress(nodes.encode()))
    columns = TableColumns(source="id", target="f", node="id", features=("f",))
    for path in (None, folder / "nodes.csv.gz"):
        _, found = read(tmp_path, folder, columns=columns, nodes=path)
        assert found == Counter([("0", "1"), ("1", "2")])
        shutil.rmtree(tmp_path / "out")


def test_one_column_has_one_role(tmp_path):
    (tmp_path / "e.csv").write_text("src,dst,w\n0,1,2\n")
    with pytest.raises(DataError, match="was given two roles"):
        table_source([tmp_path / "e.csv"], columns=TableColumns(weight="src"))
    with pytest.raises(ConfigurationError, match="given twice"):
        table_source([tmp_path / "e.csv", tmp_path / "e.csv"])


@pytest.mark.parametrize("most", [13_096, 70_000_000_000])
def test_numbers_with_gaps_are_names(tmp_path, most):
    """As lists of SNAP have them; a few nodes without edges stay what they are."""
    (tmp_path / "e.txt").write_text(f"3466\t937\n{most}\t937\n937\t3466\n")
    source, found = read(tmp_path, tmp_path / "e.txt")
    assert found == Counter([("3466", "937"), (str(most), "937"), ("937", "3466")])
    assert source.num_nodes == 3
    note = next(note for note in source.reading.assumed if note.name == "ids")
    assert note.value == "names"
    assert f"at most 3 of {most + 1:,}" in note.why or most > 1 << 26
    if most < 1 << 26:
        for options in ({"ids": "number"}, {"num_nodes": most + 1}):
            source, _ = find_source(tmp_path / "e.txt", SourceOptions(**options))
            assert (source.num_nodes, source.text_ids) == (most + 1, False)


def test_ids_below_0_are_refused(tmp_path):
    (tmp_path / "e.txt").write_text("-3\t2\n1\t2\n")
    with pytest.raises(DataError, match="an edge has source -3"):
        read(tmp_path, tmp_path / "e.txt")


def test_heads_of_konect_say_whether_an_edge_stands_for_both_directions(tmp_path):
    path = tmp_path / "out.friends"
    path.write_text("% sym unweighted\n% 2 3 3\n1 2\n2 3\n")
    source, both = find_source(path)
    assert both
    assert "% sym" in source.reading.names()
    path.write_text("# Undirected graph: friends\n1 2\n2 3\n")
    source, both = find_source(path)
    assert not both  # of SNAP's some have both directions: it is said, not guessed
    assert "as they stand" in source.reading.text()


@pytest.mark.parametrize("times", ["2020-01-01 00:00:00", "2020-01-01T01:00:00+01:00"])
def test_times_of_edges_are_seconds(tmp_path, times):
    (tmp_path / "e.csv").write_text(f"src,dst,at\n0,1,{times}\n1,0,{times}\n")
    source, _ = find_source(tmp_path / "e.csv", SourceOptions(columns=TableColumns(edge=("at",))))
    unit = {"s": 1, "ns": 10**9}
    with ingest(source, tmp_path / "out") as dataset:
        found = dataset.part("edge", "at").tolist()
    of_second = next(
        unit[word] for word in unit if f"in {word} since 1970" in source.reading.text()
    )
    assert found == [1577836800 * of_second] * 2


def test_splits_by_their_words_and_folds(tmp_path):
    (tmp_path / "e.csv").write_text(EDGES)
    nodes = tmp_path / "nodes.csv"
    nodes.write_text("id,f,fold,set,label\n0,16777217,1,train,0\n1,1,2,val,1\n2,1,3,Test,1\n")
    source, _ = find_source(tmp_path)
    told = {note.name: note for note in source.reading.assumed}
    assert told["nodes.csv: set"].value == "split"
    assert told["nodes.csv: f"].value == "16777216"  # what float32 makes of it
    assert "nodes.csv: fold" in {note.name for note in source.reading.left_out}
    with ingest(source, tmp_path / "out") as dataset:
        assert dataset.dim == 1
        assert [dataset.train, dataset.valid, dataset.test] == [[0], [1], [2]]


def test_nodes_of_two_splits_are_counted(tmp_path, caplog):
    (tmp_path / "e.csv").write_text(EDGES)
    (tmp_path / "nodes.csv").write_text(
        "id,label,train_mask,test_mask\n0,0,1,1\n1,1,1,0\n2,1,0,1\n"
    )
    with ingest(find_source(tmp_path)[0], tmp_path / "out") as dataset:
        assert describe(dataset)["labels"]["in train and test"] == 1
    assert "1 nodes are in two splits, train and test" in caplog.text
