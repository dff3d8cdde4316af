"""``fivefold collectives``: make, prove, draw, run and price collective algorithms."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fivefold.cli._help import help_text
from fivefold.errors import ConfigurationError, DataError
from fivefold.units import format_bytes, format_duration_s, parse_bytes, parse_duration_s

if TYPE_CHECKING:
    from fivefold.collectives.lowering import Program
    from fivefold.collectives.schedules import Schedule
    from fivefold.collectives.synthesis import Synthesis
    from fivefold.network.topology import Topology

__all__ = ["app"]

app = typer.Typer(
    name="collectives",
    help="Make, prove, draw, run and price the algorithms of collectives.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_File = Annotated[
    Path, typer.Argument(help="A schedule or program (.json), MSCCL XML or an MSCCL++ plan.")
]
_Network = Annotated[
    str, typer.Argument(help="A topology: a name such as dgx_a100:2 or torus:4x4, or a TOML file.")
]
_Where = Annotated[
    str | None, typer.Option(help="The topology, where the file does not bring one.")
]
_Size = Annotated[str, typer.Option(help="Size of the collective, such as 16MB.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_Rate = Annotated[str | None, typer.Option(help="Bandwidth of a generated topology's links.")]
_Latency = Annotated[str | None, typer.Option(help="Latency of a generated topology's links.")]
_ELEMENTS = 7  # integers in each chunk of a trial run


def _synthesize(  # noqa: PLR0913 - one parameter per option of the command line
    collective: Annotated[str, typer.Argument(help="Such as all_reduce.")],
    topology: _Network,
    *,
    size: _Size = "16MB",
    method: Annotated[str, typer.Option(help="auto, library, trees, taccl, ...")] = "auto",
    time_limit: Annotated[str, typer.Option(help="Limit of the search.")] = "60s",
    output: Annotated[
        Path | None, typer.Option(help="File to write: .json, .xml (MSCCL), .plan.json (MSCCL++).")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="HTML page to write: pictures, methods, other sizes.")
    ] = None,
    bandwidth: _Rate = None,
    latency: _Latency = None,
    as_json: _Json = False,
) -> None:
    """Find a fast, verified algorithm for a collective on a topology.

    Prints its time, the lower bound and the gap between the two.
    """
    from fivefold.cli._collectives_report import (  # noqa: PLC0415 - loads numpy
        Asked,
        require_folder,
        write_report,
    )
    from fivefold.collectives.synthesis import (  # noqa: PLC0415 - keeps --help fast
        SynthesisOptions,
        synthesize,
    )

    network = _topology(topology, bandwidth, latency)
    if report is not None:
        require_folder(report)
    options = SynthesisOptions(progress=lambda line: typer.echo(line, err=True))
    found = synthesize(
        collective,
        network,
        size_bytes=parse_bytes(size),
        method=method,
        time_limit_s=parse_duration_s(time_limit),
        options=options,
    )
    facts = _facts_of(found, network)
    if output is not None:
        _write(found.schedule, output)
        facts["output"] = str(output)
    if report is not None:
        asked = Asked(
            collective=found.schedule.collective.name,
            topology=topology,
            size=size,
            size_bytes=parse_bytes(size),
            method=method,
            time_limit=time_limit,
            bandwidth=bandwidth,
            latency=latency,
            output=output,
        )
        write_report(report, found, network, asked=asked)
        facts["report"] = str(report)
    _show(facts, as_json=as_json)


def _facts_of(found: Synthesis, network: Topology) -> dict[str, Any]:
    return {
        "collective": found.schedule.collective.name,
        "topology": network.name,
        "algorithm": found.schedule.name,
        "method": found.method,
        "time_s": found.time_s,
        "bound_s": found.bound.seconds,
        "gap": found.time_s / found.bound.seconds - 1 if found.bound.seconds > 0 else 0.0,
        "transfers": found.schedule.num_transfers,
        "chunks": found.schedule.collective.num_chunks,
    }


def _verify(file: _File, *, topology: _Where = None, as_json: _Json = False) -> None:
    """Prove that a schedule or a program does what it says.

    A schedule is checked transfer by transfer, a program with symbolic values, queues and waits.
    """
    from fivefold.collectives.lowering import (  # noqa: PLC0415 - keeps --help fast
        Program,
        check_program,
        lower,
    )
    from fivefold.collectives.schedules import verify  # noqa: PLC0415 - as above

    found = _read(file)
    if isinstance(found, Program):
        program = found
    else:
        verify(found, topology=None if topology is None else _topology(topology, None, None))
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
    _show(facts, as_json=as_json)


def _draw(
    file: _File,
    *,
    size: _Size = "16MB",
    topology: _Where = None,
    model: Annotated[str, typer.Option(help="serial, slotted or fluid.")] = "serial",
    output: Annotated[Path, typer.Option(help="Picture of the schedule.")] = Path("schedule.png"),
    loads: Annotated[
        Path | None, typer.Option(help="Picture of the topology with what its links carry.")
    ] = None,
) -> None:
    """Draw a schedule as a chart of what each link does, and the loads of the links."""
    from fivefold.cli._collectives_report import (  # noqa: PLC0415 - loads numpy
        loads_title,
        used_shares,
    )
    from fivefold.collectives.schedules import (  # noqa: PLC0415 - keeps --help fast
        draw_schedule,
        evaluate,
    )
    from fivefold.network.topology import draw_topology  # noqa: PLC0415 - as above

    schedule = _schedule(file)
    network = schedule.topology
    if topology is not None:
        network = _topology(topology, None, None)
    if network is None:
        raise ConfigurationError(f"{file} brings no topology", hint="give --topology")
    timing = evaluate(schedule, network, size_bytes=parse_bytes(size), model=model)  # type: ignore[arg-type]
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
    as_json: _Json = False,
) -> None:
    """Execute an algorithm with real data on this machine, and check the result.

    All ranks run in this process, on integers; sums are compared with exact ones.
    """
    import numpy as np  # noqa: PLC0415 - keeps --help fast

    from fivefold.collectives.lowering import (  # noqa: PLC0415 - as above
        Program,
        check_program,
        interpret,
        lower,
    )

    found = _read(file)
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
    _show(facts | {"verdict": "right", "interpreted_s": took_s}, as_json=as_json)


def _bench(
    collective: Annotated[str, typer.Argument(help="Such as all_reduce.")],
    topology: Annotated[
        str | None, typer.Argument(help="A topology; none where ranks are running (torchrun).")
    ] = None,
    *,
    sizes: Annotated[str, typer.Option(help="Sizes with commas.")] = "64KB,1MB,16MB",
    repetitions: Annotated[int, typer.Option(help="Measured calls of each size.")] = 5,
    bandwidth: _Rate = None,
    latency: _Latency = None,
    as_json: _Json = False,
) -> None:
    """Price the algorithms on a topology; or, under torchrun or the lab, measure the backend.

    With a topology: predicted times by message size, and which one would be chosen. Without one,
    in running ranks: measured times of the backend's choice and of the inner backend.
    """
    wanted = [parse_bytes(size.strip()) for size in sizes.split(",")]
    if topology is None:
        if "RANK" not in os.environ:
            raise ConfigurationError(
                f"{collective}: there is neither a topology nor are there ranks",
                hint="name a topology, or start it by torchrun or 'fivefold lab run'",
            )
        rows = _measured(collective, wanted, repetitions)
    else:
        rows = _priced(collective, _topology(topology, bandwidth, latency), wanted)
    if as_json and rows:
        typer.echo(json.dumps(rows))
    elif rows:
        _table(rows)


def _priced(collective: str, network: Topology, sizes: list[int]) -> list[dict[str, Any]]:
    from fivefold.collectives.execution import Settings, choose  # noqa: PLC0415 - loads torch

    rows = []
    for size_bytes in sizes:
        found = choose(collective, topology=network, settings=Settings(), size_bytes=size_bytes)
        rows.append(
            {
                "size": format_bytes(size_bytes),
                "chosen": found.label,
                "predicted_s": found.predicted_s,
                "inner_s": found.inner_s,
                **{f"{name}_s": time_s for name, time_s in sorted(found.others.items())},
            }
        )
    return rows


def _measured(collective: str, sizes: list[int], repetitions: int) -> list[dict[str, Any]]:
    import torch  # noqa: PLC0415 - keeps --help fast
    import torch.distributed as dist  # noqa: PLC0415 - as above

    import fivefold.collectives.execution  # noqa: F401, PLC0415 - registers the backend

    if collective.replace("-", "_") != "all_reduce":
        raise ConfigurationError(f"{collective} is not measured", hint="all_reduce is")
    dist.init_process_group("fivefold")
    inner, rows = dist.new_group(backend="gloo"), []
    engine: Any = dist.group.WORLD
    for size_bytes in sizes:
        data, times = torch.ones(max(size_bytes // 4, 1)), {"own": [], "inner": []}  # type: ignore[var-annotated]
        for turn in range(repetitions + 1):
            for name, group in (("own", None), ("inner", inner)):
                dist.barrier(group=inner)
                start_s = time.perf_counter()
                dist.all_reduce(data, group=group)
                if turn > 0:
                    times[name].append(time.perf_counter() - start_s)
        choice = engine.engine.choice("all_reduce", data.nbytes)
        medians = {f"{name}_s": sorted(found)[len(found) // 2] for name, found in times.items()}
        head = {"size": format_bytes(size_bytes), "chosen": choice.label}
        rows.append(head | medians | {"predicted_s": choice.predicted_s})
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rows if rank == 0 else []


# -- files and output ----------------------------------------------------------------------------


def _topology(text: str, bandwidth: str | None, latency: str | None) -> Topology:
    from fivefold.network.topology import parse_topology  # noqa: PLC0415 - keeps --help fast

    given = {"bandwidth": bandwidth, "latency": latency}
    return parse_topology(text, **{k: v for k, v in given.items() if v is not None})


def _read(file: Path) -> Schedule | Program:
    from fivefold.collectives.lowering import (  # noqa: PLC0415 - keeps --help fast
        Program,
        from_msccl_xml,
        from_mscclpp_json,
    )
    from fivefold.collectives.schedules import read_schedule  # noqa: PLC0415 - as above

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if text.lstrip().startswith("<"):
        return from_msccl_xml(text)
    if '"threadblocks"' in text:
        return from_mscclpp_json(text)
    if '"fivefold-program/1"' in text:
        return Program.from_json(text)
    return read_schedule(text)


def _schedule(file: Path) -> Schedule:
    from fivefold.collectives.schedules import Schedule  # noqa: PLC0415 - keeps --help fast

    found = _read(file)
    if not isinstance(found, Schedule):
        raise ConfigurationError(
            f"{file} holds a program, which has no times", hint="draw the schedule it comes from"
        )
    return found


def _write(schedule: Schedule, output: Path) -> None:
    from fivefold.collectives.lowering import (  # noqa: PLC0415 - keeps --help fast
        lower,
        to_msccl_xml,
        to_mscclpp_json,
    )

    if output.suffix == ".xml":
        text = to_msccl_xml(lower(schedule))
    elif output.name.endswith(".plan.json"):
        text = to_mscclpp_json(lower(schedule))
    elif output.suffix == ".json":
        text = schedule.to_json()
    else:
        raise ConfigurationError(
            f"{output} has no known ending", hint="end it with .json, .xml or .plan.json"
        )
    unfinished = output.with_name(output.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(output)


def _show(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        typer.echo(f"{_plain(name):{width}}  {_text(name, value)}")


def _table(rows: list[dict[str, Any]]) -> None:
    table = Table()
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(_plain(name))
    for row in rows:
        table.add_row(*[_text(name, row.get(name, "")) for name in names])
    Console().print(table)


def _plain(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ")


def _text(name: str, value: Any) -> str:
    if name.endswith("_s") and isinstance(value, float):
        return format_duration_s(value)
    return f"{value:.1%}" if name == "gap" else str(value)


for _command in (_synthesize, _verify, _draw, _run, _bench):
    app.command(_command.__name__.removeprefix("_"), help=help_text(_command))(_command)
