"""Threads that write behind: order of marks, and what happens to the rest after an error."""

import threading

import numpy as np
import pytest

from fivefold.gnn.storage.parallel import WriteBehind


def make():
    return WriteBehind([np.zeros(4, np.uint8) for _ in range(3)])


def test_a_mark_comes_after_all_that_was_put_before_it():
    done, gate = [], threading.Event()
    with make() as behind:
        for name in "abc":
            behind.take()
            behind.put(lambda _, name=name: (gate.wait(10), done.append(name)))
        behind.then(lambda: done.append("mark"))
        assert not done
        gate.set()
    assert sorted(done[:3]) == ["a", "b", "c"]
    assert done[3:] == ["mark"]


def test_an_error_of_the_caller_drops_what_was_not_begun():
    done, begun, gate = [], threading.Barrier(3), threading.Event()

    def busy(_):
        begun.wait(10)
        gate.wait(10)

    with pytest.raises(KeyError), make() as behind:  # noqa: PT012 - the block is what is tested
        for _ in range(2):  # both threads are busy
            behind.take()
            behind.put(busy)
        behind.take()
        behind.put(lambda _: done.append("third"))
        behind.then(lambda: done.append("mark"))
        begun.wait(10)
        threading.Timer(0.1, gate.set).start()
        raise KeyError
    assert done == []


def test_no_mark_after_a_write_that_failed():
    done = []

    def full(_):
        raise BlockingIOError

    with pytest.raises(BlockingIOError), make() as behind:  # noqa: PT012 - as above
        behind.take()
        behind.put(full)
        behind.then(lambda: done.append("mark"))
    assert done == []
