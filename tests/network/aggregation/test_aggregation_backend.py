"""The switch under torch.distributed: all-reduces, DDP, groups, and a switch that dies."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
import torch._dynamo  # DDP loads it late, which each forked rank would do again
import torch.distributed as dist
from torch import nn

from fivefold.collectives import execution
from fivefold.collectives.execution import CollectiveError, configure
from fivefold.errors import ConfigurationError
from fivefold.network.aggregation import AggregationOptions
from fivefold.network.aggregation.wire import ordered_sum
from fivefold.testing import run_processes
from helpers.switch_process import SwitchProcess

pytestmark = pytest.mark.distributed


@pytest.fixture
def switch():
    before = execution.current_settings()
    with SwitchProcess(slots=16, slot_bytes=4096) as process:
        configure(
            aggregation=process.address,
            aggregation_min_bytes=1024,
            aggregation_options=AggregationOptions(retry_every=4),
            algorithms=dict.fromkeys(("all_reduce", "all_gather", "broadcast"), "inner"),
        )
        yield process
    configure(
        aggregation=None,
        aggregation_min_bytes=before.aggregation_min_bytes,
        aggregation_options=None,
        algorithms=before.algorithms,
    )


def data_of(rank, dtype=torch.float32):
    return torch.randn(5000, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.alone  # a late chunk is summed elsewhere, to the same bits, and is no hit
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_all_reduce_gives_the_switchs_bits(switch, dtype):
    def work(rank):
        data = data_of(rank, dtype)
        dist.all_reduce(data)
        return data

    found = run_processes(3, work, backend="fivefold")
    raw = [data_of(rank, dtype) for rank in range(3)]
    if dtype is torch.bfloat16:
        parts = [part.view(torch.int16).numpy().view(np.uint16) for part in raw]
        expected = torch.from_numpy(ordered_sum(parts, "bfloat16").view(np.int16)).view(dtype)
    else:
        expected = torch.from_numpy(ordered_sum([part.numpy() for part in raw]))
    assert all(torch.equal(one, expected) for one in found)
    assert switch.stop().hits == -(-expected.nbytes // 4096)


def test_what_the_switch_does_not_take_goes_its_usual_way(switch):
    def work(rank):
        small = torch.ones(3)
        dist.all_reduce(small)
        largest = torch.full((5000,), float(rank))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        mean = torch.full((50, 100), float(rank)).t()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        works = [torch.full((3000,), float(rank + turn)) for turn in range(6)]
        handles = [dist.all_reduce(one, async_op=True) for one in works]
        gathered = [torch.empty(2000) for _ in range(2)]
        dist.all_gather(gathered, torch.full((2000,), float(rank)))
        for handle in handles:
            handle.wait()
        return (
            small.tolist(),
            largest[-1].item(),
            mean[-1, -1].item(),
            [one[-1].item() for one in works],
            [one[-1].item() for one in gathered],
        )

    expected = ([2.0] * 3, 1.0, 0.5, [1.0, 3.0, 5.0, 7.0, 9.0, 11.0], [0.0, 1.0])
    assert run_processes(2, work, backend="fivefold") == [expected] * 2
    assert switch.stop().hits > 0


@pytest.mark.alone
def test_groups_are_jobs_of_their_own(switch):
    def work(rank):
        groups = [dist.new_group(pair, backend="fivefold") for pair in ([0, 1], [2, 3])]
        data = torch.full((4000,), float(rank))
        dist.all_reduce(data, group=groups[rank // 2])
        whole = torch.full((4000,), float(rank))
        dist.all_reduce(whole)
        return data[0].item(), whole[0].item()

    found = run_processes(4, work, backend="fivefold")
    assert found == [(1.0, 6.0), (1.0, 6.0), (5.0, 6.0), (5.0, 6.0)]
    assert switch.stop().hits == 12


def train(rank, kill_at):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(8):
        if step in kill_at and rank == 0:
            os.kill(kill_at[step], signal.SIGKILL)
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def test_ddp_ends_with_the_same_bits_when_the_switch_dies_on_the_way(switch):
    undisturbed = run_processes(3, lambda rank: train(rank, {}), backend="fivefold")
    killed = run_processes(3, lambda rank: train(rank, {3: switch.pid}), backend="fivefold")
    for one in (*undisturbed, *killed):
        assert torch.equal(one, undisturbed[0])


def test_a_dead_rank_is_an_error_as_torch_users_know_them(switch):
    def work(rank):
        data = torch.ones(5000)
        dist.all_reduce(data)
        if rank == 1:
            return ""
        with pytest.raises(CollectiveError) as caught:
            dist.all_reduce(data)
        with pytest.raises(CollectiveError, match="an earlier collective"):
            dist.all_reduce(data)
        return str(caught.value)

    found = run_processes(2, work, backend="fivefold")
    assert "all-reduce 2 of job" in found[0]
    del switch


def test_the_address_comes_from_the_environment_and_is_checked(monkeypatch):
    monkeypatch.setenv("FIVEFOLD_AGGREGATION", "10.0.0.9:4000")
    assert execution.current_settings().aggregation == "10.0.0.9:4000"
    monkeypatch.setenv("FIVEFOLD_AGGREGATION", "somewhere")
    with pytest.raises(ConfigurationError, match="no address"):
        execution.current_settings()
    with pytest.raises(ConfigurationError, match="aggregation_min_bytes"):
        configure(aggregation_min_bytes=-1)
