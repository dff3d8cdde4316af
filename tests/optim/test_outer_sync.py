"""OuterSync as a whole: drains, start, kinds of tensors, statistics, dead peers.

What every rule must do is in ``tests/conformance``.
"""

import copy
import dataclasses
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold import optim
from fivefold.errors import CommunicationError, ConfigurationError, ReplicaMismatchError
from fivefold.optim._metadata import replica_hash
from fivefold.testing import run_processes, run_world
from helpers.night import number_of

SEEDING = threading.Lock()  # ranks are threads, and torch has one global generator


def make(transport, rule, *, seed=0, **settings):
    with SEEDING:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return (
        model,
        optimizer,
        optim.OuterSync(model, optimizer, rule=rule, transport=transport, **settings),
    )


def train_steps(model, optimizer, sync, steps, rank):
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        inputs = torch.randn(8, 4, generator=generator)
        loss = (model(inputs) - inputs[:, :2].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sync.step()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.filterwarnings("ignore::fivefold.optim.StabilityWarning")
@settings(deadline=None, max_examples=30)
@pytest.mark.slow
@given(
    tau=st.integers(1, 5),
    steps=st.integers(1, 23),
    world_size=st.integers(2, 4),
    kind=st.sampled_from(["co2", "local_sgd", "delay_corrected"]),
    drains=st.sets(st.integers(1, 22)),
)
def test_every_local_step_enters_the_average_exactly_once(tau, steps, world_size, kind, drains):
    """Each local step moves a coordinate of its own, so that the end names all that arrived."""
    plain = {"tau": tau, "outer_lr": 1.0, "outer_momentum": 0.0, "clip": None}
    rule = {
        "co2": optim.CO2(**plain, staleness="none"),
        "local_sgd": optim.LocalSGD(tau=tau),
        "delay_corrected": optim.DelayCorrected(tau=tau, fragments=1),
    }[kind]

    def work(transport):
        model = torch.nn.Linear(steps, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        sync = optim.OuterSync(
            model, torch.optim.SGD(model.parameters(), lr=1.0), rule=rule, transport=transport
        )
        for step in range(steps):
            with torch.no_grad():
                model.weight[0, step] += transport.rank + 1
            sync.step()
            if step + 1 in drains:
                sync.finalize()
        sync.finalize()
        return model.weight.detach()

    mean = sum(range(1, world_size + 1)) / world_size
    for weight in run_world(world_size, work):
        torch.testing.assert_close(weight, torch.full_like(weight, mean), rtol=0, atol=1e-12)


def test_live_parameters_change_on_the_training_thread_only():
    """Between boundaries nothing writes a parameter: tensor versions stand still in flight."""

    def work(rank):
        model, optimizer, sync = make(None, optim.CO2(tau=4))
        train_steps(model, optimizer, sync, range(4), rank)
        before = [(p._version, p.detach().clone()) for p in model.parameters()]
        time.sleep(0.3)  # the all-reduce completes meanwhile
        same = all(
            p._version == version and torch.equal(p, value)
            for p, (version, value) in zip(model.parameters(), before, strict=True)
        )
        sync.finalize()
        return same

    assert run_processes(2, work) == [True, True]


def test_global_parameters_are_equal_on_all_ranks_and_put_back():
    def work(transport):
        model, optimizer, sync = make(transport, optim.CO2(tau=4))
        train_steps(model, optimizer, sync, range(10), transport.rank)
        local = flat(model)
        with sync.global_parameters():
            shared = flat(model)
        assert torch.equal(flat(model), local)
        return local, shared

    (local0, shared0), (local1, shared1) = run_world(2, work)
    assert torch.equal(shared0, shared1)
    assert not torch.equal(local0, local1)


def test_start_takes_rank_zero_everywhere_with_buffers_and_frozen_parameters():
    def work(transport):
        torch.manual_seed(transport.rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        model[1].running_mean.fill_(transport.rank)
        model[0].bias.requires_grad_(requires_grad=False)
        optim.OuterSync(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            rule=optim.CO2(tau=1),
            transport=transport,
        )
        return model.state_dict()

    first, second = run_world(2, work)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert float(second["1.running_mean"].sum()) == 0.0


def test_mixed_types_tied_frozen_and_strided_parameters():
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
            self.two = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.tied = self.one
            self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
            strided = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
            self.strided = torch.nn.Parameter(strided)

    def work(transport):
        model = Mixed()
        sync = optim.OuterSync(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            rule=optim.LocalSGD(tau=1),
            transport=transport,
        )
        values = torch.arange(120.0).view(2, 3, 4, 5)
        with torch.no_grad():
            for parameter in (model.one, model.two, model.frozen):
                parameter.add_(transport.rank)
            model.strided.add_(values * transport.rank)
        sync.step()
        assert sync.statistics().payload_bytes == 5 * 4 + 3 * 8 + 120 * 4
        expected = (1 + values / 2).to(memory_format=torch.channels_last)
        assert torch.equal(model.strided, expected)
        return [p.detach().double().flatten()[0].item() for p in model.parameters()]

    assert run_world(2, work) == [[1.5, 1.5, 1.0, 1.0], [1.5, 1.5, 2.0, 1.0]]


def test_corrupted_replica_is_named():
    def work(transport):
        model, optimizer, sync = make(transport, optim.CO2(tau=1), check_every_rounds=2)
        for step in range(10):
            if transport.rank == 1 and step == 3:
                sync._fragments[0].groups[0].anchor[17] += 1e-6
            train_steps(model, optimizer, sync, [step], transport.rank)

    with pytest.raises(ReplicaMismatchError, match=r"rank\(s\) 1 differ from rank 0"):
        run_world(3, work)


def test_no_check_when_switched_off():
    def work(transport):
        model, optimizer, sync = make(transport, optim.CO2(tau=1), check_every_rounds=0)
        if transport.rank == 1:
            sync._fragments[0].groups[0].anchor[17] += 1e-6
        train_steps(model, optimizer, sync, range(6), transport.rank)
        return sync.statistics().merged_rounds

    assert run_world(2, work) == [5, 5]


@given(st.integers(1, 20_000), st.data())
def test_hash_sees_one_flipped_bit_and_one_swap(size, data):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    before = replica_hash([values])
    assert 0 <= before < 2**52
    assert replica_hash([values.clone()]) == before
    index = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 30))
    flipped = values.clone()
    flipped.view(torch.int32)[index] ^= 1 << bit
    assert replica_hash([flipped]) != before
    other = data.draw(st.integers(0, size - 1))
    if values[index] != values[other] and (index - other) % 4093 != 0:
        swapped = values.clone()
        swapped[index], swapped[other] = values[other].clone(), values[index].clone()
        assert replica_hash([swapped]) != before


def test_statistics_count_rounds_bytes_and_waits():
    def work(transport):
        model, optimizer, sync = make(transport, optim.CO2(tau=3))
        train_steps(model, optimizer, sync, range(10), transport.rank)
        sync.finalize()
        return sync.statistics(), sync.all_reduces(), flat(model).numel()

    for record, all_reduces, numel in run_world(4, work):
        assert (record.steps, record.rounds, record.merged_rounds) == (10, 4, 4)
        assert record.payload_bytes == 4 * numel * 4
        assert record.sent_bytes == sum(all_reduce.sent_bytes for all_reduce in all_reduces)
        assert [f.round for f in all_reduces] == [0, 1, 2, 3]
        for f in all_reduces:
            assert f.launched_at_s <= f.completed_at_s <= f.wait_ended_at_s
        assert record.in_flight_s == pytest.approx(
            sum(f.completed_at_s - f.launched_at_s for f in all_reduces)
        )
        assert record.exposed_wait_s == pytest.approx(
            sum(f.wait_ended_at_s - f.wait_started_at_s for f in all_reduces)
        )
        assert record.overlap_fraction == pytest.approx(
            max(0.0, 1 - record.exposed_wait_s / record.in_flight_s)
        )


def test_statistics_go_on_from_those_that_were_saved():
    def work(transport):
        model, optimizer, sync = make(transport, optim.CO2(tau=3))
        train_steps(model, optimizer, sync, range(10), transport.rank)
        state = copy.deepcopy(sync.state_dict())
        _, _, resumed = make(transport, optim.CO2(tau=3))
        resumed.load_state_dict(state)
        return sync.statistics(), resumed.statistics()

    for saved, found in run_world(2, work):
        assert saved.payload_bytes > 0
        # Times are those of this process: another machine or network is measured anew.
        assert found == dataclasses.replace(saved, step_s=None, all_reduce_s=None)


@pytest.mark.parametrize(
    ("rule", "bytes_per_element"),
    [
        (optim.CO2(tau=2), 12),
        (optim.CO2(tau=2, outer_momentum=0.0), 8),
        (optim.SlowMo(tau=2), 12),
        (optim.LocalSGD(tau=2), 8),
        (optim.DelayCorrected(tau=2, fragments=1), 12),
        (optim.OverlapLocalSGD(tau=2), 12),
        (optim.EagerDiLoCo(tau=2), 24),
        (optim.EagerDiLoCo(tau=2, outer_momentum=0.0), 16),
        (optim.OuterOptimizer(tau=2, optimizer=torch.optim.SGD, options={"lr": 1.0}), 12),
    ],
)
def test_outer_state_has_the_documented_size(rule, bytes_per_element):
    def work(transport):
        model, _, sync = make(transport, rule)
        buffers = [
            b
            for entries in sync.state_dict()["fragments"]["0"]["tensors"].values()
            for b in entries.values()
        ]
        return sum(b.nbytes for b in buffers) / flat(model).numel()

    assert optim.outer_state_bytes(rule, 1) == bytes_per_element
    not_saved = 4 if isinstance(rule, optim.OuterOptimizer) else 0  # its gradient, made anew
    assert run_world(2, work) == [bytes_per_element - not_saved] * 2


@pytest.mark.parametrize(
    ("setting", "limit"),
    [
        ({"tau": 1, "outer_lr": 0.9, "outer_momentum": 0.2}, r"0\.8"),
        # 0.1 / (0.25 * 0.75^3), of a quarter of a round; beside it 2 (1 + 0.9) is far
        ({"tau": 4, "delay_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.9}, r"0\.948"),
        ({"tau": 4, "delay_steps": 1, "outer_lr": 2.1, "outer_momentum": 0.0}, "2"),
    ],
)
def test_warning_at_the_stability_limit_names_the_limit(setting, limit):
    def work(transport):
        rule = optim.CO2(**setting, staleness="none")
        model, optimizer, sync = make(transport, rule)
        train_steps(model, optimizer, sync, range(60), transport.rank)

    with pytest.warns(optim.StabilityWarning, match=f"stability limit {limit} ") as caught:
        run_world(2, work)
    assert len([w for w in caught if w.category is optim.StabilityWarning]) == 2  # once per rank


@pytest.mark.parametrize(
    "rule",
    [
        optim.CO2(tau=1, outer_lr=0.79, outer_momentum=0.2, staleness="none"),
        optim.CO2(tau=1, outer_lr=0.9, outer_momentum=0.2, staleness="constant:2"),
        optim.SlowMo(tau=1, outer_lr=1.0, outer_momentum=0.9),
        optim.DelayCorrected(tau=1, fragments=1),
    ],
)
def test_no_warning_below_the_limit(rule):
    def work(transport):
        model, optimizer, sync = make(transport, rule)
        train_steps(model, optimizer, sync, range(30), transport.rank)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_world(2, work)


@pytest.mark.alone
@pytest.mark.distributed
def test_dead_peer_is_an_error_that_names_rank_round_and_step():
    def work(rank):
        model, optimizer, sync = make(None, optim.CO2(tau=2), timeout_s=20.0)
        train_steps(model, optimizer, sync, range(3), rank)
        if rank == 1:
            time.sleep(0.2)
            return "left"  # the process ends without a further word
        started_s = time.monotonic()
        try:
            train_steps(model, optimizer, sync, range(3, 40), rank)
        except CommunicationError as error:
            return str(error), time.monotonic() - started_s
        return "no error", 0.0

    message, waited_s = run_processes(2, work)[0]
    assert message.startswith("rank 0: the all-reduce of round ")
    assert "(launched after step " in message
    assert "start again from the last checkpoint" in message
    assert waited_s < 15


@pytest.mark.alone
@pytest.mark.distributed
def test_silent_peer_is_an_error_within_the_timeout():
    def work(rank):
        model, optimizer, sync = make(None, optim.CO2(tau=2), timeout_s=2.0)
        train_steps(model, optimizer, sync, range(3), rank)
        if rank == 1:
            time.sleep(6.0)
            return "slept"
        started_s = time.monotonic()
        try:
            train_steps(model, optimizer, sync, range(3, 8), rank)
        except CommunicationError as error:
            return str(error), time.monotonic() - started_s
        return "no error", 0.0

    message, waited_s = run_processes(2, work, timeout_s=30.0)[0]
    assert message.startswith("rank 0: the all-reduce of round 1 ")
    assert waited_s < 5


@pytest.mark.alone
@pytest.mark.distributed
def test_subgroups_synchronise_among_themselves_only():
    def work(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = torch.nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.fill_(float(rank))
        rule = optim.LocalSGD(tau=1)
        sync = optim.OuterSync(model, optimizer, rule=rule, process_group=pairs[rank // 2])
        with torch.no_grad():
            model.weight.add_(rank)
        sync.step()
        return model.weight[0, 0].item()

    # Each pair starts from its first rank's weight and adds the mean of its ranks.
    assert run_processes(4, work) == [0.5, 0.5, 4.5, 4.5]


@pytest.mark.alone
@pytest.mark.distributed
def test_leaving_with_an_all_reduce_under_way_ends_cleanly(tmp_path):
    script = tmp_path / "leave.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from fivefold.optim import CO2, OuterSync\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(1000, 2000)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "sync = OuterSync(model, optimizer, rule=CO2(tau=1))\n"
        "for _ in range(3):\n    sync.step()\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    "rule", [optim.CO2(tau=2), optim.DelayCorrected(tau=4, fragments=2)], ids=["co2", "parts"]
)
@pytest.mark.parametrize("hidden_ddp", [True, False], ids=["hidden DDP", "apart"])
def test_a_hidden_ddp_is_told_after_the_first_round(rule, hidden_ddp, caplog):
    def work(transport):
        model, optimizer, sync = make(transport, rule)
        # Averaged gradients are equal gradients.
        train_steps(model, optimizer, sync, range(12), 0 if hidden_ddp else transport.rank)

    run_world(3, work)
    told = [r.message for r in caplog.records if "the same pseudo-gradient" in r.message]
    assert len(told) == hidden_ddp
    assert all("disable_ddp" in message for message in told)


def test_ranks_that_have_not_moved_yet_are_no_hidden_ddp(caplog):
    def work(transport):
        *_, sync = make(transport, optim.LocalSGD(tau=1))
        sync.step()

    run_world(2, work)
    assert not caplog.records


STATISTICS = ["1.running_mean", "1.running_var"]


def test_a_state_is_the_same_whether_the_model_is_compiled_or_not():
    """``torch.compile`` wraps modules, and so would change the names of their parameters."""

    def work(transport):
        found = []
        for how in ("plain", "whole", "a part"):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
            if how == "a part":
                model[0] = torch.compile(model[0], backend="eager")
            model = torch.compile(model, backend="eager") if how == "whole" else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sync = optim.OuterSync(
                model, optimizer, rule=optim.DelayCorrected(tau=2, fragments=1), transport=transport
            )
            if found:
                sync.load_state_dict(found[0])
            else:
                train_steps(model, optimizer, sync, range(3), transport.rank)
            found.append(copy.deepcopy(sync.state_dict()))
        tensors = [state["fragments"]["0"]["tensors"] for state in found]
        assert list(tensors[0]) == ["0.weight", "0.bias", "1.weight", "1.bias", *STATISTICS]
        for others in tensors[1:]:
            torch.testing.assert_close(others, tensors[0], rtol=0, atol=0)
        return True

    assert run_world(2, work) == [True, True]


def test_a_boundary_walks_over_the_model_a_few_times_only(monkeypatch):
    """Names are needed where something is told; of each tensor they took seconds a round."""
    walks, plain = [], torch.nn.Module.named_parameters

    def counted(*args, **options):
        walks.append(1)
        return plain(*args, **options)

    def work(transport):
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(40)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = optim.OuterSync(model, optimizer, rule=optim.CO2(tau=1), transport=transport)
        transport.gather_objects(None)
        if transport.rank == 0:
            monkeypatch.setattr(torch.nn.Module, "named_parameters", counted)
        transport.gather_objects(None)
        for _ in range(5):
            sync.step()
        return True

    assert run_world(2, work) == [True, True]
    assert 0 < len(walks) <= 2 * 5 * 4


@pytest.mark.parametrize("who", ["one", "all"])
def test_another_ranks_state_is_taken_as_from_another_number_of_workers(who, caplog):
    """Rank 0 saves for all, as with DDP; all go on from the anchor, and nobody parts in silence."""

    def work(transport, saved):
        model, optimizer, sync = make(transport, optim.DelayCorrected(tau=4, fragments=2))
        train_steps(model, optimizer, sync, range(13), transport.rank)
        saved[transport.rank] = copy.deepcopy([model.state_dict(), sync.state_dict()])
        whose = [saved[rank] for rank in transport.gather_objects(transport.rank)]
        rank = 0 if who == "all" or transport.rank == 0 else 2
        weights, state = whose[rank]
        model, optimizer, sync = make(transport, optim.DelayCorrected(tau=4, fragments=2))
        model.load_state_dict(weights)
        sync.load_state_dict(state)
        begun = flat(model).clone()
        train_steps(model, optimizer, sync, range(13, 22), transport.rank)
        sync.finalize()
        return begun, flat(model)

    saved = {}
    with caplog.at_level(logging.WARNING, logger="fivefold.optim"):
        results = run_world(3, lambda t: work(t, saved))
    assert all(torch.equal(begun, results[0][0]) for begun, _ in results)
    assert all(torch.equal(end, results[0][1]) for _, end in results)
    assert f"{2 if who == 'all' else 1} of 3 ranks load another rank's outer state" in caplog.text


def test_closed_engines_leave_no_file_descriptor_and_no_thread():
    def work(_rank):
        model = torch.nn.Linear(2, 1)

        def engine():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sync = optim.OuterSync(model, optimizer, rule=optim.DelayedGradients(), codec="int8")
            model.weight.grad = torch.ones(1, 2)
            optimizer.step()
            sync.step()
            sync.finalize()
            sync.close()
            sync.close()
            with pytest.raises(ConfigurationError, match="has been closed"):
                sync.step()
            optimizer.step()  # it is the user's again

        def held():
            gc.collect()
            return [len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task")]

        engine()
        before = held()
        for _ in range(number_of(8, 100)):
            engine()
        return [after - then for after, then in zip(held(), before, strict=True)]

    for grown in run_processes(2, work):
        assert max(grown) <= 1, f"file descriptors and threads grew by {grown}"


def test_closing_late_is_no_error():
    def work(_rank):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = optim.OuterSync(model, optimizer, rule=optim.LocalSGD(tau=2))
        torch.distributed.destroy_process_group()
        sync.close()

    run_processes(2, work)
