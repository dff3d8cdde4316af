"""Ranks in one process hand over tensors of a GPU that are there: counted without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from fivefold.testing import run_world


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


@pytest.mark.parametrize("kind", [OnGpu, torch.Tensor])
@pytest.mark.parametrize("what", ["sum", "broadcast"])
def test_what_is_handed_over_is_there_and_what_is_let_go_was_read(monkeypatch, kind, what):
    log = []
    stream = SimpleNamespace(synchronize=lambda: log.append("finished"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)

    def work(transport):
        put, take = transport._board.put, transport._board.take
        monkeypatch.setattr(transport._board, "put", lambda *args: [log.append("put"), put(*args)])
        monkeypatch.setattr(
            transport._board,
            "take",
            lambda *args, **how: [log.append("taken"), take(*args, **how)][1],
        )
        value = torch.arange(3.0).as_subclass(kind)
        if what == "broadcast":
            transport.broadcast([value])
        else:
            metadata = torch.zeros(1, dtype=torch.float64)
            transport.launch([value], metadata=metadata, fragment=0, what="a sum").wait()
        return value.as_subclass(torch.Tensor).tolist()

    assert run_world(1, work) == [[0.0, 1.0, 2.0]]
    waits = ["finished"] if kind is OnGpu else []
    assert log == [*waits, "put", "taken", *waits]
