"""The decisions of elastic training, without processes: pure, equal for all, never twice."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.optim._elastic_quorum import Ballot, decide

NAMES = [f"w{i}" for i in range(12)]


def member(name, *, turn=5, slot=0, arrived=True, history="r", capacity=8, **more):
    own = {"turn": turn, "slot": slot, "arrived": arrived, "history": history}
    return Ballot(worker=name, capacity=capacity, **own, **more)


def joiner(name, *, capacity=8, **more):
    return Ballot(worker=name, history=f"start-{name}", capacity=capacity, **more)


@st.composite
def quorums(draw):
    """Any mix of members at some turns (slots unique within a turn) and joiners."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=10, unique=True))
    capacity = draw(st.integers(1, 12))
    ballots, slots = [], {}
    for name in names:
        turn = draw(st.sampled_from([-1, 3, 4, 5]))
        free = [s for s in range(capacity) if s not in slots.get(turn, set())]
        if turn == -1 or not free:
            steps = draw(st.integers(0, 3))
            settings_ = draw(st.sampled_from(["same", "same", "other"]))
            ballots.append(joiner(name, capacity=capacity, steps=steps, settings=settings_))
            continue
        slot = draw(st.sampled_from(free))
        slots.setdefault(turn, set()).add(slot)
        arrived = draw(st.booleans())
        ballots.append(
            member(name, turn=turn, slot=slot, arrived=arrived, capacity=capacity, settings="same")
        )
    return ballots


@given(quorums(), st.randoms(use_true_random=False))
def test_order_does_not_matter(ballots, rng):
    shuffled = ballots[:]
    rng.shuffle(shuffled)
    assert decide(ballots) == decide(shuffled)


@given(quorums())
def test_every_worker_has_exactly_one_place(ballots):
    decision = decide(ballots)
    places = [
        *(m.worker for m in decision.members),
        *decision.refused,
        *decision.left_behind,
    ]
    assert sorted(places) == sorted(b.worker for b in ballots)
    slots = [m.slot for m in decision.members]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < ballots[0].capacity for slot in slots)


@given(quorums())
def test_members_keep_their_slots_and_newcomers_have_a_source_with_the_state(ballots):
    decision = decide(ballots)
    by_name = {b.worker: b for b in ballots}
    seats = {m.worker: m.slot for m in decision.members}
    for name, slot in seats.items():
        if not by_name[name].joining:
            assert slot == by_name[name].slot
    for name, (source, _) in decision.sources.items():
        assert by_name[name].joining
        assert source in seats
        assert source not in decision.sources
    have = [name for name in seats if name not in decision.sources]
    if decision.turn == -1:
        assert len(have) == 1  # one state for all at the start
    else:
        assert all(by_name[name].turn == decision.turn for name in have)


@given(quorums())
def test_an_all_reduce_counts_only_with_every_vote_of_those_who_go_on(ballots):
    decision = decide(ballots)
    votes = [b.arrived for b in ballots if not b.joining and b.turn == decision.turn]
    assert decision.committed == (bool(votes) and all(votes))


def test_a_dead_workers_vote_is_not_needed():
    # Workers 0, 1, 2 flew; 2 died after its part had been added. Its work counts, once.
    decision = decide([member("a", slot=0), member("b", slot=1)])
    assert decision.committed
    assert [m.slot for m in decision.members] == [0, 1]


def test_one_no_is_a_no_for_all():
    decision = decide([member("a", slot=0), member("b", slot=1, arrived=False)])
    assert not decision.committed
    assert [m.worker for m in decision.members] == ["a", "b"]


def test_a_newcomer_gets_the_lowest_free_slot_and_sources_are_spread():
    ballots = [member("a", slot=0), member("c", slot=2), joiner("x"), joiner("y"), joiner("z")]
    decision = decide(ballots)
    assert {m.worker: m.slot for m in decision.members} == {"a": 0, "c": 2, "x": 1, "y": 3, "z": 4}
    assert {k: v[0] for k, v in decision.sources.items()} == {"x": "a", "y": "c", "z": "a"}
    assert decision.copiers_from("a") == ["x", "z"]


def test_the_start_takes_the_state_of_the_most_advanced_checkpoint():
    decision = decide([joiner("a", steps=10), joiner("b", steps=40), joiner("c", steps=40)])
    assert decision.turn == -1
    assert decision.sources == {"a": ("b", ""), "c": ("b", "")}


def test_no_job_starts_without_a_worker_that_any_voter_has_heard_of():
    """All read the same list: none may go on while another votes again."""
    heard = [joiner("a", alive=["a", "b"]), joiner("b", alive=["c", "b", "a"])]
    assert decide(heard).silent == ("c",)
    assert decide([*heard, joiner("c", settings="other")]).silent == ()
    assert decide([*heard, member("d")]).silent == ()  # a job is under way


def test_a_second_start_of_the_job_loses_against_the_first():
    # Two joiners that met nobody started afresh while the others were silent for long.
    old = [member("a", turn=57, slot=0, history="a")]
    fresh = [member("x", turn=2, slot=0, history="x"), member("y", turn=2, slot=1, history="x")]
    decision = decide([*old, *fresh])
    assert decision.left_behind == ("x", "y")
    assert [m.worker for m in decision.members] == ["a"]
    same_turn = decide([dataclasses.replace(old[0], turn=2), *fresh])
    assert same_turn.left_behind == ("a",)  # a rule that all apply alike, no more


@pytest.mark.parametrize(
    ("applicant", "reason"),
    [
        (joiner("x", capacity=4), "the job has max_workers=2, this worker max_workers=4"),
        (joiner("x", capacity=2, settings="o"), "the job has another model, rule or version"),
        (joiner("x", capacity=2), "all 2 slots are taken"),
    ],
)
def test_a_worker_that_does_not_fit_is_told_why(applicant, reason):
    ballots = [member("a", slot=0, capacity=2), member("b", slot=1, capacity=2), applicant]
    decision = decide(ballots)
    assert decision.refused["x"].startswith(reason)
    assert [m.worker for m in decision.members] == ["a", "b"]


# -- many rounds with deaths, joins and silences: a lighthouse and workers in one process ---------


class Worker:
    def __init__(self, name):
        self.name = name
        self.attempts = 0
        self.applied = []  # (history, frozenset of the all-reduce's members)
        self.leave()

    def leave(self):
        self.attempts += 1
        self.turn, self.slot, self.history = -1, -1, f"{self.name}/{self.attempts}"

    def ballot(self, arrived):
        return Ballot(
            worker=self.name,
            turn=self.turn,
            slot=self.slot,
            history=self.history,
            arrived=arrived,
            capacity=16,
        )


@given(st.integers(0, 2**32 - 1))
def test_random_histories_apply_every_all_reduce_on_all_or_on_none(seed):
    rng = random.Random(seed)  # noqa: S311 - a seeded history, no secret
    alive = [Worker(f"w{i}") for i in range(rng.randint(1, 4))]
    born = len(alive)
    all_reduce = frozenset()
    for _ in range(25):
        failed = bool(all_reduce) and rng.random() < 0.3
        # Someone may end, and someone may stay silent in this quorum; a majority speaks.
        if len(alive) > 1 and rng.random() < 0.2:
            alive.remove(rng.choice(alive))
            failed = failed or rng.random() < 0.5
        silent = [w for w in alive if rng.random() < 0.1]
        while 2 * len(silent) >= len(alive):
            silent.pop()
        speakers = [w for w in alive if w not in silent]
        # A failed all-reduce may have arrived at some and not at others.
        arrived = {w: not failed or rng.random() < 0.5 for w in speakers}
        decision = decide([w.ballot(arrived[w]) for w in speakers])
        by_name = {w.name: w for w in speakers}
        for name in decision.left_behind:
            by_name[name].leave()
        voters = [by_name[m.worker] for m in decision.members if m.worker not in decision.sources]
        if decision.committed:
            for worker in voters:
                assert arrived[worker]
                worker.applied.append((decision.history, all_reduce))
        for name, (source, _) in decision.sources.items():
            by_name[name].applied = list(by_name[source].applied)  # the state from a peer
        histories = {tuple(by_name[m.worker].applied) for m in decision.members}
        assert len(histories) == 1
        (history,) = histories
        assert len(set(history)) == len(history), "an all-reduce was applied twice"
        for m in decision.members:
            worker = by_name[m.worker]
            worker.turn, worker.slot = decision.turn + 1, m.slot
            worker.history = decision.history
        all_reduce = frozenset(m.worker for m in decision.members)
        if rng.random() < 0.3:
            alive.append(Worker(f"w{born}"))
            born += 1
