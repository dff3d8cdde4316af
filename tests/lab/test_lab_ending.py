from __future__ import annotations

import math
import signal

from fivefold.lab._supervisor import Ending


def _ending(*, timeout_s: float | None = None) -> Ending:
    return Ending(3, started_s=100.0, timeout_s=timeout_s, grace_s=30.0)


def test_nothing_is_due_while_all_run() -> None:
    ending = _ending()
    assert ending.next_s == math.inf
    assert ending.due(1e9) is None


def test_a_failure_gives_the_others_grace_then_terminates_then_kills() -> None:
    ending = _ending()
    ending.rank_ended(110.0, rank=1, code=3)
    ending.rank_ended(120.0, rank=0, code=4)  # a second failure does not prolong the grace
    assert ending.first_failure == 1
    assert ending.due(139.9) is None
    assert ending.due(140.0) == signal.SIGTERM
    assert ending.due(169.9) is None
    assert ending.due(170.0) == signal.SIGKILL
    assert ending.running == {2}


def test_success_of_one_rank_starts_no_clock() -> None:
    ending = _ending()
    ending.rank_ended(110.0, rank=1, code=0)
    assert ending.next_s == math.inf
    assert ending.first_failure is None


def test_the_time_limit_terminates_then_kills() -> None:
    ending = _ending(timeout_s=60.0)
    assert ending.next_s == 160.0
    assert ending.due(160.0) == signal.SIGTERM
    assert ending.timed_out
    assert ending.next_s == 190.0
    assert ending.due(190.0) == signal.SIGKILL


def test_the_time_limit_ends_a_grace_period() -> None:
    ending = _ending(timeout_s=60.0)
    ending.rank_ended(150.0, rank=0, code=1)
    assert ending.due(160.0) == signal.SIGTERM
    assert ending.next_s == 190.0


def test_a_stop_terminates_at_once_and_a_kill_does_not_wait() -> None:
    ending = _ending()
    ending.stop(105.0)
    assert ending.due(105.0) == signal.SIGTERM
    ending.stop(106.0)  # asking again changes nothing
    assert ending.due(106.0) is None
    ending.kill(107.0)
    assert ending.due(107.0) == signal.SIGKILL


def test_the_limit_does_not_start_the_ending_again() -> None:
    ending = _ending(timeout_s=60.0)
    ending.stop(150.0)
    assert ending.due(150.0) == signal.SIGTERM
    assert ending.due(160.0) is None
    assert ending.due(180.0) == signal.SIGKILL
