"""A rank that computes nonsense spoils nobody's model, is named, and ends the run only with all."""

import dataclasses
import logging
import math
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fivefold.errors import NonFiniteError
from fivefold.optim import CO2, OuterSync
from fivefold.testing import run_processes, run_world
from helpers.outer_world import OF_GRADIENTS, RULES, Counter, Lossy, Worker, all_equal

pytestmark = pytest.mark.filterwarnings("ignore::fivefold.optim.StabilityWarning")
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
BAD = (math.nan, math.inf, -math.inf)


def spoil(worker, value):
    """One bad step: the weights, and through the next loss all else."""
    with torch.no_grad():
        worker.model.last.weight[1, 2] = value


@pytest.mark.parametrize("lossy", [False, True], ids=["", "lossy"])
@every_rule
def test_a_bad_step_on_one_rank_stays_there(rule, lossy, caplog):
    if lossy and not rule.bears_losses:
        return  # it refuses such a transport

    def work(transport):
        worker = Worker(Lossy(transport) if lossy else transport, rule, check_every_rounds=1)
        for step in range(8 * rule.first_tau):
            if transport.rank == 1 and step == rule.first_tau:
                spoil(worker, BAD[step % 3])
            worker.train([step])
        worker.sync.finalize()
        return worker.flat(), worker.sync.statistics().left_out_payloads

    with caplog.at_level(logging.WARNING, logger="fivefold.optim"):
        results = run_world(3, work)
    assert all_equal([flat for flat, _ in results])
    assert results[0][0].isfinite().all()
    assert len({left_out for _, left_out in results}) == 1
    assert results[0][1] >= 1
    # Each fragment names its own first parameter; the spoilt one is in the last.
    told = {record.getMessage().split(";")[0] for record in caplog.records}
    assert all("rank 1 in " in message for message in told)
    assert not any("rank 0" in message or "rank 2" in message for message in told)


@pytest.mark.parametrize("name", ["co2", "delay-corrected", "slowmo", "eager", "sgd-hidden"])
def test_the_mean_is_that_of_the_others(name):
    """Rank 1's round is bad; what arrives of it is the mean of ranks 0 and 2 alone."""
    steps, rule = 4 * RULES[name].first_tau, RULES[name]

    def work(transport, value):
        model = Counter(steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)
        weights = [3.0, 1.0, 5.0]
        for step in range(steps):
            model.work(step, transport.rank + 1.0)
            first_round = step < rule.first_tau
            if transport.rank == 1 and step == 0 and value is not None:
                model.p.data[0] = value
            weight = 0.0 if first_round and transport.rank == 1 and value is None else 1.0
            sync.step(weights[transport.rank] * weight)
        sync.finalize()
        return torch.cat([model.p.detach(), model.q.detach()])

    bad = run_world(3, lambda t: work(t, math.nan))
    assert all_equal(bad)
    without = run_world(3, lambda t: work(t, None))
    if not rule.keeps_local and rule.merge != "eager":  # there rank 1 keeps what it did
        torch.testing.assert_close(bad[0], without[0], rtol=0, atol=1e-12)
    assert bad[0].isfinite().all()


@every_rule
def test_all_ranks_end_alike_where_none_is_finite(rule):
    def work(transport):
        worker = Worker(transport, rule)
        try:
            for step in range(4 * rule.first_tau):
                worker.train([step])
                spoil(worker, math.nan)
            worker.sync.finalize()
        except NonFiniteError as error:
            return worker.sync.statistics().steps, str(error)
        return None

    results = run_world(2, work)
    assert results[0] is not None
    assert results[0] == results[1]
    assert re.search(r"in round \d+: rank 0 in \S+, rank 1 in \S+; no other", results[0][1])


def test_rank_round_and_parameter_are_named(caplog):
    def work(transport):
        worker = Worker(transport, CO2(tau=2))
        for step in range(8):
            worker.local_step(step)
            if transport.rank == 1 and step == 3:
                with torch.no_grad():
                    worker.model.norm.bias[1] = math.inf
            worker.sync.step()

    with caplog.at_level(logging.WARNING, logger="fivefold.optim"):
        run_world(2, work)
    expected = "not-a-number or infinity in round 1: rank 1 in norm.bias; the round counts without"
    assert len(caplog.records) == 2  # one on each rank
    assert all(record.getMessage().startswith(expected) for record in caplog.records)


def test_a_bad_start_of_a_late_parameter_is_left_out():
    def work(transport):
        model = torch.nn.ParameterList([torch.zeros(3)])
        sync = OuterSync(
            model, torch.optim.SGD(model.parameters()), rule=CO2(tau=2), transport=transport
        )
        model.append(torch.nn.Parameter(torch.full((2,), [1.0, math.nan, 3.0][transport.rank])))
        sync.adopt_parameters()
        return model[1].detach()

    for value in run_world(3, work):
        assert torch.equal(value, torch.tensor([2.0, 2.0]))


ROUNDS_BEFORE = 10  # eight of them show what is usual


def wild_life(worker, rule):
    """One step of rank 1 goes astray, far but finite."""
    last = ROUNDS_BEFORE * rule.first_tau
    for step in range(last + 2 * rule.first_tau):
        if step == last and worker.sync._transport.rank == 1:
            with torch.no_grad():
                worker.model.last.weight[1, 2] += 1e4
        worker.train([step])
    worker.sync.finalize()
    return worker.flat(), worker.sync.statistics().left_out_payloads


@pytest.mark.parametrize("name", sorted(RULES.keys() - OF_GRADIENTS))
def test_an_outlying_step_on_one_rank_stays_there(name, caplog):
    rule = dataclasses.replace(RULES[name], synchronous_start=0, synchronous_end=0)

    def work(transport):
        return wild_life(Worker(transport, rule, outlier_factor=20.0, check_every_rounds=1), rule)

    with caplog.at_level(logging.WARNING, logger="fivefold.optim"):
        results = run_world(3, work)
    assert all_equal([flat for flat, _ in results])
    assert float(results[0][0].abs().max()) < 100
    assert {left_out for _, left_out in results} == {1}
    told = {text for text in caplog.messages if text.startswith("outlying payload")}
    assert len(told) == 1
    assert "rank 1's is " in told.pop()


@pytest.mark.slow
@pytest.mark.distributed
def test_codecs_leave_an_outlying_rank_out():
    cases = [
        (rule, codec)
        for rule in ("co2", "delay-corrected-parts", "diloco")
        for codec in ("bf16", "int8", "int4", "topk")
    ]

    def life(rank, rule, codec):
        worker = Worker(None, rule, data=rank, codec=codec, outlier_factor=20.0)
        return wild_life(worker, rule)

    results = run_processes(2, lambda r: [life(r, RULES[n], c) for n, c in cases], timeout_s=120.0)
    for case, ours, theirs in zip(cases, *results, strict=True):
        assert torch.equal(ours[0], theirs[0]), case
        assert float(ours[0].abs().max()) < 100, case
        assert ours[1] == theirs[1] == 1, case


@pytest.mark.nightly
@pytest.mark.distributed
def test_codecs_leave_a_bad_rank_out():
    cases = [
        (rule, codec)
        for rule in ("co2", "delay-corrected", "streaming")
        for codec in ("bf16", "fp16", "int8", "int4", "topk")
    ]

    def life(rank, rule, codec):
        worker = Worker(None, rule, data=rank, codec=codec, check_every_rounds=1)
        for step in range(6 * rule.first_tau):
            if rank == 0 and step == rule.first_tau:
                spoil(worker, math.nan)
            worker.train([step])
        worker.sync.finalize()
        return worker.flat(), worker.sync.statistics().left_out_payloads

    results = run_processes(2, lambda r: [life(r, RULES[n], c) for n, c in cases], timeout_s=120.0)
    for case, ours, theirs in zip(cases, *results, strict=True):
        assert torch.equal(ours[0], theirs[0]), case
        assert ours[0].isfinite().all(), case
        assert ours[1] == theirs[1] >= 1, case


@pytest.mark.distributed
def test_all_shards_of_a_bad_worker_are_left_out():
    """Two workers of two ranks; only the second rank's shard of worker 1 is bad."""

    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.ones_(model.weight)
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rule = CO2(tau=2, outer_lr=1.0, outer_momentum=0.0, staleness="none", clip=None)
        sync = OuterSync(model, optimizer, rule=rule, process_group=mesh["replicate"])
        for step in range(4):
            with torch.no_grad():
                local = model.weight.to_local()
                local += 1.0 + rank // 2
                if rank == 3 and step == 0:
                    local[0, 0] = math.nan
            sync.step()
        sync.finalize()
        return model.weight.full_tensor().detach()

    for weight in run_processes(4, work, timeout_s=100.0):
        # Round 0 is worker 0's alone, 2 steps of 1; round 1 is the mean of 1 and 2, 2 steps.
        assert torch.equal(weight, torch.full((4, 4), 1.0 + 2 * 1.0 + 2 * 1.5))
