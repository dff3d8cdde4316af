"""Exact searches against published optima and proofs, and TACCL's instances in TACCL's model.

Five tables. k-synchronous points (chunks, steps, rounds) on DGX-1, rings, tori, cubes and meshes:
each must be found and verified, or refuted by the solver. All-gathers in time slots on two boxes
of DGX-2 and NDv2, the length and the refutation of one slot less, without help by bounds. Both of
these searches are peers of the product's methods. What `synthesize` finds by itself on DGX-1,
beside SCCL's bandwidth-optimal points. TACCL's instances: the final time of TACCL in its own
model, and its solver's time. All-gather on two boxes of NDv2 over sizes, beside the published
schedules of TE-CCL and TACCL.

    python -m benchmarks.collectives.exact_search [--only points,slots,dgx1,taccl,sizes] [--quick]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.collectives.exact import ExactResult
from benchmarks.collectives.k_synchronous import k_synchronous
from benchmarks.collectives.slotted import SlotModel, slotted
from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.collectives.schedules import (
    Collective,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    evaluate,
    gather,
    reduce,
    reduce_scatter,
    scatter,
    verify_schedule,
)
from fivefold.collectives.synthesis import (
    SynthesisOptions,
    published_sketch,
    synthesize,
    taccl,
)
from fivefold.network.topology import (
    TacclProfile,
    Topology,
    hypercube,
    mesh,
    named_topology,
    ring,
    torus,
)

RESULTS = Path(__file__).parents[1] / "results" / "collectives"
Point = tuple[int, int, int]
Make = Callable[..., Collective]
GATHERED: list[Point] = [(1, 2, 2), (2, 2, 3), (3, 3, 4), (4, 3, 5), (6, 3, 7), (6, 7, 7)]
NOT_GATHERED: list[Point] = [(1, 1, 1), (3, 2, 4), (6, 2, 7)]
DGX1: list[tuple[Make, list[Point], list[Point]]] = [
    (all_gather, GATHERED, NOT_GATHERED),
    (reduce_scatter, GATHERED, NOT_GATHERED),
    (
        all_reduce,
        [(8, 4, 4), (16, 4, 6), (24, 6, 8), (32, 6, 10), (48, 6, 14), (48, 14, 14)],
        [],
    ),
    (broadcast, [(2, 2, 2), (6, 3, 3), (7, 3, 3), (12, 4, 4)], [(3, 2, 2), (8, 3, 3)]),
    (reduce, [(2, 2, 2), (6, 3, 3), (7, 3, 3), (12, 4, 4)], [(3, 2, 2), (8, 3, 3)]),
    (gather, [(1, 2, 2), (2, 2, 3), (3, 2, 4), (4, 2, 5), (6, 3, 7)], []),
    (scatter, [(1, 2, 2), (6, 3, 7)], []),
    (
        all_to_all,
        [(1, 2, 3), (1, 3, 3), (3, 2, 8), (3, 3, 8), (3, 8, 8)],
        [(1, 2, 2), (2, 2, 5), (3, 2, 7)],
    ),
]
OTHERS: list[tuple[Topology, Make, list[Point], list[Point]]] = [
    (ring(8), all_gather, [(1, 4, 4), (2, 4, 7), (2, 7, 7), (4, 4, 14)], [(3, 4, 10)]),
    (ring(8), broadcast, [(2, 4, 4)], []),
    (ring(8), gather, [(2, 4, 7)], []),
    (ring(8), scatter, [(2, 4, 7)], []),
    (ring(8), all_to_all, [(1, 4, 8)], [(1, 4, 7)]),
    (torus((4, 4)), all_gather, [(1, 4, 4), (4, 4, 15)], []),
    (torus((3, 3, 3)), all_gather, [(1, 5, 5)], []),
    (hypercube(3), all_gather, [(1, 3, 3), (3, 3, 7)], []),
    (hypercube(4), all_gather, [(1, 4, 4)], []),
    (mesh((4, 4)), all_gather, [(1, 7, 8), (1, 8, 8)], []),
    (mesh((5, 5)), all_gather, [(1, 12, 12)], []),
]
# Seconds of SCCL's z3 on DGX-1 all-gathers, from the documentation of microsoft/sccl.
SCCL_SECONDS = {
    (1, 2, 2): 0.5,
    (2, 2, 3): 0.9,
    (3, 2, 4): 1.1,
    (3, 3, 4): 2.9,
    (4, 3, 5): 6.5,
    (6, 3, 7): 56.1,
}
# Bandwidth-optimal points on DGX-1.
SCCL_OPTIMA: list[tuple[Make, Point]] = [
    (all_gather, (6, 3, 7)),
    (reduce_scatter, (6, 3, 7)),
    (all_reduce, (48, 6, 14)),
    (gather, (6, 3, 7)),
    (scatter, (6, 3, 7)),
    (all_to_all, (3, 2, 8)),
]
NVLINK_BYTES_PER_S = 25e9  # what carries one chunk per round
# TACCL run with HiGHS in place of Gurobi: sketch, profile, boxes, connections, collective, final
# time in the profile's units, seconds of its stages 1 and 3.
TACCL_RUNS: list[tuple[str, str, int, Literal["relay", "direct-map"], Make, float, float]] = [
    ("sk1-ndv2-n1", "ndv2_1MB", 1, "relay", all_gather, 92.0, 200.02),
    ("sk1-ndv2-n2", "ndv2_1MB", 2, "relay", all_gather, 945.0, 64.2),
    ("sk2-dgx2-n2", "dgx2_1KB", 2, "direct-map", all_gather, 1519.0, 11.6),
    ("sk1-ndv2-n1", "ndv2_1KB", 1, "relay", all_to_all, 196.0, 9.31),
]
# Finish times in us from the schedules in microsoft/TE-CCL: its own, and TACCL's as given there.
NDV2_SIZES: list[tuple[str, float, float, float | None]] = [
    ("1 GB", 1e9, 43750.0, 53766.7),
    ("64 MB", 64e6, 2800.0, 3133.2),
    ("4 MB", 4e6, 190.0, 216.5),
    ("1 MB", 1e6, 48.75, 62.15),
    ("256 KB", 256e3, 14.72, 25.26),
    ("64 KB", 64e3, 6.08, 13.08),
    ("16 KB", 16e3, 4.44, 12.68),
    ("1 KB", 1e3, 4.1375, 10.159),
]


def timed(ask: Callable[[], ExactResult]) -> tuple[ExactResult, float]:
    """A result and the seconds from the question to the answer, models and checks included."""
    started_s = time.perf_counter()
    result = ask()
    return result, time.perf_counter() - started_s


def points(*, quick: bool) -> Iterator[BenchmarkRow]:
    """Every k-synchronous point."""
    tables = [(named_topology("dgx1").scaled(latency=0.0), *row) for row in DGX1] + OTHERS
    verdicts = []
    for topology, make, feasible, infeasible in tables:
        for point in feasible + infeasible:
            if quick and (point[1] > 6 or topology.num_ranks > 8):
                continue
            row, right = one_point(topology, make, point, expected=point in feasible)
            verdicts.append(right)
            yield row
    yield summary("k-synchronous points", verdicts)


def summary(case: str, verdicts: list[bool]) -> BenchmarkRow:
    """How many answers are as published."""
    return BenchmarkRow(
        case=case,
        metric="answers as published",
        unit="answers",
        ours=sum(verdicts),
        target=len(verdicts),
        met=all(verdicts),
    )


def one_point(
    topology: Topology, make: Make, point: Point, *, expected: bool
) -> tuple[BenchmarkRow, bool]:
    """Seconds until one point was found or refuted, and whether the answer is as published."""
    chunks, steps, rounds = point
    collective = make(topology.num_ranks, chunks)
    result, seconds = timed(
        lambda: k_synchronous(collective, topology, steps=steps, rounds=rounds, time_limit_s=300)
    )
    wanted = "found" if expected else "infeasible"
    known = topology.name == "dgx1" and make is all_gather and point in SCCL_SECONDS
    row = BenchmarkRow(
        case=f"{topology.name} {make.__name__} {point}: {result.status}",
        metric="time until decided",
        unit="s",
        ours=round(seconds, 3),
        peers={"SCCL (z3, its documentation)": SCCL_SECONDS[point]} if known else {},
    )
    return row, result.status == wanted


def rotated(offset: int, size: int, ranks: int) -> np.ndarray:
    """The rotation of ranks by ``offset`` in blocks of ``size``."""
    numbers = np.arange(ranks)
    return ((numbers % size + offset) % size + numbers // size * size).astype(np.int32)


def slots(*, quick: bool) -> Iterator[BenchmarkRow]:
    """Lengths of all-gathers in slots, found and refuted."""
    ndv2, dgx2 = named_topology("ndv2", boxes=2), named_topology("dgx2", boxes=2)
    turns = (rotated(2, 16, 32), rotated(16, 32, 32))
    plain = SlotModel(use_bounds=False)
    cases = [
        ("NDv2 x2 all_gather, 35 slots", ndv2, 35, plain, "found"),
        ("NDv2 x2 all_gather, 34 slots, by bounds", ndv2, 34, SlotModel(), "infeasible"),
        (
            "DGX-2 x2 all_gather, 31 slots, symmetric",
            dgx2,
            31,
            SlotModel(symmetries=turns),
            "found",
        ),
        ("DGX-2 x2 all_gather, 30 slots, by bounds", dgx2, 30, SlotModel(), "infeasible"),
    ]
    if not quick:
        refuted = "NDv2 x2 all_gather, 34 slots, by the solver"
        cases.insert(1, (refuted, ndv2, 34, plain, "infeasible"))
    verdicts = []
    for case, topology, length, model, wanted in cases:
        question = functools.partial(
            slotted,
            all_gather(topology.num_ranks),
            topology,
            size_bytes=1e9,
            slots=length,
            model=model,
            time_limit_s=300,
        )
        result, seconds = timed(question)
        verdicts.append(result.status == wanted)
        yield BenchmarkRow(
            case=f"{case}: {result.status}",
            metric="time until decided",
            unit="s",
            ours=round(seconds, 3),
        )
    yield summary("lengths in slots", verdicts)


def dgx1(*, quick: bool) -> Iterator[BenchmarkRow]:
    """The product's default search on DGX-1, and SCCL's bandwidth-optimal points."""
    topology, size_bytes = named_topology("dgx1").scaled(latency=0.0), 64e6
    synthesize("all_gather", topology, size_bytes=size_bytes, time_limit_s=5)  # compiles
    for make, point in SCCL_OPTIMA[: 2 if quick else None]:
        chunks, _, rounds = point
        chunk_bytes = float(make(topology.num_ranks, chunks).chunk_bytes(size_bytes)[0])
        peer_us = rounds * chunk_bytes / NVLINK_BYTES_PER_S * 1e6
        started_s = time.process_time()
        found = synthesize(make.__name__, topology, size_bytes=size_bytes, time_limit_s=30)
        seconds = time.process_time() - started_s
        case = f"dgx1 {make.__name__} of 64 MB by synthesize: {found.method}"
        yield BenchmarkRow(
            case=case,
            metric="modelled time",
            unit="us",
            ours=round(found.time_s * 1e6, 2),
            peers={"SCCL's bandwidth-optimal point": round(peer_us, 2)},
            limit=round(found.bound.seconds * 1e6, 2),
            target=round(peer_us, 2),
            met=found.time_s * 1e6 <= peer_us * (1 + 1e-9),
        )
        known = make is all_gather
        yield BenchmarkRow(
            case=case,
            metric="processor time of synthesis",
            unit="s",
            ours=round(seconds, 3),
            peers={"SCCL (z3, its documentation)": SCCL_SECONDS[point]} if known else {},
        )


class Reached:
    """Listens to a synthesis, and notes when a schedule was first as short as ``target_s``."""

    def __init__(self, target_s: float) -> None:
        self.target_s, self.started_s = target_s, time.perf_counter()
        self.seconds: float | None = None

    def __call__(self, line: str) -> None:
        """Read one line of progress."""
        words = line.split()
        if words[:2] != ["schedule", "of"] or self.seconds is not None:
            return
        if float(words[2]) <= self.target_s * (1 + 1e-6):
            self.seconds = time.perf_counter() - self.started_s


def taccl_runs(*, quick: bool) -> Iterator[BenchmarkRow]:
    """TACCL's instances: length in its model, and seconds until it was reached."""
    for sketch, name, boxes, connections, make, final, peer_s in TACCL_RUNS:
        profile = TacclProfile.load(name)
        topology = profile.to_topology(
            boxes=boxes,
            connections=connections,
            as_solved=True,
        )
        collective = make(topology.num_ranks)
        size_bytes = profile.chunk_bytes * collective.buffer_weight
        unit = profile.time_scale * 1e6
        reached = Reached(final / unit)
        result = taccl(
            collective,
            topology,
            published_sketch(sketch),
            size_bytes=size_bytes,
            time_limit_s=5 if quick else 20,
            progress=reached,
        )
        verify_schedule(result.schedule, topology=topology, check_times=True)
        case = f"{sketch} {make.__name__}"
        length = result.time_s * unit
        yield BenchmarkRow(
            case=case,
            metric="length in TACCL's model",
            unit="profile units",
            ours=round(length, 2),
            peers={"TACCL with HiGHS": final},
            target=final,
            met=length <= final * (1 + 1e-9),
        )
        if reached.seconds is not None:
            yield BenchmarkRow(
                case=case,
                metric="time until a schedule as short as TACCL's",
                unit="s",
                ours=round(reached.seconds, 2),
                peers={"TACCL with HiGHS (stages 1 and 3)": peer_s},
            )


def sizes(*, quick: bool) -> Iterator[BenchmarkRow]:
    """All-gather on NDv2 x2 over sizes, in the model in which a latency only delays."""
    topology = named_topology("ndv2", boxes=2)
    for name, size_bytes, te_ccl_us, taccl_us in NDV2_SIZES[:: 3 if quick else 1]:
        options = SynthesisOptions(model="slotted")
        found = synthesize(
            all_gather(16),
            topology,
            size_bytes=size_bytes,
            time_limit_s=20 if quick else 45,
            options=options,
        )
        timing = evaluate(found.schedule, topology, size_bytes=size_bytes, model="slotted")
        peers = {"TE-CCL (15 of 16 GPUs)": te_ccl_us}
        if taccl_us is not None:
            peers["TACCL, as reported by TE-CCL"] = taccl_us
        yield BenchmarkRow(
            case=f"NDv2 x2 all_gather {name}, one chunk per rank, by {found.method}",
            metric="modelled time",
            unit="us",
            ours=round(timing.total_s * 1e6, 4),
            peers=peers,
            limit=round(found.bound.seconds * 1e6, 4),
            target=taccl_us,
            met=None if taccl_us is None else timing.total_s * 1e6 <= taccl_us,
        )


TABLES: dict[str, Callable[..., Iterator[BenchmarkRow]]] = {
    "points": points,
    "slots": slots,
    "dgx1": dgx1,
    "taccl": taccl_runs,
    "sizes": sizes,
}


def main() -> None:
    """Run the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(TABLES), help="tables, comma-separated")
    parser.add_argument("--quick", action="store_true", help="what takes seconds, no results file")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for table in arguments.only.split(","):
        rows = []
        for row in TABLES[table](quick=arguments.quick):
            print(f"{row.case}: {row.ours} {row.unit}, peers {dict(row.peers)}, met {row.met}")
            rows.append(row)
        if arguments.quick:
            continue
        name = f"exact_{table}"
        path = arguments.results / f"{name}.json"
        command = f"python -m benchmarks.collectives.exact_search --only {table}"
        write_results(path, topic=f"collectives/{name}", rows=rows, command=command)


if __name__ == "__main__":
    main()
