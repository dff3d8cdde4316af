"""Measures all-reduce by the chosen algorithm against gloo's own on real, unequal links.

Every case is a topology that the lab emulates link by link. Both backends run in the same
processes, in turns; the prediction was made before the first byte was sent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.lab import LabSpec, run_lab
from fivefold.network.topology import Link, Node, Topology, switch

TOPIC = "collectives/lab"
RESULTS = Path(__file__).parents[1] / "results" / "collectives" / "lab.json"
SIZES_MB = (1, 4, 16, 64)
REPETITIONS = 5
FEW = 4  # ranks of a look
FAST, SLOW = 100e6, 25e6  # bytes per second
MTU = 60000
QUEUE = "500ms"  # none is lost: frames this large leave TCP too few to find losses without a pause
PREDICTION_WITHIN = 0.15
EQUAL_WITHIN = 1.05
_TIMEOUT_S = 900.0
_WARM_UP_S = 0.5


@dataclass(frozen=True)
class Case:
    """One topology.

    Attributes:
        name: For people.
        topology: The network.
        equal: Whether all links are equal, so that gloo's ring is as good as anything.
    """

    name: str
    topology: Topology
    equal: bool = False


def _joined(name: str, kinds: dict[str, Any], rates: dict[tuple[str, str], float]) -> Topology:
    nodes = [Node(node, kind) for node, kind in kinds.items()]
    links = [
        Link(*ends, bandwidth_bytes_per_s=rate)
        for (one, other), rate in rates.items()
        for ends in ((one, other), (other, one))
    ]
    return Topology(name, nodes, links)


def _pairs(order: tuple[int, int, int, int], name: str) -> Topology:
    kinds = {f"host{i}": "gpu" for i in range(4)} | {"left": "switch", "right": "switch"}
    rates = {(f"host{host}", "left" if at < 2 else "right"): FAST for at, host in enumerate(order)}
    return _joined(name, kinds, rates | {("left", "right"): SLOW})


def _star(count: int, name: str) -> Topology:
    kinds = {f"host{i}": "gpu" for i in range(count)} | {"switch": "switch"}
    last = count - 1
    rates = {(f"host{i}", "switch"): SLOW if i == last else FAST for i in range(count)}
    return _joined(name, kinds, rates)


def _ring(count: int, name: str) -> Topology:
    kinds = {f"host{i}": "gpu" for i in range(count)}
    last = count - 1
    rates = {
        (f"host{i}", f"host{(i + 1) % count}"): SLOW if i == last else FAST for i in range(count)
    }
    return _joined(name, kinds, rates)


CASES = (
    Case("two fast pairs", _pairs((0, 1, 2, 3), "two fast pairs joined by a slow link")),
    Case("two fast pairs, ranks in turns", _pairs((0, 2, 1, 3), "two fast pairs, ranks in turns")),
    Case("star with one slow host, 4", _star(4, "star with one slow host")),
    Case("star with one slow host, 8", _star(8, "star with one slow host")),
    Case("ring with one slow edge, 4", _ring(4, "ring with one slow edge")),
    Case("ring with one slow edge, 8", _ring(8, "ring with one slow edge")),
    Case("equal links, 4", switch(4, bandwidth=SLOW), equal=True),
    Case("equal links, 8", switch(8, bandwidth=SLOW), equal=True),
)


def main() -> None:
    """Run all cases, or some, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four hosts, two sizes, no file")
    parser.add_argument("--case", action="append", help="only cases whose name begins so")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _work(json.loads(arguments.worker))
        return
    sizes = (1, 16) if arguments.quick else SIZES_MB
    rows: list[BenchmarkRow] = []
    cases = [case for case in CASES if not (arguments.quick and case.topology.num_ranks > FEW)]
    for case in cases:
        if arguments.case and not any(case.name.startswith(start) for start in arguments.case):
            continue
        for measured in _measure(case, sizes, 2 if arguments.quick else REPETITIONS):
            rows += _rows(case, measured)
            for row in rows[-3:]:
                print(row)
    if not arguments.quick and not arguments.case:
        write_results(RESULTS, topic=TOPIC, rows=rows)


def _measure(case: Case, sizes_mb: tuple[int, ...], repetitions: int) -> list[dict[str, Any]]:
    """What rank 0 measured, size by size."""
    found = []
    # On equal links both are measured: the choice, which may be gloo itself, and the own ring.
    for algorithm in ("auto", "ring") if case.equal else ("auto",):
        job = {"sizes_mb": sizes_mb, "repetitions": repetitions, "algorithm": algorithm}
        command = [sys.executable, "-m", "benchmarks.collectives.lab", "--worker", json.dumps(job)]
        spec = LabSpec.of_topology(case.topology, mtu=MTU, queue=QUEUE)
        result = run_lab(spec, command, timeout_s=_TIMEOUT_S, stream=False).check()
        lines = result.ranks[0].stdout().splitlines()
        found += [json.loads(line) for line in lines if line.startswith("{")]
    return found


def _rows(case: Case, measured: dict[str, Any]) -> list[BenchmarkRow]:
    name = f"{case.name}, {measured['size_mb']} MB, {measured['label']}"
    ours_s, spread = median_and_spread(measured["ours_s"])
    gloo_s, _ = median_and_spread(measured["gloo_s"])
    gain = gloo_s / ours_s
    predicted = measured["inner_predicted_s"] / measured["predicted_s"]
    off = ours_s / measured["predicted_s"] - 1
    return [
        BenchmarkRow(
            case=name,
            metric="time",
            unit="s",
            ours=ours_s,
            spread=spread,
            peers={"gloo": gloo_s},
            target=gloo_s * EQUAL_WITHIN if case.equal else gloo_s,
            met=ours_s <= (gloo_s * EQUAL_WITHIN if case.equal else gloo_s),
        ),
        BenchmarkRow(
            case=name,
            metric="measured time over predicted, less one",
            unit="",
            ours=off,
            target=PREDICTION_WITHIN,
            met=abs(off) <= PREDICTION_WITHIN,
        ),
        BenchmarkRow(
            case=name,
            metric="times as fast as gloo",
            unit="x",
            ours=gain,
            peers={"predicted": predicted},
        ),
    ]


def _work(job: dict[str, Any]) -> None:
    import torch  # noqa: PLC0415 - the outer process needs no torch
    import torch.distributed as dist  # noqa: PLC0415 - as above

    from fivefold.collectives import execution  # noqa: PLC0415 - as above

    torch.set_num_threads(1)
    execution.configure(algorithms={"all_reduce": job["algorithm"]})
    dist.init_process_group("fivefold")
    gloo = dist.new_group(backend="gloo")
    engine: Any = dist.group.WORLD
    for size_mb in job["sizes_mb"]:
        data = torch.ones(size_mb << 18)
        choice = engine.engine.choice("all_reduce", data.nbytes)
        times: dict[str, list[float]] = {"ours_s": [], "gloo_s": []}
        for turn in range(job["repetitions"] + 1):
            for key, group in (("ours_s", None), ("gloo_s", gloo)):
                took_s = _timed(dist, data, group, gloo)
                if turn > 0:
                    times[key].append(took_s)
        if dist.get_rank() == 0:
            found = {
                "size_mb": size_mb,
                "label": choice.label,
                "predicted_s": choice.predicted_s,
                "inner_predicted_s": choice.inner_s,
                **times,
            }
            print(json.dumps(found))
    dist.barrier(group=gloo)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then while the interpreter ends


def _timed(dist: Any, data: Any, group: Any, gloo: Any) -> float:
    """Time until the slowest rank is done."""
    import torch  # noqa: PLC0415 - the outer process needs no torch

    data.fill_(1.0)
    dist.barrier(group=gloo)
    start_s = time.perf_counter()
    dist.all_reduce(data, group=group)
    took = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
    if float(data[-1]) != dist.get_world_size():
        raise RuntimeError(f"the sum is {float(data[-1])}")
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=gloo)
    return float(took)


if __name__ == "__main__":
    main()
