"""Random histories of the schedule: every launched round is merged exactly once, in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.optim._schedule import RoundSchedule


@st.composite
def settings_of_schedules(draw):
    """Constructor arguments of any schedule that a rule can ask for."""
    tau = draw(st.integers(1, 7))
    delayed = draw(st.booleans())
    return {
        "tau": tau,
        "delayed": delayed,
        "delay_steps": draw(st.none() | st.integers(1, tau)) if delayed else None,
        "first_round_steps": draw(st.none() | st.integers(1, tau)),
        "first_round_synchronous": draw(st.booleans()),
        "always_sends": draw(st.booleans()),
    }


events = st.sampled_from(["step", "step", "step", "drain", "reload"]) | st.integers(1, 9)
# Long from the start: of 50 examples without a least size half are empty.
histories = st.lists(events, min_size=30, max_size=120)


class Ledger:
    """What a schedule asked for, and the steps that were sent."""

    def __init__(self):
        self.launched, self.merged = [], []
        self.sent_steps = self.open_steps = 0

    def note(self, boundary):
        if boundary is None:
            return
        if boundary.arriving_round is not None:
            self.merged.append(boundary.arriving_round)
        if boundary.launched_round is not None:
            self.launched.append(boundary.launched_round)
            self.sent_steps, self.open_steps = self.sent_steps + self.open_steps, 0
        if boundary.wait_for_launched:
            self.merged.append(boundary.launched_round)
        assert len(self.launched) - len(self.merged) in {0, 1}


@given(settings_of_schedules(), histories)
def test_each_round_is_merged_once_in_order_and_no_step_is_lost(arguments, history):
    """Steps, drains, changes of tau, and resumes into a fresh schedule, in any order."""
    schedule, ledger = RoundSchedule(**arguments), Ledger()
    for event in history:
        if event == "reload":
            state = schedule.state()
            schedule = RoundSchedule(**arguments)
            schedule.restore(state)
            assert schedule.state() == state
        elif isinstance(event, int):
            delay = arguments["delay_steps"]
            schedule.retune(event, delay_steps=delay and min(delay, event))
        elif event == "drain":
            ledger.note(schedule.drain())
            assert ledger.launched == ledger.merged
            assert schedule.open_steps == 0
            assert schedule.drain() is None
        else:
            ledger.open_steps += 1
            ledger.note(schedule.step())
        assert schedule.open_steps == ledger.open_steps
    assert ledger.launched == list(range(len(ledger.launched)))
    assert ledger.merged == ledger.launched[: len(ledger.merged)]
    assert ledger.sent_steps + ledger.open_steps == schedule.total_steps == history.count("step")


@given(settings_of_schedules(), st.integers(0, 40), st.integers(0, 40))
def test_after_a_drain_all_begins_as_at_the_start(arguments, before, after):
    """What is asked for after a drain is what a fresh schedule asks for, but for the numbers."""

    def asked(schedule, steps):
        seen = []
        for _ in range(steps):
            boundary = schedule.step()
            seen.append(
                boundary
                and (
                    boundary.arriving_round is not None,
                    boundary.launched_round is not None,
                    boundary.wait_for_launched,
                )
            )
        return seen

    schedule = RoundSchedule(**arguments)
    asked(schedule, before)
    schedule.drain()
    assert asked(schedule, after) == asked(RoundSchedule(**arguments), after)


@given(settings_of_schedules(), st.integers(1, 60))
def test_a_round_arrives_after_its_delay_or_a_whole_round_later(arguments, steps):
    schedule = RoundSchedule(**arguments)
    delay = arguments["delay_steps"] or arguments["tau"]
    launched_at = None
    for number in range(1, steps + 1):
        boundary = schedule.step()
        if boundary is None:
            continue
        if boundary.arriving_round is not None:
            assert number - launched_at == delay
        launched_at = number if boundary.launched_round is not None else launched_at


@given(settings_of_schedules())
def test_first_round_is_as_long_as_asked_and_the_others_are_whole(arguments):
    schedule = RoundSchedule(**arguments)
    launches = []
    for number in range(1, 40):
        boundary = schedule.step()
        if boundary is not None and boundary.launched_round is not None:
            launches.append(number)
    first = arguments["first_round_steps"] or arguments["tau"]
    assert launches == list(range(first, 40, arguments["tau"]))


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


def test_a_resumed_schedule_does_not_begin_with_a_synchronous_round_again():
    arguments = {"tau": 2, "delayed": True, "first_round_synchronous": True}
    schedule, resumed = RoundSchedule(**arguments), RoundSchedule(**arguments)
    assert [schedule.step(), schedule.step()][1].wait_for_launched
    resumed.restore(schedule.state())
    for _ in range(4):
        assert resumed.step() == schedule.step()
        assert resumed.state() == schedule.state()
    assert schedule.in_flight_round == 2


@given(
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 30), st.integers(0, 1)
)
def test_fragments_still_take_turns_evenly_when_tau_changes(number, before, after, when, drained):
    """One launch each ``delay`` steps, whatever the delay was before."""
    parts = [
        RoundSchedule(
            tau=number * before, delayed=True, delay_steps=before,
            first_round_steps=before * (index + 1),
        )
        for index in range(number)
    ]  # fmt: skip
    for _ in range(before * when):  # a moment at which a fragment is launched
        for part in parts:
            part.step()
    for part in parts:
        part.retune(number * after, delay_steps=after)
        if drained:
            part.drain()
    launches = []
    for step in range(1, 4 * number * after + 1):
        for part in parts:
            boundary = part.step()
            if boundary is not None and boundary.launched_round is not None:
                launches.append(step)
    assert launches == [after * (index + 1) for index in range(len(launches))]
    assert len(launches) == 4 * number


@given(st.integers(2, 64), st.booleans())
def test_a_round_ends_also_while_tau_grows_at_every_step(tau, delayed):
    schedule = RoundSchedule(tau=tau, delayed=delayed)
    for more in range(1, 2 * tau + 1):
        if schedule.step() is not None:
            return
        schedule.retune(tau + more, delay_steps=None)
    pytest.fail("no round ended")
