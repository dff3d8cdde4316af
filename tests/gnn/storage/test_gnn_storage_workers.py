"""The small pool: everyone takes part, exceptions arrive, nothing is left running."""

import signal
import threading
import time

import pytest

from fivefold.gnn.storage.reader import Workers


@pytest.fixture
def workers():
    made = Workers()
    yield made
    made.close()


def test_each_number_runs_once_at_the_same_time(workers):
    meeting = threading.Barrier(4, timeout=30)
    for _ in range(3):
        seen = []

        def work(number, seen=seen):
            meeting.wait()  # passes only if all four are here at once
            seen.append((number, threading.get_ident()))

        workers.run(work, 4)
        assert sorted(number for number, _ in seen) == [0, 1, 2, 3]
        assert len({thread for _, thread in seen}) == 4
    assert dict(seen)[0] == threading.get_ident()


@pytest.mark.parametrize("failing", [0, 2])
def test_an_exception_arrives_after_all_have_ended(workers, failing):
    ended = []

    def work(number):
        if number == failing:
            raise KeyError(number)
        time.sleep(0.1)
        ended.append(number)

    with pytest.raises(KeyError, match=str(failing)):
        workers.run(work, 3)
    assert len(ended) == 2
    workers.run(ended.append, 3)
    assert len(ended) == 5


def test_an_interruption_waits_for_the_others(workers):
    ended = []

    def work(number):
        if number:
            time.sleep(0.6)
            ended.append(number)

    workers.run(lambda _: None, 2)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        workers.run(work, 2)
    timer.join()
    assert ended == [1]


def test_an_interruption_comes_out_though_a_worker_raised(workers):
    def work(number):
        if number == 0:
            raise ValueError(number)
        time.sleep(0.6)

    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        workers.run(work, 2)
    timer.join()
