"""Sizes and addresses of symmetric heaps, with a stand-in for what needs GPUs."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe import SharedMemoryHeap, TorchSymmetricHeap, VirtualHeap

DISTANCE = 512


@pytest.fixture
def make_heap(monkeypatch):
    """A heap of rank 1 of 3; its part begins at a distance from torch's block."""
    block = torch.full((4096,), 7, dtype=torch.uint8)
    group = SimpleNamespace(size=lambda: 3)

    def make(**changes):
        bases = [10_000, block.data_ptr(), 30_000]
        handle = SimpleNamespace(**{"rank": 1, "buffer_ptrs": bases, "offset": DISTANCE} | changes)

        def empty(count, *, dtype, device):
            assert (dtype, device.type) == (torch.uint8, "cpu")
            return block[DISTANCE : DISTANCE + count]

        monkeypatch.setattr(symmetric, "empty", empty)
        monkeypatch.setattr(symmetric, "rendezvous", lambda *_: handle)
        return TorchSymmetricHeap(nbytes=1000, device="cpu", group=group)

    monkeypatch.setattr(TorchSymmetricHeap, "missing", staticmethod(lambda _device: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "barrier", lambda _group: None)
    make.block = block
    return make


def test_a_part_may_begin_at_a_distance_from_its_block(make_heap):
    heap = make_heap()
    assert heap.bases.tolist() == [
        10_000 + DISTANCE,
        make_heap.block.data_ptr() + DISTANCE,
        30_000 + DISTANCE,
    ]
    assert (heap.ranks, heap.first_rank, heap.num_local, heap.nbytes) == (3, 1, 1, 1024)
    assert heap.own.data_ptr() == heap.bases[1]
    assert not heap.own.any()
    assert set(make_heap.block[:DISTANCE].tolist()) == {7}


def test_memory_that_cannot_be_reached_is_no_address(make_heap):
    with pytest.raises(UnsupportedError, match="memory of rank 2 cannot be reached from rank 1"):
        make_heap(buffer_ptrs=[10_000, make_heap.block.data_ptr(), 0])
    with pytest.raises(UnsupportedError, match="does not lie where it says"):
        make_heap(offset=0)


@pytest.mark.parametrize(
    ("nbytes", "rounded"), [(1, 256), (255, 256), (256, 256), (257, 512), (512, 512), (513, 768)]
)
def test_a_part_is_the_least_multiple_of_256_bytes_that_holds_what_was_asked_for(
    tmp_path, nbytes, rounded
):
    with VirtualHeap(3, nbytes=nbytes) as virtual:
        assert (virtual.nbytes, tuple(virtual.own.shape)) == (rounded, (3, rounded))
        assert virtual.bases.diff().tolist() == [rounded, rounded]
    with SharedMemoryHeap(tmp_path, rank=0, ranks=1, nbytes=nbytes) as shared:
        assert (shared.nbytes, tuple(shared.own.shape)) == (rounded, (1, rounded))


@pytest.mark.parametrize("sizes", [(0, 1), (-1, 1), (1, 0), (1, -1), (0, 0)])
def test_a_heap_of_nothing_is_refused(sizes):
    ranks, nbytes = sizes
    with pytest.raises(ConfigurationError, match="of a heap must be a whole number from 1; got"):
        VirtualHeap(ranks, nbytes=nbytes)


@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_a_rank_that_is_not_there_is_refused_at_once(tmp_path, rank):
    with pytest.raises(ConfigurationError, match=f"rank must be .* 0 to 1; got {rank}"):
        SharedMemoryHeap(tmp_path, rank=rank, ranks=2, nbytes=1, timeout_s=0.0)
    assert not list(tmp_path.iterdir())
