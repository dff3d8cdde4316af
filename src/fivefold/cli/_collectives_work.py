"""The work of ``fivefold collectives``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import typer

from fivefold.cli._collectives_report import loads_title, used_shares
from fivefold.cli._options import ArgumentError, topology_of, write_json
from fivefold.collectives.execution import Settings
from fivefold.collectives.execution.choose import choose
from fivefold.collectives.lowering import (
    Program,
    check_program,
    from_msccl_xml,
    interpret,
    lower,
    to_msccl_xml,
    to_mscclpp_json,
)
from fivefold.collectives.lowering.program import can_run_in_place
from fivefold.collectives.pricing.software import Software
from fivefold.collectives.pricing.tuner import TunerRule
from fivefold.collectives.schedules import Schedule, draw_schedule, evaluate, verify_schedule
from fivefold.collectives.synthesis import Sketch, Synthesis, published_sketch
from fivefold.errors import ConfigurationError, DataError, InfeasibleError, UnsupportedError
from fivefold.files import read_text
from fivefold.network.topology import Topology, draw_topology
from fivefold.report.columns import Column, column_table, record_of, row_table
from fivefold.report.page import DataTable
from fivefold.units import format_bytes, format_duration_s

_MOST_LOWERED = 20_000  # transfers; beyond, lowering takes seconds and no build would load it
_ELEMENTS = 7  # integers in each chunk of a trial run


def priced_rows(
    collective: str, network: Topology, sizes: list[int], library: Software
) -> list[dict[str, Any]]:
    settings, rows = Settings(), []
    if library.key != "gloo":  # whose messages are those of the backend itself
        work_s, share = library.work_s, library.shared_link_share
        settings = Settings(software=library, message_work_s=work_s, shared_link_share=share)
    for size_bytes in sizes:
        found = choose(collective, topology=network, settings=settings, size_bytes=size_bytes)
        rows.append(
            {
                "size": format_bytes(size_bytes),
                "software": library.name,
                "chosen": found.label,
                "predicted_s": found.predicted_s,
                "inner_s": found.inner_s,
                **{f"{name}_s": time_s for name, time_s in sorted(found.others.items())},
            }
        )
    return rows


def measured_rows(collective: str, sizes: list[int], repetitions: int) -> list[dict[str, Any]]:
    if collective.replace("-", "_") != "all_reduce":
        raise ArgumentError(f"{collective} is not measured", hint="all_reduce is")
    Settings()  # loads the backend, which registers it
    dist.init_process_group("fivefold")
    inner, rows = dist.new_group(backend="gloo"), []
    engine: Any = dist.group.WORLD
    for size_bytes in sizes:
        data = torch.ones(max(size_bytes // 4, 1))
        times_s = torch.zeros(2, repetitions + 1, dtype=torch.float64)
        for turn in range(repetitions + 1):
            for at, group in enumerate((None, inner)):
                dist.barrier(group=inner)
                start_s = time.perf_counter()
                dist.all_reduce(data, group=group)
                times_s[at, turn] = time.perf_counter() - start_s
        # A call ends with its last rank.
        dist.all_reduce(times_s, op=dist.ReduceOp.MAX, group=inner)
        choice = engine.engine.choice("all_reduce", data.nbytes)
        own_s, inner_s = times_s[:, 1:].median(dim=1).values.tolist()
        row = {"size": format_bytes(size_bytes), "chosen": choice.label, "own_s": own_s}
        rows.append(row | {"inner_s": inner_s, "predicted_s": choice.predicted_s})
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rows if rank == 0 else []


def bench_table(rows: list[dict[str, Any]]) -> DataTable:
    """Return a column for each size: there are more algorithms than fit beside one another."""
    keys = dict.fromkeys(key for row in rows for key in row if key != "size")
    columns = [Column(key, plain_name(key), partial(value_text, key)) for key in keys]
    return column_table(columns, rows, [row["size"] for row in rows])


def show_facts(facts: dict[str, Any], *, as_json: bool) -> None:
    """Write names and values one below the other, or as JSON."""
    if as_json:
        write_json(facts)
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        typer.echo(f"{plain_name(name):{width}}  {value_text(name, value)}")


def plain_name(name: str) -> str:
    """Return a key as people read it."""
    return name.removesuffix("_s").replace("_", " ")


def value_text(name: str, value: Any) -> str:
    """Return a value as people read it."""
    if name.endswith("_s") and isinstance(value, float):
        return format_duration_s(value)
    if name == "gap":
        return "unknown, there is no lower bound" if value is None else f"{value:.1%}"
    return str(value)


def read_algorithm(file: Path) -> Schedule | Program:
    """Return a schedule or a program from a file, whichever form it has."""
    text = read_text(file, what="algorithm")
    if text.lstrip().startswith("<"):
        return from_msccl_xml(text)
    if '"threadblocks"' in text:
        raise UnsupportedError(
            f"{file} is a plan for MSCCL++, which is written and not read",
            hint="give the schedule (.json) or the MSCCL file (.xml) of the same algorithm",
        )
    return Schedule.from_json(text)


def algorithm_text(schedule: Schedule, output: Path, *, target: str, in_place: bool | None) -> str:
    """Return the contents of the file; programs run in place where the collective can."""
    if in_place is None:
        in_place = can_run_in_place(schedule.collective)
    if output.suffix == ".xml":
        return to_msccl_xml(lower(schedule, in_place=in_place), target=target)
    if output.name.endswith(".plan.json"):
        return to_mscclpp_json(schedule, in_place=in_place)
    return schedule.to_json()


def fit_of(output: Path | None, *, target: str, in_place: bool | None) -> dict[str, Any]:
    """Return the options by which an answer fits a program's limits; none without limits."""
    if output is None or not (output.suffix == ".xml" or output.name.endswith(".plan.json")):
        return {}

    def misfit(schedule: Schedule) -> str | None:
        if schedule.num_transfers > _MOST_LOWERED:
            return f"{schedule.num_transfers:,} transfers are more than a program holds"
        try:
            algorithm_text(schedule, output, target=target, in_place=in_place)
        except (InfeasibleError, DataError) as error:
            return error.message
        return None

    name = f"{''.join(output.suffixes[-2:])} {target} {in_place}"
    return {"misfit": misfit, "misfit_name": name}


def command_again(collective: str, topology: str, given: dict[str, Any]) -> list[str]:
    """Return the words of the command that asked, without options at their defaults."""
    words = ["fivefold", "collectives", "synthesize", collective, topology]
    return words + [str(word) for pair in given.items() if pair[1] for word in pair]


def share_of(text: str) -> float:
    """Return the share of a text such as "1%"."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not (text.strip().endswith("%") and 0 <= share < math.inf):
        message = f"a gap must be a percentage of at least 0; got {text!r}"
        raise ArgumentError(message, hint="write --gap 1%, or --gap 0% to search on")
    return share


def why_it_ended(gap: float, enough: float, text: str, time_limit: str) -> str:
    if gap == 0:
        return "ended: the lower bound is met, nothing is faster"
    above = f"{gap:.1%} above the lower bound"
    if gap <= enough:
        return f"ended: {above}, within --gap {text}; 0% searches on"
    known = f"{above}, beyond --gap {text}" if math.isfinite(gap) else "no lower bound is known"
    return f"ended: {known}; every method was asked, or the time limit of {time_limit} was reached"


def each_line_once() -> Callable[[str], None]:
    """Return what writes progress; methods that try several chunkings would repeat themselves."""
    said: set[str] = set()

    def say(line: str) -> None:
        if line not in said:
            said.add(line)
            typer.echo(line, err=True)

    return say


def sketch_of(text: str) -> Sketch:
    """Return a sketch from a file, or a published one by its name."""
    path = Path(text)
    if path.suffix == ".toml":
        return Sketch.from_toml(path)
    return Sketch.from_taccl(path) if path.suffix == ".json" else published_sketch(text)


def facts_of(found: Synthesis, network: Topology) -> dict[str, Any]:
    return {
        "collective": found.schedule.collective.name,
        "topology": network.name,
        "algorithm": found.schedule.name,
        "method": found.method,
        "time_s": found.time_s,
        "bound_s": found.bound.seconds,
        "gap": found.gap if math.isfinite(found.gap) else None,
        "transfers": found.schedule.num_transfers,
        "chunks": found.schedule.collective.num_chunks,
    }


def verify_algorithm(file: Path, topology: str | None) -> dict[str, Any]:
    """Return what was proved of a schedule or a program."""
    found = read_algorithm(file)
    if isinstance(found, Program):
        program = found
    else:
        verify_schedule(found, topology=None if topology is None else topology_of(topology))
        program = lower(found)
    report = check_program(program)
    return {
        "file": str(file),
        "name": program.name,
        "collective": program.collective.name,
        "chunks": program.collective.num_chunks,
        "verdict": "right",
        **{name: getattr(report, name) for name in report.__dataclass_fields__},
    }


def draw_algorithm(
    file: Path,
    size_bytes: int,
    topology: str | None,
    model: str,
    *,
    output: Path,
    loads: Path | None,
) -> None:
    """Draw a schedule, and what the links of its topology carry."""
    schedule = read_algorithm(file)
    if not isinstance(schedule, Schedule):
        message = f"{file} holds a program, which has no times"
        raise ConfigurationError(message, hint="draw the schedule it comes from")
    network = schedule.topology if topology is None else topology_of(topology)
    if network is None:
        raise ArgumentError(f"{file} brings no topology", hint="give --topology")
    timing = evaluate(schedule, network, size_bytes=size_bytes, model=model)  # type: ignore[arg-type]
    draw_schedule(schedule, timing, output, topology=network)
    typer.echo(f"schedule: {output}", err=True)
    if loads is not None:
        shares, title = used_shares(network, timing), loads_title(network, timing)
        draw_topology(network, loads, link_loads=shares, title=title)
        typer.echo(f"loads: {loads}", err=True)


def run_algorithm(file: Path, seed: int) -> dict[str, Any]:
    """Return what an algorithm did with real data of integers, compared with exact results."""
    found = read_algorithm(file)
    program = found if isinstance(found, Program) else lower(found)
    check_program(program)
    collective, numbers = program.collective, np.random.default_rng(seed)
    values = numbers.integers(-1000, 1000, (collective.num_chunks, _ELEMENTS))
    inputs = [np.zeros((rank.input_slots, _ELEMENTS), dtype=np.int64) for rank in program.ranks]
    totals = np.zeros_like(values)
    slots = collective.input_address(collective.pre_chunks, collective.pre_ranks)
    for chunk, rank, slot in zip(collective.pre_chunks, collective.pre_ranks, slots, strict=True):
        inputs[rank][slot] = values[chunk] * (rank + 1 if collective.reducing else 1)
        totals[chunk] = totals[chunk] + inputs[rank][slot] if collective.reducing else values[chunk]
    start_s = time.perf_counter()
    outputs = interpret(program, inputs)
    took_s = time.perf_counter() - start_s
    slots = collective.output_address(collective.post_chunks, collective.post_ranks)
    pairs = zip(collective.post_chunks, collective.post_ranks, slots, strict=True)
    wrong = [
        (int(chunk), int(rank))
        for chunk, rank, slot in pairs
        if not np.array_equal(outputs[rank][slot], totals[chunk])
    ]
    if wrong:
        raise DataError(f"chunk {wrong[0][0]} is wrong on rank {wrong[0][1]}, {len(wrong)} in all")
    facts = {"file": str(file), "collective": collective.name, "ranks": program.num_ranks}
    return facts | {"verdict": "right", "interpreted_s": took_s}


_RULE_COLUMNS = (
    Column("collective", "collective"),
    Column("least_bytes", "from", format_bytes),
    Column("algorithm", "algorithm"),
    Column("protocol", "protocol"),
    Column("channels", "channels"),
    Column("time_s", "time there", format_duration_s),
)


def rules_table(rules: list[TunerRule]) -> DataTable:
    """Return the first choice of each range of sizes: what follows it is for where it is not."""
    first = {(rule.collective, rule.least_bytes): rule for rule in reversed(rules)}
    shown = [record_of(_RULE_COLUMNS, rule) for rule in reversed(first.values())]
    return row_table(_RULE_COLUMNS, shown)
