"""Measured links: what a program on one host sees of another."""

from __future__ import annotations

import sys
import textwrap

import pytest

from fivefold.lab import LabResult, LabSpec, run_lab

pytestmark = pytest.mark.lab

_MEET = """
import json, os, socket, time
rank = int(os.environ["RANK"])
def meet():
    if rank == 1:
        with socket.create_server(("0.0.0.0", 5000)) as server:
            return server.accept()[0]
    for _ in range(400):
        try:
            return socket.create_connection(("10.77.0.2", 5000))
        except OSError:
            time.sleep(0.02)
    raise SystemExit("no peer")
"""

# From the first byte sent to the answer to the last one: no buffer can make that look faster than
# the link. The best of three on one connection: TCP has found the rate, and a busy machine has
# stalled one of them at most.
_TRANSFER = """
total = int(os.environ["TOTAL_BYTES"])
rates = []
with meet() as peer:
    for _ in range(3):
        start = time.perf_counter()
        if rank == 0:
            peer.sendall(bytes(total))
            assert peer.recv(1) == b"x"
            rates.append(total / (time.perf_counter() - start))
        else:
            left = total
            while left > 0:
                left -= len(peer.recv(1 << 20))
            peer.sendall(b"x")
if rank == 0:
    print(max(rates))
"""

_ROUND_TRIP = """
with meet() as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        if rank == 0:
            peer.sendall(b"p")
            peer.recv(1)
        else:
            peer.recv(1)
            peer.sendall(b"p")
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps(sorted(times)))
"""

_DATAGRAMS = """
count = 4000
if rank == 1:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inbox, meet() as peer:
        inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        inbox.bind(("0.0.0.0", 5001))
        inbox.settimeout(1.0)
        peer.sendall(b"g")
        numbers = []
        try:
            while True:
                numbers.append(int(inbox.recv(2048)[:8]))
        except TimeoutError:
            pass
        assert numbers == sorted(numbers)
        peer.sendall(str(len(numbers)).encode())
else:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outbox, meet() as peer:
        peer.recv(1)
        for number in range(count):
            outbox.sendto(b"%08d" % number, ("10.77.0.2", 5001))
            if number % 20 == 0:
                time.sleep(0.002)
        print(peer.recv(100).decode())
"""

_ALL_REDUCE = """
import os, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
data = torch.ones(int(os.environ["TOTAL_BYTES"]) // 4)
dist.all_reduce(data)
times = []
for _ in range(5):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(data)
    times.append(time.perf_counter() - start)
assert data[0] == 2.0 ** 6, data[0]
if dist.get_rank() == 0:
    print(sorted(times)[2])
dist.destroy_process_group()
"""


def _run(spec: LabSpec, script: str, *, total_bytes: int = 0) -> LabResult:
    # `env` puts the variable into the ranks' environment.
    command = ["env", f"TOTAL_BYTES={total_bytes}", sys.executable, "-c", textwrap.dedent(script)]
    return run_lab(spec, command, timeout_s=60.0, grace_s=2.0, stream=False).check()


@pytest.mark.usefixtures("bridge_works")
@pytest.mark.parametrize("rate", ["20Mbit/s", "200Mbit/s"])
def test_a_transfer_takes_the_time_that_the_rate_says(rate: str) -> None:
    spec = LabSpec(hosts=2, rate=rate)
    wanted = spec.rate_bytes_per_s
    assert wanted is not None
    result = _run(spec, _MEET + _TRANSFER, total_bytes=round(wanted * 0.6))
    assert result.lab["means"] == "tbf"
    # Headers take 4.4 % of each frame (1448 of 1514 bytes are payload).
    assert float(result.ranks[0].stdout()) == pytest.approx(wanted, rel=0.10)
    assert float(result.ranks[0].stdout()) <= wanted


@pytest.mark.usefixtures("bridge_works")
def test_a_slow_host_is_slow_and_an_unlimited_link_is_not() -> None:
    slow = LabSpec(hosts=2, rate="1Gbit/s", host_rates={1: "40Mbit/s"})
    rate = float(_run(slow, _MEET + _TRANSFER, total_bytes=2_500_000).ranks[0].stdout())
    assert rate == pytest.approx(5e6, rel=0.10)
    free = _run(LabSpec(hosts=2), _MEET + _TRANSFER, total_bytes=50_000_000)
    assert float(free.ranks[0].stdout()) > 50e6
    assert free.lab["shaped"] is False
    assert free.lab["reason"] == "no rate, delay or loss was asked for"


@pytest.mark.usefixtures("relay_works")
def test_the_relay_gives_rate_and_round_trip_time() -> None:
    spec = LabSpec(hosts=2, rate="100Mbit/s", delay="10ms")
    result = _run(spec, _MEET + _ROUND_TRIP)
    assert result.lab["means"] in ("relay", "tbf+netem")
    times_s = [float(text) for text in result.ranks[0].stdout().strip("[]\n").split(",")]
    assert times_s[0] >= 0.020  # never less than twice the one-way delay
    assert times_s[len(times_s) // 4] == pytest.approx(0.020, rel=0.10)
    moved = _run(spec, _MEET + _TRANSFER, total_bytes=7_500_000)
    assert float(moved.ranks[0].stdout()) == pytest.approx(12.5e6, rel=0.10)


@pytest.mark.usefixtures("relay_works")
def test_datagrams_are_lost_with_the_given_probability_and_keep_their_order() -> None:
    spec = LabSpec(hosts=2, delay="2ms", jitter="2ms", loss=0.1)
    # TCP needs a few tries at 10 % loss; of 4000 datagrams 3600 arrive, give or take five
    # standard deviations (5 * sqrt(4000 * 0.1 * 0.9) = 95).
    result = _run(spec, _MEET + _DATAGRAMS)
    assert abs(int(result.ranks[0].stdout()) - 3600) < 95


@pytest.mark.distributed
@pytest.mark.usefixtures("bridge_works")
def test_gloo_all_reduce_takes_the_time_of_a_ring() -> None:
    pytest.importorskip("torch")
    rate, size, world = 25e6, 10_000_000, 2
    result = _run(LabSpec(hosts=world, rate=rate), _ALL_REDUCE, total_bytes=size)
    predicted_s = 2 * (world - 1) / world * size / rate
    assert float(result.ranks[0].stdout()) == pytest.approx(predicted_s, rel=0.15)
