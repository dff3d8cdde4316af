"""Measures all-reduces through the software switch against gloo's ring on emulated hosts.

One host runs the switch on a fast link, for a ToR has one to each of its hosts; the workers are
on slow links. All ways run in the same processes, in turns. The prediction is the closed form with
the links' rate, and the time of an all-reduce of a few bytes in the place of the round trip.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.lab import LabSpec, run_lab
from fivefold.network.aggregation import AggregationSwitch, read_switch_state
from fivefold.units import parse_bytes_per_s

RESULTS = Path(__file__).parents[1] / "results" / "network" / "aggregation.json"
RATE, SWITCH_RATE = "200Mbit/s", "2Gbit/s"
WORKERS = (2, 4)
SIZES_MB = (1, 4, 16)
REPETITIONS = 5
MTU = 60000
SLOTS, SLOT_BYTES, WINDOW = 64, 1 << 16, 16
PREDICTION_WITHIN = 0.15
_PORT = 5077
_TCP_SHARE = (MTU - 52) / (MTU + 14)  # of a frame, what a program's data is
_EQUAL_WITHIN = 1.05  # two workers send no less through a switch than around a ring
_FEW = 64  # elements
_TIMEOUT_S = 300.0
_ADDRESS_S = 30.0


def main() -> None:
    """Run all cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two repetitions, no file")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _work(json.loads(arguments.worker))
        return
    rows: list[BenchmarkRow] = []
    for workers in WORKERS:
        for measured in _measure(workers, 2 if arguments.quick else REPETITIONS):
            rows += _rows(workers, measured)
            for row in rows[-3:]:
                print(row)
    if not arguments.quick:
        write_results(arguments.output, topic="network/aggregation", rows=rows)


def _measure(workers: int, repetitions: int) -> list[dict[str, Any]]:
    job = {"workers": workers, "repetitions": repetitions}
    command = [sys.executable, "-m", "benchmarks.network.aggregation", "--worker", json.dumps(job)]
    spec = LabSpec(hosts=workers + 1, rate=RATE, host_rates={workers: SWITCH_RATE}, mtu=MTU)
    result = run_lab(spec, command, timeout_s=_TIMEOUT_S, stream=False).check()
    lines = result.ranks[0].stdout().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def _rows(workers: int, measured: dict[str, Any]) -> list[BenchmarkRow]:
    size_bytes = measured["size_bytes"]
    case = f"{workers} workers at 200 Mbit/s, {size_bytes >> 20} MiB"
    rate = parse_bytes_per_s(RATE) * _TCP_SHARE
    # A chunk is whole in the switch before its sum leaves it: one passes a link once more.
    round_trip_s = statistics.median(measured["few_s"]) + SLOT_BYTES / rate
    # SwitchML's model: the round trip, and the bytes at line rate or at that of the window.
    predicted_s = round_trip_s + size_bytes / min(rate, WINDOW * SLOT_BYTES / round_trip_s)
    switch_s, spread = median_and_spread(measured["switch_s"])
    hosts_s, _ = median_and_spread(measured["hosts_s"])
    gloo_s, _ = median_and_spread(measured["gloo_s"])
    off = switch_s / predicted_s - 1
    target_s = gloo_s * (_EQUAL_WITHIN if workers == 2 else 1)
    return [
        BenchmarkRow(
            case=case,
            metric="time through the switch",
            unit="s",
            ours=switch_s,
            spread=spread,
            peers={"gloo's ring": gloo_s, "fallback by the hosts": hosts_s},
            limit=size_bytes / rate,
            target=target_s,
            met=switch_s <= target_s,
        ),
        BenchmarkRow(
            case=case,
            metric="measured time over predicted, less one",
            unit="",
            ours=off,
            target=PREDICTION_WITHIN,
            met=abs(off) <= PREDICTION_WITHIN,
        ),
        BenchmarkRow(
            case=case,
            metric="times as fast as gloo's ring",
            unit="x",
            ours=gloo_s / switch_s,
            limit=2 * (workers - 1) / workers,
        ),
    ]


def _work(job: dict[str, Any]) -> None:
    rank, workers = int(os.environ["RANK"]), int(job["workers"])
    address = f"10.77.0.{workers + 1}:{_PORT}"
    if rank == workers:
        _serve(address)
    else:
        _reduce(rank, job, address)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then while the interpreter ends


def _serve(address: str) -> None:
    """The switch, until its last job has left."""
    host, _, port = address.partition(":")
    with AggregationSwitch(host, int(port), slots=SLOTS, slot_bytes=SLOT_BYTES) as switch:
        switch.start()
        seen = False
        while not seen or switch.state().jobs:
            seen = seen or bool(switch.state().jobs)
            time.sleep(0.2)


def _reduce(rank: int, job: dict[str, Any], address: str) -> None:
    import torch  # noqa: PLC0415 - the switch needs no torch
    import torch.distributed as dist  # noqa: PLC0415 - as above

    from fivefold.collectives.execution import GlooHosts  # noqa: PLC0415 - as above
    from fivefold.network.aggregation import (  # noqa: PLC0415 - as above
        AggregationClient,
        AggregationOptions,
    )

    torch.set_num_threads(1)
    workers = int(job["workers"])
    dist.init_process_group("gloo", rank=rank, world_size=workers)
    _await_switch(address)
    hosts = GlooHosts(dist.group.WORLD)
    client = AggregationClient(
        address,
        job="benchmark",
        rank=rank,
        size=workers,
        fallback=hosts,
        options=AggregationOptions(window=WINDOW),
    )
    if not client.is_connected:
        raise RuntimeError(f"there is no switch at {address}")

    def through_switch(data: np.ndarray) -> None:
        outcome = client.all_reduce(data)
        if outcome.fallback or not outcome.chunks:
            raise RuntimeError(f"not all chunks were summed by the switch: {outcome}")

    def by_hosts(data: np.ndarray) -> None:
        data[:] = hosts.sum(data, "float32")

    def by_ring(data: np.ndarray) -> None:
        dist.all_reduce(torch.from_numpy(data))

    few = np.empty(_FEW, np.float32)
    few_s = [_timed(dist, through_switch, few) for _ in range(2 * int(job["repetitions"]) + 1)][1:]
    ways = {"switch_s": through_switch, "gloo_s": by_ring, "hosts_s": by_hosts}
    for size_mb in SIZES_MB:
        found = _in_turns(dist, ways, size_mb << 20, repetitions=int(job["repetitions"]))
        if rank == 0:
            print(json.dumps({"size_bytes": size_mb << 20, "few_s": few_s, **found}))
    dist.barrier()
    client.close()


def _in_turns(
    dist: Any, ways: dict[str, Any], size_bytes: int, *, repetitions: int
) -> dict[str, list[float]]:
    """Times of each way, after one turn to warm up."""
    data = np.empty(size_bytes // 4, np.float32)
    turns = [
        {key: _timed(dist, way, data) for key, way in ways.items()} for _ in range(repetitions + 1)
    ]
    return {key: [turn[key] for turn in turns[1:]] for key in ways}


def _await_switch(address: str) -> None:
    end_s = time.monotonic() + _ADDRESS_S
    while True:
        try:
            read_switch_state(address)
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)
        else:
            return


def _timed(dist: Any, way: Any, data: np.ndarray) -> float:
    """Time until the slowest rank is done."""
    import torch  # noqa: PLC0415 - the switch needs no torch

    data.fill(1.0)
    dist.barrier()
    start_s = time.perf_counter()
    way(data)
    took = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
    if not (data == dist.get_world_size()).all():
        raise RuntimeError(f"a sum is {data.min()} to {data.max()}")
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    main()
