"""Windows, chunks and cells: they cover the rows, fit the memory, and the cheapest way is taken."""

import dataclasses
import tracemalloc
from bisect import bisect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import InfeasibleError
from fivefold.gnn.packing import pack
from fivefold.gnn.packing._rows import Cells, batches_of_cells, cut_windows
from fivefold.gnn.planning import Budgets, make_plan
from fivefold.gnn.planning.geometry import (
    INDEX_BYTES_PER_ROW,
    Geometry,
    PackingTask,
    reader_shape,
)
from fivefold.gnn.storage.pages import PAGE_BYTES

SPEEDS = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9}
MB = 10**6


class Disk:
    """A disk with fixed prices."""

    sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9

    def seconds(self, requests, size_bytes):
        return requests * 1e-5 + size_bytes / 1e9


def choose(*, memory_bytes, free_bytes=np.inf, strategy=None, **kwargs):
    task = PackingTask(**{**SPEEDS, **kwargs})
    return task.choose(memory_bytes, free_bytes=free_bytes, strategy=strategy)


@given(
    st.integers(0, 5000),
    st.integers(1, 9000),
    st.lists(st.integers(0, 9000), min_size=3, max_size=3),
    st.integers(600_000, 40 * MB),
    st.sampled_from(["resident", "passes", "spill", None]),
)
def test_windows_cover_and_fit(num_nodes, row_bytes, rows, memory_bytes, strategy):
    sections = dict(zip(("rows", "device", "host"), rows, strict=True))
    arguments = {"num_nodes": num_nodes, "row_bytes": row_bytes, "sections": sections}
    try:
        geometry = choose(**arguments, memory_bytes=memory_bytes, strategy=strategy)
    except InfeasibleError:
        assert strategy == "resident" or memory_bytes < 20 * (row_bytes + 40)
        return
    windows = cut_windows(sections, geometry.window_rows)
    covered = [(w.section, row) for w in windows for row in range(w.start, w.stop)]
    assert covered == [(name, row) for name, count in sections.items() for row in range(count)]
    assert [w.first for w in windows] == np.cumsum([0, *(w.num_rows for w in windows)])[
        :-1
    ].tolist()
    cost = row_bytes + INDEX_BYTES_PER_ROW
    between = geometry.source_rows if geometry.strategy == "passes" else geometry.chunk_rows
    chunks = 2 * between * cost
    held = {
        "resident": num_nodes * row_bytes,
        "passes": geometry.window_rows * cost,
        "spill": 2 * geometry.window_rows * cost,
    }
    assert chunks + held[geometry.strategy] <= memory_bytes
    if geometry.strategy == "spill":
        assert geometry.source_rows == geometry.window_rows


def test_the_cheapest_way_is_taken():
    facts = {"num_nodes": 100_000, "row_bytes": 1000, "sections": {"rows": 200_000}}
    assert choose(**facts, memory_bytes=170 * MB).strategy == "resident"
    # Three windows: 3 F + R = 500 MB beside the spill's F + 3 R = 700 MB.
    assert choose(**facts, memory_bytes=120 * MB).strategy == "passes"
    assert choose(**facts, memory_bytes=10 * MB).strategy == "spill"
    spill = choose(**facts, memory_bytes=10 * MB)
    assert spill.read_bytes == pytest.approx(300 * MB, rel=0.05)
    assert spill.written_bytes == pytest.approx(400 * MB, rel=0.05)
    # Without room for the spill there are still the passes, and below that nothing.
    little = choose(**facts, memory_bytes=10 * MB, free_bytes=300 * MB)
    assert little.strategy == "passes"
    assert little.read_bytes > 2000 * MB
    with pytest.raises(InfeasibleError, match=r"the packed rows take 200 MB, 50 MB more"):
        choose(**facts, memory_bytes=10 * MB, free_bytes=150 * MB)
    slow_writes = facts | {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e8}
    assert choose(**slow_writes, memory_bytes=30 * MB).strategy == "passes"


def test_the_noise_of_a_probe_does_not_decide_whether_all_memory_is_taken():
    """At 100 M nodes both took a minute, one in 0.4 GB and the other in 6."""
    size = {"num_nodes": 10**8, "row_bytes": 128, "memory_bytes": 5800 * MB}
    sections = {"rows": 27 * 10**6, "host": 44 * 10**6, "device": 0}

    def way_at(read, write):
        speeds = {"read_bytes_per_s": read * 1e9, "write_bytes_per_s": write * 1e9}
        return choose(**size, **speeds, sections=sections).strategy

    assert [way_at(2.8, write) for write in (2.0, 1.6, 1.5)] == ["spill"] * 3
    assert way_at(2.8, 0.8) == "passes"  # two writes of a row are dearer than reads by far


def test_windows_are_as_small_as_their_cells_allow():
    for num_nodes in (10**6, 10**7, 10**8):
        facts = {"num_nodes": num_nodes, "row_bytes": 256, "sections": {"rows": 2 * num_nodes}}
        way = choose(**facts, memory_bytes=4 * 1024 * MB, strategy="spill")
        window_bytes = way.window_rows * 256
        assert window_bytes >= 16 * MB
        cell_bytes = window_bytes**2 / (num_nodes * 256)
        assert cell_bytes >= 1.4 * MB
        assert cell_bytes < 1.7 * MB or window_bytes < 17 * MB
        # What is redone after a kill is no more than 128 MiB and a window.
        assert (way.steps_per_mark - 1) * window_bytes <= 128 << 20
        little = choose(**facts, memory_bytes=20 * MB, strategy="spill")
        assert 2 * little.window_rows * (256 + INDEX_BYTES_PER_ROW) < 20 * MB
        assert little.steps_per_mark == 1


def test_ways_move_what_they_say():
    features, output, pages = 10**8, 3 * 10**8, 4096
    facts = {"num_nodes": 100_000, "row_bytes": 1000, "sections": {"rows": 300_000}}
    ways = {
        name: choose(**facts, memory_bytes=400 * MB, strategy=name)
        for name in ("resident", "passes", "spill")
    }
    assert (ways["resident"].read_bytes, ways["resident"].written_bytes) == (features, output)
    windows, ranges = (-(-rows // ways["spill"].window_rows) for rows in (300_000, 100_000))
    assert ways["spill"].scratch_bytes == output + windows * ranges * pages
    assert ways["spill"].moved_bytes == features + output + 2 * ways["spill"].scratch_bytes
    windows = -(-300_000 // ways["passes"].window_rows)
    assert ways["passes"].moved_bytes == windows * features + output
    assert ways["resident"].scratch_bytes == ways["passes"].scratch_bytes == 0


def test_a_plan_foresees_what_packing_moves(make_world, tmp_path):
    """With the memory of the plan, and none kept for records and checksums."""
    world = make_world(nodes=16_000, dim=256, seeds=600, batch_size=100, fanouts=[10, 10])
    plan = world.plan(segment_batches=2, device=100, host=4000)
    arguments = (world.features, world.samples, plan, tmp_path / "store")
    with pack(*arguments, memory_bytes=plan.budgets.host_bytes) as store:
        packing = store.manifest["packing"]
    foreseen = plan.predicted.packing
    assert packing["strategy"] == foreseen.strategy == "spill"
    assert packing["written_bytes"] == pytest.approx(foreseen.written_bytes, rel=0.01)


@settings(deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from([1, 3, 100, 512, 1025, 4096, 5000]),
    st.integers(1, 40),
)
def test_cells_hold_all_rows_and_never_overlap(seed, windows, ranges, row_bytes, chunk_rows):
    counts = np.random.default_rng(seed).integers(0, 120, (windows, ranges))
    cells = Cells(counts, row_bytes, chunk_rows)
    taken = np.zeros(cells.total_bytes, np.int64)
    chunk_bytes = chunk_rows * row_bytes + PAGE_BYTES
    written = {}
    for g in range(ranges):
        for group in batches_of_cells(cells, g, chunk_rows, chunk_bytes):
            assert group
            for piece in group:
                size = -(-piece.num_rows * row_bytes // PAGE_BYTES) * PAGE_BYTES
                assert piece.place % PAGE_BYTES == piece.offset % PAGE_BYTES == 0
                assert piece.offset + size <= chunk_bytes
                taken[piece.place : piece.place + size] += 1
                written[piece.place] = piece.num_rows * row_bytes
    assert (taken == 1).all()
    read = {}
    for window in range(windows):
        places, lengths = cells.extents(window)
        assert (np.diff(places) > 0).all()
        assert lengths.sum() == counts[window].sum() * row_bytes
        read |= dict(zip(places.tolist(), lengths.tolist(), strict=True))
    assert read == written


@pytest.mark.parametrize("strategy", ["spill", "passes", "resident"])
def test_memory_stays_within_the_budget(make_world, tmp_path, strategy):
    world = make_world(nodes=16_000, dim=256, seeds=600, batch_size=100, fanouts=[10, 10])
    plan = world.plan(segment_batches=2, device=100, host=500)
    memory_bytes = (24 if strategy == "resident" else 6) << 20
    arguments = (world.features, world.samples, plan)
    pack(*arguments, tmp_path / "warm", memory_bytes=memory_bytes, strategy=strategy).close()
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        with pack(
            *arguments, tmp_path / "store", memory_bytes=memory_bytes, strategy=strategy
        ) as store:
            assert store.manifest["packing"]["strategy"] == strategy
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # Each of the two writers copies through a buffer of 4 MiB.
    assert peak <= memory_bytes + (9 << 20)
    if strategy != "resident":
        assert 16_000 * 1024 + plan.predicted.packed_bytes > 3 * memory_bytes


@pytest.mark.nightly
def test_a_cache_of_many_short_rows_stays_within_the_budget(make_world, tmp_path):
    """Its ids and slots are larger than the buffers: none of them is copied, even in passing."""
    nodes = 1_500_000
    world = make_world(nodes=nodes, dim=4, seeds=nodes // 2, batch_size=20_000, fanouts=[2])
    plan = world.plan(segment_batches=1, device=0, host=nodes // 2)
    arguments, memory_bytes = (world.features, world.samples, plan), 20 << 20
    pack(*arguments, tmp_path / "warm", memory_bytes=memory_bytes, strategy="spill").close()
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        pack(*arguments, tmp_path / "store", memory_bytes=memory_bytes, strategy="spill").close()
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert plan.num_host_slots == nodes // 2
    assert peak <= memory_bytes + (9 << 20)


def test_the_set_of_cached_ids_counts_and_is_bounded(make_world, tmp_path):
    world = make_world(nodes=20_000, seeds=32)
    plan = world.plan(policy="static", segment_batches=2)
    cached = len(plan.device_rows) + len(plan.host_rows)
    numbers = range(world.samples.num_batches)
    cold = sum(len(plan.cold_ids(n, world.samples.node_ids(n))) for n in numbers)
    arguments = (world.features, world.samples, plan, tmp_path / "store")
    laid_out, listed, bits = 28 * cold, 8 * cached, 12 * -(-20_000 // 64)
    assert listed < bits
    assert (laid_out + listed) // 8 < bits
    with pytest.raises(InfeasibleError, match="laying out"):
        pack(*arguments, memory_bytes=laid_out + listed - 1)
    with pytest.raises(InfeasibleError, match="making the records"):  # which come after
        pack(*arguments, memory_bytes=laid_out + listed)


@pytest.mark.parametrize("memory_bytes", [4 << 20, 64 << 20, 512 << 20])
def test_features_in_memory_leave_room_for_chunks_and_both_engines(memory_bytes):
    row_bytes, sections = 512, {"rows": 10_000, "device": 0, "host": 0}

    def way(num_nodes):
        try:
            return choose(
                num_nodes=num_nodes,
                row_bytes=row_bytes,
                sections=sections,
                memory_bytes=memory_bytes,
                strategy="resident",
            )
        except InfeasibleError:
            return None

    most = bisect(range(memory_bytes // row_bytes + 1), 0, key=lambda nodes: way(nodes) is None)
    threads, block_bytes = reader_shape(memory_bytes)
    chunks = Geometry.NUM_CHUNKS * way(most - 1).chunk_rows * (row_bytes + INDEX_BYTES_PER_ROW)
    taken = (most - 1) * row_bytes + chunks + 2 * threads * block_bytes
    assert memory_bytes - row_bytes < taken <= memory_bytes


@pytest.mark.parametrize("policy", ["static", "belady"])
@pytest.mark.parametrize("host_bytes", [2 * MB, 6 * MB, 9 * MB, 30 * MB])
def test_a_plan_tells_how_packing_will_go(make_world, tmp_path, policy, host_bytes):
    """The way, its sizes and its scratch space are those that ``pack`` then has."""
    world = make_world(nodes=60_000, dim=64, seeds=3000, batch_size=100, fanouts=[9, 6])
    disk = Disk()
    budgets = Budgets(host_bytes=host_bytes, disk_bytes=10**9)
    plan = make_plan(world.samples, world.features, budgets, disk, policy=policy, buffer_batches=0)
    with pack(
        world.features, world.samples, plan, tmp_path / "store",
        memory_bytes=host_bytes, profile=disk,
    ) as store:  # fmt: skip
        assert store.manifest["packing"] == dataclasses.asdict(plan.predicted.packing)


def test_the_disk_budget_holds_the_plan_too(make_world, tmp_path):
    """Arrays of the caches are part of what is written: 12 bytes for each row that enters."""
    world = make_world(nodes=3000, seeds=900, batch_size=30)
    disk = Disk()
    budgets = Budgets(host_bytes=150_000, disk_bytes=10**9)
    plan = make_plan(
        world.samples, world.features, budgets, disk, policy="belady", buffer_batches=0
    )
    folder = tmp_path / "store"
    with pack(world.features, world.samples, plan, folder, memory_bytes=10**6) as store:
        kept = sum(path.stat().st_size for path in folder.rglob("*.fvf"))
        without = kept - (folder / "plan.fvf").stat().st_size
        assert without < kept <= store.plan.predicted.disk_bytes
        assert (folder / "plan.fvf").stat().st_size <= plan.nbytes
