"""``fivefold collectives bench``: algorithms priced on a topology, or the backend measured."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fivefold.cli._arguments import ArgumentError, bytes_of, topology_of
from fivefold.cli._collectives_files import (
    plain_name,
    value_text,
)
from fivefold.cli._options import BandwidthOption, JsonOption, LatencyOption
from fivefold.cli._outputs import write_json
from fivefold.network.topology import Topology
from fivefold.units import format_bytes


def bench_algorithms(
    collective: Annotated[str, typer.Argument(help="Such as all_reduce.")],
    topology: Annotated[
        str | None, typer.Argument(help="A topology; none where ranks are running (torchrun).")
    ] = None,
    *,
    sizes: Annotated[str, typer.Option(help="Sizes with commas.")] = "64KB,1MB,16MB",
    repetitions: Annotated[int, typer.Option(min=1, help="Measured calls of each size.")] = 5,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Price the algorithms on a topology; or, under torchrun or the lab, measure the backend.

    With a topology: predicted times by message size, and which one would be chosen. Without one,
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
        rows = _priced(
            collective, topology_of(topology, bandwidth=bandwidth, latency=latency), wanted
        )
    if as_json and rows:
        write_json(rows)
    elif rows:
        _table(rows)


def _priced(collective: str, network: Topology, sizes: list[int]) -> list[dict[str, Any]]:
    from fivefold.collectives.execution import Settings  # noqa: PLC0415 - loads torch
    from fivefold.collectives.execution.choose import choose  # noqa: PLC0415 - loads torch

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
        raise ArgumentError(f"{collective} is not measured", hint="all_reduce is")
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
        dist.all_reduce(
            times_s, op=dist.ReduceOp.MAX, group=inner
        )  # a call ends with its last rank
        choice = engine.engine.choice("all_reduce", data.nbytes)
        own_s, inner_s = times_s[:, 1:].median(dim=1).values.tolist()
        medians = {"own_s": own_s, "inner_s": inner_s}
        head = {"size": format_bytes(size_bytes), "chosen": choice.label}
        rows.append(head | medians | {"predicted_s": choice.predicted_s})
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rows if rank == 0 else []


def _table(rows: list[dict[str, Any]]) -> None:
    table = Table()
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(plain_name(name))
    for row in rows:
        table.add_row(*[escape(value_text(name, row.get(name, ""))) for name in names])
    Console().print(table)
