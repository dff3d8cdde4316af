"""Packing that is killed, fails or runs out of disk, and is run again."""

import dataclasses
import fcntl
import json
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest

from fivefold.errors import ConfigurationError, DataError, InfeasibleError, StorageError
from fivefold.gnn.packing import PackedStore, _records, pack
from fivefold.gnn.planning import geometry
from fivefold.gnn.storage import ContainerWriter
from fivefold.gnn.storage.parallel import side_by_side

FILES = ("store.json", "plan.fvf", "rows.fvf", "records.fvf")

# One process loads everything and is forked for each attempt, so that a kill can come at any
# moment of packing without a second of imports before it.
KILLED_AT_RANDOM = """
import os, random, shutil, signal, sys, time
from fivefold.gnn.packing import pack
from fivefold.gnn.planning import Plan
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import Container

folder, strategy = sys.argv[1:3]
kills, memory_bytes = map(int, sys.argv[3:])
features = Container.open(f"{folder}/features.fvf")
samples = SampleFile.open(f"{folder}/samples.fvf")
plan = Plan.open(f"{folder}/plan")

def run(name):
    settings = {"memory_bytes": memory_bytes, "strategy": strategy}
    pack(features, samples, plan, f"{folder}/{name}", **settings).close()

run("whole")
begin_s = time.monotonic()
run("warm")
whole_s = time.monotonic() - begin_s
random.seed(strategy)
killed = 0
while killed < kills:
    child = os.fork()
    if child == 0:
        try:
            run("killed")
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    time.sleep(random.uniform(0.0, 0.9) * whole_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed += os.WIFSIGNALED(status)
    assert os.WIFSIGNALED(status) or status == 0, status
    if os.WIFEXITED(status) and killed < kills:
        shutil.rmtree(f"{folder}/killed")
run("killed")
print(killed)
"""


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture
def wide_world(make_world):
    """Rows of 1 KiB and enough of them for several windows in 1 MiB of memory."""
    world = make_world(nodes=3000, dim=256, seeds=300, batch_size=40)
    plan = world.plan(segment_batches=3, device=50, host=200)
    return world, plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "memory_bytes"), [("spill", 1 << 20), ("passes", 1 << 20), ("spill", 8 << 20)]
)
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(wide_world, strategy, memory_bytes):
    world, plan = wide_world
    plan.write(world.folder / "plan")
    settings = [strategy, "8", str(memory_bytes)]
    command = [sys.executable, "-c", KILLED_AT_RANDOM, str(world.folder), *settings]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == 8
    assert contents(world.folder / "killed") == contents(world.folder / "whole")
    assert {path.name for path in (world.folder / "killed").iterdir()} == set(FILES)


class StoppedError(Exception):
    pass


def stopping_after(monkeypatch, calls):
    """Let the writers' ``write`` fail after so many calls; returns the list of calls."""
    original, made = ContainerWriter.write, []

    def write(self, name, start_row, array):
        if len(made) == calls:
            raise StoppedError
        made.append((self.path.name, name, start_row))
        original(self, name, start_row, array)

    monkeypatch.setattr(ContainerWriter, "write", write)
    return made


@pytest.mark.parametrize("strategy", ["spill", "passes", "resident"])
def test_at_most_one_step_is_done_twice(wide_world, tmp_path, monkeypatch, strategy):
    world, plan = wide_world
    memory_bytes = 5 << 20 if strategy == "resident" else 1 << 20
    arguments = (world.features, world.samples, plan)

    def run(name):
        pack(*arguments, tmp_path / name, memory_bytes=memory_bytes, strategy=strategy).close()

    with monkeypatch.context() as patch:
        every = stopping_after(patch, -1)
        run("whole")
    for calls in range(1, len(every), max(1, len(every) // 6)):
        shutil.rmtree(tmp_path / "stopped", ignore_errors=True)
        with monkeypatch.context() as patch:
            stopping_after(patch, calls)
            with pytest.raises(StoppedError):
                run("stopped")
        with monkeypatch.context() as patch:
            after = stopping_after(patch, -1)
            run("stopped")
        assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
        # A step is one segment of records, one range that is spilled, or one window of rows.
        windows = {call for call in every if call[0] == every[calls][0]}
        assert len(after) <= len(every) - calls + len(windows) // 2 + 8


@pytest.mark.parametrize("strategy", ["spill", "passes"])
def test_with_memory_for_both_records_are_made_beside_the_rows(wide_world, tmp_path, strategy):
    world, plan = wide_world
    threads = {"records": set(), "rows": set()}

    def progress(stage, _done, _total):
        if stage in threads:
            threads[stage].add(threading.current_thread().name)

    def run(memory_bytes):
        folder = tmp_path / f"{memory_bytes}"
        settings = {"memory_bytes": memory_bytes, "strategy": strategy, "progress": progress}
        pack(world.features, world.samples, plan, folder, **settings).close()
        return contents(folder)

    one_by_one = run(1 << 20)
    assert threads["records"] == {"MainThread"}
    threads["records"].clear()
    at_once = run(12 << 20)
    assert len(threads["records"]) == 1
    assert threads["records"].isdisjoint({"MainThread"} | threads["rows"])
    for name in ("rows.fvf", "records.fvf", "plan.fvf"):
        assert one_by_one[name] == at_once[name]


def test_an_error_in_the_records_ends_the_rows_and_the_next_run_goes_on(
    wide_world, tmp_path, monkeypatch
):
    world, plan = wide_world
    settings = {"memory_bytes": 12 << 20, "strategy": "spill"}
    arguments = (world.features, world.samples, plan)
    pack(*arguments, tmp_path / "whole", **settings).close()
    made = _records.encode_record
    rows, moving = [], threading.Event()

    def encode(record):
        if record.number == 4:
            assert moving.wait(30)
            raise StoppedError
        return made(record)

    def slowly(stage, done, _total):
        if stage in {"rows", "spill"}:
            rows.append(done)
            moving.set()
            time.sleep(0.05)

    with monkeypatch.context() as patch:
        patch.setattr(_records, "encode_record", encode)
        patch.setattr(geometry, "_LEAST_WINDOW_BYTES", 64 << 10)
        patch.setattr(geometry, "_CELL_BYTES", 1)
        with pytest.raises(StoppedError):
            pack(*arguments, tmp_path / "store", **settings, progress=slowly)
    assert 0 < len(rows) < 20, "there are some forty ranges and windows"
    assert not [t for t in threading.enumerate() if t.name.startswith("fivefold-pack")]
    pack(*arguments, tmp_path / "store", **settings).close()
    store, whole = (contents(tmp_path / name) for name in ("store", "whole"))
    del store["store.json"], whole["store.json"]  # they name the sizes of the steps
    assert store == whole


def test_an_interrupt_while_records_are_made_ends_them():
    ended = threading.Event()

    def interrupted(_check):
        raise KeyboardInterrupt

    def for_ever(check):
        try:
            while True:
                check()
                time.sleep(0.001)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        side_by_side(interrupted, for_ever)
    assert ended.is_set()


def test_windows_between_two_marks_are_done_again(wide_world, tmp_path, monkeypatch):
    world, plan = wide_world
    monkeypatch.setattr(geometry, "_LEAST_WINDOW_BYTES", 64 << 10)
    monkeypatch.setattr(geometry, "_CELL_BYTES", 1)
    arguments = (world.features, world.samples, plan)
    settings = {"memory_bytes": 1 << 20, "strategy": "spill"}
    with monkeypatch.context() as patch:
        every = stopping_after(patch, -1)
        pack(*arguments, tmp_path / "whole", **settings).close()
    for file in ("spill.fvf", "rows.fvf"):
        calls = [n for n, call in enumerate(every) if call[0] == file]
        with monkeypatch.context() as patch:
            stopping_after(patch, calls[2 * len(calls) // 3])
            with pytest.raises(StoppedError):
                pack(*arguments, tmp_path / file, **settings)
        job = json.loads((tmp_path / file / "packing" / "job.json").read_text())
        assert job["geometry"]["steps_per_mark"] > 1
        with monkeypatch.context() as patch:
            after = stopping_after(patch, -1)
            pack(*arguments, tmp_path / file, **settings).close()
        assert contents(tmp_path / file) == contents(tmp_path / "whole")
        # A third is left. Done again is less than two times what lies between marks, a quarter of
        # the memory: the last mark but one was on the disk before the last one was asked for.
        again = [call for call in after if call[0] == file]
        assert len(calls) // 3 <= len(again) <= len(calls) // 3 + 2 * (len(calls) // 4)


def test_other_memory_goes_on_where_the_last_run_stopped(wide_world, tmp_path, monkeypatch):
    world, plan = wide_world
    arguments = (world.features, world.samples, plan)
    with monkeypatch.context() as patch:
        every = stopping_after(patch, -1)
        pack(*arguments, tmp_path / "whole", memory_bytes=1 << 20, strategy="passes").close()
    first_row = next(n for n, call in enumerate(every) if call[1] == "rows")
    with monkeypatch.context() as patch:
        stopping_after(patch, first_row + 12)
        with pytest.raises(StoppedError):
            pack(*arguments, tmp_path / "stopped", memory_bytes=1 << 20, strategy="passes")
    pack(*arguments, tmp_path / "stopped", memory_bytes=700_000, strategy="spill").close()
    for name in ("plan.fvf", "rows.fvf", "records.fvf"):
        whole, stopped = (tmp_path / folder / name for folder in ("whole", "stopped"))
        assert whole.read_bytes() == stopped.read_bytes()


def test_a_finished_store_is_taken_as_it_is_or_replaced(wide_world, tmp_path):
    world, plan = wide_world
    arguments = (world.features, world.samples, plan, tmp_path / "store")
    pack(*arguments, memory_bytes=1 << 20).close()
    before = (tmp_path / "store" / "rows.fvf").stat().st_mtime_ns
    pack(*arguments, memory_bytes=1 << 20).close()
    assert (tmp_path / "store" / "rows.fvf").stat().st_mtime_ns == before
    pack(*arguments, memory_bytes=1 << 20, resume=False).close()
    assert (tmp_path / "store" / "rows.fvf").stat().st_mtime_ns != before


def test_other_inputs_are_refused_by_name(wide_world, make_world, tmp_path, monkeypatch):
    world, plan = wide_world
    other = make_world(nodes=3000, dim=256, seeds=300, batch_size=40, seed=2)
    other_plan = other.plan(segment_batches=3)
    folder = tmp_path / "store"
    with pytest.raises(DataError, match="plan was made for other features"):
        pack(other.features, world.samples, plan, folder, memory_bytes=1 << 20)
    with pytest.raises(DataError, match="plan was made for other samples"):
        pack(world.features, other.samples, plan, folder, memory_bytes=1 << 20)
    stopping_after(monkeypatch, 12)
    with pytest.raises(StoppedError):
        pack(world.features, world.samples, plan, folder, memory_bytes=1 << 20)
    monkeypatch.undo()
    with pytest.raises(DataError, match="holds an unfinished store; run packing again"):
        PackedStore.open(folder)
    with pytest.raises(
        DataError, match=r"unfinished store of other inputs \(features, samples, plan"
    ):
        pack(other.features, other.samples, other_plan, folder, memory_bytes=1 << 20)
    pack(world.features, world.samples, plan, folder, memory_bytes=1 << 20).close()
    with pytest.raises(DataError, match="store of other inputs"):
        pack(other.features, other.samples, other_plan, folder, memory_bytes=1 << 20)
    with pytest.raises(DataError, match="packed from other features"):
        PackedStore.open(folder, features=other.features)
    with pytest.raises(DataError, match="packed from other samples"):
        PackedStore.open(folder, samples=other.samples)
    settings = {"memory_bytes": 1 << 20, "resume": False}
    pack(other.features, other.samples, other_plan, folder, **settings).close()
    PackedStore.open(folder, features=other.features, samples=other.samples).close()


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(bytes(data))


def test_files_of_another_store_and_damaged_ones_are_seen(wide_world, tmp_path):
    world, plan = wide_world
    other_plan = world.plan(segment_batches=2)
    for name, made in (("a", plan), ("b", other_plan)):
        arguments = (world.features, world.samples, made, tmp_path / name)
        pack(*arguments, memory_bytes=1 << 20).close()
    for name in ("rows.fvf", "records.fvf", "plan.fvf"):
        mixed = shutil.copytree(tmp_path / "a", tmp_path / f"mixed-{name}")
        shutil.copy(tmp_path / "b" / name, mixed / name)
        with pytest.raises(DataError, match=r"do not belong to this store.*pack again"):
            PackedStore.open(mixed)
        for place in (0, 5000, -100):
            broken = shutil.copytree(tmp_path / "a", tmp_path / "broken")
            flip(broken / name, place)
            with pytest.raises(DataError):
                read_all(broken)
            shutil.rmtree(broken)
        with (mixed / name).open("r+b") as file:
            file.truncate(6000)
        with pytest.raises(DataError, match="truncated"):
            PackedStore.open(mixed)
        (mixed / name).unlink()
        with pytest.raises(DataError, match=name):
            PackedStore.open(mixed)


def read_all(folder):
    with PackedStore.open(folder) as store:
        store.rows.verify()
        store.records.verify()
        for number in range(store.num_batches):
            store.record(number)


def test_a_damaged_manifest_is_seen(wide_world, tmp_path):
    world, plan = wide_world
    arguments = (world.features, world.samples, plan, tmp_path / "store")
    pack(*arguments, memory_bytes=1 << 20).close()
    manifest = tmp_path / "store" / "store.json"
    for text in ("", "[]", "{}", '{"version": 99}', '{"version": 1}'):
        manifest.write_text(text)
        with pytest.raises(DataError, match="pack again"):
            PackedStore.open(tmp_path / "store")


def test_a_damaged_spill_is_seen_and_made_anew(wide_world, tmp_path, monkeypatch):
    world, plan = wide_world
    arguments = (world.features, world.samples, plan)
    settings = {"memory_bytes": 1 << 20, "strategy": "spill"}
    whole = tmp_path / "whole"
    with monkeypatch.context() as patch:
        every = stopping_after(patch, -1)
        pack(*arguments, whole, **settings).close()
    first_row = next(n for n, call in enumerate(every) if call[1] == "rows")
    with monkeypatch.context() as patch:
        stopping_after(patch, first_row + 2)
        with pytest.raises(StoppedError):
            pack(*arguments, tmp_path / "stopped", **settings)
    flip(tmp_path / "stopped" / "packing" / "spill.fvf", 4096 * 40 + 17)
    with pytest.raises(DataError, match=r"spill\.fvf.*damaged.*run packing again"):
        pack(*arguments, tmp_path / "stopped", **settings)
    pack(*arguments, tmp_path / "stopped", **settings).close()
    assert contents(tmp_path / "stopped") == contents(whole)


def test_memory_and_disk_that_do_not_suffice_are_refused_before_work(wide_world, tmp_path):
    world, plan = wide_world
    arguments = (world.features, world.samples, plan, tmp_path / "store")
    with pytest.raises(InfeasibleError, match=r"memory.*give"):
        pack(*arguments, memory_bytes=1000)
    with pytest.raises(ConfigurationError, match=r"memory_bytes must be .*; got 0"):
        pack(*arguments, memory_bytes=0)
    with pytest.raises(ConfigurationError, match="strategy is 'best'; use one of resident"):
        pack(*arguments, memory_bytes=1 << 20, strategy="best")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be made"):
        pack(*arguments[:3], tmp_path / "file" / "store", memory_bytes=1 << 20)
    short = world.plan(segment_batches=3, device=50, host=200)
    budgets = dataclasses.replace(short.budgets, disk_bytes=plan.predicted.packed_bytes // 2)
    short = dataclasses.replace(short, budgets=budgets)
    with pytest.raises(InfeasibleError, match="left of its budget"):
        pack(world.features, world.samples, short, tmp_path / "short", memory_bytes=1 << 20)


@pytest.mark.parametrize("strategy", ["spill", "passes", "resident"])
def test_a_damaged_page_of_the_features_stops_packing(wide_world, tmp_path, strategy):
    world, plan = wide_world
    settings = {"memory_bytes": 5 << 20, "strategy": strategy}
    path = world.folder / "features.fvf"
    flip(path, 4096 * 400 + 5)
    arguments = (world.features, world.samples, plan, tmp_path / "store")
    with pytest.raises(DataError, match=r"page 400 of .*features\.fvf.* is damaged"):
        pack(*arguments, **settings)
    assert (tmp_path / "store" / "rows.fvf.partial").exists()
    flip(path, 4096 * 400 + 5)
    pack(*arguments, **settings).close()
    pack(*arguments[:3], tmp_path / "whole", **settings).close()
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")


def test_two_processes_do_not_pack_into_one_folder(wide_world, tmp_path):
    world, plan = wide_world
    (tmp_path / "store" / "packing").mkdir(parents=True)
    with (tmp_path / "store" / "packing" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"another process packs into .*wait"):
            pack(world.features, world.samples, plan, tmp_path / "store", memory_bytes=1 << 20)


ON_A_SMALL_DISK = """
set -e
mount -t tmpfs -o size=$3 tmpfs "$2"
exec "$1" -c '
import sys
from fivefold.errors import StorageError, InfeasibleError
from fivefold.gnn.packing import pack
from fivefold.gnn.planning import Plan
from fivefold.gnn.sampling import SampleFile
from fivefold.gnn.storage import Container
import os, json
folder, small = sys.argv[1:3]
features = Container.open(f"{folder}/features.fvf")
samples = SampleFile.open(f"{folder}/samples.fvf")
plan = Plan.open(f"{folder}/plan")
said = []
for filler in (int(sys.argv[3]), 0):
    with open(f"{small}/filler", "wb") as file:
        file.write(bytes(filler))
    try:
        pack(features, samples, plan, f"{small}/store", memory_bytes=1 << 20).close()
        said.append("packed")
    except (StorageError, InfeasibleError) as error:
        said.append(str(error)); print(error, file=sys.stderr)
print(json.dumps(said))
' "$4" "$2" "$5"
"""


@pytest.mark.parametrize("filler", [3_500_000, 5_080_000])
def test_a_full_disk_keeps_what_was_written_and_says_what_is_missing(wide_world, tmp_path, filler):
    world, plan = wide_world
    plan.write(world.folder / "plan")
    small = tmp_path / "small"
    small.mkdir()
    script = ["sh", "-c", ON_A_SMALL_DISK, "sh", sys.executable, str(small), "5000k"]
    command = ["unshare", "--mount", "--map-root-user", *script, str(world.folder), str(filler)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip("this user may not mount a small disk")
    assert result.returncode == 0, result.stderr
    refused, packed = json.loads(result.stdout)
    assert packed == "packed"
    assert re.search(r"more than is free|No space left", refused), refused
