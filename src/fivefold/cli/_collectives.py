"""``fivefold collectives``: make, prove, draw, run and price collective algorithms."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import typer

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
    typed_arguments,
    write_json,
)
from fivefold.errors import require_one_of

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
    from fivefold.cli import _collectives_work as work
    from fivefold.collectives.pricing.software import software_of

    wanted = [bytes_of(size.strip()) for size in sizes.split(",")]
    if topology is None:
        if "RANK" not in os.environ:
            raise ArgumentError(
                f"{collective}: there is neither a topology nor are there ranks",
                hint="name a topology, or start it by torchrun or 'fivefold lab run'",
            )
        rows = work.measured_rows(collective, wanted, repetitions)
    else:
        network, reading = read_topology_of(topology, bandwidth=bandwidth, latency=latency)
        say_readings(reading)
        with typed_arguments():
            library = software_of(network, software)
        rows = work.priced_rows(collective, network, wanted, library)
        if as_json and reading is not None:
            rows = [row | {"reading": reading.to_json()} for row in rows]
    if as_json and rows:
        write_json(rows)
    elif rows:
        how = "measured" if topology is None else f"predicted on {topology}, {library.name}"
        show(f"{collective}, {how}", work.bench_table(rows))


SizeOption = Annotated[str, typer.Option(help="Size of the collective, such as 16MB.")]
_GAP = "1%"
_File = Annotated[
    Path,
    typer.Argument(
        help="A schedule or program (.json), or MSCCL XML.", exists=True, dir_okay=False
    ),
]
_Where = Annotated[
    str | None, typer.Option(help="The topology, where the file does not bring one.")
]


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
    from fivefold.cli import _collectives_work as work
    from fivefold.collectives.lowering.program import MSCCL_TARGETS, can_run_in_place
    from fivefold.collectives.schedules import named_collective
    from fivefold.collectives.synthesis import SynthesisOptions, synthesize
    from fivefold.runs import write_text

    network, reading = read_topology_of(topology, bandwidth=bandwidth, latency=latency)
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
    enough = work.share_of(gap)
    options = SynthesisOptions(
        model=model,  # type: ignore[arg-type]
        seed=seed,
        gap=enough,
        root=0 if cut and wanted.root is None else root,
        cache=cache,
        progress=work.each_line_once(),
        **work.fit_of(output, target=target, in_place=in_place),
    )
    found = synthesize(
        wanted if cut else collective,
        network,
        size_bytes=bytes_of(size),
        method=method,
        time_limit_s=seconds_of(time_limit),
        sketch=None if sketch is None else work.sketch_of(sketch),
        options=options,
    )
    facts = work.facts_of(found, network)
    typer.echo(work.why_it_ended(found.gap, enough, gap, time_limit), err=True)
    if output is not None:
        text = work.algorithm_text(found.schedule, output, target=target, in_place=in_place)
        write_text(output, text)
        facts["output"] = str(output)
    if report is not None:
        from fivefold.cli._collectives_report import Asked, collective_page
        from fivefold.report import write_html

        asked = Asked(
            collective=found.schedule.collective.name, size_bytes=bytes_of(size), method=method,
            time_limit=time_limit, model=model, output=output,
            words=work.command_again(found.schedule.collective.name, topology, {
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
    work.show_facts(facts, as_json=as_json)


def _verify(file: _File, *, topology: _Where = None, as_json: JsonOption = False) -> None:
    """Prove that a schedule or a program does what it says.

    A schedule is checked transfer by transfer, a program with symbolic values, queues and waits.
    """
    from fivefold.cli._collectives_work import show_facts, verify_algorithm

    show_facts(verify_algorithm(file, topology), as_json=as_json)


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
    from fivefold.cli._collectives_work import draw_algorithm

    draw_algorithm(file, bytes_of(size), topology, model, output=output, loads=loads)


def _run(
    file: _File,
    *,
    seed: Annotated[int, typer.Option(help="Seed of the data.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Execute an algorithm with real data on this machine, and check the result.

    All ranks run in this process, on integers; the results are compared with exact ones.
    """
    from fivefold.cli._collectives_work import run_algorithm, show_facts

    show_facts(run_algorithm(file, seed), as_json=as_json)


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
    from fivefold.cli._collectives_work import rules_table
    from fivefold.collectives.pricing.tuner import nccl_tuner_rules, tuner_csv
    from fivefold.runs import write_text

    network, reading = read_topology_of(topology, bandwidth=bandwidth, latency=latency)
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
        rules_table(whole),
        "load it with " + " ".join(f"{name}={value}" for name, value in environment.items()),
    )


app = command_group(
    "collectives",
    help="Make, prove, draw, run and price the algorithms of collectives.",
    commands={
        "synthesize": _synthesize, "verify": _verify, "draw": _draw, "run": _run,
        "bench": bench_algorithms, "tune": _tune,
    },
)  # fmt: skip
