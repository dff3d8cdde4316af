"""``fivefold topology``: what machines and networks look like, on the terminal and as pictures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.cli._options import (
    BandwidthOption,
    JsonOption,
    LatencyOption,
    TopologyArgument,
    command_group,
    output_option,
    read_topology_of,
    require_picture,
    require_writable,
    topology_of,
    write_json,
)
from fivefold.errors import DataError, InfeasibleError
from fivefold.files import read_json
from fivefold.units import format_bytes_per_s, format_duration_s

if TYPE_CHECKING:
    from fivefold.network.topology import Topology


def list_command(*, as_json: JsonOption = False) -> None:
    """Name the machines, generators and profiles that can be given as TOPOLOGY."""
    from fivefold.network.topology.readers.boxes import OPTIONS
    from fivefold.network.topology.text import catalogue

    known = catalogue()
    machines, generators = dict(known.machines), dict(known.generators.values())
    profiles = [f"taccl:{name}" for name in known.profiles]
    if as_json:
        write_json(
            {"machines": machines, "generators": generators, "profiles": profiles}
            | {"files": dict(known.files)}
        )
        return
    sections = {
        "Machines, one box; NAME:4 joins four": {
            name: source.partition(":")[0] for name, source in machines.items()
        },
        "Generators, by example; the keys are those of the Python functions": generators,
        "Profiles of TACCL; NAME:2 joins two boxes": dict.fromkeys(profiles, ""),
        "Files": {
            "lingjun:PATH": "Hosts of the Alibaba Lingjun data set (topo.csv).",
            "PATH.toml": "A topology file; fivefold topology convert writes one.",
        },
        "Files of other programs, by what is in them; PATH:2 joins two boxes": dict(known.files),
        "What may be told beside such a file, as PATH,KEY=VALUE": {
            f"{option.key}={option.example}": option.help for option in OPTIONS.values()
        },
    }
    for title, entries in sections.items():
        typer.echo(f"{title}:")
        width = max(map(len, entries))
        for name, text in entries.items():
            typer.echo(f"  {name:<{width}}  {text}".rstrip())


def show_command(
    topology: TopologyArgument,
    *,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a topology: its nodes, its links, how far apart ranks are, what limits it.

    Of another program's file it also says what was read, assumed and left out.
    """
    found, reading = read_topology_of(topology, bandwidth=bandwidth, latency=latency)
    facts = _facts(found)
    if as_json:
        write_json(facts | ({"reading": reading.to_json()} if reading is not None else {}))
        return
    for line in [*_described(facts), *([reading.text()] if reading is not None else [])]:
        typer.echo(line)


def draw_command(
    topology: TopologyArgument,
    output: Annotated[
        Path, typer.Argument(help="Picture to write: .png, .svg or .pdf.", dir_okay=False)
    ],
    *,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    loads: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with one number per link, bytes or shares; colours the links.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the picture.")] = None,
) -> None:
    """Draw a topology as a picture."""
    require_picture(output)
    require_writable(output)
    found = topology_of(topology, bandwidth=bandwidth, latency=latency)

    from fivefold.network.topology import draw_topology

    draw_topology(found, output, link_loads=_read_loads(loads), title=title)
    typer.echo(f"picture: {output}", err=True)


def convert_command(
    topology: TopologyArgument,
    *,
    output: Annotated[
        Path | None, output_option("The TOML file; left out, standard output.")
    ] = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    name: Annotated[str | None, typer.Option(help="Name to give it.")] = None,
) -> None:
    """Write a topology as a TOML file that can be edited and given to every command."""
    require_writable(output)
    found = topology_of(topology, bandwidth=bandwidth, latency=latency)
    text = (found.renamed(name) if name else found).to_toml()

    from fivefold.runs import write_text

    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text(output, text)
        typer.echo(f"topology: {output}", err=True)


def _read_loads(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        return [float(value) for value in read_json(path)]
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is no list of numbers: {error}", hint="write [0.5, 1.0, ...], one per link"
        ) from None


def _cut_off(topology: Topology) -> str | None:
    """Return which ranks cannot be reached, or cannot reach; None where all is well."""
    try:
        topology.require_connected()
    except InfeasibleError as error:
        return f"NO: {error.message.partition(': ')[2]}"
    return None


def _facts(topology: Topology) -> dict[str, Any]:
    import numpy as np

    kinds = Counter(node.kind for node in topology.nodes)
    ends = zip(topology.links, topology.link_sources, topology.link_targets, strict=True)
    classes = Counter(
        (
            topology.nodes[source].kind, topology.nodes[target].kind,
            link.bandwidth_bytes_per_s, link.latency_s, link.count,
        )
        for link, source, target in ends
    )  # fmt: skip
    names = ("from", "to", "bandwidth_bytes_per_s", "latency_s", "count", "links")
    out = np.bincount(
        topology.link_sources, topology.capacities_bytes_per_s, minlength=topology.num_nodes
    )
    cut_off = _cut_off(topology)
    connected = cut_off is None
    small = topology.num_ranks <= 2048 and topology.num_ranks > 1
    return {
        "name": topology.name,
        "source": topology.source,
        "ranks": topology.num_ranks,
        "hosts": len(topology.hosts),
        "nodes": kinds,
        "links": [
            dict(zip(names, (*key, number), strict=True)) for key, number in sorted(classes.items())
        ],
        "connected": connected,
        "cut_off": cut_off,
        "farthest_latency_s": float(topology.eccentricity_s.max()) if connected and small else None,
        "fewest_out_bytes_per_s": float(out[topology.rank_nodes].min()),
        "switches": [
            {"node": ability.node, "multicast": ability.multicast}
            | ({"slots": ability.aggregation.slots} if ability.aggregation else {})
            for ability in topology.switches
        ],
        "fingerprint": topology.fingerprint,
    }


def _described(facts: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts["nodes"].items())
    lines = [
        facts["name"],
        f"  ranks        {facts['ranks']}" + (f" on {facts['hosts']} hosts" * (facts["hosts"] > 0)),
        f"  nodes        {kinds}",
    ]
    for number, link in enumerate(facts["links"]):
        rate = format_bytes_per_s(link["bandwidth_bytes_per_s"])
        wide = f"{link['count']} x {rate}" if link["count"] > 1 else rate
        ends = f"{link['links']} {link['from']} -> {link['to']}"
        latency = format_duration_s(link["latency_s"])
        lines.append(f"  {'' if number else 'links':<11}  {ends}, {wide}, {latency}")
    lines.append(f"  connected    {facts['cut_off'] or 'yes'}")
    if facts["farthest_latency_s"] is not None:
        lines.append(f"  farthest     {format_duration_s(facts['farthest_latency_s'])} of latency")
    lines.append(f"  out of rank  at least {format_bytes_per_s(facts['fewest_out_bytes_per_s'])}")
    for ability in facts["switches"][:5]:
        able = ["multicast"] * ability["multicast"]
        able += [f"aggregation in {ability['slots']} slots"] if "slots" in ability else []
        lines.append(f"  switch       {ability['node']}: {', '.join(able)}")
    if facts["source"]:
        lines.append(f"  source       {facts['source']}")
    return lines


app = command_group(
    "topology",
    help="Show, draw and convert the networks that plans are made for.",
    commands={
        "list": list_command, "show": show_command, "draw": draw_command,
        "convert": convert_command,
    },
)  # fmt: skip
