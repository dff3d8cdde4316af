"""``fivefold profile``: alpha and beta of the links between running ranks, as a topology file."""

from __future__ import annotations

import datetime as dt
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fivefold.cli._arguments import bytes_of, seconds_of
from fivefold.cli._later import later
from fivefold.cli._outputs import write_json
from fivefold.errors import ConfigurationError
from fivefold.units import format_bytes_per_s, format_duration_s

with later():
    import torch
    import torch.distributed as dist

    from fivefold.network.profiling import Profile, profile_links
    from fivefold.runs import write_text


_SHOWN_PAIRS = 56  # all pairs of eight ranks


def profile_command(
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the topology to this TOML file.")
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Message sizes, separated by commas.")
    ] = "64B,1KiB,16KiB,256KiB,1MiB,4MiB",
    repetitions: Annotated[int, typer.Option(help="Transfers of each size.")] = 5,
    backend: Annotated[
        str | None, typer.Option(help="gloo or nccl.", show_default="nccl where there are GPUs")
    ] = None,
    contention: Annotated[
        bool, typer.Option(help="Also measure transfers at the same time.")
    ] = True,
    timeout: Annotated[str, typer.Option(help="Longest wait for a peer, such as 2min.")] = "2min",
    as_json: Annotated[
        bool, typer.Option("--json", help="Write all measurements as JSON.")
    ] = False,
) -> None:
    """Measure latency and bandwidth of the links between running ranks, and fit a topology.

    Every rank runs this command: start it with torchrun, or on an emulated cluster. Rank 0 shows
    the fit and its residuals. What one direction takes is half of a round trip.

    Example: fivefold lab run --hosts 4 --rate 200Mbit/s -- fivefold profile -o measured.toml

    Raises:
        ConfigurationError: It was not started as ranks, or an option is not usable.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"there are no ranks to measure: {missing[0]} is not set",
            hint="start it as ranks: fivefold lab run -- fivefold profile, or "
            "torchrun --nproc-per-node 4 --no-python fivefold profile",
        )
    sizes_bytes = [bytes_of(size.strip()) for size in sizes.split(",")]
    wait = dt.timedelta(seconds=seconds_of(timeout))
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if chosen == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(chosen, timeout=wait)
    try:
        profile = profile_links(
            sizes_bytes=sizes_bytes, repetitions=repetitions, contention=contention
        )
        dist.barrier()  # nobody leaves while another is still being told
        if dist.get_rank() == 0:
            _hand_on(profile, output, as_json=as_json)
    finally:
        dist.destroy_process_group()


def _hand_on(profile: Profile, output: Path | None, *, as_json: bool) -> None:

    topology = profile.to_topology() if profile.num_ranks > 1 else None
    if output is not None and topology is not None:
        write_text(output, topology.to_toml())
    if as_json:
        write_json(profile.to_dict())
        return
    _show(profile)
    if topology is not None:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"[bold]profile[/]  {escape(topology.source)}"
            + (f"; written to {escape(str(output))}" if output is not None else "")
        )


def _show(profile: Profile) -> None:

    console = Console(file=sys.stdout, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("from", "to", "alpha", "bandwidth", "fit error, largest size", "all sizes"):
        table.add_column(title, justify="left" if title in {"from", "to"} else "right")
    pairs = [(a, b) for a in range(profile.num_ranks) for b in range(profile.num_ranks) if a != b]
    alphas, rates, residuals = profile.alpha_s, profile.rates_bytes_per_s, profile.residuals
    bounds = profile.usable_rates_bytes_per_s
    for a, b in pairs[:_SHOWN_PAIRS]:
        error, worst = residuals[a, b, -1], max(residuals[a, b].tolist(), key=abs)
        table.add_row(
            escape(f"rank{a} ({profile.hosts[a]})"),
            escape(f"rank{b} ({profile.hosts[b]})"),
            format_duration_s(alphas[a, b]),
            ("" if rates[a, b] < float("inf") else "over ") + format_bytes_per_s(bounds[a, b]),
            f"{100 * error:+.1f} %",
            f"{100 * worst:+.1f} %",
        )
    console.print(table)
    if len(pairs) > _SHOWN_PAIRS:
        console.print(f"and {len(pairs) - _SHOWN_PAIRS} more pairs (--json has all)")
    for line in _contention_lines(profile, format_bytes_per_s):
        console.print(line, markup=False)


def _contention_lines(profile: Profile, text: Any) -> list[str]:
    found = profile.contention
    if found is None:
        return []
    out, into = found.out_bytes_per_s, found.in_bytes_per_s
    lines = [
        "",
        f"to all others at once    {text(out.min())} to {text(out.max())} a rank",
        f"from all others at once  {text(into.min())} to {text(into.max())} a rank",
        f"all to all at once       {text(found.all_bytes_per_s)} a rank",
    ]
    hosts = found.host_out_bytes_per_s
    return [*lines, *(f"all ranks of {host} at once  {text(rate)}" for host, rate in hosts.items())]
