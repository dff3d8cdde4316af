"""The hook over real processes: the same training as DDP, the planned order, dead peers."""

import functools
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import CommunicationError, ConfigurationError
from fivefold.tasks import ScheduledReduction
from fivefold.tasks.schedule import BucketCost, plan_send_order
from fivefold.testing import run_processes

STEPS = 5


def make_model(rank):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        *[layer for _ in range(7) for layer in (torch.nn.Linear(24, 24), torch.nn.Tanh())]
    )
    # A small cap, so that there are several buckets.
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=0.004)
    torch.manual_seed(100 + rank)
    return ddp, torch.randn(STEPS, 16, 24), torch.randn(STEPS, 16, 24)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_plainly(rank):
    ddp, inputs, targets = make_model(rank)
    optimizer = sgd(ddp.parameters())
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        (ddp(x) - y).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def train_scheduled(rank, *, overlap, chunk_bytes, planned, timeout_s=20.0):
    ddp, inputs, targets = make_model(rank)
    reduction = ScheduledReduction(
        ddp, update=sgd if overlap else None, chunk_bytes=chunk_bytes, timeout_s=timeout_s
    )
    optimizer = None if overlap else sgd(ddp.parameters())
    order = None
    for step, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        if planned and step == 2:
            reduction.finish()
            reduction.sent()
        if planned and step == 3:
            order = reduction.plan(ordering="priority", chunk_bytes=chunk_bytes)
            reduction.sent()
        if optimizer is not None:
            optimizer.zero_grad()
        (ddp(x) - y).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
        else:
            reduction.step()
    reduction.finish()
    sent = [(chunk.bucket, chunk.chunk) for chunk in reduction.sent()]
    reduction.close()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()]), order, sent


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("chunk_bytes", "planned"), [(None, False), (1000, False), (1000, True)])
def test_training_is_that_of_plain_ddp_bit_for_bit(overlap, chunk_bytes, planned):
    """With two ranks a sum has one order only, so that nothing may differ."""
    wanted = run_processes(2, train_plainly)
    work = functools.partial(
        train_scheduled, overlap=overlap, chunk_bytes=chunk_bytes, planned=planned
    )
    found = run_processes(2, work)
    for rank in range(2):
        assert torch.equal(found[rank][0], wanted[rank])
        order, sent = found[rank][1:]
        assert order == found[0][1]
        if planned:  # two passes were made after planning, both in that order
            assert sent == list(order.chunks) * 2
            assert len({bucket for bucket, _ in order.chunks}) > 2


def test_three_ranks_agree_with_ddp_within_rounding():
    wanted = run_processes(3, train_plainly)
    work = functools.partial(train_scheduled, overlap=True, chunk_bytes=500, planned=True)
    found = run_processes(3, work)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][0], found[2][0])
    torch.testing.assert_close(found[0][0], wanted[0])


def stop_in_the_middle(rank, *, overlap):
    ddp, inputs, targets = make_model(rank)
    reduction = ScheduledReduction(ddp, update=sgd if overlap else None, timeout_s=2.0)
    for step, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        if rank == 1 and step == 2:
            time.sleep(6.0)
            return None
        try:
            (ddp(x) - y).square().mean().backward()
            if overlap:
                reduction.step()
        except Exception as error:  # noqa: BLE001 - its kind and text are what is tested
            return type(error).__name__, str(error)
    return None


def test_a_peer_that_stops_is_an_error_not_a_hang():
    found = run_processes(2, functools.partial(stop_in_the_middle, overlap=True), timeout_s=40.0)
    kind, text = found[0]
    assert kind == "CommunicationError"
    assert "rank 0: all-reduce of gradients failed" in text


def test_without_overlap_the_error_comes_out_of_backward():
    found = run_processes(2, functools.partial(stop_in_the_middle, overlap=False), timeout_s=40.0)
    assert found[0] is not None


def plan_too_early(rank):
    ddp, *_ = make_model(rank)
    reduction = ScheduledReduction(ddp)
    try:
        reduction.plan()
    except ConfigurationError as error:
        return error.message
    finally:
        reduction.close()


def test_all_ranks_hear_why_there_is_no_plan():
    assert run_processes(2, plan_too_early) == ["no backward pass was seen yet"] * 2


def refuse(_rank):
    net = torch.nn.Linear(2, 2)
    messages = []
    for make in (
        lambda: ScheduledReduction(DistributedDataParallel(net)),
        lambda: ScheduledReduction(
            DistributedDataParallel(net, gradient_as_bucket_view=True), chunk_bytes=0
        ),
        lambda: ScheduledReduction(
            DistributedDataParallel(net, gradient_as_bucket_view=True)
        ).step(),
    ):
        try:
            make()
        except ConfigurationError as error:
            messages.append(error.message)
    return messages


def test_bad_use_is_refused():
    messages = run_processes(1, refuse)[0]
    assert "live in its buckets" in messages[0]
    assert "chunk_bytes must be a whole number from 1; got 0" in messages[1]
    assert "update" in messages[2]


def test_an_order_is_refused_where_buckets_are_not_in_order():
    late, soon = (BucketCost(size_bytes=1, ready_s=s) for s in (2.0, 1.0))
    for buckets in ([late, soon], []):
        with pytest.raises(ConfigurationError, match="order in which they become ready"):
            plan_send_order(buckets, cost_s_per_byte=1.0)


def test_without_overlap_the_order_cannot_matter():
    buckets = [BucketCost(size_bytes=4, ready_s=s, forward_s=1.0) for s in (1.0, 2.0, 3.0)]
    times = {
        plan_send_order(
            buckets, cost_s_per_byte=1.0, ordering=ordering, overlap_forward=False
        ).predicted_s
        for ordering in ("fifo", "priority")
    }
    assert times == {1 + 12 + 3.0}
    assert plan_send_order(buckets, cost_s_per_byte=1.0, chunk_bytes=1).predicted_s < 16


def test_an_empty_bucket_is_sent_too():
    """The hook counts the buckets of the order, and those of the model have one that is empty."""
    buckets = [BucketCost(size_bytes=size, ready_s=1.0) for size in (4, 0, 8)]
    order = plan_send_order(buckets, cost_s_per_byte=1e-9)
    assert sorted(order.chunks) == [(0, 0), (1, 0), (2, 0)]


def test_the_process_group_is_its_own():
    """A hook must not mix its collectives into the user's group."""

    def work(rank):
        ddp, inputs, targets = make_model(rank)
        reduction = ScheduledReduction(ddp, update=sgd, chunk_bytes=400)
        for x, y in zip(inputs, targets, strict=True):
            (ddp(x) - y).square().mean().backward()
            reduction.step()
            mine = torch.tensor([float(rank + 1)])
            dist.all_reduce(mine)
            assert mine.item() == 3.0
        reduction.close()
        return True

    assert run_processes(2, work) == [True, True]


def test_errors_are_of_the_house():
    assert issubclass(CommunicationError, ConnectionError)
