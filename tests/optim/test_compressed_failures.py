"""Compressed sums whose peers are killed, stall, or leave before an all-reduce has landed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fivefold.errors import CommunicationError
from fivefold.optim.transport import ProcessGroupTransport

pytestmark = [pytest.mark.distributed, pytest.mark.alone]


class Stream:
    """One transport; fragment k has one payload of ``sizes[k]`` elements."""

    def __init__(self, sizes, *, bucket_bytes=2**25, timeout_s=30.0):
        self.transport = ProcessGroupTransport(
            None, timeout_s=timeout_s, codec="int8", bucket_bytes=bucket_bytes
        )
        self.payloads = [torch.ones(size) for size in sizes]
        for fragment, payload in enumerate(self.payloads):
            self.transport.prepare([payload], fragment=fragment)

    def launch(self, turn, *, fragment=0):
        metadata = torch.zeros(2, dtype=torch.float64)
        what = f"turn {turn} of fragment {fragment}"
        payloads = [self.payloads[fragment]]
        return self.transport.launch(payloads, metadata=metadata, fragment=fragment, what=what)


def run_until_some_fail(world_size, work, folder, *, timeout_s=40.0):
    """Like ``run_processes`` for ranks that may be killed: what each left behind, or None."""

    def main(rank):
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
        )
        (folder / f"{rank}.json").write_text(json.dumps(work(rank)))
        os._exit(0)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=main, args=(rank,)) for rank in range(world_size)]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(deadline_s - time.monotonic(), 0.1))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert hung == []
    files = [folder / f"{rank}.json" for rank in range(world_size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def failure_of(action):
    started_s = time.monotonic()
    try:
        action()
    except CommunicationError as error:
        return str(error), time.monotonic() - started_s
    return None


@pytest.mark.parametrize("delay_s", [0.0, 0.004])
def test_a_killed_peer_is_an_error_for_the_survivors(tmp_path, delay_s):
    def work(rank):
        stream = Stream([2_000_000, 100], bucket_bytes=2**18)
        stream.launch(0).wait()
        if rank == 1:
            stream.launch(1)
            time.sleep(delay_s)
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce = stream.launch(1)
        later = stream.launch(1, fragment=1)
        return [failure_of(f.wait) for f in (all_reduce, all_reduce, later)]

    first, second, third = run_until_some_fail(3, work, tmp_path)
    assert second is None
    for rank, (one, again, later) in ((0, first), (2, third)):
        assert one[0].startswith(f"rank {rank}: turn 1 of fragment 0 failed: ")
        assert again[0] == one[0]
        assert later[0].startswith(f"rank {rank}: turn 1 of fragment 1 was not started: ")
        assert max(one[1], again[1], later[1]) < 20


def test_a_stalled_peer_is_an_error_in_time(tmp_path):
    noticed = multiprocessing.get_context("fork").Event()

    def work(rank):
        stream = Stream([5000], timeout_s=2.0)
        stream.launch(0).wait()
        if rank == 1:
            noticed.wait(20)
            return None
        failed = failure_of(stream.launch(1).wait)
        noticed.set()
        return failed

    failed, _ = run_until_some_fail(2, work, tmp_path)
    assert failed[0].startswith("rank 0: turn 1 of fragment 0 failed: ")
    assert 1.0 < failed[1] < 7.0


LEAVING = """
import os, sys, time
import torch, torch.distributed as dist
from fivefold.optim import ProcessGroupTransport, _comm_thread

rank, how = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(sys.argv[3], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
transport = ProcessGroupTransport(None, timeout_s=60, codec="int8")
payload, metadata = torch.ones(300_000), torch.zeros(2, dtype=torch.float64)
transport.prepare([payload], fragment=0)
transport.launch([payload], metadata=metadata, fragment=0, what="first").wait()
if how == "forgotten":
    transport.launch([payload], metadata=metadata, fragment=0, what="second")
elif how in {"collected", "collected, still at work"}:
    if how == "collected, still at work":  # within torch, where a thread must not be cut off
        a = torch.ones(1500, 1500)
        _comm_thread.Job.stamp = lambda _job: [a @ a for _ in range(4)]  # well under the patience
    all_reduce = transport.launch([payload], metadata=metadata, fragment=0, what="second")
    del transport
    all_reduce.wait()
    del all_reduce
elif how == "alone":
    if rank == 1:
        time.sleep(100)  # until it is killed
    _comm_thread._PATIENCE_S = 2.0
    transport.launch([payload], metadata=metadata, fragment=0, what="second")
print("end")
"""


@pytest.mark.parametrize("how", ["forgotten", "collected", "collected, still at work", "alone"])
def test_a_program_may_end_with_an_all_reduce_under_way(tmp_path, how):
    script = tmp_path / "leave.py"
    script.write_text(LEAVING)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), how, str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    watched = ranks[:1] if how == "alone" else ranks
    try:
        for process in watched:
            output, errors = process.communicate(timeout=60)
            assert (process.returncode, output) == (0, "end\n"), errors[-2000:]
            assert "terminate" not in errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
