"""Real processes, a real switch, and what goes wrong: the sums are the same bits all the same."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
import torch.distributed as dist

from fivefold.collectives.execution import GlooHosts
from fivefold.errors import CommunicationError
from fivefold.network.aggregation import AggregationClient, AggregationOptions, read_switch_state
from fivefold.network.aggregation.wire import ordered_sum
from fivefold.testing import run_processes
from helpers.switch_process import SwitchProcess

pytestmark = [pytest.mark.distributed, pytest.mark.alone]

SLOT = 4096
QUICK = AggregationOptions(retry_every=2, connect_timeout_s=1.0)


def client_of(address, *, job="job", ranks=None, options=QUICK):
    """This rank's client; ``ranks`` are those of the job where they are not all."""
    group = dist.new_group(ranks, backend="gloo") if ranks else dist.group.WORLD
    return AggregationClient(
        address,
        job=job,
        rank=dist.get_rank(group),
        size=dist.get_world_size(group),
        fallback=GlooHosts(group),
        options=options,
    )


def contribution(rank, turn, size):
    return np.random.default_rng([rank, turn]).standard_normal(size).astype(np.float32)


def sum_and_check(client, turn, *, ranks=None, size=40_000):
    """One all-reduce of random numbers, checked bit by bit."""
    ranks = ranks or range(dist.get_world_size())
    data = contribution(dist.get_rank(), turn, size)
    outcome = client.all_reduce(data)
    expected = ordered_sum([contribution(rank, turn, size) for rank in ranks])
    assert data.tobytes() == expected.tobytes(), (dist.get_rank(), turn, outcome)
    return outcome


def all_summed(outcome):
    return outcome.chunks > 0 and outcome.fallback == 0


def test_sums_of_every_type_and_size():
    def work(rank):
        client = client_of(switch.address)
        for size in (0, 1, 2, 511, 512, 513, 5000):
            for dtype in ("int32", "int64", "float64", "float16", "float32"):
                values = np.arange(size) % 50
                data = (values + rank).astype(dtype)
                outcome = client.all_reduce(data)
                assert outcome.fallback == 0
                assert outcome.chunks == -(-data.nbytes // SLOT)
                assert np.array_equal(data, (3 * values + 3).astype(dtype))
        # Integers wrap, as any order of adding does.
        data = np.full(3, 2**31 - 1, np.int32)
        client.all_reduce(data)
        assert data.tolist() == [2**31 - 3] * 3
        data = np.full((2, 3), 0x3F80, np.uint16)  # ones
        client.all_reduce(data, dtype="bfloat16")
        assert data.tolist() == [[0x4040] * 3] * 2
        client.close()

    with SwitchProcess(slots=8, slot_bytes=SLOT) as switch:
        run_processes(3, work)
        state = switch.stop()
    assert (state.misses, state.expired, state.jobs) == (0, 0, 0)


def test_a_window_never_takes_more_slots_than_it_has():
    def work(rank):
        client = client_of(switch.address, options=AggregationOptions(window=3))
        for turn in range(4):
            time.sleep(0.02 * rank)
            assert all_summed(sum_and_check(client, turn))

    with SwitchProcess(slots=64, slot_bytes=SLOT) as switch:
        run_processes(3, work)
        state = switch.stop()
    assert state.most_used <= 3
    assert state.misses == 0


def test_a_switch_killed_in_the_middle_and_started_again():
    """Chunks under way are lost with it; every sum is right; the new switch is used."""

    def work(rank):
        client = client_of(switch.address)
        assert all_summed(sum_and_check(client, 0))
        if rank == 0:
            threading.Timer(0.3, os.kill, (switch.pid, signal.SIGKILL)).start()
        if rank == 1:
            time.sleep(0.8)  # the others' parts are in the switch when it dies
        broken = sum_and_check(client, 1)
        assert broken.summed == 0
        assert "connection" in broken.reason or "switch" in broken.reason
        assert not client.is_connected
        alone = sum_and_check(client, 2)
        assert alone.chunks == 0
        again = None
        if rank == 0:
            again = SwitchProcess(port=port, slots=8, slot_bytes=SLOT)
        dist.barrier()
        used = [all_summed(sum_and_check(client, turn)) for turn in range(3, 8)]
        client.close()
        dist.barrier()
        if again is not None:
            again.stop()
        return used

    with SwitchProcess(slots=8, slot_bytes=SLOT) as switch:
        port = switch.address.rpartition(":")[2]
        used = run_processes(3, work)
    assert used[0] == used[1] == used[2]
    assert any(used[0]), "the new switch was never used"
    assert used[0][-1]


def test_a_switch_that_dies_and_comes_back_again_and_again():
    def work(rank):
        client = client_of(switch.address, options=AggregationOptions(retry_every=1))
        server = None
        outcomes = []
        for turn in range(24):
            if rank == 0 and turn in (4, 12, 20):
                victim = switch.pid if server is None else server.pid
                delay_s = 0.002 * (turn % 5)
                threading.Timer(delay_s, os.kill, (victim, signal.SIGKILL)).start()
            outcomes.append(sum_and_check(client, turn, size=150_000))
            if rank == 0 and turn in (8, 16):
                if server is not None:
                    server.kill()
                server = SwitchProcess(port=port, slots=8, slot_bytes=SLOT)
        if server is not None:
            server.kill()
        return [(one.chunks, one.summed) for one in outcomes]

    with SwitchProcess(slots=8, slot_bytes=SLOT) as switch:
        port = switch.address.rpartition(":")[2]
        found = run_processes(3, work)
    assert found[0] == found[1] == found[2]
    assert any(chunks == 0 for chunks, _ in found[0])
    assert any(chunks and chunks == summed for chunks, summed in found[0][9:])


class Cutter:
    """Passes a connection on, and cuts it after so many bytes from the switch."""

    def __init__(self, address, after_bytes):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._target = address.partition(":")[::2]
        self._left = after_bytes
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        ours, _ = self._server.accept()
        host, port = self._target
        theirs = socket.create_connection((host, int(port)))
        threading.Thread(target=self._pass_on, args=(ours, theirs), daemon=True).start()
        with ours, theirs, contextlib.suppress(OSError):
            while self._left > 0 and (data := theirs.recv(min(self._left, 1 << 16))):
                ours.sendall(data)
                self._left -= len(data)
            for one in (ours, theirs):
                one.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)


@pytest.mark.parametrize("after_bytes", [150, 5_000, 60_000, 100_001])
def test_one_rank_loses_its_connection_half_way_and_all_take_the_same_chunks(after_bytes):
    """Other ranks have sums that this one never got: those chunks are summed by the hosts."""

    def work(rank):
        address = switch.address
        if rank == 1:
            address = Cutter(address, after_bytes).address
        client = client_of(address, options=AggregationOptions(retry_every=99))
        first = sum_and_check(client, 0)
        assert not client.is_connected
        assert sum_and_check(client, 1).chunks == 0
        return first.chunks, first.summed

    with SwitchProcess(slots=8, slot_bytes=SLOT) as switch:
        (chunks, summed), *others = run_processes(3, work)
    assert others == [(chunks, summed)] * 2
    assert 0 <= summed < chunks
    # All that came whole is kept: only what was cut, or came after it, is done again.
    assert summed >= after_bytes // (SLOT + 64) - 1


def test_two_jobs_share_a_switch_and_the_one_without_slots_sums_by_itself():
    def work(rank):
        ranks = [0, 1] if rank < 2 else [2, 3]
        groups = [dist.new_group(pair, backend="gloo") for pair in ([0, 1], [2, 3])]
        group = groups[rank // 2]
        client = AggregationClient(
            switch.address,
            job=f"job{rank // 2}",
            rank=rank % 2,
            size=2,
            fallback=GlooHosts(group),
            options=QUICK,
        )
        dist.barrier()
        if rank == 1:  # rank 0 holds all slots meanwhile
            time.sleep(0.8)
        if rank >= 2:
            time.sleep(0.3)
        first = sum_and_check(client, 0, ranks=ranks)
        dist.barrier()
        later = [sum_and_check(client, turn, ranks=ranks) for turn in range(1, 6)]
        assert client.is_connected
        assert all(one.chunks for one in later)
        return first.summed, first.fallback, first.reason

    with SwitchProcess(slots=4, slot_bytes=SLOT) as switch:
        found = run_processes(4, work)
        state = switch.stop()
    assert found[0] == found[1] == (40, 0, None)
    assert found[2] == found[3] == (0, 40, "no slot was free")
    assert state.most_used <= 4
    assert state.misses >= 40


def test_slots_that_are_reserved_go_to_the_first_job_and_then_to_the_next():
    def work(rank):
        del rank
        first = client_of(switch.address, job="first")
        second = client_of(switch.address, job="second")
        assert first.is_connected
        assert not second.is_connected
        assert all_summed(sum_and_check(first, 0))
        assert sum_and_check(second, 0).chunks == 0
        dist.barrier()
        first.close()
        dist.barrier()
        time.sleep(0.2)
        assert [all_summed(sum_and_check(second, turn)) for turn in range(1, 5)][-1]

    with SwitchProcess(slots=8, slot_bytes=SLOT, sharing="reserved") as switch:
        run_processes(2, work)


def test_a_switch_without_slots_and_one_that_is_not_there():
    def work(rank):
        del rank
        for address in (switch.address, "127.0.0.1:9"):
            client = client_of(address)
            assert not client.is_connected
            for turn in range(4):
                assert sum_and_check(client, turn).chunks == 0

    with SwitchProcess(slots=0, slot_bytes=SLOT) as switch:
        run_processes(2, work)


def test_ranks_on_different_switches_leave_both_alone():
    def work(rank):
        client = client_of((one if rank else other).address)
        assert not client.is_connected
        assert sum_and_check(client, 0).chunks == 0

    with SwitchProcess(slot_bytes=SLOT) as one, SwitchProcess(slot_bytes=2 * SLOT) as other:
        run_processes(2, work)


def test_a_switch_that_stands_still_is_left_and_used_again_when_it_moves():
    def work(rank):
        options = AggregationOptions(timeout_s=0.4, connect_timeout_s=0.4, retry_every=1)
        client = client_of(switch.address, options=options)
        assert all_summed(sum_and_check(client, 0))
        dist.barrier()
        if rank == 0:
            os.kill(switch.pid, signal.SIGSTOP)
        dist.barrier()
        began_s = time.monotonic()
        stuck = sum_and_check(client, 1, size=200_000)
        assert time.monotonic() - began_s < 5.0
        assert stuck.summed == 0
        dist.barrier()
        if rank == 0:
            os.kill(switch.pid, signal.SIGCONT)
        dist.barrier()
        time.sleep(0.3)
        return [all_summed(sum_and_check(client, turn)) for turn in range(2, 7)]

    with SwitchProcess(slots=8, slot_bytes=SLOT) as switch:
        used = run_processes(2, work)
    assert used[0] == used[1]
    assert used[0][-1]


@pytest.mark.parametrize(("switch_s", "client_s"), [("0.3s", 10.0), ("30s", 0.3)])
def test_a_late_rank_costs_time_and_nothing_else(switch_s, client_s):
    """Whoever loses patience first, the switch or the clients, the hosts wait and sum."""

    def work(rank):
        client = client_of(
            switch.address, options=AggregationOptions(timeout_s=client_s, retry_every=1)
        )
        if rank == 2:
            time.sleep(1.2)
        late = sum_and_check(client, 0)
        used = [all_summed(sum_and_check(client, turn)) for turn in range(1, 5)]
        return late.summed, late.reason, used

    with SwitchProcess(slots=64, slot_bytes=SLOT, expire=switch_s) as switch:
        found = run_processes(3, work)
    assert found[0][0] < 40
    if client_s > 1:
        assert "in time from rank 2" in found[0][1]
    assert found[0][2][-1]


def test_a_dead_rank_is_an_error_in_bounded_time_that_names_it():
    def work(rank):
        client = client_of(switch.address)
        assert all_summed(sum_and_check(client, 0))
        dist.barrier()
        if rank == 2:
            return ""  # and the process ends
        data = np.ones(40_000, np.float32)
        began_s = time.monotonic()
        with pytest.raises(CommunicationError) as caught:
            client.all_reduce(data)
        assert time.monotonic() - began_s < 8.0
        assert data.tolist() == [1.0] * 40_000
        return str(caught.value)

    with SwitchProcess(slots=8, slot_bytes=SLOT) as switch:
        found = run_processes(3, work)
    assert any("rank 2 lost its connection to the switch" in text for text in found[:2])
    assert all("all-reduce 2 of job 'job' failed on rank" in text for text in found[:2])


def test_ranks_that_disagree_about_size_are_told():
    def work(rank):
        client = client_of(switch.address)
        for sizes in ((100, 200), (5000, 6000)):
            fresh = client_of(switch.address, job=f"job {sizes}")
            with pytest.raises(CommunicationError, match="arrays differ"):
                fresh.all_reduce(np.zeros(sizes[rank % 2], np.float32))
        fresh = client_of(switch.address, job="types")
        with pytest.raises(CommunicationError, match=r"int32.*float32|float32.*int32"):
            fresh.all_reduce(np.zeros(64, np.float32 if rank else np.int32))
        assert all_summed(sum_and_check(client, 0))

    with SwitchProcess(slots=8, slot_bytes=SLOT) as switch:
        run_processes(2, work)


def test_the_state_can_be_asked_while_jobs_run():
    def work(rank):
        client = client_of(switch.address)
        sum_and_check(client, 0)
        dist.barrier()
        state = read_switch_state(switch.address)
        dist.barrier()
        assert rank < 2
        client.close()
        return state

    with SwitchProcess(slots=8, slot_bytes=SLOT) as switch:
        state, _ = run_processes(2, work)
    assert (state.slots_total, state.slots_free, state.jobs, state.hits) == (8, 8, 1, 40)
