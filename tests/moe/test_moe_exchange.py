"""The exchange between ranks: against one rank bit for bit, and against one token at a time."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe import (
    OneSidedConfig,
    OneSidedGroup,
    SharedMemoryHeap,
    TorchSymmetricHeap,
    VirtualHeap,
)
from helpers.night import by_night
from oracles.children import check_case, environment, lines_of_cases

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(1200)  # interpreted, in one child: minutes beside other work

HERE = Path(__file__).parent
LIMITS = {
    "bfloat16": 5e-3,
    "gate: bfloat16": 5e-3,
    "float16": 1e-3,
    "a second writer is found": "rank 0 wrote a row that rank 1 had written in epoch 1",
    "more rows than room": "more rows than the 30 it has room for (rank 0, epoch 1)",
    "a task that no one does": "rank 0 waited 0.05 s for the counts of rank 1 in epoch 1",
    "operands that do not fit": "it is closed",
}
CASES = [
    "one token",
    "every expert",
    "more experts than used",
    "odd sizes without descriptors",
    "all sizes one",
    "several tiles per expert",
    "a plain activation with weights on the input",
    "dropped ids",
    "gate: softmax",
    "gate: not normalised",
    "gate: top k, then softmax",
    "gate: sigmoid in groups by two",
    "gate: softmax in groups by one",
    "group: forward and gradients of one launch",
    "group: any number of ranks",
    "group: the capacity layout",
    "group: bfloat16",
    "group: float16 with a plain activation",
    "group: weights on the input",
    "group: dropped and skewed",
    "group: a capacity of each rank",
    "group: a layer",
    *LIMITS,
    "no tokens at all",
    "skewed calls one after the other",
    "capacity drops by its rule on every rank",
    "every row has the writer that its index says",
    "a gate without numbers",
    "a gate that does not fit",
    "a call is part of no graph",
    "group: a copy of a layer has its ranks",
    "group: no tokens anywhere",
    "group: what does not fit is named",
]
FOR_THE_NIGHT = {
    "several tiles per expert",
    "all sizes one",
    "gate: not normalised",
    "gate: top k, then softmax",
    "group: any number of ranks",
    "group: the capacity layout",
    "group: bfloat16",
    "group: a layer",
    "float16",
    "every expert",
    "more experts than used",
    "odd sizes without descriptors",
    "group: weights on the input",
    "group: float16 with a plain activation",
    "bfloat16",
    "skewed calls one after the other",
    "every row has the writer that its index says",
}
TRAINED = {"2 ranks train, fused": 1, "3 ranks train, reference": 2, "4 ranks train, reference": 2}
SCENES = [f"{n} ranks, {layout}" for n in (2, 3, 4) for layout in ("compact", "capacity")]


@pytest.fixture(scope="module")
def virtual(request):
    return lines_of_cases(HERE / "exchange_cases.py", request)


@pytest.fixture(scope="module")
def processes():
    """Four processes play all scenes; the last one of them dies in the last scene."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of our own in it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        ranks = subprocess.Popen(
            [sys.executable, str(HERE / "exchange_ranks.py"), folder],
            env=environment(interpreted=True),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, problems = ranks.communicate(timeout=1100)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
        left = sorted(path.name for path in Path(folder).glob("* ranks, */rank-*"))
    *lines, last = map(json.loads, out.splitlines())
    assert last == {"codes": [0, 0, 0, 9]}, problems
    assert left == []  # nothing of the heaps stays behind
    return {(line["scene"], line["rank"]): line for line in lines}


@pytest.mark.parametrize("name", by_night(CASES, FOR_THE_NIGHT))
def test_ranks_give_the_bits_of_one_rank_and_hold_what_they_say(virtual, name):
    check_case(virtual[name], LIMITS)


def test_every_case_is_looked_at(virtual):
    assert set(virtual["all"]["names"]) == set(CASES)


@pytest.mark.alone
@pytest.mark.parametrize("scene", SCENES)
def test_processes_without_a_barrier(processes, scene):
    number = int(scene[0])
    for rank in range(number):
        found = processes[scene, rank]
        assert "failed" not in found, found["failed"]
        assert found["error"] < 2e-6
        assert found["epochs"] == {2: 5, 3: 3, 4: 2}[number]
        assert found["sent_bytes"] == found["formula_bytes"]
    assert sum(processes[scene, rank]["sent_bytes"] for rank in range(number)) > 0


@pytest.mark.alone
@pytest.mark.parametrize("scene", TRAINED)
def test_gradients_between_processes(processes, scene):
    for rank in range(int(scene[0])):
        found = processes[scene, rank]
        assert "failed" not in found, found["failed"]
        assert found["error"] < 2e-5
        assert found["epochs"] == 2 * TRAINED[scene]


@pytest.mark.alone
def test_a_layer_between_processes_and_a_peer_that_leaves_before_the_backward(processes):
    for rank in range(2):
        found = processes["a layer", rank]
        assert "failed" not in found, found["failed"]
        assert found["error"] < 2e-6
        assert found["loads"] == [14, 4]  # all ranks' tokens; those of its last call
    left = processes["a layer", 0]
    assert "rank 0 waited 1 s for the counts of rank 1 in epoch 4" in left["refused"]
    assert left["waited_s"] < 60


@pytest.mark.alone
def test_who_waits_for_a_dead_rank_is_told(processes):
    for rank in range(3):
        found = processes["a rank dies", rank]
        assert "failed" not in found, found["failed"]
        assert f"rank {rank} waited 4 s for" in found["refused"]
        assert "rank 3" in found["refused"]
        assert "in epoch 2" in found["refused"]
        assert found["waited_s"] < 60


@pytest.mark.alone
def test_setting_a_heap_up_is_bounded_and_compared(processes):
    assert (
        "waited 0.1 s for rank 1 to be ready" in processes["a rank that never comes", 0]["refused"]
    )
    for rank in range(2):
        assert "the same sizes on all ranks" in processes["sizes that differ", rank]["refused"]


def test_a_folder_serves_once(tmp_path):
    SharedMemoryHeap(tmp_path, rank=0, ranks=1, nbytes=10).close()
    (tmp_path / "rank-0").touch()
    with pytest.raises(ConfigurationError, match="rank 0 has been here before"):
        SharedMemoryHeap(tmp_path, rank=0, ranks=1, nbytes=10)
    with pytest.raises(ConfigurationError, match="rank must be a whole number from 0 to 1; got 2"):
        SharedMemoryHeap(tmp_path, rank=2, ranks=2, nbytes=10)
    with pytest.raises(ConfigurationError, match="ranks of a heap must be"):
        VirtualHeap(0, nbytes=10)


def test_memory_of_a_peer_is_the_same_memory(tmp_path):
    heap = SharedMemoryHeap(tmp_path, rank=0, ranks=1, nbytes=300)
    assert heap.nbytes == 512
    assert int(heap.bases[0]) == heap.own.data_ptr()
    assert not heap.own.any()
    assert not (tmp_path / "rank-0").exists()


def test_symmetric_memory_of_torch_says_what_is_missing(monkeypatch):
    with pytest.raises(UnsupportedError, match="got cpu"):
        TorchSymmetricHeap(nbytes=64, device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch finds none"):
        TorchSymmetricHeap(nbytes=64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert TorchSymmetricHeap.missing(torch.device("cuda")) is None
    with pytest.raises(ConfigurationError, match="init_process_group"):
        TorchSymmetricHeap(nbytes=64)


def sizes(**changes):
    usual = {"ranks": 4, "experts": 8, "hidden": 64, "intermediate": 32, "top_k": 2}
    return usual | {"max_tokens": 10} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 9}, "9 experts cannot be shared out evenly among 4 ranks"),
        ({"top_k": 9}, "top_k is 9, there are 8 experts"),
        ({"hidden": 0}, "hidden must be a whole number from 1; got 0"),
        ({"dtype": torch.float64}, "dtype is torch.float64"),
        ({"capacity": 0}, "capacity must be a whole number from 1; got 0"),
        ({"capacity": 4, "max_rows": 4}, "give one of them"),
        ({"activation": "sin"}, "no activation 'sin'"),
        ({"precision": "fp8"}, "no precision 'fp8'"),
        ({"max_tokens": 2**30}, "must be below 2"),
    ],
)
def test_sizes_that_cannot_be(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        OneSidedConfig(**sizes(**changes))


def test_room_is_for_the_worst_routing_and_no_more():
    assert OneSidedConfig(**sizes()).receive_rows == 4 * 10 * 2  # all ranks' rows may come
    one_each = OneSidedConfig(**sizes(experts=4))
    assert one_each.receive_rows == 4 * 10  # a token's experts are distinct: one of a rank's one
    assert OneSidedConfig(**sizes(max_rows=30)).receive_rows == 30
    capacity = OneSidedConfig(**sizes(capacity=200))
    # The paper's L without its outgoing buffers: 2 P L C H elements, C in whole tiles.
    assert capacity.receive_rows == capacity.return_rows == 8 * 256
    assert 0 < capacity.heap_bytes() - 2 * 8 * 256 * 64 * 2 < 0.1 * capacity.heap_bytes()


def test_cannot_be_had_without_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = OneSidedConfig(**sizes())
    with pytest.raises(UnsupportedError, match="group cannot work here: it needs a CUDA"):
        OneSidedGroup(config, VirtualHeap(4, nbytes=config.heap_bytes()))
