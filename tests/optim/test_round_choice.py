"""Round, fragments, delay and codec chosen together: hidden, monotone, agreed on, resumed."""

import copy
import statistics
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fivefold.errors import ConfigurationError
from fivefold.optim import CO2, AutoTau, DelayCorrected, OuterSync, _boundary_clock, _round_choice
from fivefold.optim._round_choice import MessageTimes, choose_round
from fivefold.optim.auto_tau import TauController
from fivefold.optim.transport import ProcessGroupTransport
from fivefold.testing import run_processes, run_world
from helpers.outer_world import Clock, Timed, all_equal

CODECS = ("fp32", "int8", "int4")


def times_of(fixed_s, whole_s, *, by=1.0, busy_s=(0.0, 0.0, 0.0)):
    return MessageTimes(
        busy_s=dict(zip(CODECS, busy_s, strict=True)),
        fixed_s={codec: by * s for codec, s in zip(CODECS, fixed_s, strict=True)},
        whole_s={codec: by * s for codec, s in zip(CODECS, whole_s, strict=True)},
    )


@st.composite
def links(draw):
    """Latencies and whole payloads' seconds; shares of up to 8 unequal fragments; a step; what it
    takes to encode."""
    fixed_s = draw(st.floats(1e-5, 1.0))
    whole_s = draw(st.floats(1e-4, 100.0))
    slower = [draw(st.floats(1.0, 3.0)) for _ in range(2)]
    busy_s = [0.0, 0.0, 0.0]
    if draw(st.booleans()):  # beside latencies that are alike
        slower, busy_s = [1.0, 1.0], [0.0, draw(st.floats(0.0, 1.0)), draw(st.floats(0.0, 1.0))]
    smaller = draw(st.floats(0.24, 0.6)), draw(st.floats(0.12, 0.6))
    sizes = draw(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=8))
    shares = {}
    for turns in range(1, len(sizes) + 1):
        loads = [0.0] * turns
        for index, size in enumerate(sizes):
            loads[index * turns // len(sizes)] += size / sum(sizes)
        shares[turns] = max(loads)
    if draw(st.booleans()):  # a rule that says how many
        shares = dict([draw(st.sampled_from(sorted(shares.items())))])
    fixed = [fixed_s, *(fixed_s * more for more in slower)]
    whole = [whole_s, *(whole_s * less for less in smaller)]
    return fixed, whole, shares, draw(st.floats(0.01, 1.0)), busy_s


def test_a_codec_is_worth_what_it_rounds_from_a_tenth_on():
    assert times_of((0.0, 0.0, 0.0), (1.0, 0.9, 0.82)).worthwhile() == ["fp32", "int8"]


bounds = st.tuples(st.sampled_from([1, 3, 8]), st.sampled_from([10, 64, 1024]))


@given(links(), bounds, st.floats(1.0, 3.0), st.lists(st.floats(1.0, 1.6), max_size=8))
def test_what_is_chosen_hides_and_a_slower_link_never_shortens_it(link, limits, stretch, slower):
    fixed, whole, shares, step_s, busy_s = link
    minimum, maximum = limits
    by, before = 1.0, None
    for factor in (1.0, *slower):
        by *= factor
        times = times_of(fixed, whole, by=by, busy_s=busy_s)
        found = choose_round(
            times, step_s=step_s, shares=shares, stretch=stretch, minimum=minimum, maximum=maximum
        )
        needed_s = stretch * times.message_s(found.codec, shares[found.fragments])
        fits = found.delay * step_s >= needed_s * (1 - 1e-6)
        assert fits or not found.hides
        encoding = times.busy_s[found.codec] / (found.tau * step_s)
        assert encoding <= 0.05 * (1 + 1e-6) or found.tau >= maximum - max(shares)
        assert found.tau == found.delay * found.fragments <= max(maximum, found.fragments)
        if before is not None:
            assert found.tau >= before.tau
            assert CODECS.index(found.codec) >= CODECS.index(before.codec)
        before = found


FOUR = {1: 1.0, 2: 0.5, 4: 0.25}


@pytest.mark.parametrize(
    ("fixed_s", "whole_s", "expected"),
    [
        (0.001, 0.9, (1, 1, "fp32")),  # a message fits behind one step
        (0.001, 3.0, (1, 1, "int8")),  # a codec before a longer round
        (0.001, 6.0, (1, 1, "int4")),
        (0.001, 12.0, (2, 1, "int4")),  # 1.5 steps: two fragments, merged after one
        (0.001, 24.0, (4, 1, "int4")),
        (0.001, 48.0, (4, 2, "int4")),  # 6 steps: no fragment can be merged sooner
        (0.4, 9.0, (1, 2, "int4")),  # half a message is latency: more of them waste the link
        (2.5, 0.1, (1, 3, "fp32")),  # no codec can help where nothing but latency is
    ],
)
def test_by_hand(fixed_s, whole_s, expected):
    times = times_of([fixed_s] * 3, [whole_s, whole_s / 4, whole_s / 8])
    found = choose_round(times, step_s=1.0, shares=FOUR)
    assert (found.fragments, found.delay, found.codec) == expected


@pytest.mark.parametrize(
    ("whole_s", "busy_s", "expected"),
    [
        (3.0, 0.0, (1, "int8")),
        (3.0, 0.04, (1, "int8")),  # within a twentieth of the one step
        (3.0, 0.14, (3, "int4")),  # in three steps; as it is the message would need four
        (3.0, 0.5, (4, "fp32")),  # ten steps of encoding, where four hide it as it is
        (30.0, 0.5, (10, "int4")),  # where the message alone would take nine, and five
        (300.0, 0.5, (42, "int4")),  # a round so long that encoding is nothing
    ],
)
def test_a_codec_that_takes_the_steps_time_is_for_longer_rounds(whole_s, busy_s, expected):
    """0.85 of the compute-only rate with int4 in every step, 0.96 without (100 Mbit/s)."""
    times = times_of([0.0] * 3, [whole_s, whole_s / 4, whole_s / 8], busy_s=(0.0, busy_s, busy_s))
    found = choose_round(times, step_s=1.0, shares={1: 1.0})
    assert (found.tau, found.codec) == expected


# -- the controller -------------------------------------------------------------------------------


def steady(controller, load_s, rounds=80, step_s=0.1):
    """Feed what a link would show that is so many times as slow as its times say."""
    for number in range(rounds):
        all_reduce_s = load_s(number) if callable(load_s) else load_s
        message_s = all_reduce_s * controller._unit_s  # what the messages of this moment take
        controller.observe([step_s] * 2, [message_s] * 2, round_number=number)
    return controller.tau, controller.fragments, controller.codec


def controller(whole_s, **settings):
    times = times_of([1e-4] * 3, [whole_s, whole_s / 4, whole_s / 8])
    return TauController(AutoTau(**settings), 2, shares=FOUR, times=times)


def test_a_link_that_is_slower_beside_compute_than_alone_is_followed():
    assert steady(controller(0.05), 1.0) == (1, 1, "fp32")
    assert steady(controller(0.05), 4.0) == (1, 1, "int8")
    assert steady(controller(0.05), 400.0) == (32, 4, "int4")  # 7.3 steps each


def test_jitter_asks_for_more_than_the_mean_and_one_stall_does_not():
    calm = steady(controller(0.8, minimum=4), 1.0, rounds=200)
    rare = steady(controller(0.8, minimum=4), lambda n: 50.0 if n == 60 else 1.0, rounds=200)
    # A third of the messages take 20 times as long.
    rough = steady(controller(0.8, minimum=4), lambda n: 20.0 if n % 3 == 0 else 1.0, rounds=200)
    assert calm == rare == (4, 4, "int8")
    assert rough[0] > 4
    assert rough[0] // rough[1] * 0.1 >= 20 * 0.8 / 8 / rough[1]


def test_a_state_carries_choice_times_and_measurements():
    first = controller(3.0)
    steady(first, 1.3, rounds=20)
    other = controller(0.001)  # the link was measured anew, and is another
    other.restore(copy.deepcopy(first.state()))
    assert (other.tau, other.fragments, other.codec) == (first.tau, first.fragments, first.codec)
    assert steady(other, 9.0) == steady(first, 9.0)
    assert other.state() == first.state()


# -- the engine on a virtual clock ----------------------------------------------------------------

STEP_S = 0.125


class Link(Timed):
    """Messages one after another, on a link of known latency and rate."""

    chooses_codec = True

    def __init__(self, inner, clock, *, fixed_s, bytes_per_s):
        super().__init__(inner, clock, None)
        self.fixed_s, self.bytes_per_s = fixed_s, bytes_per_s
        self.codec, self.free_s = "fp32", 0.0

    def measure_link(self, num_bytes, *, device):
        del device
        whole_s = num_bytes / self.bytes_per_s
        return times_of([self.fixed_s] * 3, [whole_s, whole_s / 4, whole_s / 8])

    def use_codec(self, name):
        self.codec = name

    def launch(self, payloads, *, metadata, fragment, what):
        width = {"fp32": 1, "int8": 4, "int4": 8}[self.codec]
        message_s = self.fixed_s + sum(p.nbytes for p in payloads) / width / self.bytes_per_s
        self.all_reduce_s = lambda _: message_s
        found = super().launch(payloads, metadata=metadata, fragment=fragment, what=what)
        found.wait = lambda: self.arrive(found, message_s)
        return found

    def arrive(self, message, message_s):
        """Waits come in the order of the launches."""
        message.inner.wait()
        launches = self.inner.gather_objects(message.launched_at_s)
        self.free_s = message.completed_at_s = max(*launches, self.free_s) + message_s
        self.clock.until(self.free_s)
        return True


class Blocks(torch.nn.Module):
    def __init__(self, elements=1 << 18):
        super().__init__()
        self.blocks = torch.nn.ParameterList(torch.zeros(elements) for _ in range(4))


def life(transport, clock, rule, steps, *, link, state=None, bytes_per_s=None):
    model = Blocks(1 << 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    road = Link(transport, clock, **link)
    sync = OuterSync(model, optimizer, rule=rule, transport=road)
    if state is not None:
        model.load_state_dict(state["model"])
        sync.load_state_dict(state["sync"])
    start = sync.statistics().steps
    for step in range(start, steps):
        if bytes_per_s is not None and step == bytes_per_s[0]:
            road.bytes_per_s = bytes_per_s[1]
        with torch.no_grad():
            for block in model.blocks:
                block[step] += 1.0 + transport.rank
        clock.advance(STEP_S)
        sync.step()
    return model, sync


@pytest.fixture
def clock(monkeypatch):
    virtual = Clock()
    monkeypatch.setattr(_boundary_clock, "time", virtual)
    monkeypatch.setattr(_round_choice, "LEAST_FRAGMENT_BYTES", 1 << 12)  # so that tests are fast
    return virtual


LINKS = {
    # 16 KiB, and steps of 0.125 s
    "fast": ({"fixed_s": 1e-4, "bytes_per_s": 64 * 2.0**12}, (1, 1, "fp32")),
    "slow": ({"fixed_s": 1e-4, "bytes_per_s": 16 * 2.0**12}, (1, 1, "int8")),
    "slower": ({"fixed_s": 1e-4, "bytes_per_s": 2.0 * 2.0**12}, (4, 4, "int4")),
    "slowest": ({"fixed_s": 1e-4, "bytes_per_s": 0.5 * 2.0**12}, (12, 4, "int4")),
}


AUTO = AutoTau(patience=3)
PLAIN_CO2 = CO2(
    tau=AUTO, fragments=None, outer_lr=1.0, outer_momentum=0.0, staleness="none", clip=None
)


@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, DelayCorrected(tau=AUTO)) for name in LINKS), ("slowest", PLAIN_CO2)],
    ids=[*LINKS, "co2"],
)
def test_the_engine_takes_what_hides_on_all_ranks_alike(name, rule, clock):
    link, expected = LINKS[name]

    def work(transport):
        model, sync = life(transport, clock, rule, 200, link=link)
        record = sync.statistics()
        before_s = record.exposed_wait_s
        for step in range(200, 260):
            with torch.no_grad():
                model.blocks[0][step] += 1.0 + transport.rank
            clock.advance(STEP_S)
            sync.step()
        waited_s = sync.statistics().exposed_wait_s - before_s
        sync.finalize()
        flat = torch.cat([block.detach() for block in model.blocks])
        return (record.tau, record.fragments, record.codec), waited_s, sync.tau_decisions(), flat

    results = run_world(2, work)
    assert all_equal([flat for *_, flat in results])
    assert results[0][2] == results[1][2]
    # Every local step arrived exactly once: each moved one element, by 1 here and by 2 there.
    done = results[0][3][:200]
    torch.testing.assert_close(done, torch.full_like(done, 1.5), rtol=0, atol=1e-6)
    found, waited_s, *_ = results[0]
    assert waited_s == pytest.approx(0.0, abs=1e-6)
    assert found == expected


def test_a_link_that_changes_is_followed_and_a_resumed_run_is_the_run_that_goes_on(clock):
    link, rule = LINKS["fast"][0], DelayCorrected(tau=AutoTau(patience=3))

    def first(transport):
        model, sync = life(transport, clock, rule, 90, link=link, bytes_per_s=(60, 2.0 * 2.0**12))
        state = copy.deepcopy({"model": model.state_dict(), "sync": sync.state_dict()})
        return state, sync.statistics()

    saved = run_world(2, first)
    assert saved[0][1].codec == "int4"
    assert saved[0][1].fragments == saved[1][1].fragments > 1

    def second(transport):
        state, record = saved[transport.rank]
        # The set-up measures the fast link again; what was chosen and measured comes back.
        _, sync = life(transport, clock, rule, 90, link=link, state=state)
        again = sync.statistics()
        assert (again.tau, again.fragments, again.codec, again.delay_steps) == (
            record.tau, record.fragments, record.codec, record.delay_steps,
        )  # fmt: skip
        assert sync._transport.codec == record.codec
        assert sync.state_dict()["tau"] == state["sync"]["tau"]
        return [fragment.schedule.state() for fragment in sync._fragments]

    schedules = run_world(2, second)
    kept = [each["schedule"] for each in saved[0][0]["sync"]["fragments"].values()]
    assert schedules[0] == schedules[1] == kept


def test_a_codec_to_be_chosen_needs_a_round_to_be_chosen():
    def work(_):
        model = Blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rule in (DelayCorrected(tau=8, fragments=1), CO2(tau=8)):
            with pytest.raises(ConfigurationError, match='codec="auto" is chosen with the round'):
                OuterSync(model, optimizer, rule=rule, codec="auto")

    run_processes(2, work)


# -- real processes -------------------------------------------------------------------------------


def slow_transport(bytes_per_s):
    """Real processes, whose messages a stand-in for a slow link holds up."""
    transport = ProcessGroupTransport(None, timeout_s=60.0, codec="auto")
    submit = transport._thread.submit

    def slowly(run, *, tensors, what, sent_bytes=0):
        def delayed():
            run()
            time.sleep(sent_bytes / bytes_per_s)

        return submit(delayed, tensors=tensors, what=what, sent_bytes=sent_bytes)

    transport._thread.submit = slowly
    return transport


def real_life(rank, *, bytes_per_s):
    """Steps of 20 ms; from step 100 on also in a second engine that resumed there."""

    def engine():
        model = Blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = DelayCorrected(tau=AutoTau(patience=3))
        transport = slow_transport(bytes_per_s)
        return model, OuterSync(model, optimizer, rule=rule, transport=transport)

    def train(model, sync, steps):
        for step in steps:
            with torch.no_grad():
                model.blocks[step % 4][step] += 1.0 + rank
            time.sleep(0.02)
            sync.step()

    model, sync = engine()
    train(model, sync, range(70))
    before = sync.all_reduces()
    train(model, sync, range(70, 100))
    end, after = sync.statistics(), sync.all_reduces()
    state = copy.deepcopy({"model": model.state_dict(), "sync": sync.state_dict()})
    again, resumed = engine()
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["sync"])
    flats = []
    for one, its in ((model, sync), (again, resumed)):
        its._tau.observe = lambda *_, **__: None  # what is decided later depends on the clock
        train(one, its, range(100, 112))
        its.finalize()
        flats.append(torch.cat([block.detach() for block in one.blocks]))
    assert torch.equal(*flats)
    waits_s = [
        statistics.median(record.wait_ended_at_s - record.wait_started_at_s for record in records)
        for records in (before[:4], after)
    ]
    return flats[0], (end.tau, end.fragments, end.codec), waits_s


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_hide_a_slow_link_and_resume_bit_for_bit():
    # 4 MiB take 0.5 s: 25 steps as they are, 3 in int4.
    first, second = run_processes(2, lambda rank: real_life(rank, bytes_per_s=8 * 2.0**20))
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]
    assert first[1][2] != "fp32"
    for beginning_s, end_s in (first[2], second[2]):  # medians: other processes stall some
        assert beginning_s > 0.05
        assert end_s < max(0.005, 0.1 * beginning_s)  # beside other work a thread is late itself
    moved = first[0].view(4, -1)[:, :112].sum(0)  # residuals of the codec may be held back
    torch.testing.assert_close(moved, torch.full_like(moved, 1.5), rtol=0.2, atol=0.2)


def plain_life(_, *, codec):
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rule = DelayCorrected(tau=AutoTau(initial=16, patience=1, window=1))
    sync = OuterSync(model, optimizer, rule=rule, codec=codec)
    for step in range(80):
        with torch.no_grad():
            model.blocks[step % 4][step % 64] += 1.0
        time.sleep(0.02)
        sync.step()
    record, decided = sync.statistics(), sync.tau_decisions()
    state = sync.state_dict()
    sync.finalize()
    again = OuterSync(model, optimizer, rule=rule, codec=codec)
    again.load_state_dict(state)
    return record.tau, again.statistics().tau, [decision.codec for decision in decided]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "topk"])
def test_a_round_is_chosen_beside_a_given_codec(codec):
    """Messages of milliseconds behind steps of 20: sixteen steps a round are too many.

    But for topk, which takes some 30 ms to choose its elements: a twentieth of more steps.
    """
    first, second = run_processes(2, lambda rank: plain_life(rank, codec=codec))
    assert first == second
    tau, resumed, codecs = first
    assert tau == resumed
    assert tau < 16 or codec == "topk"
    assert set(codecs) == {None}  # nobody's choice


def sharded_life(_):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rule = DelayCorrected(tau=AutoTau(patience=1, window=1))
    sync = OuterSync(model, optimizer, rule=rule, process_group=mesh["replicate"], codec="auto")
    for _ in range(40):
        model(torch.randn(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    record, state = sync.statistics(), sync.state_dict()["tau"]
    sync.finalize()
    return (record.tau, record.fragments, record.codec), (state["times"], state["shares"])


@pytest.mark.nightly
@pytest.mark.distributed
def test_all_ranks_of_sharded_workers_decide_alike(monkeypatch):
    monkeypatch.setattr(_round_choice, "LEAST_FRAGMENT_BYTES", 1 << 8)
    found = run_processes(4, sharded_life)
    assert all(other == found[0] for other in found)
    assert len(found[0][1][1]) > 1  # there were fragments to choose from
