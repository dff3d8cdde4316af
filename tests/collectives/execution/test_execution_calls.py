"""Ranks that do not call alike, or not at one time: no hang, no wrong sum, no broken group."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fivefold.cli import main
from fivefold.collectives import execution
from fivefold.collectives.execution import CollectiveError, configure
from fivefold.network.topology import ring, switch
from fivefold.testing import free_port, run_processes

pytestmark = pytest.mark.distributed

FORCED = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_to_all": "pairwise",
    "broadcast": "binary_tree",
}


@pytest.fixture(autouse=True)
def _settings():
    before = execution.current_settings()
    configure(algorithms=dict(FORCED))
    yield
    configure(topology=before.topology, algorithms=before.algorithms)


def group_of(limit_s=15):
    return dist.new_group(backend="fivefold", timeout=timedelta(seconds=limit_s))


# -- nothing is decided by what one rank sees ------------------------------------------------------


@pytest.mark.parametrize(
    "table", [[[2, 2], [2, 3]], [[3, 3], [3, 3]], [[0, 0], [0, 4]], [[1, 2], [2, 2]]]
)
@pytest.mark.parametrize("said", [True, False], ids=["said", "where needed"])
def test_uneven_shares_that_some_ranks_see_as_even(table, said):
    def work(rank):
        sent, received = table[rank], [row[rank] for row in table]
        for turn in range(3):
            data = torch.arange(sum(sent)) + 100 * rank + 1000 * turn
            output = torch.empty(sum(received), dtype=data.dtype)
            splits = {"output_split_sizes": received, "input_split_sizes": sent}
            if not said:
                splits = {name: some for name, some in splits.items() if len(set(some)) > 1}
            dist.all_to_all_single(output, data, group=group_of(), **splits)
            first = [sum(row[:rank]) + 100 * source for source, row in enumerate(table)]
            expected = [
                1000 * turn + first[source] + at
                for source in range(2)
                for at in range(table[source][rank])
            ]
            assert output.tolist() == expected
        return True

    assert all(run_processes(2, work))


def test_a_list_of_uneven_shares():
    def work(rank):
        inputs = [torch.full((3 if rank == target == 1 else 2,), 10.0 * rank) for target in (0, 1)]
        outputs = [torch.empty(3 if rank == source == 1 else 2) for source in (0, 1)]
        dist.all_to_all(outputs, inputs, group=group_of())
        return [part.tolist() for part in outputs]

    assert run_processes(2, work) == [[[0.0] * 2, [10.0] * 2], [[0.0] * 2, [10.0] * 3]]


def test_layouts_differ_from_rank_to_rank():
    """An output with gaps on one rank only, one element with a stride, negated bits; two types."""

    def work(rank):
        group = group_of()
        for collective, expected in ((_all_reduce, 3.0), (_broadcast_from_1, 2.0)):
            data = torch.full((8,), 2.0)[::8] if rank else torch.ones(1)
            collective(data, group)
            assert data.item() == expected
        gathered = torch.zeros(8)[::2] if rank else torch.zeros(4)
        dist.all_gather_single(gathered, torch.full((2,), float(rank)), group=group)
        assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0]
        share = torch.zeros(4)[::2] if rank else torch.zeros(2)
        dist.reduce_scatter_single(share, torch.arange(4.0), group=group)
        assert share.tolist() == ([4.0, 6.0] if rank else [0.0, 2.0])
        received = torch.zeros(4)[::2] if rank else torch.zeros(2)
        dist.all_to_all_single(received, torch.full((2,), float(rank)), group=group)
        assert received.tolist() == [0.0, 1.0]
        for call, *sizes in (
            (dist.all_gather_single, 4, 2),
            (dist.reduce_scatter_single, 2, 4),
        ):
            output, source = torch.zeros(sizes[0], dtype=torch.float64), torch.zeros(sizes[1])
            with pytest.raises(RuntimeError, match=r"dtype|tensor type"):
                call(output, source, group=group)
        negated = torch.tensor([1 + 2j]).conj().imag if rank else torch.tensor([5.0])
        dist.all_reduce(negated, group=group)
        return negated.tolist()

    assert run_processes(2, work) == [[3.0]] * 2


def test_what_the_inner_backend_does_sees_layouts_too():
    """Gloo itself takes memory as it lies: a column would be read along its row."""

    def column(*values, dtype=torch.int32):
        found = torch.full((len(values), 2), -7).to(dtype)[:, 0]
        return found.copy_(torch.tensor(values))

    def work(rank):
        group = group_of()
        summed = column(1, 2, 3)
        dist.reduce(summed, 0, group=group)
        parts = [column(1, 2, 3), column(4, 5, 6)]
        own = column(0, 0, 0)
        dist.scatter(own, parts if rank == 0 else None, 0, group=group)
        listed = [column(0, 0, 0) for _ in range(2)] if rank == 0 else None
        dist.gather(parts[rank], listed, 0, group=group)
        some = column(True, False, bool(rank), dtype=torch.bool)
        dist.all_reduce(some, dist.ReduceOp.MAX, group=group)
        either = column(0, 0, 0)
        dist.reduce_scatter(either, [column(1, 2, 4 + rank)] * 2, dist.ReduceOp.BOR, group=group)
        if rank == 0:
            assert summed.tolist() == [2, 4, 6]
            assert [part.tolist() for part in listed] == [[1, 2, 3], [4, 5, 6]]
        assert own.tolist() == ([4, 5, 6] if rank else [1, 2, 3])
        assert some.tolist() == [True, False, True]
        return either.tolist()

    assert run_processes(2, work) == [[1, 2, 5]] * 2


def test_the_first_ranks_settings_count():
    def work(rank):
        configure(algorithms=dict(FORCED) if rank == 0 else dict.fromkeys(FORCED, "inner"))
        configure(topology=ring(3, bandwidth="1 GB/s") if rank == 1 else switch(3))
        group = group_of()
        for size in (1, 10_000):
            data = torch.arange(size) + rank
            dist.all_reduce(data, group=group)
            assert data.tolist() == (3 * torch.arange(size) + 3).tolist()
            received = torch.empty(3)
            dist.all_to_all_single(received, torch.full((3,), float(rank)), group=group)
            assert received.tolist() == [0.0, 1.0, 2.0]
        return group.engine.choice("all_reduce", 80_000).label

    assert run_processes(3, work) == ["ring"] * 3


# -- asynchronous calls ----------------------------------------------------------------------------


def test_an_asynchronous_first_call_returns_at_once():
    def work(rank):
        group = group_of()
        data, note = torch.full((1000,), float(rank)), torch.zeros(1)
        if rank == 1:
            pending = dist.all_reduce(data, group=group, async_op=True)
            dist.send(note + 7, 0, group=group)
            pending.wait()
        else:
            dist.recv(note, 1, group=group)
            assert note.item() == 7
            dist.all_reduce(data, group=group)
        return data[-1].item()

    assert run_processes(2, work) == [1.0, 1.0]


def test_an_asynchronous_first_call_does_not_hold_up_the_store():
    def work(rank):
        group = group_of()
        data = torch.full((1000,), float(rank))
        if rank == 1:
            pending = dist.all_reduce(data, group=group, async_op=True)
            dist.new_group(backend="gloo")
            pending.wait()
        else:
            time.sleep(0.5)
            dist.new_group(backend="gloo")
            dist.all_reduce(data, group=group)
        return data[-1].item()

    assert run_processes(2, work) == [1.0, 1.0]


def test_calls_after_an_asynchronous_one_keep_their_order():
    def work(rank):
        group = group_of()
        if rank == 1:
            time.sleep(0.3)
        first, second = torch.full((1000,), float(rank)), torch.full((5,), rank == 0)
        pending = dist.all_reduce(first, group=group, async_op=rank == 0)
        dist.all_reduce(second, op=dist.ReduceOp.MAX, group=group)  # of bools: the inner group's
        dist.barrier(group=group)
        if pending is not None:
            pending.wait()
        return first[-1].item(), second.tolist()

    assert run_processes(2, work) == [(1.0, [True] * 5)] * 2


# -- calls that differ -----------------------------------------------------------------------------


def _all_reduce(data, group):
    dist.all_reduce(data, group=group)


def _product(data, group):
    dist.all_reduce(data, op=dist.ReduceOp.PRODUCT, group=group)


def _broadcast(data, group):
    dist.broadcast(data, 0, group=group)


def _broadcast_from_1(data, group):
    dist.broadcast(data, 1, group=group)


def _shorter(data, group):
    dist.all_reduce(data[:-10], group=group)


def _integers(data, group):
    dist.all_reduce(data.view(torch.int32), group=group)


def _reduce(data, group):
    dist.reduce(data, 0, group=group)


def _barrier(data, group):
    del data
    dist.barrier(group=group)


DIFFERENT = {
    "broadcast": (_all_reduce, _broadcast),
    "root": (_broadcast, _broadcast_from_1),
    "operation": (_all_reduce, _product),
    "size": (_all_reduce, _shorter),
    "type": (_all_reduce, _integers),
    "inner": (_all_reduce, _reduce),
    "both inner": (_barrier, _reduce),
}


# One of each kind in every run: another collective, another size, one that the inner backend does.
@pytest.mark.parametrize(
    ("world", "pair"),
    [(2, "size"), (2, "inner"), (3, "broadcast")]
    + [
        pytest.param(2, name, marks=pytest.mark.nightly)
        for name in ("broadcast", "root", "operation", "type", "both inner")
    ],
)
def test_swapped_calls_are_an_error_that_names_both(world, pair):
    def work(rank):
        group = group_of(30)
        _all_reduce(torch.ones(1000), group)
        calls = DIFFERENT[pair] if rank != 1 else DIFFERENT[pair][::-1]
        data = torch.full((1000,), rank + 1.0)
        start_s = time.monotonic()
        message = "called different collectives: call 2 is"
        with pytest.raises(CollectiveError, match=message) as error:  # noqa: PT012 - one of both
            for call in calls:
                call(data, group)
        assert time.monotonic() - start_s < 15
        with pytest.raises(CollectiveError, match="an earlier collective of this group failed"):
            _all_reduce(data, group)
        data = torch.full((10,), float(rank))
        dist.all_reduce(data)  # other groups go on
        assert data[0].item() == world * (world - 1) / 2
        return str(error.value)

    for text in run_processes(world, work):
        assert all(name in text for name in ("on rank 1", "all ranks call the same"))


def test_a_call_of_another_size_class_is_an_error_too():
    def work(rank):
        group = group_of(30)
        with pytest.raises(CollectiveError, match="called different collectives"):
            dist.all_reduce(torch.ones(10 if rank else 100_000), group=group)
        return True

    assert all(run_processes(2, work))


def test_a_late_rank_is_no_error():
    def work(rank):
        group = group_of(30)
        if rank == 1:
            time.sleep(3.5)  # the others compare what was called meanwhile
        sums = []
        for collective in (_all_reduce, _broadcast_from_1, _reduce, _all_reduce):
            data = torch.full((1000,), rank + 1.0)
            collective(data, group)
            sums.append(data[0].item())
        return sums[:2] + sums[3:]

    assert run_processes(3, work) == [[6.0, 2.0, 6.0]] * 3


# -- what else is on the group ---------------------------------------------------------------------


@pytest.mark.parametrize("tag", [0, 1 << 29, (1 << 29) + 1, (1 << 31) - 1])
def test_any_tag_of_the_users_messages(tag):
    def work(rank):
        group = group_of()
        data, note = torch.ones(30_000), torch.full((3,), float(rank))
        pending = dist.all_reduce(data, group=group, async_op=True)
        if rank == 0:
            dist.send(note + 5, 1, group=group, tag=tag)
        else:
            dist.recv(note, 0, group=group, tag=tag)
        pending.wait()
        dist.all_reduce(data, group=group)
        return data[-1].item(), note[0].item()

    assert run_processes(2, work) == [(4.0, 0.0), (4.0, 5.0)]


def test_the_groups_own_monitored_barrier_names_who_is_missing():
    def work(rank):
        group = group_of()
        group.monitored_barrier()
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"[Rr]ank.* 1"):
                group.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
        return True

    assert all(run_processes(2, work))


def test_the_profiler_sees_collectives_with_their_shapes():
    def work(rank):
        group = group_of()
        data = torch.ones(10, 3)
        dist.all_reduce(data, group=group)
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            dist.all_reduce(data, group=group)
            dist.all_reduce(data, group=group, async_op=True).wait()
            dist.reduce(data, 0, group=group)
        del rank
        return sorted(
            (event.name, event.input_shapes, event.is_async)
            for event in profile.function_events
            if event.name.startswith("fivefold:")
        )

    sums = [("fivefold:all_reduce", [[10, 3]], True)] * 2
    assert run_processes(2, work) == [[*sums, ("fivefold:reduce", [[10, 3]], True)]] * 2


# -- the command that measures ---------------------------------------------------------------------


def test_bench_counts_the_slowest_rank(tmp_path):
    port, slow_s = str(free_port()), 0.2

    def work(rank):
        dist.destroy_process_group()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        whole = dist.all_reduce

        def slow(*words, **options):
            result = whole(*words, **options)
            if rank == 1:
                time.sleep(slow_s)
            return result

        dist.all_reduce = slow
        sys.argv = ["fivefold", "collectives", "bench", "all_reduce", "--sizes", "4KB", "--json"]
        with (tmp_path / f"{rank}.json").open("w") as out, contextlib.redirect_stdout(out):  # noqa: SIM117
            with pytest.raises(SystemExit) as ended:
                main()
        assert not ended.value.code
        return True

    assert all(run_processes(2, work))
    (row,) = json.loads((tmp_path / "0.json").read_text())
    assert row["own_s"] >= slow_s
    assert row["inner_s"] >= slow_s
    assert (tmp_path / "1.json").read_text() == ""
