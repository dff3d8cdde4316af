"""The back ends in one table: the rows of an in-memory gather, bit for bit, and no page twice."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, DataError, StorageError, UnsupportedError
from fivefold.gnn.storage import Container, ContainerWriter, RowReader
from fivefold.gnn.storage._uring import Ring
from fivefold.gnn.storage.reader import ReadStatistics

PAGE = 4096


def ring_works():
    try:
        Ring(1).close()
    except UnsupportedError:
        return False
    return True


without_ring = pytest.mark.skipif(not ring_works(), reason="io_uring is not permitted here")
BACKENDS = ["threads", pytest.param("io_uring", marks=without_ring)]
# Rows and blocks: rows that divide a page, that do not, larger than a page, larger than a block.
SHAPES = [
    (9000, 1, "u1", 1 << 20),
    (5000, 1, "f4", 8192),
    (5000, 3, "f4", 4096),
    (700, 100, "f4", 1 << 20),
    (1200, 128, "f4", 16384),
    (600, 768, "f2", 1 << 20),
    (300, 1025, "f4", 1 << 20),
    (40, 5000, "f4", 12288),
    (7, 0, "f4", 4096),
    (0, 3, "f4", 4096),
]


def reference(rows, runs, out):
    """A gather row by row."""
    for start, count, place in runs:
        for i in range(count):
            out[place + i] = rows[start + i]
    return out


def pages_of(section, runs):
    """The pages that hold bytes of the runs, ascending."""
    pages = set()
    for start, count, _ in runs:
        begin = section.offset + start * section.row_bytes
        end = begin + count * section.row_bytes
        if end > begin:
            pages.update(range(begin // PAGE, (end - 1) // PAGE + 1))
    return sorted(pages)


def extents_of(pages, gap):
    """Ranges of pages after joining over gaps of at most so many pages."""
    extents = []
    for page in pages:
        if extents and page - extents[-1][1] <= gap:
            extents[-1][1] = page + 1
        else:
            extents.append([page, page + 1])
    return extents


def patterns(count):
    random = np.random.default_rng(count)
    yield "nothing", []
    yield "everything", [(0, count, 0)]
    if count < 7:
        return
    yield "ends", [(0, 1, 1), (count - 1, 1, 0)]
    yield "touching, backwards", [(1, 2, 4), (3, 0, 0), (3, 4, 0)]
    chosen = np.sort(random.choice(count, count // 3, replace=False))
    places = random.permutation(len(chosen))
    yield "single rows", [(int(r), 1, int(p)) for r, p in zip(chosen, places, strict=True)]
    cuts = np.sort(random.choice(count, min(41, count), replace=False)).tolist()
    lengths = [b - a for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    starts = cuts[: 2 * len(lengths) : 2]
    where = np.concatenate([[0], np.cumsum(lengths[::-1])])[:-1][::-1].tolist()
    yield "runs, reversed", list(zip(starts, lengths, where, strict=True))


def read(reader, runs, out):
    table = np.array(runs, np.int64).reshape(-1, 3).T
    return reader.read_runs(table[0], table[1], table[2], out)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}{s[2]}-{s[3]}")
def test_conformance(make_file, random_rows, backend, shape):
    count, dim, dtype, block = shape
    rows = random_rows(count, dim, dtype)
    container = make_file(rows)
    section = container.sections["x"]
    for threads, direct in [(1, True), (3, True), (2, False)]:
        with RowReader(
            container, "x", backend=backend, threads=threads, block_bytes=block, direct=direct
        ) as reader:
            assert reader.backend == backend
            for name, runs in patterns(count):
                expected = reference(rows, runs, np.full_like(rows, 7))
                out = np.full_like(rows, 7)
                cost = read(reader, runs, out)
                assert out.tobytes() == expected.tobytes(), name
                pages = pages_of(section, runs)
                extents = extents_of(pages, 0)
                assert cost.bytes_read == PAGE * len(pages), name
                assert cost.bytes_used == sum(c for _, c, _ in runs) * section.row_bytes, name
                assert cost.requests == sum(-(-(b - a) * PAGE // block) for a, b in extents), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_gaps_are_read_over_as_far_as_allowed(make_file, random_rows, backend):
    rows = random_rows(20_000, 3, "f4")
    container = make_file(rows)
    chosen = np.sort(np.random.default_rng(3).choice(len(rows), 60, replace=False))
    runs = [(int(row), 1, i) for i, row in enumerate(chosen)]
    pages = pages_of(container.sections["x"], runs)
    for gap_pages in (0, 1, 3, 1000):
        with RowReader(container, "x", backend=backend, max_gap_bytes=gap_pages * PAGE) as reader:
            out = np.empty((60, 3), np.float32)
            cost = reader.read_rows(chosen, out)
            assert out.tobytes() == rows[chosen].tobytes()
            extents = extents_of(pages, gap_pages)
            assert cost.requests == len(extents)
            assert cost.bytes_read == PAGE * sum(b - a for a, b in extents)


@given(data=st.data())
def test_any_runs_come_out_right(data, shared_files):
    rows, container = shared_files[data.draw(st.sampled_from(sorted(shared_files)))]
    count = len(rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=30)))
    runs = []
    place = 0
    for low, high in zip(cuts[::2], cuts[1::2], strict=False):
        runs.append((low, high - low, place))
        place += high - low
    backends = ["threads", "auto"]
    with RowReader(
        container,
        "x",
        backend=data.draw(st.sampled_from(backends)),
        threads=data.draw(st.integers(1, 4)),
        queue_depth=data.draw(st.integers(1, 9)),
        block_bytes=PAGE * data.draw(st.integers(1, 5)),
        max_gap_bytes=data.draw(st.integers(0, 3 * PAGE)),
    ) as reader:
        out = np.zeros_like(rows)
        read(reader, runs, out)
        assert out.tobytes() == reference(rows, runs, np.zeros_like(rows)).tobytes()


@pytest.fixture(scope="module")
def shared_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    made = {}
    for name, shape, dtype in [
        ("a", (5000, 3), "i4"),
        ("b", (90, 1025), "i4"),
        ("c", (9, 1), "u1"),
    ]:
        rows = np.random.default_rng(5).integers(0, 100, shape).astype(dtype)
        schema = {"x": (rows.dtype, rows.shape)}
        writer = ContainerWriter(folder / name, kind="k", sections=schema, attributes={})
        writer.write("x", 0, rows)
        made[name] = (rows, writer.commit())
    yield made
    for _, container in made.values():
        container.close()


def test_rows_of_more_dimensions(tmp_path):
    rows = np.arange(50 * 3 * 5, dtype=np.int16).reshape(50, 3, 5)
    schema = {"x": (rows.dtype, rows.shape)}
    writer = ContainerWriter(tmp_path / "a", kind="k", sections=schema, attributes={})
    writer.write("x", 0, rows)
    with writer.commit() as container, RowReader(container, "x") as reader:
        out = np.zeros((4, 3, 5), np.int16)
        reader.read_rows(np.array([3, 4, 49]), out, np.array([2, 0, 1]))
        assert np.array_equal(out[:3], rows[[4, 49, 3]])


def read_bytes():
    text = Path("/proc/self/io").read_text()
    return int(text.split("read_bytes: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count reads")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_system_counts_the_same_bytes(make_file, random_rows, backend):
    container = make_file(random_rows(20_000, 100, "f4"))
    chosen = np.sort(np.random.default_rng(0).choice(20_000, 1000, replace=False))
    out = np.empty((1000, 100), np.float32)
    with RowReader(container, "x", backend=backend, verify=True) as reader:
        if not reader.direct:
            pytest.skip("the file system has no direct I/O: reads cannot be counted")
        reader.read_rows(chosen[:5], out[:5])  # whatever is read at first use
        before = read_bytes()
        cost = reader.read_rows(chosen, out)
        assert read_bytes() - before == cost.bytes_read


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_row_of_a_damaged_page_is_handed_out(make_file, random_rows, backend):
    rows = random_rows(4000, 100, "f4")
    container = make_file(rows)
    section = container.sections["x"]
    bad = section.offset // PAGE + 200
    with container.path.open("r+b") as file:
        file.seek(bad * PAGE + 1234)
        byte = file.read(1)[0]
        file.seek(bad * PAGE + 1234)
        file.write(bytes([byte ^ 16]))
    touched = np.arange((200 * PAGE) // 400, (201 * PAGE - 1) // 400 + 1)
    away = np.setdiff1d(np.arange(4000), touched)
    out = np.zeros_like(rows)
    with RowReader(container, "x", backend=backend, block_bytes=PAGE) as reader:
        reader.read_rows(away, out, away)
        assert out[away].tobytes() == rows[away].tobytes()
        for chosen in ([touched[1]], np.arange(4000)):
            out = np.zeros_like(rows)
            with pytest.raises(DataError, match=rf"page {bad} of .*section 'x'.*damaged"):
                reader.read_rows(np.array(chosen), out, np.array(chosen))
            assert not out[touched[1:-1]].any()
        reader.read_rows(away, out, away)  # the reader goes on working
    with RowReader(container, "x", backend=backend, verify=False) as reader:
        reader.read_rows(np.arange(4000), out)
        assert (out.view(np.uint8) != rows.view(np.uint8)).sum() == 1


def test_wrong_requests_are_refused(make_file, random_rows):
    container = make_file(random_rows(100, 3, "f4"))
    out = np.zeros((10, 3), np.float32)
    with RowReader(container, "x") as reader:
        for runs in [
            [(5, 3, 0), (7, 1, 3)],  # overlap
            [(5, 1, 0), (4, 1, 1)],  # out of order
            [(-1, 1, 0)],
            [(99, 2, 0)],
            [(0, 2, 9)],
            [(0, 1, -1)],
            [(0, -1, 0)],
            [(2**62, 2**62, 0)],
        ]:
            with pytest.raises(ConfigurationError, match="is not allowed; runs ascend"):
                read(reader, runs, out)
        for wrong in [
            out.astype(np.float64),
            np.zeros((10, 4), np.float32),
            np.zeros((10, 6), np.float32)[:, ::2],
            np.zeros(3, np.float32),
        ]:
            with pytest.raises(ConfigurationError, match="contiguous, writable"):
                reader.read_rows(np.array([1]), wrong)
        with pytest.raises(ConfigurationError, match="one per row"):
            reader.read_rows(np.array([1]), out, np.array([1, 2]))
        with pytest.raises(ConfigurationError, match="one of each"):
            reader.read_runs(np.array([1]), np.array([1, 2]), np.array([1]), out)


@pytest.mark.parametrize(
    "settings_",
    [
        {"backend": "odd"},
        {"threads": 0},
        {"queue_depth": 0},
        {"block_bytes": 0},
        {"block_bytes": 5000},
        {"max_gap_bytes": -1},
    ],
)
def test_wrong_settings_are_refused(make_file, random_rows, settings_):
    with pytest.raises(ConfigurationError):
        RowReader(make_file(random_rows(5, 3, "f4")), "x", **settings_)


def test_without_direct_io_the_reader_falls_back_and_says_so(
    make_file, random_rows, monkeypatch, caplog
):
    caplog.set_level("DEBUG", "fivefold.gnn.storage")
    rows = random_rows(100, 3, "f4")
    container = make_file(rows)
    real = os.open

    def no_direct(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_direct)
    with RowReader(container, "x") as reader:
        assert not reader.direct
        assert "the file system has no direct I/O (Invalid argument)" in caplog.text
        out = np.empty_like(rows)
        reader.read_rows(np.arange(100), out)
        assert out.tobytes() == rows.tobytes()


def test_without_io_uring_auto_falls_back_and_says_so(make_file, random_rows, monkeypatch, caplog):
    caplog.set_level("DEBUG", "fivefold.gnn.storage")

    def refuse(*_args, **_more):
        message = "io_uring is not available: Operation not permitted"
        raise UnsupportedError(message)

    monkeypatch.setattr("fivefold.gnn.storage._uring.Ring", refuse)
    container = make_file(random_rows(100, 3, "f4"))
    with RowReader(container, "x") as reader:
        assert reader.backend == "threads"
        assert "not permitted" in caplog.text
    with pytest.raises(UnsupportedError, match="not permitted"):
        RowReader(container, "x", backend="io_uring")


@pytest.mark.parametrize("backend", BACKENDS)
def test_readers_side_by_side(make_file, random_rows, backend):
    rows = random_rows(8000, 100, "f4")
    container = make_file(rows)
    failures = []

    def work(seed):
        random = np.random.default_rng(seed)
        out = np.empty((500, 100), np.float32)
        with RowReader(container, "x", backend=backend, block_bytes=16384) as reader:
            for _ in range(10):
                chosen = np.sort(random.choice(8000, 500, replace=False))
                reader.read_rows(chosen, out)
                if out.tobytes() != rows[chosen].tobytes():
                    failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_container_may_be_closed_and_its_file_replaced(make_file, random_rows, backend):
    rows = random_rows(1000, 3, "f4")
    container = make_file(rows)
    with RowReader(container, "x", backend=backend) as reader:
        container.close()
        make_file(random_rows(1000, 3, "f4", seed=9))  # under the same name
        out = np.empty_like(rows)
        reader.read_rows(np.arange(1000), out)
        assert out.tobytes() == rows.tobytes()
    with pytest.raises(StorageError, match="closed"):
        reader.read_rows(np.arange(5), out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_ends_a_read_of_another_thread(make_file, random_rows, backend):
    rows = random_rows(20_000, 100, "f4")
    container = make_file(rows)
    reader = RowReader(container, "x", backend=backend, block_bytes=PAGE, threads=2)
    out = np.empty_like(rows)
    ends = []

    def work():
        try:
            while True:
                reader.read_rows(np.arange(0, 20_000, 2), out[:10_000])
        except StorageError as error:
            ends.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    threading.Event().wait(0.2)
    reader.close()
    thread.join(30)
    assert not thread.is_alive()
    assert "closed" in ends[0]


def test_a_forked_child_reads_on_its_own(make_file, random_rows, run_script):
    rows = random_rows(3000, 100, "i4")
    container = make_file(rows)
    np.save(container.path.with_name("rows.npy"), rows)
    backends = ["threads", *(["io_uring"] if ring_works() else [])]
    result = run_script(FORK, container.path, *backends)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["child", "parent"] * len(backends)


FORK = """
import os, sys, warnings
import numpy as np
from pathlib import Path
from fivefold.gnn.storage import Container, RowReader

path = Path(sys.argv[1])
rows = np.load(path.with_name("rows.npy"))
chosen = np.arange(0, len(rows), 2)

def check(reader):
    out = np.empty((len(chosen), 100), np.int32)
    for _ in range(3):
        out.fill(0)
        reader.read_rows(chosen, out)
        assert np.array_equal(out, rows[chosen])

def test(container, backend):
    reader = RowReader(container, "x", backend=backend, block_bytes=4096, threads=3)
    check(reader)
    child = os.fork()
    if child == 0:
        check(reader)
        reader.close()
        print("child", flush=True)
        os._exit(0)
    check(reader)
    assert os.waitpid(child, 0)[1] == 0
    check(reader)
    reader.close()
    print("parent", flush=True)

warnings.simplefilter("ignore")  # later Pythons warn of forks beside threads
for backend in sys.argv[2:]:
    with Container.open(path) as container:
        test(container, backend)
"""


def test_statistics_add_up():
    one = ReadStatistics(1, 8192, 4096, 0.5)
    total = sum([one, one], ReadStatistics())
    assert (total.requests, total.bytes_read, total.bytes_used, total.seconds) == (
        2,
        16384,
        8192,
        1.0,
    )


def test_a_forgotten_reader_ends_its_threads(make_file, random_rows):
    rows = random_rows(3000, 100, "i4")
    reader = RowReader(make_file(rows), "x", backend="threads", threads=3, block_bytes=PAGE)
    reader.read_rows(np.arange(3000), np.empty_like(rows))
    mine = [t for t in threading.enumerate() if t.name == "fivefold-reader"]
    assert len(mine) >= 2
    del reader
    for thread in mine[-2:]:
        thread.join(10)
        assert not thread.is_alive()


def test_containers_of_one_file_agree(make_file, random_rows):
    container = make_file(random_rows(10, 3, "f4"))
    with Container.open(container.path) as again:
        assert again.fingerprint == container.fingerprint
        assert repr(again).startswith("Container(")
