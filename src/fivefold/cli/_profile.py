"""``fivefold profile``: links between running ranks and what ranks can do, as a cluster file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli._options import JsonOption, bytes_of, output_option, require_writable, seconds_of
from fivefold.errors import ConfigurationError

_Job = Annotated[
    Path | None,
    typer.Option(
        help="Configuration of fivefold train; its step and all-reduce are timed too.",
        exists=True,
        dir_okay=False,
    ),
]
_Base = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Known GPU and software, for constants that are not measured.",
        show_default="by the device",
    ),
]
_Backend = Annotated[
    str | None, typer.Option(help="gloo or nccl.", show_default="nccl where there are GPUs")
]


def profile_command(  # noqa: PLR0913 - each option is a parameter
    *,
    output: Annotated[Path | None, output_option("The cluster file (TOML), for --cluster.")] = None,
    job: _Job = None,
    base: _Base = None,
    sizes: Annotated[
        str, typer.Option(help="Message sizes, separated by commas.")
    ] = "64B,1KiB,16KiB,256KiB,1MiB,4MiB",
    repetitions: Annotated[int, typer.Option(help="Transfers of each size.")] = 5,
    backend: _Backend = None,
    contention: Annotated[bool, typer.Option(help="Also measure concurrent transfers.")] = True,
    timeout: Annotated[str, typer.Option(help="Longest wait for a peer, such as 2min.")] = "2min",
    as_json: JsonOption = False,
) -> None:
    """Measure the links between running ranks and the speed of each; write a cluster file.

    Every rank runs this command: start it with torchrun, or on an emulated cluster. Rank 0 shows
    the fit and its residuals. One-way times are half of a round trip. With --job the trainer's own
    step is timed too, on all ranks at once, and predictions are calibrated to it.

    Example: fivefold lab run --hosts 2 -- fivefold profile --job train.toml -o measured.toml
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

    import torch
    import torch.distributed as dist

    from fivefold.cli._profile_work import MeasuredCluster, base_of, hand_on, measure_job
    from fivefold.network.profiling import profile_links
    from fivefold.runs import rank_process
    from fivefold.runs.ranks import close_ranks, open_ranks
    from fivefold.strategy import load_cluster
    from fivefold.train.config import load_config
    from fivefold.train.profile import measure_device

    on_gpu = (backend or ("nccl" if torch.cuda.is_available() else "gloo")) == "nccl"
    config = None if job is None else load_config(job)
    known = load_cluster(base or base_of(on_gpu=on_gpu))
    with rank_process():
        ranks = open_ranks(device="cuda" if on_gpu else "cpu", timeout_s=wait_s)
        if ranks.world_size == 1:  # a rank alone needs no group, but what measures links does
            store = dist.HashStore()  # type: ignore[attr-defined]  # torch
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            ranks.owned = True
        profile = profile_links(
            sizes_bytes=sizes_bytes, repetitions=repetitions, contention=contention
        )
        rates = measure_device(ranks, threads=1 if config is None else config.run.threads)
        measured = None if config is None else measure_job(config, ranks)
        ranks.gather(None, what="the end of the profile")  # nobody leaves before
        if ranks.is_main:
            found = MeasuredCluster(profile=profile, rates=rates, base=known, step=measured)
            hand_on(found, output, as_json=as_json)
        close_ranks(ranks)
