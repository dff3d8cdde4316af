"""Random histories of the schedule: every launched round is merged exactly once, in order."""

from hypothesis import given
from hypothesis import strategies as st

from fivefold.optim._schedule import RoundSchedule

schedules = st.builds(
    RoundSchedule,
    tau=st.integers(1, 7),
    delayed=st.booleans(),
    first_round_synchronous=st.booleans(),
    always_sends=st.booleans(),
)
histories = st.lists(st.sampled_from(["step", "step", "step", "drain", "reload"]), max_size=120)


@given(schedules, histories)
def test_each_round_is_merged_once_in_order_and_no_step_is_lost(schedule, history):
    launched, merged, steps_sent, open_steps = [], [], 0, 0
    for event in history:
        if event == "reload":
            other = RoundSchedule(
                tau=schedule.tau,
                delayed=schedule.delayed,
                first_round_synchronous=schedule._first_round_synchronous,
                always_sends=schedule._always_sends,
            )
            other.restore(schedule.state())
            schedule = other
            continue
        open_steps += event == "step"
        boundary = schedule.step() if event == "step" else schedule.drain()
        if boundary is None:
            continue
        if boundary.arriving_round is not None:
            merged.append(boundary.arriving_round)
        if boundary.launched_round is not None:
            launched.append(boundary.launched_round)
            steps_sent, open_steps = steps_sent + open_steps, 0
        if boundary.wait_for_launched:
            merged.append(boundary.launched_round)
        assert len(launched) - len(merged) in {0, 1}
        if event == "drain":
            assert launched == merged
    assert launched == list(range(len(launched)))
    assert merged == launched[: len(merged)]
    assert steps_sent + schedule.steps_in_round == schedule.total_steps == history.count("step")


@given(schedules, st.integers(0, 40))
def test_drain_after_any_number_of_steps_leaves_nothing_and_a_second_does_nothing(schedule, steps):
    for _ in range(steps):
        schedule.step()
    schedule.drain()
    assert schedule.in_flight_round is None
    assert schedule.steps_in_round == 0
    assert schedule.drain() is None


def test_delayed_schedule_by_hand():
    schedule = RoundSchedule(tau=2, delayed=True)
    seen = [schedule.step() for _ in range(6)]
    assert [b is None for b in seen] == [True, False] * 3
    assert [(b.arriving_round, b.launched_round, b.wait_for_launched) for b in seen if b] == [
        (None, 0, False),
        (0, 1, False),
        (1, 2, False),
    ]


def test_synchronous_bootstrap_by_hand():
    schedule = RoundSchedule(tau=1, delayed=True, first_round_synchronous=True)
    seen = [schedule.step() for _ in range(4)]
    assert [(b.arriving_round, b.launched_round, b.wait_for_launched) for b in seen] == [
        (None, 0, True),
        (None, 1, False),
        (1, 2, False),
        (2, 3, False),
    ]
