"""What the statistics say should be changed, from times that are known."""

import dataclasses

import pytest
import torch

from fivefold.optim import (
    DelayCorrected,
    DelayedGradients,
    OuterSync,
    SyncStatistics,
    _boundary_clock,
)
from fivefold.testing import run_world
from helpers.outer_world import Clock, Timed

MEASURED = SyncStatistics(
    steps=1000, rounds=125, merged_rounds=124, payload_bytes=2 * 10**9, sent_bytes=10**9,
    in_flight_s=1.0, exposed_wait_s=0.0, overlap_fraction=1.0, boundary_s=0.0, staleness_gap=1.0,
    last_staleness_gap=1.0, clipped_fraction=0.0, tau=8, tau_changes=0, lost_all_reduces=0,
    left_out_payloads=0, rule="CO2", delay_steps=8, most_fragments=8,
    step_s=0.1, all_reduce_s=0.6,
)  # fmt: skip


def late(takes, use, *, has=8, part=""):
    return [f"an all-reduce{part} takes {takes} steps and has {has} to hide behind: {use}"]


def sooner(takes, settings):
    why = "would hide it too, and what is less late learns better"
    return [f"an all-reduce takes {takes} steps: {settings} {why}"]


def stalls(takes, use, *, part=""):
    waits = "but 9% of the time is waiting: it stalls at times"
    return [f"an all-reduce{part} takes {takes} steps, {waits}; use {use}"]


def hidden_by(rule):
    return [f"50% of the time is waiting: {rule} hides it"]


CORRECTED = {"rule": "delay-corrected"}
GRADIENTS = {"rule": "delayed gradients", "delay_steps": 1, "tau": 1}
LOCAL_SGD = {"rule": "Local SGD", "delay_steps": 0}
WHOLE = {"rule": "eager DiLoCo"}  # is not sent in parts
FOUR = {"fragments": 4, "delay_steps": 2}
FEW_BYTES = {"payload_bytes": 10**7}
OF_FOUR = " of one of 4 fragments"
OF_TWO = " of one of 2 fragments"
CASES = [
    # 6 steps in fp32; CO2 is not told less than tau 4, where parts of a quarter of the bytes fit.
    ({}, sooner("6.0", 'tau=4, fragments=4, codec="int8"')),
    ({"all_reduce_s": 1.1}, late("11.0", 'use tau=4, fragments=4, codec="int8"')),
    ({"all_reduce_s": 2.0}, late("20.0", 'use tau=4, fragments=4, codec="int4"')),
    ({"all_reduce_s": 0.11}, sooner("1.1", "tau=4, fragments=4")),
    # Who runs a shorter round is not told a longer one.
    (
        {"all_reduce_s": 0.3, "tau": 2, "delay_steps": 2},
        late("3.0", 'use fragments=2, codec="int8"', has=2),
    ),
    # 60 in fp32, 8.5 in int4 with a tenth to spare: two steps for each of five.
    (
        {"all_reduce_s": 3.0, "codec": "bf16"},
        late("30.0", 'use tau=10, fragments=5, codec="int4"'),
    ),
    # 1.6 steps in int4 are two for the whole model.
    ({"all_reduce_s": 1.1} | WHOLE, late("11.0", 'use tau=2, codec="int4"')),
    # What nobody knows the size of stays, and only the round changes.
    ({"all_reduce_s": 2.0, "codec": "topk"} | WHOLE, late("20.0", "use tau=22")),
    ({"all_reduce_s": 2.0, "codec": "Mine(bits=3)"}, late("20.0", "use tau=24, fragments=8")),
    # 12 steps for all, 1.7 in int4, in two parts.
    (
        {"all_reduce_s": 0.3} | FOUR | CORRECTED,
        late("3.0", 'use tau=2, fragments=2, codec="int4"', has=2, part=OF_FOUR),
    ),
    ({"all_reduce_s": 0.25} | GRADIENTS, late("2.5", 'use codec="int8"', has=1)),
    (
        {"all_reduce_s": 2.5} | GRADIENTS,
        late("25.0", 'use gradients accumulated over 4 batches, codec="int4"', has=1),
    ),
    ({"exposed_wait_s": 10.0, "all_reduce_s": 0.5}, stalls("5.0", "a larger tau")),
    (
        {"exposed_wait_s": 10.0, "all_reduce_s": 0.1} | FOUR,
        stalls("1.0", "fewer fragments", part=OF_FOUR),
    ),
    # A delay of 5 steps where 8 are given is too little for a change; in parts it is one.
    ({"all_reduce_s": 0.45, "codec": "topk"} | WHOLE, []),
    ({"codec": "topk"} | CORRECTED, sooner("6.0", "tau=7, fragments=7")),
    (
        {"exposed_wait_s": 100.0, "all_reduce_s": 1.6} | LOCAL_SGD,
        hidden_by('DelayCorrected(tau=3, fragments=3) with codec="int4"'),
    ),
    ({"exposed_wait_s": 5.0} | LOCAL_SGD, []),
    # What a model of few tensors or few bytes cannot do is not said.
    (
        {"codec": "topk", "most_fragments": 1, "all_reduce_s": 1.6} | CORRECTED,
        late("16.0", "use tau=18"),
    ),
    (FEW_BYTES | CORRECTED, []),
    ({"all_reduce_s": 1.1} | FEW_BYTES, late("11.0", "use tau=13")),
    # 1,024 steps are the longest round.
    (
        {"all_reduce_s": 1e5} | FEW_BYTES,
        late("1000000.0", "no round of up to 1024 steps hides it"),
    ),
    (
        {"left_out_payloads": 2, "lost_all_reduces": 3, "all_reduce_s": None},
        [
            "2 payloads were left out; the log names ranks and parameters",
            "3 all-reduces were lost and sent again",
        ],
    ),
    ({"step_s": None, "all_reduce_s": None}, []),
    # A delay shorter than the round allows is raised first.
    (
        {"all_reduce_s": 0.15, "fragments": 2, "delay_steps": 1, "tau": 4, "codec": "topk"}
        | {"most_fragments": 2, **CORRECTED},
        late("1.5", "use delay_steps=2", has=1, part=OF_TWO),
    ),
    # What is decided while training is not for the user to change.
    ({"all_reduce_s": 1.1, "automatic": ("tau",)}, late("11.0", 'use codec="auto"')),
    ({"all_reduce_s": 1.1, "automatic": ("tau", "codec")}, late("11.0", "tau follows")),
    ({"all_reduce_s": 0.11, "automatic": ("tau",)}, []),
]


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_what_to_change(changes, expected):
    record = dataclasses.replace(MEASURED, **changes)
    assert record.advice() == expected
    for line in expected or ["nothing to change"]:
        assert f"  -> {line}" in str(record)


@pytest.mark.parametrize("rule", [DelayCorrected(tau=4, fragments=2), DelayedGradients()])
def test_a_run_fills_the_table(rule):
    def work(transport):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)
        for _ in range(12):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
        return sync.statistics()

    record = run_world(2, work)[0]
    assert record.step_s > 0
    assert record.all_reduce_s > 0
    assert (record.fragments, record.rule) == (rule.num_fragments, rule.name)
    first, second, *_ = str(record).splitlines()
    assert first.startswith(f"{rule.name}: tau {rule.tau}")
    assert second.strip().startswith("12 steps, ")


@pytest.mark.parametrize(
    ("rule", "message_s"),
    [
        (DelayCorrected(tau=4, fragments=4), 0.25),
        (DelayCorrected(tau=4, fragments=1), 0.25),
        (DelayedGradients(), 0.25),
    ],
    ids=["fragments", "whole", "gradients"],
)
def test_times_of_a_known_link_and_of_known_steps(rule, message_s, monkeypatch):
    """Rank 1 is slow: what rank 0 waits for it is neither the network's time nor a step's."""
    clock = Clock()
    monkeypatch.setattr(_boundary_clock, "time", clock)

    def work(transport):
        model = torch.nn.ParameterList([torch.zeros(4) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        road = Timed(transport, clock, lambda _: message_s)
        sync = OuterSync(model, optimizer, rule=rule, transport=road)
        for _ in range(24):
            clock.advance(0.5 if transport.rank == 0 else 1.0)
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            sync.step()
        return sync.statistics()

    quick, slow = run_world(2, work)
    assert quick.all_reduce_s == slow.all_reduce_s == pytest.approx(message_s)
    assert (quick.step_s, slow.step_s) == (pytest.approx(0.5), pytest.approx(1.0))
    assert slow.advice() == [] or "learns better" in slow.advice()[0]
