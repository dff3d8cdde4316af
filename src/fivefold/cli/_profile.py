"""``fivefold profile``: links between running ranks and what ranks can do, as a cluster file."""

from __future__ import annotations

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
from fivefold.cli._options import output_option
from fivefold.cli._outputs import require_writable, write_json
from fivefold.cli._profile_file import MeasuredCluster, measure_job
from fivefold.errors import ConfigurationError
from fivefold.units import format_bytes_per_s, format_duration_s

with later():
    import torch

    from fivefold.network.profiling import Profile, profile_links
    from fivefold.runs import rank_process, write_text
    from fivefold.runs.ranks import close_ranks, open_ranks
    from fivefold.strategy import load_cluster, named_clusters
    from fivefold.train.config import load_config
    from fivefold.train.profile import measure_device

# A part of the device's name, and the known stack that is nearest to the trainer's.
_BASES = {
    "H200": "h200-nemo", "H100": "h100-torchtitan", "H800": "h800-deepseek", "A100": "a100-fsdp",
    "GB200": "gb200-nemo", "MI300X": "mi300x-primus", "V100": "v100-megatron",
}  # fmt: skip
_SHOWN_PAIRS = 56  # all pairs of eight ranks


def profile_command(  # noqa: PLR0913 - each option is a parameter
    *,
    output: Annotated[
        Path | None,
        output_option("The cluster file (TOML), for --cluster."),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(
            help="Configuration of fivefold train whose step and all-reduce are timed too.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Known GPU and software that the file begins with.",
            show_default="by the device",
        ),
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
    """Measure what joins running ranks and what each can do, as a cluster file for all commands.

    Every rank runs this command: start it with torchrun, or on an emulated cluster. Rank 0 shows
    the fit and its residuals. What one direction takes is half of a round trip. With --job the
    trainer's own step is timed on all ranks at once, and predictions for it begin there.

    Example: fivefold lab run --hosts 2 -- fivefold profile --job train.toml -o measured.toml

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
    require_writable(output)
    sizes_bytes = [bytes_of(size.strip()) for size in sizes.split(",")]
    wait_s = seconds_of(timeout)
    on_gpu = (backend or ("nccl" if torch.cuda.is_available() else "gloo")) == "nccl"
    config = None if job is None else load_config(job)
    known = load_cluster(base or _base_of(on_gpu=on_gpu))
    with rank_process():
        ranks = open_ranks(device="cuda" if on_gpu else "cpu", timeout_s=wait_s)
        profile = profile_links(
            sizes_bytes=sizes_bytes, repetitions=repetitions, contention=contention
        )
        rates = measure_device(ranks, threads=1 if config is None else config.run.threads)
        measured = None if config is None else measure_job(config, ranks)
        ranks.gather(None, what="the end of the profile")  # nobody leaves before
        if ranks.is_main:
            found = MeasuredCluster(profile=profile, rates=rates, base=known, step=measured)
            _hand_on(found, output, as_json=as_json)
        close_ranks(ranks)


def _base_of(*, on_gpu: bool) -> str:
    """Return the known device and software that are nearest to this machine's."""
    if not on_gpu:
        return "cpu-lab"
    name = torch.cuda.get_device_name()
    found = next((base for mark, base in _BASES.items() if mark in name), None)
    if found is None:
        message = f"the constants of {name!r} are not known"
        hint = f"give the nearest with --base: one of {', '.join(named_clusters())}"
        raise ConfigurationError(message, hint=hint)
    return found


def _hand_on(found: MeasuredCluster, output: Path | None, *, as_json: bool) -> None:
    profile = found.profile
    if output is not None:
        write_text(output, found.to_toml())
    if as_json:
        write_json(profile.to_dict() | found.facts())
        return
    _show(profile)
    for line in found.lines():
        typer.echo(line)
    if output is not None:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"[bold]profile[/]  written: {escape(str(output))}; every command takes it as --cluster"
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
