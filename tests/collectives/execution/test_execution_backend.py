"""The backend between real processes: every collective, DDP, FSDP2, groups, failures."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch._dynamo  # DDP loads it late, which each forked rank would do again
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fivefold.collectives import execution
from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.execution import CollectiveError, configure
from fivefold.collectives.lowering import lower, to_msccl_xml
from fivefold.collectives.schedules import all_reduce
from fivefold.errors import ConfigurationError
from fivefold.network.topology import ring, switch
from fivefold.testing import run_processes

pytestmark = pytest.mark.distributed

OWN = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_to_all": "pairwise",
    "broadcast": "binary_tree",
}


@pytest.fixture(autouse=True)
def _settings():
    before = execution.current_settings()
    configure(topology=None, algorithms=dict(OWN))
    yield
    configure(topology=before.topology, algorithms=before.algorithms)


def every_collective(size):
    """Checks against what each collective is defined to give; integers, so exactly."""
    rank, world = dist.get_rank(), dist.get_world_size()
    base = torch.arange(size) % 101
    total = sum(base + other for other in range(world))
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        if dtype is torch.bfloat16 and size > 100:
            continue
        data = (base + rank).to(dtype)
        dist.all_reduce(data)
        assert torch.equal(data, total.to(dtype))
    data = base + rank
    work = dist.all_reduce(data, op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    assert torch.equal(data, base + world - 1)
    data = torch.full((size,), float(rank))
    dist.all_reduce(data, op=dist.ReduceOp.AVG)
    assert torch.equal(data, torch.full((size,), (world - 1) / 2))
    gathered = torch.empty(world * size)
    dist.all_gather_single(gathered, torch.full((size,), float(rank)))
    assert torch.equal(gathered, torch.arange(world).float().repeat_interleave(size))
    listed = [torch.empty(size) for _ in range(world)]
    dist.all_gather(listed, torch.full((size,), float(rank)))
    assert [part[0].item() for part in listed] == list(range(world))
    whole, share = torch.arange(world * size).float(), torch.empty(size)
    dist.reduce_scatter_single(share, whole + rank)
    expected = world * whole + world * (world - 1) / 2
    assert torch.equal(share, expected[rank * size : (rank + 1) * size])
    received = torch.empty(world * size)
    dist.all_to_all_single(received, (torch.arange(world) + 100.0 * rank).repeat_interleave(size))
    assert torch.equal(received, (torch.arange(world) * 100.0 + rank).repeat_interleave(size))
    data = torch.full((size,), float(rank))
    dist.broadcast(data, src=world - 1)
    assert torch.equal(data, torch.full((size,), world - 1.0))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ["inner", "own", "trees"])
def test_every_collective(world, algorithm):
    if algorithm == "inner":
        configure(algorithms=dict.fromkeys(OWN, "inner"))
    if algorithm == "trees":
        configure(algorithms=OWN | {"all_reduce": "trees", "all_gather": "trees"})

    def work(rank):
        for size in (1, 7, 30_001):
            every_collective(size)
        return rank

    assert run_processes(world, work, backend="fivefold") == list(range(world))


def test_strides_empty_tensors_and_means_of_integers():
    def work(rank):
        data = (torch.arange(14) * (rank + 1))[::2]
        dist.all_reduce(data)
        assert torch.equal(data, torch.arange(0, 14, 2) * 6)
        table = (torch.arange(6.0) + rank).reshape(2, 3).t()
        dist.broadcast(table, src=1)
        assert torch.equal(table, (torch.arange(6.0) + 1).reshape(2, 3).t())
        nothing = torch.empty(0)
        dist.all_reduce(nothing)
        dist.broadcast(nothing, src=2)
        for collective in (dist.all_gather_single, dist.reduce_scatter_single):
            collective(torch.empty(0), nothing)
        dist.all_to_all_single(torch.empty(0), nothing)
        with contextlib.suppress(RuntimeError):  # what gloo makes of a mean of integers
            dist.all_reduce(torch.ones(3, dtype=torch.int8), op=dist.ReduceOp.AVG)
        data = torch.ones(3, dtype=torch.int8)
        dist.all_reduce(data)  # the group lives on
        return data.tolist()

    assert run_processes(3, work, backend="fivefold") == [[3, 3, 3]] * 3


def test_rounds_give_the_same():
    """What NCCL would run, over gloo: all messages of a round at once."""

    def work(rank):
        from fivefold.collectives.execution import _engine
        from fivefold.collectives.execution._run import RoundRunner

        _engine.Runner = RoundRunner
        for algorithm in ("ring", "recursive_halving_doubling", "double_binary_tree", "direct"):
            configure(algorithms=OWN | {"all_reduce": algorithm})
            group = dist.new_group(backend="fivefold")
            data = torch.arange(10_001.0) + rank
            dist.all_reduce(data, group=group)
            assert torch.equal(data, 4 * torch.arange(10_001.0) + 6)
        return True

    assert all(run_processes(4, work))


def test_without_a_known_order_of_arrival_nothing_changes():
    """One rank is slow in every call: sums are the same bits all the same."""
    parts = torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0))

    def work(rank):
        sums = []
        for slow in (0, 2, None):
            data = parts[rank].clone()
            dist.barrier()
            if rank == slow:
                time.sleep(0.2)
            dist.all_reduce(data)
            sums.append(data)
        assert all(torch.equal(sums[0], other) for other in sums)
        return sums[0]

    configure(algorithms=OWN | {"all_reduce": "double_binary_tree"})
    first, *others = run_processes(4, work, backend="fivefold")
    again = run_processes(4, work, backend="fivefold")
    assert all(torch.equal(first, other) for other in [*others, *again])
    assert torch.allclose(first, parts.sum(0), atol=1e-5)


def _train(model):
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        inputs, targets = (torch.randn(8, n, generator=generator) for n in (33, 7))
        loss = ((model(inputs) - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 7))


def _ddp(_):
    replica = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.005)
    return _train(replica)


def _fsdp(_):

    world = dist.get_world_size()
    losses = []
    for shape in ((world,), (2, world // 2)):
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = _model()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses += _train(model)
    return losses


def _functional(rank):

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = torch.arange(12.0) + rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch renames these just now
        results = [
            functional.all_reduce(data, "sum", mesh),
            functional.all_gather_tensor(data, 0, mesh),
            functional.reduce_scatter_tensor(data, "sum", 0, mesh),
            functional.all_to_all_single(data, None, None, mesh),
            *functional.all_reduce_coalesced([data, data * 2], "sum", mesh),
            *functional.all_gather_into_tensor_coalesced([data, data * 2], mesh),
            *functional.reduce_scatter_tensor_coalesced([data, data * 2], "sum", [0, 0], mesh),
        ]
        return [result.tolist() for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("work", [_ddp, _fsdp, _functional], ids=["DDP", "FSDP2", "functional"])
def test_what_torch_builds_on_it(work):
    own = run_processes(4, work, backend="fivefold")
    assert run_processes(4, work, backend="fivefold") == own  # bit for bit
    for ours, gloos in zip(own, run_processes(4, work), strict=True):
        assert torch.allclose(torch.tensor(ours[0]), torch.tensor(gloos[0]), rtol=1e-5)


def test_fivefold_optim_runs_on_it():
    from fivefold.optim import CO2, OuterSync

    def work(rank):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = OuterSync(model, optimizer, rule=CO2(tau=2))
        generator = torch.Generator().manual_seed(rank)
        for _ in range(6):
            inputs, targets = (torch.randn(4, n, generator=generator) for n in (33, 7))
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
        sync.finalize()
        return [parameter.detach().clone() for parameter in model.parameters()]

    own = run_processes(2, work, backend="fivefold")
    gloos = run_processes(2, work)
    for ours, other, gloo in zip(own[0], own[1], gloos[0], strict=True):
        assert torch.equal(ours, other)
        assert torch.allclose(ours, gloo, atol=1e-6)


def test_groups_use_their_part_of_the_topology():
    configure(topology=ring(4, bandwidth="1 GB/s"))

    def work(rank):
        pair = dist.new_group([0, 1], backend="fivefold")
        halves, _ = dist.new_subgroups(2)
        data = torch.full((1000,), float(rank))
        dist.all_reduce(data, group=halves)
        if rank < 2:
            assert pair.engine._topology.num_ranks == 2
        return data[0].item()

    assert run_processes(4, work, backend="fivefold") == [1.0, 1.0, 5.0, 5.0]


def test_layouts_and_empty_tensors():
    def work(rank):
        data = torch.arange(12.0).reshape(3, 4).t() + rank
        assert not data.is_contiguous()
        dist.all_reduce(data)
        assert torch.equal(data, 2 * torch.arange(12.0).reshape(3, 4).t() + 1)
        empty = torch.empty(0)
        dist.all_reduce(empty)
        flags = torch.tensor([rank == 0])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)  # of bools: the inner backend's
        works = [dist.all_reduce(torch.ones(100), async_op=True) for _ in range(5)]
        futures = [work.get_future() for work in works]
        return [future.wait()[0][0].item() for future in futures]

    assert run_processes(2, work, backend="fivefold") == [[2.0] * 5] * 2


def test_what_it_cannot_do_goes_to_the_inner_backend_and_is_said_once(caplog):
    def work(_):
        for _ in range(3):
            dist.reduce(torch.ones(3), 0)
        engine = dist.group.WORLD.engine
        return sorted(engine._said)

    del caplog
    first, second = run_processes(2, work, backend="fivefold")
    assert "reduce" in first
    assert first == second


def test_a_registered_file(tmp_path):
    path = tmp_path / "algo.xml"
    path.write_text(to_msccl_xml(lower(build_algorithm("recursive_doubling", all_reduce(4)))))
    execution.register_algorithm("from a file", path)
    configure(algorithms=OWN | {"all_reduce": "from a file"})

    def work(rank):
        data = torch.arange(1000.0) + rank
        dist.all_reduce(data)
        assert torch.equal(data, 4 * torch.arange(1000.0) + 6)
        return dist.group.WORLD.engine.choice("all_reduce", data.nbytes).label

    assert run_processes(4, work, backend="fivefold") == ["from a file"] * 4


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_dead_rank_is_an_error_on_the_others():
    def work(rank):
        data = torch.ones(1 << 16)
        dist.all_reduce(data)
        if rank == 1:
            dist.barrier = lambda: None
            return "left"
        start_s = time.monotonic()
        with pytest.raises(RuntimeError):  # noqa: PT012 - one of the calls sees it
            for _ in range(3):
                dist.all_reduce(data)
        assert time.monotonic() - start_s < 20
        return "saw it"

    # Rank 1's process ends when it has returned; its neighbours see the connection close.
    configure(algorithms=OWN)
    assert run_processes(3, work, backend="fivefold", timeout_s=60) == ["saw it", "left", "saw it"]


@pytest.mark.alone
def test_a_stuck_rank_is_a_timeout_that_names_it():
    def work(rank):
        group = dist.new_group(backend="fivefold", timeout=timedelta(seconds=3))
        data = torch.ones(1 << 16)
        dist.all_reduce(data, group=group)
        if rank == 1:
            time.sleep(6)
            return "slept"
        with pytest.raises(CollectiveError) as caught:
            dist.all_reduce(data, group=group)
        assert isinstance(caught.value, RuntimeError)
        assert "all_reduce of 262144 bytes by ring on rank 0 failed" in str(caught.value)
        assert "rank 1" in str(caught.value)
        with pytest.raises(CollectiveError, match="an earlier collective of this group failed"):
            dist.all_reduce(data, group=group)
        return "timed out"

    assert run_processes(2, work, timeout_s=60) == ["timed out", "slept"]


@pytest.mark.alone
def test_an_asynchronous_failure_reaches_wait_and_the_future():
    def work(rank):
        group = dist.new_group(backend="fivefold", timeout=timedelta(seconds=2))
        data = torch.ones(1000)
        dist.all_reduce(data, group=group)
        if rank == 1:
            time.sleep(5)
            return True
        pending = dist.all_reduce(data, group=group, async_op=True)
        with pytest.raises(RuntimeError, match="all_reduce"):
            pending.get_future().wait()
        with pytest.raises(CollectiveError):
            pending.wait()
        assert not pending.is_success()
        return True

    assert all(run_processes(2, work, timeout_s=60))


@pytest.mark.alone
def test_calls_that_differ_are_an_error_not_a_hang():
    def work(rank):
        group = dist.new_group(backend="fivefold", timeout=timedelta(seconds=2))
        if rank == 0:
            time.sleep(4)
            return True
        with pytest.raises(CollectiveError, match="rank 0 did not say within 2 s"):
            dist.all_reduce(torch.ones(1000), group=group)
        return True

    assert all(run_processes(2, work, timeout_s=60))


def test_an_algorithm_that_does_not_exist_is_said_on_every_rank():
    configure(algorithms={"all_reduce": "no such"})

    def work(_):
        with pytest.raises(ConfigurationError, match="no algorithm 'no such' for all_reduce"):
            dist.all_reduce(torch.ones(3))
        return True

    assert all(run_processes(2, work, backend="fivefold"))


def test_a_topology_of_another_size_is_refused():
    configure(topology=switch(5))

    def work(_):
        return True

    with pytest.raises(RuntimeError, match="has 5 ranks, the job 2"):
        run_processes(2, work, backend="fivefold")


def test_destroy_and_start_again():
    def work(rank):
        dist.all_reduce(torch.ones(10))
        dist.destroy_process_group()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ["AGAIN"]
        dist.init_process_group("fivefold", rank=rank, world_size=2)
        data = torch.ones(10)
        dist.all_reduce(data)
        return data[0].item()

    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["AGAIN"] = str(probe.getsockname()[1])
    assert run_processes(2, work, backend="fivefold") == [2.0, 2.0]
