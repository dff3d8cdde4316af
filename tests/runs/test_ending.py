"""How a run is asked to stop, and the exit code with which it ends."""

import os
import signal
import threading

import pytest

from fivefold.errors import ConfigurationError, FivefoldError
from fivefold.runs import StopRequest, exit_code


def ask(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (KeyboardInterrupt(), 130),  # as shells say of a process that Ctrl-C ended
        (ConfigurationError("no"), ConfigurationError.exit_code),
        (ValueError("not ours"), FivefoldError.exit_code),
    ],
)
def test_exit_codes(error, code):
    assert exit_code(error) == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_is_a_request_and_the_handlers_of_before_come_back(number):
    stop = StopRequest()
    before = signal.getsignal(number)
    with stop.handling_signals():
        assert not stop.requested
        ask(number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_the_second_interrupt_aborts_and_a_termination_before_it_does_not_count():
    stop = StopRequest()
    with stop.handling_signals():
        ask(signal.SIGTERM)
        ask(signal.SIGTERM)
        ask(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            ask(signal.SIGINT)


def test_another_thread_installs_nothing():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with StopRequest().handling_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_work_before_training_ends_where_a_stop_was_asked_for():
    stop, told = StopRequest(), []
    progress = stop.breaking(lambda *args: told.append(args))
    progress("sample", 1, 3)
    stop.requested = True
    with pytest.raises(KeyboardInterrupt):
        progress("sample", 2, 3)
    assert told == [("sample", 1, 3)]
