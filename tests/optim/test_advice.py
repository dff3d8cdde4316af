"""What the statistics say should be changed, from times that are known."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from fivefold.optim import (
    DelayCorrected,
    DelayedGradients,
    OuterSync,
    SyncStatistics,
    _fragment,
)
from fivefold.testing import run_world

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from outer_world import Clock, Timed

MEASURED = SyncStatistics(
    steps=1000, rounds=125, merged_rounds=124, payload_bytes=2 * 10**9, sent_bytes=10**9,
    in_flight_s=1.0, exposed_wait_s=0.0, overlap_fraction=1.0, boundary_s=0.0, staleness_gap=1.0,
    last_staleness_gap=1.0, clipped_fraction=0.0, tau=8, tau_changes=0, lost_all_reduces=0,
    left_out_payloads=0, rule="CO2", delay_steps=8, most_fragments=8,
    step_s=0.1, all_reduce_s=0.6,
)  # fmt: skip
CASES = [
    # 6 steps; CO2 learns best at tau 4, behind which they fit with a quarter of the bytes.
    (
        {},
        [
            ('an all-reduce takes 6.0 steps: tau=4, codec="int8" would hide it too, and what is '
            "less late learns better")
        ],
    ),
    (
        {"all_reduce_s": 1.1},
        ['an all-reduce takes 11.0 steps and has 8 to hide behind: use tau=4, codec="int8"'],
    ),
    (
        {"all_reduce_s": 3.0, "codec": "bf16"},  # 60 in fp32, 8.5 in int4 with a tenth to spare
        ['an all-reduce takes 30.0 steps and has 8 to hide behind: use tau=9, codec="int4"'],
    ),
    (
        {"all_reduce_s": 2.0},
        ['an all-reduce takes 20.0 steps and has 8 to hide behind: use tau=4, codec="int4"'],
    ),
    # What nobody knows the size of stays, and only the round changes.
    (
        {"all_reduce_s": 2.0, "codec": "topk"},
        ["an all-reduce takes 20.0 steps and has 8 to hide behind: use tau=22"],
    ),
    (
        {"all_reduce_s": 2.0, "codec": "Mine(bits=3)"},
        ["an all-reduce takes 20.0 steps and has 8 to hide behind: use tau=22"],
    ),
    (  # 12 steps for all, 1.7 in int4, in two parts
        {"all_reduce_s": 0.3, "fragments": 4, "delay_steps": 2, "rule": "delay-corrected"},
        [
            ("an all-reduce of one of 4 fragments takes 3.0 steps and has 2 to hide behind: "
            'use tau=2, fragments=2, codec="int4"')
        ],
    ),
    (
        {"all_reduce_s": 0.25, "delay_steps": 1, "tau": 1, "rule": "delayed gradients"},
        ['an all-reduce takes 2.5 steps and has 1 to hide behind: use codec="int8"'],
    ),
    (
        {"all_reduce_s": 2.5, "delay_steps": 1, "tau": 1, "rule": "delayed gradients"},
        [
            ("an all-reduce takes 25.0 steps and has 1 to hide behind: "
            'use gradients accumulated over 4 batches, codec="int4"')
        ],
    ),
    (
        {"exposed_wait_s": 10.0, "all_reduce_s": 0.5},
        [
            ("an all-reduce takes 5.0 steps, but 9% of the time is waiting: it stalls at times; "
            "use a larger tau")
        ],
    ),
    (
        {"exposed_wait_s": 10.0, "fragments": 4, "delay_steps": 2, "all_reduce_s": 0.1},
        [
            ("an all-reduce of one of 4 fragments takes 1.0 steps, but 9% of the time is waiting: "
            "it stalls at times; use fewer fragments")
        ],
    ),
    (
        {"all_reduce_s": 0.11},
        [
            ("an all-reduce takes 1.1 steps: tau=4 would hide it too, and what is less late learns "
            "better")
        ],
    ),
    # A delay of 5 steps where 8 are given is too little for a change.
    ({"all_reduce_s": 0.45, "codec": "topk"}, []),
    # A round of as many steps, in parts: 0.6 s for all of it, in 6 of one step each.
    (
        {"rule": "delay-corrected", "codec": "topk"},
        [
            ("an all-reduce takes 6.0 steps: tau=7, fragments=7 would hide it too, and what is "
            "less late learns better")
        ],
    ),
    (
        {"rule": "Local SGD", "delay_steps": 0, "exposed_wait_s": 100.0, "all_reduce_s": 1.6},
        [
            ('50% of the time is waiting: DelayCorrected(tau=3, fragments=3) with codec="int4" '
            "hides it")
        ],
    ),
    ({"rule": "Local SGD", "delay_steps": 0, "exposed_wait_s": 5.0}, []),
    # What a model of few tensors or few bytes cannot do is not said.
    (
        {"rule": "delay-corrected", "codec": "topk", "most_fragments": 1, "all_reduce_s": 1.6},
        ["an all-reduce takes 16.0 steps and has 8 to hide behind: use tau=18"],
    ),
    ({"rule": "delay-corrected", "payload_bytes": 10**7}, []),
    (
        {"all_reduce_s": 1.1, "payload_bytes": 10**7},
        ["an all-reduce takes 11.0 steps and has 8 to hide behind: use tau=13"],
    ),
    # 1,024 steps are the longest round.
    (
        {"all_reduce_s": 1e5, "payload_bytes": 10**7},
        [
            ("an all-reduce takes 1000000.0 steps and has 8 to hide behind: no round of up to 1024 "
            "steps hides it")
        ],
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
        {"all_reduce_s": 0.15, "fragments": 2, "delay_steps": 1, "tau": 4, "codec": "topk",
         "rule": "delay-corrected", "most_fragments": 2},
        [
            ("an all-reduce of one of 2 fragments takes 1.5 steps and has 1 to hide behind: "
            "use delay_steps=2")
        ],
    ),
    # What is decided while training is not for the user to change.
    (
        {"all_reduce_s": 1.1, "automatic": ("tau",)},
        ['an all-reduce takes 11.0 steps and has 8 to hide behind: use codec="auto"'],
    ),
    (
        {"all_reduce_s": 1.1, "automatic": ("tau", "codec")},
        ["an all-reduce takes 11.0 steps and has 8 to hide behind: tau follows"],
    ),
    ({"all_reduce_s": 0.11, "automatic": ("tau",)}, []),
]  # fmt: skip


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
    monkeypatch.setattr(_fragment, "time", clock)

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
