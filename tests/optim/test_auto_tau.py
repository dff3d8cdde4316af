"""tau="auto" against closed forms and a simulated cluster with a virtual clock."""

import itertools
import json
import math
import random
import statistics
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.optim.auto_tau import AutoTau, TauController, TauDecision, named_auto_tau
from helpers.night import by_day


@dataclass
class Cluster:
    """Ranks that launch, compute and wait on a virtual clock; one controller per rank.

    Communication starts when the last rank has launched. Where the two share cores, a second of
    all-reduce beside compute moves compute by 1 - compute_loss only, and the other way round.
    An all-reduce that lands at a boundary is told in the metadata launched there, which arrives one
    boundary later: the delay that the engine has.
    """

    settings: AutoTau
    steps_s: list[float]
    link_s: object  # round -> seconds of one undisturbed all-reduce
    noise: float = 0.0
    seed: int = 0
    compute_loss: float = 0.0
    all_reduce_loss: float = 0.0
    taus: list[int] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    round_s: list[list[float]] = field(default_factory=list)

    def __post_init__(self):
        self.controllers = [TauController(self.settings, len(self.steps_s)) for _ in self.steps_s]
        self.random = random.Random(self.seed)  # noqa: S311 - noise
        self.clock_s = [0.0 for _ in self.steps_s]
        self.metadata = None

    @property
    def tau(self):
        return self.controllers[0].tau

    @property
    def decisions(self):
        return self.controllers[0].decisions

    def noisy(self, value):
        return value * self.random.uniform(1 - self.noise, 1 + self.noise)

    def run(self, rounds):
        for _ in range(rounds):
            self.run_round()
        return self

    def run_round(self):
        number = len(self.taus)
        local = [c.local_tau(rank) for rank, c in enumerate(self.controllers)]
        self.taus.append(self.tau)
        launched = list(self.clock_s)
        start_s = max(launched)
        alone = [self.noisy(n * s) for n, s in zip(local, self.steps_s, strict=True)]
        landed_s = start_s + self.all_reduce(
            max(b + c for b, c in zip(launched, alone, strict=True)) - start_s, number
        )
        ready = []
        for begin_s, compute_s in zip(launched, alone, strict=True):
            # Compute that stands beside the all-reduce is slowed down by it.
            beside_s = max(0.0, min(landed_s - start_s, compute_s / (1 - self.compute_loss)))
            ready.append(begin_s + compute_s + beside_s * self.compute_loss)
        self.exposed_s.append(max(0.0, landed_s - max(ready)))
        self.round_s.append([r - b for r, b in zip(ready, launched, strict=True)])
        self.clock_s = [max(r, landed_s) for r in ready]
        steps = [(r - b) / n for r, b, n in zip(ready, launched, local, strict=True)]
        all_reduces = [landed_s - b for b in launched]
        if self.metadata is not None:
            for controller in self.controllers:
                controller.observe(*self.metadata, round_number=number)
        self.metadata = (steps, all_reduces)

    def all_reduce(self, room_s, number):
        work_s = self.noisy(self.link_s(number))
        beside_s = max(room_s, 0.0) / (1 - self.compute_loss)
        if work_s <= beside_s * (1 - self.all_reduce_loss):
            return work_s / (1 - self.all_reduce_loss)
        return beside_s + work_s - beside_s * (1 - self.all_reduce_loss)


def steady(ratio, **settings):
    return Cluster(AutoTau(**settings), [0.1, 0.1], lambda _: 0.1 * ratio)


def changes(taus):
    return sum(a != b for a, b in itertools.pairwise(taus))


def returns(taus):
    """How often tau went up after its last change had been down."""
    moves = [b - a for a, b in itertools.pairwise(taus) if a != b]
    return sum(a < 0 < b for a, b in itertools.pairwise(moves))


# -- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("knee", [1, 2, 3, 6, 7, 8, 12, 48, 96])
@pytest.mark.parametrize("step_s", [0.1, 0.2, 0.3, 0.7])
@pytest.mark.parametrize("initial", [1, 8, 512])
def test_without_margin_tau_is_the_knee_of_the_overlap_law(knee, step_s, initial):
    cluster = Cluster(AutoTau(initial=initial, margin=1.0), [step_s], lambda _: knee * step_s)
    cluster.run(40)
    # The virtual clock adds up seconds and rounds; at the knee itself one more step is right too.
    assert cluster.tau in {knee, knee + 1}
    controller = TauController(AutoTau(initial=initial, margin=1.0), 1)
    for number in range(40):
        controller.observe([step_s], [knee * step_s], round_number=number)
    assert controller.tau == knee


@pytest.mark.parametrize(("ratio", "tau"), [(0.01, 1), (0.9, 1), (0.92, 2), (7.2, 8), (10.1, 12)])
def test_the_margin_is_kept(ratio, tau):
    assert steady(ratio).run(60).tau == tau == math.ceil(1.1 * ratio)


def test_bounds_hold():
    assert steady(500, maximum=64).run(40).tau == 64
    assert steady(0.01, minimum=4).run(40).tau == 4


def test_by_hand_up_at_once_and_down_with_patience():
    controller = TauController(AutoTau(initial=4, window=3, patience=5), 2)
    slow = ([0.1, 0.2], [2.4, 2.0])  # the network needs 2.0 s, the slow rank steps in 0.2 s
    assert [controller.observe(*slow, round_number=n) for n in (1, 2)] == [None, None]
    decision = controller.observe(*slow, round_number=3)
    assert decision == TauDecision(
        round=3, previous=4, tau=11, step_s=0.2, all_reduce_s=2.0, reason="exposed"
    )
    fast = ([0.1, 0.2], [1.4, 1.0])
    seen = [controller.observe(*fast, round_number=4 + n) for n in range(6)]
    # One round until the median turns, then five that agree.
    assert seen[:5] == [None] * 5
    assert (seen[5].tau, seen[5].reason, seen[5].round) == (6, "slack", 9)
    assert controller.decisions == (decision, seen[5])
    assert controller.changes == 2


def test_what_fits_without_the_margin_goes_up_after_patience_only():
    controller = TauController(AutoTau(initial=8, patience=5), 1)
    seen = [controller.observe([0.1], [0.78], round_number=n) for n in range(7)]
    assert seen[:6] == [None] * 6
    assert (seen[6].tau, seen[6].reason) == (9, "margin")


def test_the_fastest_all_reduce_and_the_slowest_compute_count():
    cluster = Cluster(AutoTau(), [0.1, 0.3, 0.15, 0.1], lambda _: 3.0).run(40)
    assert cluster.tau == math.ceil(1.1 * 3.0 / 0.3 - 1e-9)
    assert cluster.exposed_s[-1] == 0.0


def test_hiccups_that_hit_another_rank_each_round_are_not_slow_compute():
    controller = TauController(AutoTau(), 4)
    for number in range(60):
        step_s = [0.1] * 4
        step_s[number % 4] = 0.5
        controller.observe(step_s, [1.2, 1.0, 1.1, 1.3], round_number=number)
    assert controller.tau == 11


def test_an_absent_rank_is_left_out_and_forgotten():
    controller = TauController(AutoTau(initial=1, maximum=64), 3)
    for number in range(6):
        controller.observe([0.1, 0.4, 0.1], [1.6, 1.6, 1.6], round_number=number)
    assert controller.tau == 5  # 1.76 s behind steps of 0.4 s
    for number in range(6, 12):
        controller.observe([0.1, 0.0, 0.1], [1.6, 0.0, 1.6], round_number=number)
    assert controller.tau == 18  # the slow one is gone
    assert controller.observe([0.0] * 3, [0.0] * 3, round_number=12) is None
    assert controller.tau == 18


# -- simulated links ------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 5])
def test_a_slower_link_is_followed_within_the_window(window):
    cluster = Cluster(
        AutoTau(window=window), [0.1, 0.1], lambda r: 0.7 if r < 20 else 7.0, noise=0.02
    )
    cluster.run(20)
    assert cluster.tau == 8
    # One round until the first slow all-reduce has landed and one until its metadata has.
    cluster.run(window + 1)
    assert cluster.tau * 0.1 >= 7.0
    cluster.run(30)
    assert cluster.exposed_s[-30:] == [0.0] * 30
    assert changes(cluster.taus[20:]) <= 2


def test_a_faster_link_is_followed_after_window_and_patience():
    settings = AutoTau(window=3, patience=10)
    cluster = Cluster(settings, [0.1, 0.1], lambda r: 7.0 if r < 30 else 0.7)
    cluster.run(30)
    assert cluster.tau == 77
    cluster.run(settings.window + settings.patience + 1)
    assert cluster.tau == 8
    assert max(cluster.exposed_s[10:]) == 0.0


def test_noise_just_before_a_change_does_not_hold_it_up():
    settings = AutoTau(initial=33, window=3, patience=12)
    controller = TauController(settings, 1)
    for number in range(6):  # needs 32 of 33 steps: agrees with going down, by one step
        controller.observe([0.1], [2.85], round_number=number)
    seen = [controller.observe([0.1], [0.8], round_number=6 + n) for n in range(16)]
    # One round until the median turns, then twelve that agree, whatever was before.
    assert [d.tau for d in seen if d] == [9]
    assert seen[12] is not None


@pytest.mark.parametrize("stalled", [{30}, {30, 40, 50}, {30, 33, 36}])
def test_a_link_that_hangs_once_changes_nothing_but_the_wait_is_there(stalled):
    cluster = Cluster(AutoTau(), [0.1, 0.1], lambda r: 30.0 if r in stalled else 0.7)
    cluster.run(80)
    assert changes(cluster.taus) == 0
    assert sum(wait_s > 0 for wait_s in cluster.exposed_s) == len(stalled)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tau", [1, 2, 8, 21])
@pytest.mark.parametrize("offset", [-0.02, 0.02, 0.4])
def test_noise_of_ten_percent_does_not_make_tau_flap(seed, tau, offset):
    ratio = tau / 1.1 + offset  # at the knee, where noise does most
    cluster = Cluster(AutoTau(), [0.1] * 4, lambda _: 0.1 * ratio, noise=0.1, seed=seed)
    cluster.run(1000)
    settled = cluster.taus[100:]
    assert returns(settled) <= 1
    assert changes(settled) <= 4
    waited = sum(wait_s > 0 for wait_s in cluster.exposed_s[100:]) / 900
    assert waited < 0.07
    assert cluster.tau <= math.ceil(1.1 * ratio * 1.1 / 0.9)


@pytest.mark.parametrize("seed", range(3))
def test_stragglers_noise_stalls_and_two_changes_of_the_link(seed):
    def link_s(number):
        stall_s = 20.0 if number in {50, 150, 250} else 0.0
        return stall_s + (2.0 if 100 <= number < 200 else 0.6)

    cluster = Cluster(AutoTau(), [0.1, 0.1, 0.12, 0.2], link_s, noise=0.05, seed=seed)
    cluster.run(300)
    assert 4 <= cluster.taus[99] <= 5
    assert 11 <= cluster.taus[105] <= 13
    assert 11 <= cluster.taus[199] <= 13
    assert 4 <= cluster.taus[-1] <= 5
    assert sum(wait_s > 0 for wait_s in cluster.exposed_s) <= 3 + 5 + 3


@pytest.mark.parametrize("start", [1, 8, 256])
@pytest.mark.parametrize(("compute_loss", "all_reduce_loss"), [(0.5, 0.5), (0.7, 0.2), (0.2, 0.7)])
def test_shared_cores_lead_to_a_fixed_point_without_swings(start, compute_loss, all_reduce_loss):
    cluster = Cluster(
        AutoTau(initial=start),
        [0.1, 0.1],
        lambda _: 1.6,
        compute_loss=compute_loss,
        all_reduce_loss=all_reduce_loss,
    )
    cluster.run(300)
    moves = [b - a for a, b in itertools.pairwise(cluster.taus) if a != b]
    assert all(m > 0 for m in moves) or all(m < 0 for m in moves)
    assert changes(cluster.taus[150:]) == 0
    assert cluster.exposed_s[-1] == 0.0
    # Fully hidden: the all-reduce lasts 1.6 / (1 - all_reduce_loss), and its compute is slowed
    # down.
    all_reduce_s = 1.6 / (1 - all_reduce_loss)
    smallest = (1.1 - compute_loss) * all_reduce_s / 0.1
    few = 1 / (1 - compute_loss / 1.1)  # how early it may stop from above
    assert smallest - 1e-6 <= cluster.tau <= smallest + 1 + few


def test_a_network_that_stands_still_beside_compute_ends_at_the_maximum():
    cluster = Cluster(AutoTau(maximum=64), [0.1], lambda _: 1.6, all_reduce_loss=0.999)
    assert cluster.run(200).tau == 64


# -- properties -----------------------------------------------------------------------------------

times = st.floats(1e-4, 1e3)
maybe_times = st.one_of(st.just(0.0), times)
settings = st.builds(
    lambda low, span, start, **rest: AutoTau(
        minimum=low, maximum=low + span, initial=low + min(start, span), **rest
    ),
    st.integers(1, 20),
    st.integers(0, 200),
    st.integers(0, 200),
    margin=st.floats(1.0, 2.0),
    window=st.integers(1, 5),
    patience=st.integers(1, 6),
    balance=st.booleans(),
)


@st.composite
def histories(draw, elements=maybe_times):
    world_size = draw(st.integers(1, 4))
    row = st.lists(elements, min_size=world_size, max_size=world_size)
    return world_size, draw(st.lists(st.tuples(row, row), min_size=1, max_size=40))


@given(settings, histories(), st.data())
def test_any_history_stays_in_bounds_and_goes_on_alike_from_any_state(chosen, history, data):
    world_size, rounds = history
    controller, resumed = (TauController(chosen, world_size) for _ in range(2))
    shape = {name: _length(value) for name, value in controller.state().items()}
    for number, (step_s, all_reduce_s) in enumerate(rounds):
        decision = controller.observe(step_s, all_reduce_s, round_number=number)
        assert resumed.observe(step_s, all_reduce_s, round_number=number) == decision
        assert chosen.minimum <= controller.tau <= chosen.maximum
        assert all(controller.local_tau(rank) >= 1 for rank in range(world_size))
        if not chosen.balance:
            assert {controller.local_tau(rank) for rank in range(world_size)} == {controller.tau}
        state = controller.state()
        assert {name: _length(value) for name, value in state.items()} == shape
        if data.draw(st.booleans()):
            resumed = TauController(chosen, world_size)
            resumed.restore(json.loads(json.dumps(state)))
        assert resumed.state() == state


def _length(value):
    return (type(value), len(value)) if isinstance(value, list) else type(value)


@by_day(30)
@given(settings, histories(), times, times)
def test_after_a_steady_phase_tau_is_the_smallest_that_hides(chosen, history, step_s, all_reduce_s):
    world_size, rounds = history
    controller = TauController(chosen, world_size)
    for number, (some_step_s, some_all_reduce_s) in enumerate(rounds):
        controller.observe(some_step_s, some_all_reduce_s, round_number=number)
    # Until what the rounds before needed is forgotten, and then as patient as it may have become.
    longest = 64 + chosen.window + controller.patience_rounds + chosen.patience * 4**3
    for number in range(longest):
        controller.observe([step_s] * world_size, [all_reduce_s] * world_size, round_number=number)
    tau = controller.tau
    fits = 1 - 1e-6
    assert tau * step_s >= chosen.margin * all_reduce_s * fits or tau == chosen.maximum
    assert (tau - 1) * step_s < chosen.margin * all_reduce_s / fits or tau == chosen.minimum
    if chosen.balance:
        assert {controller.local_tau(rank) for rank in range(world_size)} == {tau}


@given(
    st.lists(st.floats(0.05, 0.5), min_size=2, max_size=6),
    st.floats(0.01, 20.0),
    st.integers(1, 64),
)
def test_balanced_rounds_last_equally_long_within_one_step(steps_s, link_s, initial):
    chosen = AutoTau(initial=initial, balance=True)
    cluster = Cluster(chosen, steps_s, lambda _: link_s).run(60)
    last_s = cluster.round_s[-1]
    for rank, round_s in enumerate(last_s):
        assert abs(round_s - cluster.tau * min(steps_s)) <= steps_s[rank]
    assert max(last_s) - min(last_s) <= 2 * max(steps_s)
    assert max(last_s) >= link_s
    smallest = math.ceil(max(1.1 * link_s, *steps_s) / min(steps_s) * (1 - 1e-6))
    assert smallest <= cluster.tau <= smallest + 1  # the virtual clock rounds


def test_balance_by_hand():
    controller = TauController(AutoTau(initial=4, window=1, patience=3, balance=True), 3)
    decision = controller.observe([0.1, 0.2, 0.4], [1.0, 1.1, 1.2], round_number=0)
    assert (decision.tau, decision.step_s) == (11, 0.1)  # 1.1 s of the fastest rank's steps
    assert [controller.local_tau(rank) for rank in range(3)] == [11, 6, 3]
    late = controller.observe([0.1, 0.2, 0.1], [1.0, 1.1, 1.2], round_number=1)
    assert (late.tau, late.previous, late.reason) == (11, 11, "balance")
    assert [controller.local_tau(rank) for rank in range(3)] == [11, 6, 11]
    assert controller.changes == 1


def test_balance_waits_for_no_one_where_lock_step_waits_for_the_slow_rank():
    def steps_per_s(*, balance):
        cluster = Cluster(AutoTau(balance=balance), [0.1, 0.1, 0.1, 0.3], lambda _: 1.5, noise=0.02)
        cluster.run(100)
        local = [c.local_tau(rank) for rank, c in enumerate(cluster.controllers)]
        return sum(local) / statistics.mean(max(times_s) for times_s in cluster.round_s[-40:])

    assert steps_per_s(balance=True) > 2.3 * steps_per_s(balance=False)
    assert steps_per_s(balance=False) == pytest.approx(4 / 0.3, rel=0.05)


def test_balance_under_noise_is_not_rewritten_every_round():
    settings = AutoTau(balance=True)
    cluster = Cluster(settings, [0.1, 0.1, 0.2], lambda _: 1.6, noise=0.05, seed=3).run(400)
    assert len([d for d in cluster.decisions if d.round > 50]) <= 20


@pytest.mark.parametrize("settings", [AutoTau(), AutoTau(balance=True, patience=5)])
def test_a_run_resumed_at_every_round_is_the_run_that_never_stopped(settings):
    def cluster():
        return Cluster(
            settings,
            [0.1, 0.12, 0.2],
            lambda r: 1.5 if r < 100 else 0.5,
            noise=0.08,
            seed=5,
        )

    straight, resumed = cluster().run(200), cluster()
    for _ in range(200):
        resumed.run_round()
        states = [json.loads(json.dumps(c.state())) for c in resumed.controllers]
        resumed.controllers = [TauController(settings, 3) for _ in states]
        for controller, state in zip(resumed.controllers, states, strict=True):
            controller.restore(state)
    assert resumed.taus == straight.taus
    assert resumed.clock_s == straight.clock_s  # the local steps were alike too


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial": 0},
        {"minimum": 0},
        {"maximum": 4},
        {"initial": 2, "minimum": 3},
        {"margin": 0.9},
        {"margin": math.nan},
        {"margin": True},
        {"window": 0},
        {"window": 2.0},
        {"patience": True},
        {"balance": 1},
    ],
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        AutoTau(**wrong)


def test_a_state_of_another_world_is_refused():
    state = TauController(AutoTau(), 2).state()
    with pytest.raises(ConfigurationError, match="step_windows has 6 entries, not 12"):
        TauController(AutoTau(), 4).restore(state)
    with pytest.raises(ConfigurationError, match="all_reduces has 3 entries, not 5"):
        TauController(AutoTau(window=5), 2).restore(state)


def test_names():
    assert named_auto_tau("auto") == AutoTau()
    assert named_auto_tau(AutoTau(initial=3)).initial == 3
    with pytest.raises(ConfigurationError, match="'fast' is not known"):
        named_auto_tau("fast")


def test_the_log_keeps_the_last_64():
    controller = TauController(AutoTau(initial=1, window=1, patience=1), 1)
    for number in range(200):
        controller.observe([0.1], [10.0 if number % 40 < 20 else 0.1], round_number=number)
    assert len(controller.decisions) <= 64
    assert controller.changes == len(controller.decisions)
    resumed = TauController(AutoTau(initial=1, window=1, patience=1), 1)
    resumed.restore(controller.state())
    assert (resumed.decisions, resumed.changes) == ((), controller.changes)
