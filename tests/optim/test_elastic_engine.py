"""``OuterSync`` over the elastic transport: kills and joins, with every update counted.

Each worker's local step moves a coordinate of its own by one unit, and what each worker sent is
logged at every launch. A slow reference adds up what the all-reduces that count brought, and must
arrive at the engine's anchor.
"""

import math
import os
import signal
import time
from collections import defaultdict

import pytest
import torch

os.environ.setdefault("RUST_LOG", "error")  # read when torchft is loaded
pytest.importorskip("torchft", reason="torchft is not installed (fivefold[elastic])")

from fivefold import optim
from fivefold.errors import ConfigurationError
from helpers.elastic_world import World, again_after_a_crash

pytestmark = pytest.mark.distributed

NAMES = "abcdefgh"
UNIT = 2.0**-6
RULES = {
    "co2": optim.CO2(tau=2, outer_lr=0.5, outer_momentum=0.0, staleness="none"),
    "co2_momentum": optim.CO2(tau=2, outer_lr=0.5, outer_momentum=0.25),
    "local_sgd": optim.LocalSGD(tau=2),
    "slowmo": optim.SlowMo(tau=2),
    "sync_bootstrap": optim.CO2(tau=2, bootstrap="sync"),
    "co2_short": optim.CO2(tau=2, delay_steps=1),
    "diloco": optim.DiLoCo(tau=2),
    "delay_corrected": optim.DelayCorrected(tau=2, fragments=1),
    "overlap": optim.OverlapLocalSGD(tau=2),
    "adam_outside": optim.OuterOptimizer(
        tau=2, optimizer=torch.optim.Adam, options={"lr": 0.01}, hidden=True
    ),
}


class Spy:
    """Passes everything on, and logs what is sent and whether it counted."""

    may_lose = True

    def __init__(self, transport, log):
        self._transport, self._log = transport, log

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def launch(self, payloads, *, metadata, fragment, what):
        weight = metadata[self._transport.rank].item()
        turn = self._transport._decision.turn + 1
        self._log("launch", turn=turn, weight=weight, payload=payloads[0][: len(NAMES)].tolist())
        all_reduce = self._transport.launch(
            payloads, metadata=metadata, fragment=fragment, what=what
        )
        plain_wait = all_reduce.wait

        def wait():
            counted = plain_wait()
            history = self._transport._decision.history
            self._log("landed", turn=turn, counted=counted, history=history)
            return counted

        all_reduce.wait = wait
        return all_reduce


def train(log, *, lighthouse, name, rule="co2", weight=None, steps=120, **options):
    options = {"timeout_s": 4.0, "quorum_timeout_s": 60.0, "max_workers": 8, **options}
    model = torch.nn.Module()
    model.p = torch.nn.Parameter(torch.zeros(len(NAMES)))
    model.other = torch.nn.Parameter(torch.zeros(5))
    model.register_buffer("count", torch.full((1,), float(NAMES.index(name))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    transport = optim.elastic_transport(lighthouse=lighthouse, **options)
    sync = optim.OuterSync(model, optimizer, rule=RULES[rule], transport=Spy(transport, log))
    transport.join(sync)
    log("joined", steps=sync.statistics().steps, slot=transport.rank)
    done = 0
    while sync.statistics().steps < steps:
        time.sleep(0.02)
        model.p.grad = torch.zeros(len(NAMES))
        model.p.grad[NAMES.index(name)] = -UNIT
        model.other.grad = torch.full((5,), UNIT * NAMES.index(name))
        optimizer.step()
        done += 1
        try:
            sync.step(weight)
        except optim.LeftBehindError:
            log("left_behind")
            transport.join(sync)
        with sync.global_parameters():
            log("round", step=sync.statistics().steps, anchor=snapshot(model), done=done)
    sync.finalize()
    log("end", anchor=snapshot(model), done=done, steps=sync.statistics().steps)
    transport.close()


def snapshot(model):
    return torch.cat([model.p, model.other, model.count]).tolist()


def counted_turns(world, names):
    """Every turn's fate, which all who saw it tell alike."""
    fate = {}
    for name in names:
        for event in world.log(name, "landed"):
            assert fate.setdefault(event["turn"], event["counted"]) == event["counted"]
    return {turn for turn, counted in fate.items() if counted}


def reference_anchor(world, names, turns, *, outer_lr):
    """Plain means, added up in float64: the anchor of CO2 without momentum, and of local SGD."""
    sent = defaultdict(list)
    for name in names:
        for event in world.log(name, "launch"):
            sent[event["turn"]].append(event)
    anchor = [0.0] * len(NAMES)
    for turn in sorted(turns):
        total = sum(event["weight"] for event in sent[turn])
        for i in range(len(NAMES)):
            mean = sum(event["payload"][i] for event in sent[turn]) / total
            anchor[i] -= outer_lr * mean
    return anchor


def require_one_truth(world, *names):
    """At every step that two workers saw, their anchors are equal bit for bit."""
    seen = {}
    for name in names:
        for event in world.log(name, "round"):
            assert seen.setdefault(event["step"], event["anchor"]) == event["anchor"], event["step"]
    ends = [world.log(name, "end")[0]["anchor"] for name in names if world.log(name, "end")]
    assert len(ends) >= 2
    assert all(end == ends[0] for end in ends)
    assert all(math.isfinite(x) for x in ends[0])
    return ends[0][: len(NAMES)]


def require_work_once(world, turns, *names, weights=None):
    """What a worker did is in the all-reduces that count, once, times the weight of its rounds."""
    for name in names:
        times = 1.0 if weights is None else 2 * weights[name]  # a round has two steps
        i = NAMES.index(name)
        launched = [e for e in world.log(name, "launch") if e["turn"] in turns]
        done = world.log(name, "end")[0]["done"]
        sent = -sum(event["payload"][i] for event in launched)
        # Means over three leave roundings; a lost or doubled round would be 2 * UNIT.
        assert sent == pytest.approx(times * done * UNIT, abs=UNIT / 100), name


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["co2", "local_sgd"])
@again_after_a_crash
def test_kill_in_flight_then_a_newcomer(tmp_path, rule):
    with World(tmp_path, min_workers=2) as world:
        for name in "abc":
            world.start(name, train, rule=rule)
        for name in "abc":
            world.until_rounds(name, 10)
        world.kill("c")
        seen = len(world.log("a", "round"))
        world.until_rounds("a", seen + 12)
        world.start("d", train, rule=rule)
        world.join("a", "b", "d")
        anchor = require_one_truth(world, "a", "b", "d", "c")
        turns = counted_turns(world, "abcd")
        assert len(turns) > 30
        require_work_once(world, turns, "a", "b", "d")
        expected = reference_anchor(world, "abcd", turns, outer_lr=RULES[rule].outer_lr)
        assert anchor == pytest.approx(expected, abs=1e-5)
        (joined,) = world.log("d", "joined")
        assert joined["steps"] > 10
        assert world.log("d", "end")[0]["done"] == 120 - joined["steps"]


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"co2", "local_sgd"}))
@again_after_a_crash
def test_other_rules_agree_after_a_kill_and_a_join(tmp_path, rule):
    with World(tmp_path, min_workers=2) as world:
        for name in "abc":
            world.start(name, train, rule=rule, steps=80)
        for name in "abc":
            world.until_rounds(name, 10)
        world.start("d", train, rule=rule, steps=80)
        world.kill("b")
        world.join("a", "c", "d")
        anchor = require_one_truth(world, "a", "c", "d", "b")
        assert all(anchor[NAMES.index(name)] > 0 for name in "abcd")


@pytest.mark.nightly
@again_after_a_crash
def test_a_silent_worker_comes_back(tmp_path):
    with World(tmp_path, min_workers=2, join_timeout_s=2.0) as world:
        for name in "abc":
            world.start(name, train, steps=200, timeout_s=2.0)
        world.until_rounds("c", 10)
        world.kill("c", signal.SIGSTOP)
        seen = len(world.log("a", "round"))
        world.until_rounds("a", seen + 12)
        world.kill("c", signal.SIGCONT)
        world.join(*"abc", timeout_s=35)
        assert world.log("c", "left_behind")
        ends = [world.log(name, "end")[0]["anchor"] for name in "abc"]
        assert ends[0] == ends[1] == ends[2]
        require_one_truth(world, "a", "b")


@again_after_a_crash
def test_workers_weigh_as_many_tokens_as_they_have(tmp_path):
    """A worker that ends, and its weight with it; the others' lost all-reduce travels again."""
    weights = {"a": 3.0, "b": 1.0, "c": 2.0}
    with World(tmp_path, min_workers=2) as world:
        for name, weight in weights.items():
            world.start(name, train, weight=weight, steps=80)
        for name in "abc":
            world.until_rounds(name, 10)
        world.kill("c")
        world.join("a", "b")
        anchor = require_one_truth(world, "a", "b", "c")
        turns = counted_turns(world, "abc")
        require_work_once(world, turns, "a", "b", weights=weights)
        expected = reference_anchor(world, "abc", turns, outer_lr=RULES["co2"].outer_lr)
        assert anchor == pytest.approx(expected, abs=1e-5)


def refuse(log, *, lighthouse, name):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    transport = optim.elastic_transport(lighthouse=lighthouse)
    refused = {
        "rules with one fragment": optim.StreamingDiLoCo(tau=4, fragments=2),
        "cannot be used with a transport that may lose a round": optim.EagerDiLoCo(tau=2),
    }
    for message, rule in refused.items():
        with pytest.raises(ConfigurationError, match=message):
            optim.OuterSync(model, optimizer, rule=rule, transport=transport)
    log("refused", worker=name)


def test_rules_that_cannot_be_elastic_are_refused(tmp_path):
    with World(tmp_path) as world:
        world.start("a", refuse)
        world.join("a")
        assert world.log("a", "refused")
