"""ASTRA-sim's analytical results on the same cases, by this package's simulator.

ASTRA-sim (congestion-aware analytical network, commit f66c1da of 2024-11) was run on an all-reduce
of eight GPUs on one switch with its HGX-H100-validated example, and on an iteration of a
22-billion GPT. Here the same rules are given to `fivefold.network.simulation`: messages are stored
and forwarded by the switch, a link sends one at a time in order of arrival, two reads and a write
of memory follow each reducing step, and only so many chunks are under way.

    python -m benchmarks.strategy.astra_sim
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.network.simulation import Compute, simulate
from fivefold.network.topology import Topology, star

RESULTS = Path(__file__).parents[1] / "results" / "strategy" / "astra_sim.json"
GPUS, CHUNKS, MIB, GIB = 8, 4, 2**20, 2**30
# MiB and nanoseconds that ASTRA-sim gave; beside them what eight H100 took (nccl-tests).
ALL_REDUCES = (
    (1, 57_426, 27_370),
    (16, 128_808, 123_800),
    (128, 661_905, 586_400),
    (1024, 4_926_513, 4_029_400),
)
ITERATION_S, EXPOSED_S, MEASURED_S = 0.977, 0.369, 1.42


@dataclass(frozen=True)
class Machine:
    """What ASTRA-sim's network and system files say; bandwidths of links are in 2^30 bytes."""

    link_gib_per_s: float
    latency_s: float
    memory_bytes_per_s: float
    active_chunks: int
    endpoint_s: float = 10e-9


def note(text: str) -> None:
    """Say how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def all_reduce_s(machine: Machine, size_bytes: float) -> float:
    """Time of a ring all-reduce in four chunks, message by message."""
    message = size_bytes / CHUNKS / GPUS
    sent_s = message / (machine.link_gib_per_s * GIB)
    added_s = 3.0 * message / machine.memory_bytes_per_s
    tasks: list[Compute] = []
    for chunk in range(CHUNKS):
        for step in range(2 * (GPUS - 1)):
            for rank in range(GPUS):
                tasks += _message(
                    machine, (chunk, step, rank), sent_s=sent_s,
                    added_s=added_s if step < GPUS - 1 else 0.0,
                )  # fmt: skip
    result = simulate(_switch(), tasks)
    return max(float(end) for end in result.finish_s)


def _switch() -> Topology:
    """Tasks take times, not bytes, so that the links' own rates do not matter."""
    return star(GPUS, bandwidth="400 GB/s", latency="0 s")


def _message(
    machine: Machine, place: tuple[int, int, int], *, sent_s: float, added_s: float
) -> list[Compute]:
    """One message of a step: up to the switch, down to the next rank, and added there."""
    chunk, step, rank = place
    receiver = (rank + 1) % GPUS
    before: list[tuple[object, ...]] = []
    if step:
        before = [("done", chunk, step - 1, rank)]
    elif chunk >= machine.active_chunks:
        before = [("done", chunk - machine.active_chunks, 2 * GPUS - 3, rank)]
    names = [(what, *place) for what in ("up", "at switch", "down", "there")]
    arrival_s = machine.latency_s + machine.endpoint_s
    return [
        Compute(names[0], sent_s, depends_on=before, processor=("up", rank)),
        Compute(names[1], machine.latency_s, depends_on=[names[0]]),
        Compute(names[2], sent_s, depends_on=[names[1]], processor=("down", receiver)),
        Compute(names[3], arrival_s, depends_on=[names[2]]),
        Compute(("done", chunk, step, receiver), added_s, depends_on=[names[3]]),
    ]


def iteration_s() -> tuple[float, float]:
    """22B with tensor degree 8 and full recomputation: the iteration, and what of it is exposed."""
    tokens, hidden, sequence, vocab, layers = 8192, 6144, 2048, 51200, 48
    machine = Machine(300.0, 500e-9, 2039e9, active_chunks=1)
    message = 2.0 * tokens * hidden
    reduce_s = all_reduce_s(machine, message)
    attention = (8.0 * tokens * hidden**2 + 4.0 * tokens * sequence * hidden) / GPUS
    products = 16.0 * tokens * hidden**2 / GPUS
    head = 6.0 * tokens * hidden * vocab / GPUS

    def roofline_s(flops: float, passes: float) -> float:
        return max(flops / 312e12, passes * message / machine.memory_bytes_per_s)

    forward = [roofline_s(attention, 12), reduce_s, roofline_s(products, 12), reduce_s]
    backward = [roofline_s(2 * products, 24), reduce_s, roofline_s(2 * attention, 24), reduce_s]
    steps = forward * layers + [roofline_s(head, 4)] + (forward + backward) * layers
    tasks = [
        Compute(i, seconds, depends_on=[i - 1] if i else []) for i, seconds in enumerate(steps)
    ]
    result = simulate(_switch(), tasks)
    return float(max(result.finish_s)), reduce_s * steps.count(reduce_s)


def compared(
    case: str, ours: float, theirs: float, unit: str, *, real: float | None = None
) -> BenchmarkRow:
    """A row: our figure beside ASTRA-sim's, met within two percent."""
    note(f"{case}: {ours:.6g} {unit}, ASTRA-sim {theirs:.6g} ({100 * (ours / theirs - 1):+.2f} %)")
    peers = {"ASTRA-sim": theirs} if real is None else {"ASTRA-sim": theirs, "measured": real}
    return BenchmarkRow(
        case=case, metric="time by ASTRA-sim's rules", unit=unit, ours=ours, peers=peers,
        target=theirs, met=abs(ours / theirs - 1.0) <= 0.02,
    )  # fmt: skip


def main() -> None:
    """Run everything and write the results."""
    machine = Machine(400.0, 936.25e-9, 3350e9, active_chunks=2)
    rows = [
        compared(f"all-reduce of {size} MiB, 8 GPUs on a switch", 1e6 * all_reduce_s(
            machine, size * MIB), theirs / 1e3, "us", real=real / 1e3)
        for size, theirs, real in ALL_REDUCES
    ]  # fmt: skip
    whole_s, exposed_s = iteration_s()
    rows.append(compared("GPT 22B, tensor degree 8, full recomputation", whole_s, ITERATION_S, "s",
                         real=MEASURED_S))  # fmt: skip
    rows.append(compared("of it exposed communication", exposed_s, EXPOSED_S, "s"))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    command = "python -m benchmarks.strategy.astra_sim"
    write_results(RESULTS, topic="strategy/astra_sim", rows=rows, command=command)


if __name__ == "__main__":
    main()
