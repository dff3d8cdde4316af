"""``fivefold collectives``: make, prove, draw, run and price collective algorithms."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.cli._collectives_report import Asked, collective_page, loads_title, used_shares
from fivefold.cli._later import later
from fivefold.cli._options import (
    ArgumentError,
    BandwidthOption,
    JsonOption,
    LatencyOption,
    PageOption,
    TopologyArgument,
    bytes_of,
    command_group,
    output_option,
    read_topology_of,
    require_writable,
    say_readings,
    seconds_of,
    show,
    topology_of,
    typed_arguments,
    write_json,
)
from fivefold.errors import (
    ConfigurationError,
    DataError,
    InfeasibleError,
    UnsupportedError,
    require_one_of,
)
from fivefold.files import read_text
from fivefold.units import format_bytes, format_duration_s

with later():
    import numpy as np
    import torch
    import torch.distributed as dist

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
    from fivefold.collectives.lowering.program import MSCCL_TARGETS, can_run_in_place
    from fivefold.collectives.pricing.software import Software, software_of
    from fivefold.collectives.pricing.tuner import TunerRule, nccl_tuner_rules, tuner_csv
    from fivefold.collectives.schedules import (
        Schedule,
        draw_schedule,
        evaluate,
        named_collective,
        verify_schedule,
    )
    from fivefold.collectives.synthesis import (
        Sketch,
        Synthesis,
        SynthesisOptions,
        published_sketch,
        synthesize,
    )
    from fivefold.network.topology import Topology, draw_topology
    from fivefold.report import write_html
    from fivefold.report.page import DataTable
    from fivefold.runs import write_text


_Collective = Annotated[str, typer.Argument(help="Such as all_reduce.")]


def bench_algorithms(  # noqa: PLR0913 - one parameter per option of the command line
    collective: _Collective,
    topology: Annotated[
        str | None, typer.Argument(help="A topology; none where ranks are running (torchrun).")
    ] = None,
    *,
    sizes: Annotated[str, typer.Option(help="Sizes with commas.")] = "64KB,1MB,16MB",
    repetitions: Annotated[int, typer.Option(min=1, help="Measured calls of each size.")] = 5,
    software: Annotated[
        str | None,
        typer.Option(
            help="Communication library that prices are of: nccl, rccl or gloo (fivefold's own "
            "backend over it).",
            show_default="by the ranks",
        ),
    ] = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Price the algorithms on a topology; or, under torchrun or the lab, measure the backend.

    With a topology: predicted times by message size, and which one would be chosen, under the
    communication library of its GPUs (inner is the library's own choice). Without one,
    in running ranks: measured times of the backend's choice and of the inner backend, each the
    median of the slowest rank's.
    """
    wanted = [bytes_of(size.strip()) for size in sizes.split(",")]
    if topology is None:
        if "RANK" not in os.environ:
            raise ArgumentError(
                f"{collective}: there is neither a topology nor are there ranks",
                hint="name a topology, or start it by torchrun or 'fivefold lab run'",
            )
        rows = _measured(collective, wanted, repetitions)
    else:
        network, reading = read_topology_of(topology, bandwidth=bandwidth, latency=latency)
        if reading is not None:
            say_readings(reading)
        with typed_arguments():
            library = software_of(network, software)
        rows = _priced(collective, network, wanted, library)
        if as_json and reading is not None:
            rows = [row | {"reading": reading.to_json()} for row in rows]
    if as_json and rows:
        write_json(rows)
    elif rows:
        how = "measured" if topology is None else f"predicted on {topology}, {library.name}"
        show(f"{collective}, {how}", _table(rows))


def _priced(
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


def _measured(collective: str, sizes: list[int], repetitions: int) -> list[dict[str, Any]]:
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


def _table(rows: list[dict[str, Any]]) -> DataTable:
    """Return a column for each size: there are more algorithms than fit beside one another."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "size"]
    return DataTable.of(
        ("", *(row["size"] for row in rows)),
        [
            (plain_name(name), *(value_text(name, row.get(name, "")) for row in rows))
            for name in names
        ],
    )


SizeOption = Annotated[str, typer.Option(help="Size of the collective, such as 16MB.")]


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


def write_algorithm(
    schedule: Schedule, output: Path, *, target: str = "executor", in_place: bool | None = None
) -> None:
    """Write a schedule, or the program that it lowers to, as the file's ending says."""
    write_text(output, algorithm_text(schedule, output, target=target, in_place=in_place))


def algorithm_text(schedule: Schedule, output: Path, *, target: str, in_place: bool | None) -> str:
    """Return the contents of the file; programs run in place where the collective can."""
    if in_place is None:
        in_place = can_run_in_place(schedule.collective)
    if output.suffix == ".xml":
        return to_msccl_xml(lower(schedule, in_place=in_place), target=target)
    if output.name.endswith(".plan.json"):
        return to_mscclpp_json(schedule, in_place=in_place)
    return schedule.to_json()


def _fit_of(output: Path | None, *, target: str, in_place: bool | None) -> dict[str, Any]:
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


_GAP = "1%"
_MOST_LOWERED = 20_000  # transfers; beyond, lowering takes seconds and no build would load it

_File = Annotated[
    Path,
    typer.Argument(
        help="A schedule or program (.json), or MSCCL XML.", exists=True, dir_okay=False
    ),
]
_Where = Annotated[
    str | None, typer.Option(help="The topology, where the file does not bring one.")
]
_ELEMENTS = 7  # integers in each chunk of a trial run


def _search_option(help: str, **how: Any) -> Any:  # noqa: A002 - as typer calls it
    return typer.Option(help=help, rich_help_panel="Search", **how)


_Root = Annotated[int, typer.Option(min=0, help="Root of a broadcast, reduce, scatter or gather.")]
_Method = Annotated[str, _search_option("auto, library, paths, trees, matching, flow or taccl.")]
_Chunks = Annotated[
    int | None,
    _search_option(
        "Chunks that a buffer is cut into (all_reduce: the whole buffer; others: each rank's "
        "share).",
        min=1,
        show_default="chosen",
    ),
]
_Sketch = Annotated[
    str | None,
    _search_option(
        "Communication sketch for taccl: .toml, TACCL's .json, or a published one.",
        metavar="FILE|NAME",
    ),
]
_TimeLimit = Annotated[str, _search_option("Limit of the search.")]
_Gap = Annotated[
    str,
    _search_option("Stop at the first answer so little above the lower bound; 0% searches on."),
]
_Model = Annotated[str, _search_option("Cost model: serial, slotted or fluid.")]
_Seed = Annotated[int, _search_option("Random seed.", min=0)]
_Cache = Annotated[
    Path | None, _search_option("Folder of known answers, read and added to.", metavar="FOLDER")
]
_Output = Annotated[
    Path | None, output_option("The algorithm: .json, .xml (MSCCL) or .plan.json (MSCCL++).")
]

_Target = Annotated[
    str,
    typer.Option(help="Build of MSCCL that an .xml is for: executor, executor-256 or msccl."),
]
_InPlace = Annotated[
    bool | None,
    typer.Option(
        "--in-place/--out-of-place",
        help="Whether input and output of a program are one memory, as PyTorch's are.",
        show_default="in place where the collective can",
    ),
]


def _synthesize(  # noqa: PLR0913 - one parameter per option of the command line
    collective: _Collective,
    topology: TopologyArgument,
    *,
    size: SizeOption = "16MB",
    root: _Root = 0,
    method: _Method = "auto",
    chunks: _Chunks = None,
    sketch: _Sketch = None,
    time_limit: _TimeLimit = "60s",
    gap: _Gap = _GAP,
    model: _Model = "serial",
    seed: _Seed = 0,
    cache: _Cache = None,
    output: _Output = None,
    target: _Target = "executor",
    in_place: _InPlace = None,
    report: PageOption = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find a fast, verified algorithm for a collective on a topology.

    Prints its time, the lower bound and the gap between the two.
    """
    network, reading = read_topology_of(topology, bandwidth=bandwidth, latency=latency)
    if reading is not None:
        say_readings(reading)
    cut = {} if chunks is None else {"chunks": chunks}
    # At once: kernels compile after.
    wanted = named_collective(collective, network.num_ranks, root=root, **cut)
    if output is not None and output.suffix not in {".json", ".xml"}:  # before the search
        raise ArgumentError(
            f"{output} has no known ending", hint="end it with .json, .xml or .plan.json"
        )
    require_one_of(target, MSCCL_TARGETS, f"there is no target {target!r}")
    if in_place and not can_run_in_place(wanted):
        raise ArgumentError(
            f"{wanted.name} cannot run in place", hint="leave out --in-place, or --out-of-place"
        )
    require_writable(output, report, cache)
    enough = _share_of(gap)
    options = SynthesisOptions(
        model=model,  # type: ignore[arg-type]
        seed=seed,
        gap=enough,
        root=0 if cut and wanted.root is None else root,
        cache=cache,
        progress=_each_line_once(),
        **_fit_of(output, target=target, in_place=in_place),
    )
    found = synthesize(
        wanted if cut else collective,
        network,
        size_bytes=bytes_of(size),
        method=method,
        time_limit_s=seconds_of(time_limit),
        sketch=None if sketch is None else _sketch_of(sketch),
        options=options,
    )
    facts = _facts_of(found, network)
    typer.echo(_why_it_ended(found.gap, enough, gap, time_limit), err=True)
    if output is not None:
        write_algorithm(found.schedule, output, target=target, in_place=in_place)
        facts["output"] = str(output)
    if report is not None:
        asked = Asked(
            collective=found.schedule.collective.name, size_bytes=bytes_of(size), method=method,
            time_limit=time_limit, model=model, output=output,
            words=_command_again(found.schedule.collective.name, topology, {
                "--size": size, "--method": method, "--time-limit": time_limit,
                "--model": None if model == "serial" else model, "--root": root,
                "--chunks": chunks, "--sketch": sketch, "--seed": seed,
                "--gap": None if gap == _GAP else gap,
                "--target": None if target == "executor" else target,
                "--bandwidth": bandwidth, "--latency": latency,
            }),
        )  # fmt: skip
        write_html(collective_page(found, network, asked), report)
        facts["report"] = str(report)
    if as_json and reading is not None:
        facts["reading"] = reading.to_json()
    show_facts(facts, as_json=as_json)


def _command_again(collective: str, topology: str, given: dict[str, Any]) -> list[str]:
    """Return the words of the command that asked, without options at their defaults."""
    words = ["fivefold", "collectives", "synthesize", collective, topology]
    return words + [str(word) for pair in given.items() if pair[1] for word in pair]


def _share_of(text: str) -> float:
    """Return the share of a text such as "1%"."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not (text.strip().endswith("%") and 0 <= share < math.inf):
        message = f"a gap must be a percentage of at least 0; got {text!r}"
        raise ArgumentError(message, hint="write --gap 1%, or --gap 0% to search on")
    return share


def _why_it_ended(gap: float, enough: float, text: str, time_limit: str) -> str:
    if gap == 0:
        return "ended: the lower bound is met, nothing is faster"
    above = f"{gap:.1%} above the lower bound"
    if gap <= enough:
        return f"ended: {above}, within --gap {text}; 0% searches on"
    known = f"{above}, beyond --gap {text}" if math.isfinite(gap) else "no lower bound is known"
    return f"ended: {known}; every method was asked, or the time limit of {time_limit} was reached"


def _each_line_once() -> Callable[[str], None]:
    """Return what writes progress; methods that try several chunkings would repeat themselves."""
    said: set[str] = set()

    def say(line: str) -> None:
        if line not in said:
            said.add(line)
            typer.echo(line, err=True)

    return say


def _sketch_of(text: str) -> Sketch:
    """Return a sketch from a file, or a published one by its name."""
    path = Path(text)
    if path.suffix == ".toml":
        return Sketch.from_toml(path)
    return Sketch.from_taccl(path) if path.suffix == ".json" else published_sketch(text)


def _facts_of(found: Synthesis, network: Topology) -> dict[str, Any]:
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


def _verify(file: _File, *, topology: _Where = None, as_json: JsonOption = False) -> None:
    """Prove that a schedule or a program does what it says.

    A schedule is checked transfer by transfer, a program with symbolic values, queues and waits.
    """
    found = read_algorithm(file)
    if isinstance(found, Program):
        program = found
    else:
        verify_schedule(found, topology=None if topology is None else topology_of(topology))
        program = lower(found)
    report = check_program(program)
    facts = {
        "file": str(file),
        "name": program.name,
        "collective": program.collective.name,
        "chunks": program.collective.num_chunks,
        "verdict": "right",
        **{name: getattr(report, name) for name in report.__dataclass_fields__},
    }
    show_facts(facts, as_json=as_json)


def _draw(
    file: _File,
    *,
    size: SizeOption = "16MB",
    topology: _Where = None,
    model: Annotated[str, typer.Option(help="serial, slotted or fluid.")] = "serial",
    output: Annotated[Path, output_option("Picture of the schedule.")] = Path("schedule.png"),
    loads: Annotated[
        Path | None, typer.Option(help="Picture of the topology with what its links carry.")
    ] = None,
) -> None:
    """Draw a schedule as a chart of what each link does, and the loads of the links."""
    schedule = read_algorithm(file)
    if not isinstance(schedule, Schedule):
        message = f"{file} holds a program, which has no times"
        raise ConfigurationError(message, hint="draw the schedule it comes from")
    network = schedule.topology if topology is None else topology_of(topology)
    if network is None:
        raise ArgumentError(f"{file} brings no topology", hint="give --topology")
    timing = evaluate(schedule, network, size_bytes=bytes_of(size), model=model)  # type: ignore[arg-type]
    draw_schedule(schedule, timing, output, topology=network)
    typer.echo(f"schedule: {output}", err=True)
    if loads is not None:
        shares, title = used_shares(network, timing), loads_title(network, timing)
        draw_topology(network, loads, link_loads=shares, title=title)
        typer.echo(f"loads: {loads}", err=True)


def _run(
    file: _File,
    *,
    seed: Annotated[int, typer.Option(help="Seed of the data.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Execute an algorithm with real data on this machine, and check the result.

    All ranks run in this process, on integers; the results are compared with exact ones.
    """
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
    show_facts(facts | {"verdict": "right", "interpreted_s": took_s}, as_json=as_json)


def _tune(
    topology: TopologyArgument,
    *,
    output: Annotated[Path, output_option("The rules, as NCCL's example tuner plugin reads them.")],
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write which algorithm and protocol a stock NCCL should take, by size, for its tuner plugin.

    Prints the rules of the group of all ranks with their predicted times, and how to load the file.
    """
    network, reading = read_topology_of(topology, bandwidth=bandwidth, latency=latency)
    if reading is not None:
        say_readings(reading)
    require_writable(output)
    rules = nccl_tuner_rules(network)
    write_text(output, tuner_csv(network.name, rules))
    environment = {
        "NCCL_TUNER_PLUGIN": "libnccl-tuner-example.so",
        "NCCL_TUNER_CONFIG_FILE": str(output.absolute()),
    }
    whole = [rule for rule in rules if rule.ranks == network.num_ranks]
    if as_json:
        facts = {
            "output": str(output),
            "environment": environment,
            "rules": [dataclasses.asdict(rule) for rule in rules],
        }
        write_json(facts | ({} if reading is None else {"reading": reading.to_json()}))
        return
    show(
        f"NCCL's choices on {network.name}, predicted: {output}",
        _rules_table(whole),
        "load it with " + " ".join(f"{name}={value}" for name, value in environment.items()),
    )


def _rules_table(rules: list[TunerRule]) -> DataTable:
    """Return the first choice of each range of sizes: what follows it is for where it is not."""
    first = {(rule.collective, rule.least_bytes): rule for rule in reversed(rules)}
    return DataTable.of(
        ("collective", "from", "algorithm", "protocol", "channels", "time there"),
        [
            (
                rule.collective, format_bytes(rule.least_bytes), rule.algorithm, rule.protocol,
                str(rule.channels), format_duration_s(rule.time_s),
            )
            for rule in reversed(first.values())
        ],
    )  # fmt: skip


app = command_group(
    "collectives",
    help="Make, prove, draw, run and price the algorithms of collectives.",
    commands={
        "synthesize": _synthesize, "verify": _verify, "draw": _draw, "run": _run,
        "bench": bench_algorithms, "tune": _tune,
    },
)  # fmt: skip
