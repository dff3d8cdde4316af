"""What one quorum means: who goes on, who joins, whether the last all-reduce counts.

The lighthouse hands the same list of ballots to everybody who voted, and :func:`decide` is a pure
function of it, so all decide alike. An all-reduce counts only when every member that is still there
says that the sums arrived; nobody applies a sum before that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

JOINING = -1


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """Message of a worker to the lighthouse, to be read by all workers."""

    worker: str  # unique name of the process
    # Number of the all-reduce that is voted on; -1 for a worker that wants to join.
    turn: int = JOINING
    # Digest of all decisions so far; while joining a name never used before, for the case that
    # this worker starts a job.
    history: str
    slot: int = JOINING  # the worker's slot; -1 while joining
    arrived: bool = False  # whether the sums of the all-reduce arrived here
    # Local steps behind the state that the worker has, from a checkpoint for example.
    steps: int = 0
    capacity: int  # number of slots that the worker was started with
    settings: str = ""  # fingerprint of model, rule and software; equal on all
    store: str = ""  # host:port of the worker's key-value store
    state: str = ""  # address of the worker's state server
    members: Sequence[str] = ()  # workers of the all-reduce that is voted on
    gone: Sequence[str] = ()  # those of them that this worker knows to have ended
    alive: Sequence[str] = ()  # while joining: all workers that the lighthouse has heard of late

    @property
    def joining(self) -> bool:
        """Return whether the worker has no part in the job yet."""
        return self.turn == JOINING


@dataclass(frozen=True, kw_only=True)
class Member:
    """One worker of the next all-reduce."""

    worker: str  # its name
    slot: int  # its slot, for as long as it stays
    store: str  # host:port of its key-value store


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Next step of all workers that read the same ballots."""

    turn: int  # number of the all-reduce that was voted on; -1 at the start of a job
    history: str  # digest of this decision and all before it
    committed: bool  # whether that all-reduce counts
    members: tuple[Member, ...]  # workers of the next all-reduce, by slot
    # For each worker that joins: name and state address of the worker to copy from.
    sources: dict[str, tuple[str, str]]
    refused: dict[str, str]  # for each worker that cannot join: the reason
    left_behind: tuple[str, ...]  # workers that the others went on without; they have to join again
    # Workers of the last all-reduce that did not vote, and that some voter does not know to have
    # ended. While there are any the decision does not stand: all vote again. A lighthouse that
    # was started again has heard of some workers and not yet of others.
    missing: tuple[str, ...] = ()
    # At the start of a job: workers that are alive but did not vote. One of them may have a job's
    # state, and newcomers alone must not start a second job while it is only slow: all vote again.
    silent: tuple[str, ...] = ()

    def copiers_from(self, worker: str) -> list[str]:
        """Return the workers that copy their state from this one."""
        return [name for name, (source, _) in self.sources.items() if source == worker]


def decide(ballots: Sequence[Ballot]) -> Decision:
    """Read the ballots of one quorum; where nobody is a member the job starts."""
    # Members are the ballots with the highest turn and the same history. A lower turn means that
    # the others went on while this worker was silent. Another history at the same turn means that
    # two parts of the job went on without each other; one, which all see alike, prevails.
    voters = [ballot for ballot in ballots if not ballot.joining]
    applicants = sorted((b for b in ballots if b.joining), key=lambda b: b.worker)
    if not voters:
        return _start(applicants)
    turn, history = max((ballot.turn, ballot.history) for ballot in voters)
    current = sorted(
        (ballot for ballot in voters if (ballot.turn, ballot.history) == (turn, history)),
        key=lambda ballot: ballot.slot,
    )
    accepted, refused = _screen(applicants, like=current[0], taken=len(current))
    names = {ballot.worker for ballot in current}
    here = {ballot.worker for ballot in ballots}
    known = set.intersection(*(set(ballot.gone) for ballot in current))
    missing = {name for ballot in current for name in ballot.members} - here - known
    committed = all(ballot.arrived for ballot in current)
    members = _seat(current, accepted)
    return Decision(
        turn=turn,
        history=_extend(history, turn, committed, members),
        committed=committed,
        members=members,
        sources=_sources(accepted, current),
        refused=refused,
        left_behind=tuple(sorted(b.worker for b in voters if b.worker not in names)),
        missing=tuple(sorted(missing)),
    )


def _start(applicants: Sequence[Ballot]) -> Decision:
    source = min(applicants, key=lambda ballot: (-ballot.steps, ballot.worker))
    rest = [ballot for ballot in applicants if ballot is not source]
    accepted, refused = _screen(rest, like=source, taken=1)
    alive = {name for ballot in applicants for name in ballot.alive}
    members = _seat([], [source, *accepted])
    return Decision(
        turn=JOINING,
        history=_extend(source.history, JOINING, False, members),
        committed=False,
        members=members,
        sources=_sources(accepted, [source]),
        refused=refused,
        left_behind=(),
        silent=tuple(sorted(alive - {ballot.worker for ballot in applicants})),
    )


def _extend(history: str, *events: object) -> str:
    """Return the digest of a history and what happened then."""
    text = repr((history, *events))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _screen(
    applicants: Sequence[Ballot], *, like: Ballot, taken: int
) -> tuple[list[Ballot], dict[str, str]]:
    """Split applicants into those that fit the job and those that do not."""
    accepted: list[Ballot] = []
    refused: dict[str, str] = {}
    for ballot in applicants:
        if ballot.capacity != like.capacity:
            here = f"the job has max_workers={like.capacity}"
            refused[ballot.worker] = f"{here}, this worker max_workers={ballot.capacity}"
        elif ballot.settings != like.settings:
            refused[ballot.worker] = "the job has another model, rule or version of fivefold"
        elif taken + len(accepted) >= like.capacity:
            refused[ballot.worker] = f"all {like.capacity} slots are taken"
        else:
            accepted.append(ballot)
    return accepted, refused


def _seat(current: Sequence[Ballot], newcomers: Sequence[Ballot]) -> tuple[Member, ...]:
    """Seat newcomers in the lowest free slots; members keep theirs."""
    seats = {ballot.slot: ballot for ballot in current}
    slot = 0
    for ballot in newcomers:
        while slot in seats:
            slot += 1
        seats[slot] = ballot
    return tuple(
        Member(worker=ballot.worker, slot=slot, store=ballot.store)
        for slot, ballot in sorted(seats.items())
    )


def _sources(newcomers: Sequence[Ballot], have: Sequence[Ballot]) -> dict[str, tuple[str, str]]:
    """Spread the newcomers over the workers that have the state."""
    return {
        ballot.worker: (have[i % len(have)].worker, have[i % len(have)].state)
        for i, ballot in enumerate(newcomers)
    }
