"""The comparison with peers: its arithmetic, its pace, and one small run without any peer."""

import json
import sys
import time
import warnings

import pytest
import torch
from benchmarks.optim._peers._case import Case
from benchmarks.optim._peers._figures import Curve, curve_of, error_of, seconds_to_target, timing_of
from benchmarks.optim._peers._pace import Pacer
from benchmarks.optim._peers._rows import Measured, rows_of
from benchmarks.optim._peers._table import CASES, choice_text, find_case

from fivefold.optim import DelayCorrected
from helpers.forked_ranks import forked_worlds


def answer(**changed):
    base = {
        "steps": 10,
        "wall_s": 2.0,
        "link_sent_bytes": 1000,
        "link_received_bytes": 500,
        "overruns": 1,
        "peak_bytes": 7,
        "drain_s": 0.25,
    }
    return base | changed


def test_a_timing_takes_the_slowest_rank_and_the_mean_of_the_links():
    ranks = [
        answer(rounds=5.0, in_flight_s=10.0, exposed_wait_s=0.5, sent_bytes=900.0),
        answer(
            wall_s=3.0,
            link_sent_bytes=3000,
            rounds=5.0,
            in_flight_s=8.0,
            exposed_wait_s=1.0,
            sent_bytes=900.0,
        ),
    ]
    timing = timing_of(ranks)
    assert timing.step_s == 0.3
    assert timing.sent_bytes == 200.0
    assert timing.busiest_bytes == 300.0
    assert timing.formula_bytes == 90.0
    assert timing.round_steps == 2.0
    # The slowest rank waits 0.1 s per step, 0.2 s of a round's 2 s of flight.
    assert timing.hidden == pytest.approx(0.9)


def test_a_peer_has_no_engine_figures():
    timing = timing_of([answer(), answer()])
    assert (timing.hidden, timing.formula_bytes, timing.allreduce_s) == (None, None, None)


def test_the_first_error_of_the_ranks_counts():
    assert error_of([answer(), {"error": "one"}, {"error": "two"}]) == "one"
    assert error_of([answer()]) is None


def test_points_of_all_ranks_make_one_curve():
    ranks = [
        {"problem": {"seed": 3}, "curve": [[16, 3.0], [48, 2.0]]},
        {"problem": {"seed": 3}, "curve": [[32, 2.5]]},
    ]
    assert curve_of(ranks) == Curve(seed=3, points=((16, 3.0), (32, 2.5), (48, 2.0)))


def test_time_to_target_counts_the_first_steps_at_the_rate_of_ddp_and_the_drain():
    case = Case(name="c", kind="peer", adapter="ddp", ddp_steps=20)
    curve = Curve(seed=0, points=((16, 4.0), (32, 3.0), (48, 2.0)))
    found_s = seconds_to_target(curve, 2.5, case=case, step_s=0.1, ddp_step_s=1.0, drain_s=0.5)
    # Half way from step 32 to 48: 20 steps of a second, 20 of a tenth, and the drain.
    assert found_s == pytest.approx(20.0 + 2.0 + 0.5)
    never = seconds_to_target(curve, 1.0, case=case, step_s=0.1, ddp_step_s=1.0, drain_s=0.5)
    assert never is None


def measured_with(ours_s, peer_s):
    cases = [
        Case(name="compute only", kind="alone", adapter="alone"),
        Case(name="DDP", kind="peer", adapter="ddp"),
        Case(name="CO2", kind="ours", adapter="ours", round_steps=2, overlaps=True),
    ]
    measured = Measured(cases=cases, rates=["50Mbit/s"], tokens_per_step=100, payload_bytes=100)
    engine = {"rounds": 5.0, "in_flight_s": 1.0, "exposed_wait_s": 0.1, "sent_bytes": 750.0}
    for name, wall_s, more in (
        ("compute only", 1.0, {"allreduce_s": 0.15}),
        ("DDP", peer_s, {}),
        ("CO2", ours_s, engine),
    ):
        measured.timings["50Mbit/s", name] = [timing_of([answer(wall_s=wall_s, **more)])]
    measured.equal["DDP"] = [Curve(seed=0, points=((5, 3.0), (10, 2.0)))]
    measured.equal["CO2"] = [Curve(seed=0, points=((5, 3.0), (10, 1.0)))]
    return measured


def row(rows, case, metric):
    return next(row for row in rows if row.case == case and row.metric == metric)


def test_rows_hold_ours_beside_the_peers_and_say_who_won():
    rows = rows_of(measured_with(ours_s=1.25, peer_s=5.0))
    fraction = row(rows, "50Mbit/s, CO2", "fraction of the compute-only rate")
    assert fraction.ours == pytest.approx(0.8)
    assert fraction.peers == {"compute only": 1.0, "DDP": pytest.approx(0.2)}
    assert (fraction.target, fraction.met) == (0.95, False)  # a flight fits behind two steps
    best = next(row for row in rows if "best of the table" in row.metric)
    # Ours reaches 2.0 half way from step 5 to 10, at an eighth of a second each, plus the drain.
    assert best.ours == pytest.approx(7.5 * 0.125 + 0.25)
    assert best.target == pytest.approx(10 * 0.5 + 0.25)
    assert best.met
    lost = rows_of(measured_with(ours_s=50.0, peer_s=5.0))
    assert not next(row for row in lost if "best of the table" in row.metric).met


def test_a_round_that_cannot_be_hidden_has_no_target():
    measured = measured_with(ours_s=1.25, peer_s=5.0)
    alone = timing_of([answer(wall_s=1.0, allreduce_s=0.25)])
    measured.timings["50Mbit/s", "compute only"] = [alone]
    rows = rows_of(measured)
    assert row(rows, "50Mbit/s, CO2", "fraction of the compute-only rate").target is None


def test_a_failed_peer_is_named():
    measured = measured_with(ours_s=1.25, peer_s=5.0)
    measured.failures["memory", "DDP"] = "ImportError: no module"
    assert row(rows_of(measured), "DDP (memory)", "failed").ours == 1.0


class Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

    def loss(self, inputs, targets):
        for block in self.blocks:
            inputs = block(inputs)
        return (inputs - targets).square().mean()


def paced_step_s(model, pacer, optimizer, wait_s=0.0):
    start_s = time.perf_counter()
    inputs = torch.ones(1, 2, requires_grad=True)  # as an embedding gives them
    value = pacer.forward(model.loss)(inputs, torch.zeros(1, 2))
    value.backward()
    time.sleep(wait_s)  # as DDP waits for its last bucket before backward() returns
    pacer.backward_done()
    optimizer.step()
    return time.perf_counter() - start_s


@pytest.mark.alone
def test_a_paced_step_lasts_its_time_and_a_wait_is_not_padded_away():
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pacer = Pacer(0.2, model, optimizer)
    paced_step_s(model, pacer, optimizer)
    pacer.overruns = 0  # the first step loads what the others use
    # A busy machine only makes steps longer; a wait that was padded away would leave 0.2 s.
    assert 0.19 < paced_step_s(model, pacer, optimizer) < 0.34
    assert 0.34 < paced_step_s(model, pacer, optimizer, wait_s=0.15) < 0.6
    assert pacer.overruns == 0


@pytest.mark.alone
def test_gradients_become_ready_one_block_after_the_other():
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ready_s = {}
    for index, block in enumerate(model.blocks):
        block.weight.register_post_accumulate_grad_hook(
            lambda _, index=index: ready_s.update({index: time.perf_counter()})
        )
    pacer = Pacer(0.3, model, optimizer)
    start_s = time.perf_counter()
    paced_step_s(model, pacer, optimizer)
    shares = [(ready_s[index] - start_s) / 0.3 for index in (2, 1, 0)]
    # After the forward pass's 0.3, at 2/7, 4/7 and 6/7 of the backward pass's 0.6.
    assert shares == pytest.approx([0.3 + 0.6 * k / 7 for k in (2, 4, 6)], abs=0.08)


@pytest.mark.alone
def test_longer_work_than_the_stated_time_is_an_overrun():
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pacer = Pacer(1e-6, model, optimizer)
    paced_step_s(model, pacer, optimizer)
    assert pacer.overruns == 1
    assert pacer.overrun_s > 0


def test_cases_have_names_of_their_own_and_a_chosen_round_makes_a_case():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert CASES[0].kind == "alone"
    assert "DDP" in names
    chosen = {"tau": 6, "fragments": 3, "delay_steps": 2, "codec": "int8"}
    fixed = find_case(f"delay-corrected auto = {choice_text(chosen)}")
    assert (fixed.round_steps, fixed.settings["codec"]) == (6, "int8")
    assert DelayCorrected(**fixed.settings["options"]).delay_steps == 2
    assert find_case("delay-corrected auto").settings["options"]["tau"] == "auto"


def run_peers():
    warnings.simplefilter("default")  # torch's own hooks for DDP are of a kind that it deprecates
    from benchmarks.optim import peers

    peers.main()
    return 0


@pytest.mark.alone
@pytest.mark.distributed
def test_two_hosts_run_every_measurement_without_a_peer(tmp_path, monkeypatch):
    problem = {"steps": 8, "seed": 0, "lr": 4e-3}
    jobs = [
        {"measurement": "timing", "case": "CO2 tau 8", "step_s": 0.0},
        {"measurement": "memory", "case": "DDP"},
        {"measurement": "learning", "case": "DDP", "problem": problem, "every": 4},
        {"measurement": "learning", "case": "no such case", "problem": problem, "every": 4},
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    monkeypatch.setattr(sys, "argv", ["peers", "--worker", str(tmp_path)])
    with forked_worlds(tmp_path / "hosts") as start:
        hosts = start(run_peers, world_size=2)
        assert hosts.wait(240) == {0: 0, 1: 0}, hosts.logs()
    timing, memory, learning, missing = (
        [json.loads((tmp_path / f"{job}-{rank}.json").read_text()) for rank in range(2)]
        for job in range(4)
    )
    assert timing_of(timing).round_steps == 8
    assert memory[0]["added_bytes_per_parameter"] > 0
    curve = curve_of(learning)
    assert [steps for steps, _ in curve.points] == [4, 8]
    assert curve.final < 8.0  # bits per byte of a uniform guess
    assert "KeyError" in error_of(missing)
