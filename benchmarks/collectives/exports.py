"""Counts the exported programs that the executors' own parsers accept, by build.

Small programs of the library, and NCCL's tuner files, are read by the code that reads them on a
cluster. It is compiled here, from where the user has it; none is part of this repository, and what
is not given is left out:

``--executor FOLDER``  a checkout of Azure/msccl-executor-nccl (g++, CUDA's headers).
``--mscclpp FOLDER``   a checkout of microsoft/mscclpp (g++, CUDA's headers, nlohmann's json).
``--nccl FOLDER``      a checkout of NVIDIA/nccl, whose plugins/tuner/example is built (gcc).
``--include FOLDER``   further folders of headers, such as those of CUDA; several times.

MSCCL++'s parser is asked as every rank, and MSCCL's as up to four of them, for it takes long.
MSCCL++'s leaves the sizes of tables to its executor: they are compared with the constants of its
header.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.lowering import lower, to_msccl_xml, to_mscclpp_json
from fivefold.collectives.lowering.program import MSCCL_TARGETS, can_run_in_place
from fivefold.collectives.pricing.tuner import nccl_tuner_rules, tuner_csv
from fivefold.collectives.schedules import Schedule, named_collective
from fivefold.errors import FivefoldError, InfeasibleError
from fivefold.network.topology import named_topology, switch

RESULTS = Path(__file__).parents[1] / "results" / "collectives" / "exports.json"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
RANKS = (2, 3, 4, 6, 8, 12, 16)
PARTS = (1, 2, 4)
HOST = 4  # ranks of a host, where plans cross hosts
STEPS = {"executor": 64, "executor-256": 256}
CALLS = 2000

XML_DRIVER = """
#include "core.h"
#include "msccl/msccl_parser.h"
#include <cstdio>
#include <malloc.h>
thread_local int ncclDebugNoWarn = 0;
void ncclDebugLog(ncclDebugLogLevel, unsigned long, const char*, int, const char*, ...) {}
int main() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);  // the parser clears 75 MB for each file: keep the pages
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  char path[4096];
  int ranks;
  mscclAlgo* algo = (mscclAlgo*)malloc(sizeof(mscclAlgo));
  while (scanf("%d %4095s", &ranks, path) == 2) {
    int failed = 0;
    int step = ranks > 4 ? (ranks - 1) / 2 : 1;
    for (int rank = 0; rank < ranks; rank += step) {
      memset(algo, 0, sizeof(mscclAlgo));
      failed += mscclGetAlgoFromXmlFile(path, algo, rank) != ncclSuccess;
    }
    printf("%d\\n", failed);
  }
}
"""
PLAN_DRIVER = """
#include "execution_plan.hpp"
#include <iostream>
#include <fstream>
extern "C" const char* cudaGetErrorString(cudaError_t) { return ""; }
extern "C" CUresult cuGetErrorString(CUresult, const char**) { return CUDA_SUCCESS; }
using namespace mscclpp;
static bool fits(const std::string& path, int rank, const nlohmann::json& gpu) {
  ExecutionPlan::Impl plan(path, rank);
  size_t chunk = 16 * 960, in = gpu["input_chunks"], out = gpu["output_chunks"];
  plan.loadExecutionPlan(chunk * in, chunk * out, 0, 0);
  bool good = plan.semaphoreInfos.size() <= MAX_DEVICE_SEMAPHORES;
  for (int block = 0; block < plan.getThreadblockCount(); block++) {
    good = good && plan.getOperations(block).size() <= MAX_OPERATION &&
           plan.threadblockMemoryChannels[block].size() <= MAX_CHANNEL &&
           plan.threadblockPortChannels[block].size() <= MAX_CHANNEL;
  }
  return good;
}
int main() {
  std::string path;
  int ranks;
  while (std::cin >> ranks >> path) {
    int failed = 0;
    try {
      nlohmann::json gpus = nlohmann::json::parse(std::ifstream(path))["gpus"];
      for (int rank = 0; rank < ranks; rank++) failed += !fits(path, rank, gpus[rank]);
    } catch (std::exception&) { failed++; }
    std::cout << failed << "\\n";
  }
}
"""


@dataclass(frozen=True)
class _Parser:
    """A compiled parser that reads ranks and paths, and writes how many ranks fail."""

    program: Path

    def accepts(self, files: list[tuple[int, Path]]) -> list[bool]:
        asked = "".join(f"{ranks} {path}\n" for ranks, path in files)
        done = subprocess.run(
            [str(self.program)], input=asked, capture_output=True, text=True, check=True
        )
        return [line == "0" for line in done.stdout.split()]


def compile_xml_parser(source: Path, steps: int, include: list[str], work: Path) -> _Parser:
    """Build MSCCL's parser for a number of steps of a block."""
    headers = work / f"headers_{steps}"
    headers.mkdir()
    text = (source / "src" / "nccl.h.in").read_text()
    (headers / "nccl.h").write_text(re.sub(r"\$\{nccl:\w+\}", "2", text))
    (headers / "driver.cc").write_text(XML_DRIVER)
    program = headers / "parser"
    # CUDA 13 has no such names any more; the parser does not use them.
    flags = [
        "-fpermissive", "-DNCCL_CUDAWRAP_H_", "-DCUCHECK(x)=",
        "-DncclCuMemHandleType=CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
        f"-DMSCCL_MAX_NUM_STEPS={steps}",
    ]  # fmt: skip
    folders = [headers, source / "src" / "include", *include]
    files = [source / "src" / "misc" / "msccl" / "msccl_parser.cc", headers / "driver.cc"]
    _build("-std=c++14", flags, folders, files, program)
    return _Parser(program)


def compile_plan_parser(source: Path, include: list[str], work: Path) -> _Parser:
    """Build the part of MSCCL++'s executor that reads plans."""
    headers = work / "mscclpp_headers"
    (headers / "mscclpp").mkdir(parents=True)
    version = "".join(f"#define MSCCLPP_{name} 0\n" for name in ("MAJOR", "MINOR", "PATCH"))
    (headers / "mscclpp" / "version.hpp").write_text(version)
    (headers / "driver.cc").write_text(PLAN_DRIVER)
    program = headers / "parser"
    core = source / "src" / "core"
    folders = [headers, source / "include", core / "include", *include]
    files = [core / "executor" / "execution_plan.cc", core / "errors.cc", headers / "driver.cc"]
    _build("-std=c++17", ["-fno-access-control", "-DMSCCLPP_USE_CUDA"], folders, files, program)
    return _Parser(program)


def _build(
    standard: str, flags: list[str], folders: list[Any], files: list[Any], program: Path
) -> None:
    paths = [f"-I{folder}" for folder in folders]
    command = ["g++", standard, "-O1", "-w", *flags, *paths, *map(str, files), "-o", str(program)]
    subprocess.run(command, check=True)


def schedules_of(ranks: tuple[int, ...]) -> Iterator[tuple[Schedule, bool]]:
    """Yield small schedules of the library, out of place and in place."""
    for name in COLLECTIVES:
        for count in ranks:
            for parts in PARTS:
                chunks = named_collective(name, count).num_chunks * parts
                if name in {"all_gather", "reduce_scatter", "all_to_all"}:
                    chunks = parts
                collective = named_collective(name, count, chunks=chunks)
                for algorithm in available_algorithms(collective):
                    try:
                        schedule = build_algorithm(algorithm, collective)
                    except FivefoldError:
                        continue  # no hosts, no hierarchy
                    for in_place in (False, True)[: 1 + can_run_in_place(collective)]:
                        yield schedule, in_place


def _rows(case: str, verdicts: list[tuple[bool, bool]]) -> Iterator[BenchmarkRow]:
    """Yield the rows of programs as (written, accepted)."""
    written = sum(one for one, _ in verdicts)
    accepted = sum(one and other for one, other in verdicts)
    yield BenchmarkRow(
        case=case, metric="written and accepted", unit="programs", ours=accepted,
        limit=len(verdicts), target=written, met=accepted == written,
    )  # fmt: skip
    yield BenchmarkRow(
        case=case,
        metric="refused, though the parser takes them",
        unit="programs",
        ours=sum(other and not one for one, other in verdicts),
    )


def xml_rows(
    source: Path, include: list[str], work: Path, ranks: tuple[int, ...]
) -> Iterator[BenchmarkRow]:
    """Yield the rows of MSCCL's builds."""
    programs = [lower(schedule, in_place=in_place) for schedule, in_place in schedules_of(ranks)]
    for target, steps in STEPS.items():
        parser = compile_xml_parser(source, steps, include, work)
        files, written = [], []
        for number, program in enumerate(programs):
            path = work / f"{target}_{number}.xml"
            try:
                path.write_text(to_msccl_xml(program, target=target))
                written.append(True)
            except InfeasibleError:
                path.write_text(to_msccl_xml(program, check_limits=False))
                written.append(False)
            files.append((program.num_ranks, path))
        case = f"MSCCL XML, {target}: {MSCCL_TARGETS[target].what}"
        yield from _rows(case, list(zip(written, parser.accepts(files), strict=True)))


def plan_rows(
    source: Path, include: list[str], work: Path, ranks: tuple[int, ...]
) -> Iterator[BenchmarkRow]:
    """Yield the rows of MSCCL++'s plans, on one host and across hosts of four ranks."""
    parser = compile_plan_parser(source, include, work)
    for where, per_host in (("one host", None), (f"hosts of {HOST} ranks", HOST)):
        files, written = [], []
        for number, (schedule, in_place) in enumerate(schedules_of(ranks)):
            path = work / f"{per_host}_{number}.plan.json"
            count = schedule.collective.num_ranks
            hosts = None if per_host is None else [rank // per_host for rank in range(count)]
            options: dict[str, Any] = {"in_place": in_place, "hosts": hosts}
            try:
                path.write_text(to_mscclpp_json(schedule, **options))
                written.append(True)
            except InfeasibleError:
                path.write_text(to_mscclpp_json(schedule, check_limits=False, **options))
                written.append(False)
            files.append((count, path))
        case = f"MSCCL++ plans, {where}"
        yield from _rows(case, list(zip(written, parser.accepts(files), strict=True)))


_COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
_ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
_PROTOCOLS = ("ll", "ll128", "simple")


class _Plugin(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("name", "init", "get", "finalize")]


def tuner_rows(source: Path, work: Path) -> Iterator[BenchmarkRow]:
    """Yield the rows of NCCL's example plugin: random calls get what the first rule says."""
    folder, library = source / "plugins" / "tuner" / "example", work / "tuner.so"
    command = ["gcc", "-w", "-fPIC", "-shared", f"-I{folder / 'nccl'}", "-o", str(library)]
    subprocess.run([*command, str(folder / "plugin.c")], check=True)
    plugin = _Plugin.in_dll(ctypes.CDLL(str(library)), "ncclTunerPlugin_v5")
    size = ctypes.c_size_t
    init = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64, size, size,
        *[ctypes.c_void_p] * 3,
    )(plugin.init)  # fmt: skip
    get = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_int, size, ctypes.c_int, ctypes.c_void_p,
        ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int),
    )(plugin.get)  # fmt: skip
    networks = [
        named_topology("dgx_a100", boxes=4), named_topology("dgx_h100", boxes=1),
        named_topology("dgx_h100", boxes=16), switch(8, bandwidth="25 GB/s", latency="2 us"),
    ]  # fmt: skip
    numbers = random.Random(0)  # noqa: S311 - calls, no secrets
    for network in networks:
        rules, path = nccl_tuner_rules(network), work / "tuner.csv"
        path.write_text(tuner_csv(network.name, rules))
        os.environ["NCCL_TUNER_CONFIG_FILE"] = str(path)
        shapes = sorted({(rule.hosts, rule.ranks) for rule in rules})
        right = 0
        for _ in range(CALLS):
            hosts, ranks = numbers.choice(shapes)
            collective = numbers.choice(_COLLECTIVES)
            message = int(2 ** numbers.uniform(0, 36))
            context, channels = ctypes.c_void_p(), ctypes.c_int(0)
            init(ctypes.byref(context), 0, ranks, hosts, None, None, None)
            costs = (ctypes.c_float * 21)(*[100.0] * 21)
            kind = _COLLECTIVES.index(collective)
            get(context, kind, message, 1, costs, 7, 3, 0, ctypes.byref(channels))
            [chosen] = [at for at, cost in enumerate(costs) if cost == 0] or [-1]
            expected = next(
                rule.choice for rule in rules
                if (rule.collective, rule.hosts, rule.ranks) == (collective, hosts, ranks)
                and rule.least_bytes <= message <= rule.most_bytes
            )  # fmt: skip
            named = (_ALGORITHMS[chosen // 3], _PROTOCOLS[chosen % 3], channels.value)
            right += chosen >= 0 and named == expected
        yield BenchmarkRow(
            case=f"NCCL's example tuner, {network.name}, {len(rules)} rules",
            metric="calls that get what the file says", unit="calls", ours=right, limit=CALLS,
            target=CALLS, met=right == CALLS,
        )  # fmt: skip


def main() -> None:
    """Run what is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("executor", "mscclpp", "nccl"):
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER")
    parser.add_argument("--include", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="few ranks; writes no results")
    given = parser.parse_args()
    ranks = RANKS[:3] if given.quick else RANKS
    rows: list[BenchmarkRow] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if given.executor:
            rows += xml_rows(given.executor, given.include, work, ranks)
        if given.mscclpp:
            rows += plan_rows(given.mscclpp, given.include, work, ranks)
        if given.nccl:
            rows += tuner_rows(given.nccl, work)
    if given.quick:
        print(json.dumps([row.model_dump() for row in rows], indent=1))
    else:
        write_results(RESULTS, topic="collectives/exports", rows=rows)


if __name__ == "__main__":
    main()
