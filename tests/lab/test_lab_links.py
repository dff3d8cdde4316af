"""Measured links: what a program on one host sees of another."""

from __future__ import annotations

import sys
import textwrap

import pytest

from fivefold.lab import LabResult, LabSpec, run_lab

pytestmark = [pytest.mark.lab, pytest.mark.alone]

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
# the link. A busy machine can make it look slower: so five short transfers on one connection, and
# more until one was undisturbed and took no longer than ENOUGH_S, or sixty were not.
_TRANSFER = """
data = bytes(int(os.environ["TOTAL_BYTES"]))
enough_s = float(os.environ["ENOUGH_S"])
shortest_s = float("inf")
with meet() as peer:
    if rank == 0:
        for turn in range(60):
            start = time.perf_counter()
            peer.sendall(data)
            assert peer.recv(1) == b"x"
            shortest_s = min(shortest_s, time.perf_counter() - start)
            if turn >= 4 and shortest_s <= enough_s:
                break
        print(shortest_s)
    else:
        left = len(data)
        while arrived := len(peer.recv(1 << 20)):
            left -= arrived
            if left == 0:
                peer.sendall(b"x")
                left = len(data)
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


def _run(spec: LabSpec, script: str, **environment: float) -> LabResult:
    # `env` puts the variables into the ranks' environment.
    variables = [f"{name.upper()}={value}" for name, value in environment.items()]
    command = ["env", *variables, sys.executable, "-c", textwrap.dedent(script)]
    return run_lab(spec, command, timeout_s=60.0, grace_s=2.0, stream=False).check()


def _transfer(
    spec: LabSpec, rate: float, *, seconds: float = 0.25, round_trip_s: float = 0.0
) -> tuple[LabResult, float]:
    """Send what takes so long at this rate; return the run, and the payload's rate in bytes/s."""
    size, enough_s = round(seconds * rate), seconds / 0.94 + round_trip_s
    result = _run(spec, _MEET + _TRANSFER, total_bytes=size, enough_s=enough_s)
    return result, size / (float(result.ranks[0].stdout()) - round_trip_s)


@pytest.mark.usefixtures("bridge_works")
@pytest.mark.parametrize("rate", ["20Mbit/s", "200Mbit/s"])
def test_a_transfer_takes_the_time_that_the_rate_says(rate: str) -> None:
    spec = LabSpec(hosts=2, rate=rate)
    result, found = _transfer(spec, spec.rate_bytes_per_s)
    assert result.lab["means"] == "tbf"
    # Headers take 4.4 % of each frame (1448 of 1514 bytes are payload).
    assert 0.93 * spec.rate_bytes_per_s <= found <= spec.rate_bytes_per_s


@pytest.mark.usefixtures("bridge_works")
def test_a_slow_host_is_slow_and_an_unlimited_link_is_not() -> None:
    slow = LabSpec(hosts=2, rate="1Gbit/s", host_rates={1: "40Mbit/s"})
    # A full bucket of 66 kB may pass at once, which is 5.3 % of a transfer; headers take 4.4 %.
    assert 0.93 * 5e6 <= _transfer(slow, 5e6)[1] <= 1.01 * 5e6
    free, found = _transfer(LabSpec(hosts=2), 50e6)
    assert found > 50e6
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
    # Headers take 1.3 % of each packet (4948 of 5014 bytes are payload).
    _, found = _transfer(spec, 12.5e6, seconds=0.1, round_trip_s=0.020)
    assert 0.94 * 12.5e6 <= found <= 12.5e6


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
