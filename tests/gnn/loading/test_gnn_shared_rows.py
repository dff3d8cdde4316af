"""One cache for the ranks of a host: same batches, held once, whoever dies."""

import contextlib
import fcntl
import multiprocessing
import os
import re
import signal
import time
import zlib
from pathlib import Path

import pytest

from fivefold.gnn.data import Dataset
from fivefold.gnn.loading import DiskLoader, OnlineLoader
from fivefold.gnn.packing import PackedStore

pytestmark = pytest.mark.distributed
WAIT_S = 120
HOW = {"shuffle": True, "seed": 3, "backend": "threads"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, dataset_of, store_of):
    """Two stores of one shape, of other features: 6 MB of rows of 8 KB, most of them cached."""
    found = []
    for seed in (0, 1):
        with dataset_of(
            tmp_path_factory.mktemp("data"), nodes=800, dim=2048, train=180, seed=seed
        ) as dataset:
            made = store_of(
                tmp_path_factory.mktemp("store"),
                dataset,
                batch_size=10,
                device_rows=0,
                host_rows=500,
            )
            found.append(made.folder)
            made.close()
    return found


def told(batch):
    parts = (batch.n_id, batch.edge_index, batch.x)
    return batch.number, [zlib.crc32(part.numpy().tobytes()) for part in parts]


@pytest.fixture(scope="module")
def expected(folders):
    """What every batch of a store is, from a loader that has all to itself."""
    found = []
    for folder in folders:
        with PackedStore.open(folder) as store, DiskLoader(store, **HOW) as loader:
            found.append(dict(map(told, loader)))
            assert loader.statistics().hit_rates["host"] > 0.5
    return found


def shared_maps():
    """Label, bytes in memory and this process's share of them, of each shared cache."""
    text = Path("/proc/self/smaps").read_text()
    pattern = r"/memfd:(fivefold\S+) .*\n(?:.*\n)*?Rss: +(\d+) kB\nPss: +(\d+)"
    return [(name, int(rss) << 10, int(pss) << 10) for name, rss, pss in re.findall(pattern, text)]


class Rank:
    """A process with a loader, which does what it is told."""

    def __init__(self, folder, rank, world_size):
        context = multiprocessing.get_context("fork")
        self._pipe, child = context.Pipe()
        self.process = context.Process(target=self._serve, args=(child, folder, rank, world_size))
        self.process.start()

    @staticmethod
    def _serve(pipe, folder, rank, world_size):
        inherited = {name for name, _, _ in shared_maps()}  # of loaders that other tests left
        how = HOW | {"rank": rank, "world_size": world_size}
        with contextlib.ExitStack() as opened:
            if (folder / "graph.fvf").exists():
                data = opened.enter_context(Dataset.open(folder))
                sampling = {"fanouts": [4, 3], "batch_size": 10, "features": "memory"}
                loader = OnlineLoader(data, data.train, **sampling, **how)
            else:
                loader = DiskLoader(opened.enter_context(PackedStore.open(folder)), **how)
            opened.enter_context(loader)
            batches = iter(loader)
            commands = {
                "batch": lambda: told(next(batches)),
                "rest": lambda: list(map(told, batches)),
                "read": lambda: loader.statistics().fill_bytes,
                "maps": lambda: [own for own in shared_maps() if own[0] not in inherited],
            }
            while (command := pipe.recv()) != "end":
                pipe.send(commands[command]())

    def ask(self, command):
        self.tell(command)
        return self.answer()

    def tell(self, command):
        self._pipe.send(command)

    def answer(self, wait_s=WAIT_S):
        assert self._pipe.poll(wait_s), "no answer"
        return self._pipe.recv()

    def is_silent(self, for_s):
        return not self._pipe.poll(for_s)

    def end(self):
        with contextlib.suppress(OSError):
            self.tell("end")
        self.process.join(WAIT_S)
        self.process.kill()


@pytest.fixture
def start():
    """Start a rank; those that are left are ended with the test."""
    ranks = []

    def started(folder, rank, world_size):
        ranks.append(Rank(folder, rank, world_size))
        return ranks[-1]

    yield started
    for rank in ranks:
        rank.end()


def cache_bytes(folder):
    with PackedStore.open(folder) as store:
        return (store.plan.num_host_slots + len(store.plan.device_rows)) * store.row_bytes


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_have_one_cache_and_the_same_batches(folders, expected, start, world_size):
    ranks = [start(folders[0], rank, world_size) for rank in range(world_size)]
    for rank in ranks:
        rank.tell("rest")
    found = dict(batch for rank in ranks for batch in rank.answer())
    assert found == expected[0]
    read = sorted(rank.ask("read") for rank in ranks)
    assert read[-1] >= cache_bytes(folders[0]), "one of them reads all"
    assert not any(read[:-1]), "and the others nothing"
    maps = [rank.ask("maps") for rank in ranks]
    names = [sorted(name for name, _, _ in own) for own in maps]
    assert all(own == names[0] for own in names)
    resident, shares = ([part[i] for own in maps for part in own] for i in (1, 2))
    assert sum(shares) < 1.02 * cache_bytes(folders[0]), "memory counts once"
    assert sum(resident) > 1.5 * sum(shares), "though every rank has it"


def test_features_in_memory_are_there_once(tmp_path, dataset_of, start):
    with (
        dataset_of(tmp_path, nodes=800, dim=2048, train=180) as dataset,
        OnlineLoader(
            dataset, dataset.train, fanouts=[4, 3], batch_size=10, features="memory", **HOW
        ) as loader,
    ):
        expected, size = dict(map(told, loader)), dataset.features.section("x").nbytes
    ranks = [start(tmp_path, rank, 2) for rank in (0, 1)]
    for rank in ranks:
        rank.tell("rest")
    assert dict(batch for rank in ranks for batch in rank.answer()) == expected
    maps = [rank.ask("maps") for rank in ranks]
    (name, first, share), (other, second, rest) = (own[0] for own in maps)
    assert name == other
    assert share + rest < 1.02 * size
    assert first + second > 1.5 * (share + rest)


def test_the_one_that_filled_it_is_killed(folders, expected, start):
    before = sorted(path.name for path in folders[0].iterdir())
    ranks = [start(folders[0], rank, 2) for rank in (0, 1)]
    found = dict(rank.ask("batch") for rank in ranks)
    owner, other = sorted(ranks, key=lambda rank: rank.ask("read"), reverse=True)
    os.kill(owner.process.pid, signal.SIGKILL)
    owner.process.join(WAIT_S)
    found |= dict(other.ask("rest"))
    again = start(folders[0], ranks.index(owner), 2)
    found |= dict(again.ask("rest"))
    assert again.ask("read") == 0, "it finds what the other one kept alive"
    assert found == expected[0]
    for rank in (other, again):
        rank.end()
    last = start(folders[0], 0, 2)
    last.ask("batch")
    assert last.ask("read") > 0, "nothing is left when all are gone"
    assert sorted(path.name for path in folders[0].iterdir()) == before


def test_caches_of_others_are_not_taken(folders, expected, start):
    """Of another store of the same shape, unfinished, or of another size."""
    first = start(folders[0], 0, 2)
    assert dict([first.ask("batch")]).items() <= expected[0].items()
    names = [name for name, _, _ in first.ask("maps")]
    other = start(folders[1], 0, 2)
    assert dict(other.ask("rest")).items() <= expected[1].items()
    assert other.ask("read") > 0
    assert not {name for name, _, _ in other.ask("maps")} & set(names)
    first.end()
    forged = [os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in names for _ in (0, 1)]
    try:
        for number, descriptor in enumerate(forged):
            os.ftruncate(descriptor, cache_bytes(folders[0]) + number % 2)
            if number % 2:  # whole, of the wrong size
                fcntl.fcntl(descriptor, 1033, 15)
        again = start(folders[0], 0, 2)
        assert dict(again.ask("rest")).items() <= expected[0].items()
        assert again.ask("read") > 0
    finally:
        for descriptor in forged:
            os.close(descriptor)


def test_ranks_wait_for_the_one_that_fills_and_not_for_a_dead_one(folders, expected, start):
    """A process that holds the lock stands for one that fills."""
    (rows,) = folders[0].glob("rows*")
    context = multiprocessing.get_context("fork")
    locked = context.Event()

    def hold():
        with rows.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            locked.set()
            time.sleep(WAIT_S)

    holder = context.Process(target=hold)
    holder.start()
    assert locked.wait(WAIT_S)
    rank = start(folders[0], 0, 2)
    rank.tell("rest")
    assert rank.is_silent(1.0)
    holder.kill()
    holder.join()
    assert dict(rank.answer()).items() <= expected[0].items()
