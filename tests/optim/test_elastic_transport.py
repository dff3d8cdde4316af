"""The elastic transport over real processes, kills and joins, under a miniature engine.

The miniature applies plain sums of whole numbers, so every applied piece of work can be counted:
a worker's work of one round adds one to the worker's own counter.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

os.environ.setdefault("RUST_LOG", "error")  # read when torchft is loaded
pytest.importorskip("torchft", reason="torchft is not installed (fivefold[elastic])")

from fivefold.errors import CommunicationError, ConfigurationError, UnsupportedError
from fivefold.optim import _elastic_services
from fivefold.optim._elastic import LeftBehindError, elastic_transport
from helpers.elastic_world import World, again_after_a_crash

pytestmark = pytest.mark.distributed

NAMES = "abcdefgh"
SLOTS = 8
# Of an all-reduce, where a busy machine must not cost a round; others wait for its vote for longer.
UNHURRIED_S = 20.0
UNHURRIED = {"timeout_s": UNHURRIED_S, "quorum_timeout_s": 2 * UNHURRIED_S}


class Miniature:
    """One-round-late sums: the smallest engine with an all-reduce in the air at every boundary."""

    def __init__(self, transport, name, *, rounds, delayed=True, stops_before=None):
        self.transport, self.me, self.delayed = transport, NAMES.index(name), delayed
        self.stops_before = stops_before
        self.anchor = torch.zeros(len(NAMES), dtype=torch.float64)
        self.work = torch.zeros_like(self.anchor)
        self.payload = torch.zeros_like(self.anchor)
        self.sent = torch.zeros_like(self.anchor)
        self.metadata = torch.zeros(SLOTS, dtype=torch.float64)
        self.round, self.all_reduce, self.lost = 0, None, 0
        transport.gather_objects({"rounds": rounds})

    def local_round(self):
        self.work[self.me] += 1
        self.boundary()

    def boundary(self):
        if self.all_reduce is not None:
            self.merge()
        self.round += 1
        self.sent.copy_(self.work)
        self.payload.copy_(self.work)
        self.work.zero_()
        self.launch(weight=1.0)
        if not self.delayed:
            self.merge()

    def launch(self, *, weight):
        if self.stops_before and self.round >= self.stops_before:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.metadata.zero_()
        self.metadata[self.transport.rank] = weight
        what = f"the sum of round {self.round}"
        self.all_reduce = self.transport.launch(
            [self.payload], metadata=self.metadata, fragment=0, what=what
        )

    def merge(self):
        all_reduce, self.all_reduce = self.all_reduce, None
        if all_reduce.wait():
            self.anchor.add_(self.payload)
            self.weights = self.metadata.tolist()
        else:
            self.work.add_(self.sent)
            self.lost += 1
        self.sent.zero_()

    def peer_state(self):
        return {"anchor": self.anchor, "round": self.round}

    def load_peer_state(self, state):
        self.anchor.copy_(state["anchor"])
        self.round = state["round"]
        self.work.zero_()
        if self.round:
            self.payload.zero_()
            self.sent.zero_()
            self.launch(weight=0.0)
            if not self.delayed:  # the others wait for this launch where they made it
                self.merge()

    def finish(self):
        """Apply what is in the air or was lost; every worker does the same number of turns."""
        for _ in range(3):
            self.boundary()
        if self.all_reduce is not None:
            self.merge()


def train(
    log,
    *,
    lighthouse,
    name,
    rounds=10_000,
    round_s=0.05,
    delayed=True,
    stops_before=None,
    **options,
):
    options = {"timeout_s": 4.0, "quorum_timeout_s": 20.0, "max_workers": SLOTS, **options}
    transport = elastic_transport(lighthouse=lighthouse, **options)
    mini = Miniature(transport, name, rounds=rounds, delayed=delayed, stops_before=stops_before)
    started_s = time.monotonic()
    transport.join(mini)
    log("joined", slot=transport.rank, round=mini.round, took_s=time.monotonic() - started_s)
    done = 0
    while mini.round < rounds:
        time.sleep(round_s)
        try:
            mini.local_round()
            done += 1
        except LeftBehindError as error:
            log("left_behind", message=str(error))
            transport.join(mini)
            log("joined", slot=transport.rank, round=mini.round)
        log("round", round=mini.round, done=done, anchor=mini.anchor.tolist(), lost=mini.lost)
    mini.finish()
    log("end", anchor=mini.anchor.tolist(), done=done, lost=mini.lost, weights=mini.weights)
    transport.close()


def anchors_by_round(world, name):
    return {e["round"]: e["anchor"] for e in world.log(name, "round")}


def require_equal_anchors(world, *names):
    """At every round that two workers saw, their anchors are equal bit for bit."""
    first, *rest = [anchors_by_round(world, name) for name in names]
    for other in rest:
        common = first.keys() & other.keys()
        assert common
        assert {r: first[r] for r in common} == {r: other[r] for r in common}


def end_of(world, name):
    (end,) = world.log(name, "end")
    return end


def require_all_work_of(world, *names):
    """Every round of work that these workers did is in the anchor once, and anchors are equal."""
    ends = [end_of(world, name) for name in names]
    for end in ends:
        assert end["anchor"] == ends[0]["anchor"]
        for name, other in zip(names, ends, strict=True):
            assert end["anchor"][NAMES.index(name)] == other["done"], "work was lost or came twice"


def test_three_workers_apply_all_their_work(tmp_path):
    with World(tmp_path, min_workers=3) as world:
        for name in "abc":
            world.start(name, train, rounds=8, timeout_s=UNHURRIED_S)
        world.join(*"abc", timeout_s=60)
        require_equal_anchors(world, *"abc")
        for name in "abc":
            end = end_of(world, name)
            assert end["anchor"] == [8, 8, 8, 0, 0, 0, 0, 0]
            assert end["lost"] == 0
            assert end["weights"] == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.alone
@pytest.mark.parametrize("delayed", [True, False])
@again_after_a_crash
def test_a_killed_worker_costs_the_others_nothing(tmp_path, delayed):
    with World(tmp_path, min_workers=2) as world:
        for name in "abc":
            world.start(name, train, rounds=60, delayed=delayed)
        world.until_rounds("c", 5)
        world.kill("c")
        killed_s = time.monotonic()
        seen = len(world.log("a", "round"))
        world.until_rounds("a", seen + 3)
        assert time.monotonic() - killed_s < 4 + 1 + 2  # all-reduce, heartbeat, slack
        world.join("a", "b")
        require_equal_anchors(world, "a", "b")
        require_all_work_of(world, "a", "b")
        done = world.log("c", "round")[-1]["done"]
        assert 1 <= end_of(world, "a")["anchor"][2] <= done + 1


@pytest.mark.parametrize("delayed", [True, False])
def test_a_newcomer_stands_where_the_others_stand(tmp_path, delayed):
    options = {"rounds": 40, "delayed": delayed, "timeout_s": UNHURRIED_S}
    with World(tmp_path, min_workers=2) as world:
        for name in "ab":
            world.start(name, train, **options)
        world.until_rounds("a", 5)
        world.start("c", train, **options)
        world.join(*"abc", timeout_s=60)
        require_equal_anchors(world, *"abc")
        (joined,) = world.log("c", "joined")
        assert joined["slot"] == 2
        assert joined["round"] >= 5
        require_all_work_of(world, *"abc")
        assert end_of(world, "c")["done"] == 40 - joined["round"]
        assert sum(end_of(world, name)["lost"] for name in "abc") == 0


@again_after_a_crash
def test_kill_and_rejoin_takes_the_free_slot(tmp_path):
    with World(tmp_path, min_workers=2) as world:
        for name in "abc":
            world.start(name, train, rounds=50)
        world.until_rounds("b", 4)
        victim_slot = world.log("b", "joined")[0]["slot"]
        world.kill("b")
        seen = len(world.log("a", "round"))
        world.until_rounds("a", seen + 4)
        world.start("d", train, rounds=50)
        world.join("a", "c", "d")
        assert world.log("d", "joined")[0]["slot"] == victim_slot
        require_equal_anchors(world, "a", "c", "d")
        require_all_work_of(world, "a", "c", "d")


def test_two_newcomers_at_once(tmp_path):
    with World(tmp_path, min_workers=2) as world:
        for name in "ab":
            world.start(name, train, rounds=24, round_s=0.15)
        world.until_rounds("a", 3)
        world.start("c", train, rounds=24, round_s=0.15)
        world.start("d", train, rounds=24, round_s=0.15)
        world.join(*"abcd")
        require_equal_anchors(world, *"abcd")
        assert sorted(world.log(n, "joined")[0]["slot"] for n in "abcd") == [0, 1, 2, 3]
        require_all_work_of(world, *"abcd")


def test_newcomers_start_no_second_job_while_a_worker_is_only_slow(tmp_path):
    """Two newcomers outnumber the one worker, which is in a long round: they wait for it."""
    with World(tmp_path, min_workers=1, join_timeout_s=0.5) as world:
        world.start("b", train, rounds=4, round_s=1.5, timeout_s=10.0)
        world.until_rounds("b", 1)
        world.start("c", train, rounds=4, round_s=1.5, timeout_s=10.0)
        world.start("d", train, rounds=4, round_s=1.5, timeout_s=10.0)
        world.join(*"bcd", timeout_s=35)
        assert world.log("c", "joined")[0]["round"] >= 1
        assert world.log("d", "joined")[0]["round"] >= 1
        require_all_work_of(world, *"bcd")


class DiesOnLoad(Miniature):
    def load_peer_state(self, _):
        os.kill(os.getpid(), signal.SIGKILL)


def die_while_recovering(log, *, lighthouse, name):
    transport = elastic_transport(lighthouse=lighthouse, max_workers=SLOTS, timeout_s=4.0)
    log("joining")
    transport.join(DiesOnLoad(transport, name, rounds=30))


def test_a_newcomer_that_dies_while_it_recovers(tmp_path):
    with World(tmp_path, min_workers=2) as world:
        for name in "ab":
            world.start(name, train, rounds=30)
        world.until_rounds("a", 4)
        world.start("c", die_while_recovering)
        world.processes["c"].join(10)
        assert world.processes["c"].exitcode == -9
        world.join("a", "b")
        require_equal_anchors(world, "a", "b")
        require_all_work_of(world, "a", "b")
        assert end_of(world, "a")["anchor"][2] == 0


@again_after_a_crash
def test_the_source_of_a_newcomer_dies(tmp_path):
    """The newcomer has been promised a state, and its source ends before the next launch."""
    with World(tmp_path, min_workers=2) as world:
        for name in "abc":
            world.start(name, train, rounds=12, round_s=0.5)
        world.until_rounds("a", 3)
        slot_zero = next(n for n in "abc" if world.log(n, "joined")[0]["slot"] == 0)
        world.start("d", train, rounds=12, round_s=0.5)
        time.sleep(0.35)  # into a round: the all-reduce has landed and the vote is over, or nearly
        world.kill(slot_zero)
        rest = sorted(set("abcd") - {slot_zero})
        world.join(*rest, timeout_s=35)
        require_equal_anchors(world, *rest)
        require_all_work_of(world, *rest)


@again_after_a_crash
def test_the_last_worker_goes_on_alone_where_that_is_allowed(tmp_path):
    with World(tmp_path, min_workers=1) as world:
        for name in "ab":
            world.start(name, train, rounds=20)
        world.until_rounds("a", 4)
        world.until_rounds("b", 4)
        world.kill("b")
        world.join("a")
        end = end_of(world, "a")
        assert end["anchor"][0] == end["done"]


@again_after_a_crash
def test_too_few_workers_are_an_error_that_names_worker_and_round(tmp_path):
    with World(tmp_path, min_workers=2) as world:
        for name in "ab":
            world.start(name, train, quorum_timeout_s=3.0)
        world.until_rounds("a", 3)
        world.until_rounds("b", 3)
        world.kill("b")
        world.until(lambda: world.log("a", "error"), what="an error", timeout_s=15)
        (error,) = world.log("a", "error")
        assert error["type"] == "CommunicationError"
        assert "no quorum for the sum of round" in error["message"]
        assert "worker 127.0.0.1-" in error["message"]


@pytest.mark.slow
@again_after_a_crash
def test_a_silent_worker_is_left_behind_and_comes_back(tmp_path):
    """A stopped process beats no heart; the others go on, and it joins again when it wakes."""
    with World(tmp_path, min_workers=2, join_timeout_s=2.0) as world:
        for name in "abc":
            world.start(name, train, rounds=90, timeout_s=2.0)
        world.until_rounds("c", 4)
        world.kill("c", signal.SIGSTOP)
        seen = len(world.log("a", "round"))
        world.until_rounds("a", seen + 5)
        world.kill("c", signal.SIGCONT)
        world.until(lambda: len(world.log("c", "joined")) == 2, what="a second join")
        world.join(*"abc", timeout_s=35)
        (event,) = world.log("c", "left_behind")
        assert "the others went on after the sum of round" in event["message"]
        require_equal_anchors(world, "a", "b")
        require_all_work_of(world, "a", "b")
        end = end_of(world, "c")
        assert end["anchor"] == end_of(world, "a")["anchor"]
        assert end["anchor"][2] <= end["done"] + 2


def test_a_deadline_follows_what_arrived():
    deadline = _elastic_services.ArrivalDeadline(120.0)
    seen = []
    for took_s in (3.0, 2.0, 2.0, 2.0, 2.0):
        seen.append(deadline.seconds)
        deadline.arrived(took_s)
    assert seen == [120.0] * 5  # nothing is usual yet
    assert deadline.seconds == 24.0  # eight times the longest
    for _ in range(32):
        deadline.arrived(0.5)
    assert deadline.seconds == 10.0  # the 3 s are forgotten; no less than this
    waits = []
    for _ in range(6):
        waits.append(deadline.seconds)
        deadline.missed()
    assert waits == [10.0, 20.0, 40.0, 80.0, 120.0, 120.0]
    deadline.arrived(30.0)  # the link has become slow
    assert deadline.seconds == 120.0


@again_after_a_crash
def test_a_worker_that_vanished_is_noticed_long_before_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(_elastic_services, "_SHORTEST_DEADLINE_S", 1.5)
    with World(tmp_path, min_workers=2, join_timeout_s=2.0) as world:
        for name, stop in ("a", None), ("b", None), ("c", 8):  # the others have launched this sum
            world.start(name, train, rounds=30, timeout_s=100.0, stops_before=stop)
        world.join("a", "b", timeout_s=60)
        require_equal_anchors(world, "a", "b")
        require_all_work_of(world, "a", "b")
        assert end_of(world, "a")["lost"] >= 1
        world.kill("c", signal.SIGKILL)


def other_settings(_, *, lighthouse, name):
    transport = elastic_transport(lighthouse=lighthouse, max_workers=SLOTS, timeout_s=4.0)
    mini = Miniature(transport, name, rounds=7)
    transport.join(mini)


def test_a_worker_with_other_settings_is_told_so(tmp_path):
    with World(tmp_path, min_workers=2) as world:
        for name in "ab":
            world.start(name, train, rounds=30)
        world.until_rounds("a", 3)
        world.start("c", other_settings)
        world.join("a", "b")
        (error,) = world.log("c", "error")
        assert error["type"] == "ConfigurationError"
        assert "the job has another model, rule or version of fivefold" in error["message"]
        require_all_work_of(world, "a", "b")
        assert end_of(world, "a")["anchor"][2] == 0


def test_the_lighthouse_is_killed_and_another_takes_its_place(tmp_path):
    with World(tmp_path, min_workers=2) as world:
        for name in "ab":
            world.start(name, train, rounds=40, **UNHURRIED)
        world.until_rounds("a", 5)
        lost = world.log("a", "round")[-1]["lost"]
        world.kill_lighthouse()
        time.sleep(1.5)
        seen = len(world.log("a", "round"))
        time.sleep(0.5)
        assert len(world.log("a", "round")) == seen < 38  # they wait at a vote
        world.start_lighthouse(world.lighthouse)
        world.join("a", "b", timeout_s=60)
        require_equal_anchors(world, "a", "b")
        require_all_work_of(world, "a", "b")
        assert end_of(world, "a")["lost"] == lost


@again_after_a_crash
def test_a_new_lighthouse_leaves_no_healthy_worker_behind(tmp_path):
    """Its first two voters would be a quorum, but it has not heard of the third yet."""
    # On a busy machine a heart may miss a second.
    with World(tmp_path, min_workers=2, heartbeat_timeout_s=5.0) as world:
        for name in "abc":
            world.start(name, train, rounds=30, **UNHURRIED)
        world.until_rounds("a", 4)
        lost = world.log("a", "round")[-1]["lost"]
        world.kill_lighthouse()
        time.sleep(0.7)  # into the vote: before it, the others would wait for the third's sum
        world.kill("c", signal.SIGSTOP)  # so that the others are the first to be heard of
        world.start_lighthouse(world.lighthouse)
        time.sleep(1.5)
        world.kill("c", signal.SIGCONT)
        world.join("a", "b", "c", timeout_s=60)
        assert not world.log("c", "left_behind")
        require_equal_anchors(world, "a", "b", "c")
        require_all_work_of(world, "a", "b", "c")
        assert end_of(world, "a")["lost"] == lost


@again_after_a_crash
def test_a_new_lighthouse_waits_for_a_dead_worker_only_so_long(tmp_path, monkeypatch):
    monkeypatch.setattr(_elastic_services, "_RETURN_S", 2.0)
    with World(tmp_path, min_workers=2) as world:
        for name in "abc":
            world.start(name, train, rounds=12)
        world.until_rounds("a", 4)
        world.kill_lighthouse()
        world.kill("c")
        world.start_lighthouse(world.lighthouse)
        world.join("a", "b")
        require_equal_anchors(world, "a", "b")


def test_a_lighthouse_that_is_not_there():
    with pytest.raises(CommunicationError, match="no lighthouse answers"):
        elastic_transport(lighthouse="127.0.0.1:1", quorum_timeout_s=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lighthouse": "nowhere"}, "must be host:port"),
        ({"lighthouse": "h:1", "max_workers": 0}, "max_workers must be a whole number from 2"),
        ({"lighthouse": "h:1", "timeout_s": 0}, "timeout_s must be a number"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ConfigurationError, match=message):
        elastic_transport(**options)


def test_without_torchft(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    with pytest.raises(UnsupportedError, match="needs the package torchft"):
        elastic_transport(lighthouse="127.0.0.1:1")


SCENE = """
import os, signal
from pathlib import Path
from helpers.elastic_world import World, again_after_a_crash

def crash(*_, **__):
    os.kill(os.getpid(), signal.SIGSEGV)

@again_after_a_crash
def test_scene(tmp_path):
    played = Path(os.environ["PLAYED"])
    played.write_text(played.read_text() + "x")
    with World(tmp_path) as world:
        crashes = len(played.read_text()) <= int(os.environ["CRASHES"])
        world.start("a", crash if crashes else lambda *_, **__: None)
        world.join("a")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("crashes", [0, 1, 2])
def test_a_scene_in_which_gloo_crashed_is_played_once_more_and_no_third_time(
    tmp_path, monkeypatch, crashes
):
    scene, played = tmp_path / "test_scene.py", tmp_path / "played"
    scene.write_text(SCENE)
    played.write_text("")
    monkeypatch.setenv("PLAYED", str(played))
    monkeypatch.setenv("CRASHES", str(crashes))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(scene)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode == 0) == (crashes < 2), result.stdout[-3000:]
    assert played.read_text() == "x" * min(crashes + 1, 2)
