"""``fivefold gnn sample``, ``probe``, ``plan`` and ``pack``: from a data set to a packed store."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fivefold.cli._options import (
    ArgumentError,
    DatasetArgument,
    JsonOption,
    bytes_of,
    numbers_of,
    output_option,
    require_writable,
    write_json,
)

SamplesArgument = Annotated[
    Path, typer.Argument(help="File of sampled batches.", exists=True, dir_okay=False)
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")]
HostOption = Annotated[
    str, typer.Option(help='Host memory for feature caches and buffers, such as "4 GB".')
]
DeviceOption = Annotated[str, typer.Option(help="Device memory for feature caches and buffers.")]
DiskOption = Annotated[
    str | None,
    typer.Option(help="Disk space for the packed store and the scratch files of packing."),
]
PolicyOption = Annotated[
    Literal["static", "belady"],
    typer.Option(help="Cache contents: static, or belady for a fixed order of batches."),
]
SegmentOption = Annotated[
    int | None, typer.Option(min=1, help="Batches per segment; left out, the cheapest.")
]


def sample_command(  # noqa: PLR0913 - the command's options
    dataset: DatasetArgument,
    samples: Annotated[Path, typer.Argument(help="File to write.")],
    *,
    fanouts: Annotated[
        str, typer.Option(help="Neighbours per hop, such as 10,10,10; -1 takes all.")
    ] = "10,10,10",
    batch_size: Annotated[int, typer.Option(min=1, help="Seeds per batch.")] = 1024,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs to sample.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed of the order and the samples.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Sampling threads; left out, one per core.")
    ] = None,
    mapped: Annotated[
        bool, typer.Option("--mapped", help="Leave the topology on disk (memory-mapped).")
    ] = False,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Sample the mini-batches of whole epochs and keep them in a file.

    The result depends on the data set and on these options, not on the number of threads. A run
    that was stopped goes on where it was.
    """
    from fivefold.gnn.data import Dataset
    from fivefold.gnn.sampling import NeighborSampler, sample_epochs
    from fivefold.runs import ProgressBar

    with Dataset.open(dataset) as data, ProgressBar() as show:
        topology = data.topology(mapped=mapped, progress=show)
        sampler = NeighborSampler(
            topology, numbers_of(fanouts, "fanouts", example="10,10,10"), seed=seed, threads=threads
        )
        sampled = sample_epochs(
            sampler,
            data.train,
            samples,
            batch_size=batch_size,
            epochs=epochs,
            seed=seed,
            progress=lambda done, total: show("batches", done, total),
            resume=not fresh,
        )
    with sampled:
        facts = {
            "path": str(sampled.path),
            "batches": sampled.num_batches,
            "epochs": sampled.num_epochs,
            "batch_size": sampled.batch_size,
            "fanouts": list(sampled.fanouts),
            "bytes": sampled.nbytes,
            "fingerprint": sampled.fingerprint,
        }
    _write_result(facts, as_json=as_json)


def probe_command(
    folder: Annotated[
        Path, typer.Argument(help="A folder on the disk in question.", exists=True, file_okay=False)
    ],
    *,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time per measurement.")] = 2.0,
    size: Annotated[
        str | None, typer.Option(help='Size of the test file, such as "1 GB"; it is removed.')
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a disk reads and writes, by the size of the request."""
    size_bytes = None if size is None else bytes_of(size)

    from fivefold.gnn.storage import probe_disk

    profile = probe_disk(folder, seconds=seconds, size_bytes=size_bytes, fresh=True)
    if as_json:
        write_json(json.loads(profile.to_json()))
    else:
        typer.echo(profile.explain())


_DatasetOrCounts = Annotated[
    str,
    typer.Argument(
        help="Folder of the data set. With --estimate also papers100M, MAG240M, IGB-full, or "
        "counts such as nodes=1e8,edges=1.6e9,row_bytes=512,seeds=1e6."
    ),
]
_OptionalSamples = Annotated[
    Path | None, typer.Argument(help="File of sampled batches.", exists=True, dir_okay=False)
]
_PlanOutput = Annotated[Path | None, output_option("The plan, for pack.")]
_Estimate = Annotated[
    bool,
    typer.Option(
        "--estimate",
        help="Estimate time, memory and disk of every stage from the counts of the graph: "
        "nothing is sampled or written.",
    ),
]
_EstimateFanouts = Annotated[str, typer.Option(help="Of --estimate: neighbours per hop.")]
_EstimateBatch = Annotated[int, typer.Option(min=1, help="Of --estimate: seeds per batch.")]
_DiskSpeed = Annotated[
    str | None,
    typer.Option(help="Of --estimate: speed of the disk; left out, this disk is measured."),
]


def plan_command(  # noqa: PLR0913 - the command's options
    dataset: _DatasetOrCounts,
    samples: _OptionalSamples = None,
    *,
    host_memory: HostOption = "1 GB",
    device_memory: DeviceOption = "0 B",
    disk: DiskOption = None,
    policy: PolicyOption = "static",
    segment_batches: SegmentOption = None,
    output: _PlanOutput = None,
    estimated: _Estimate = False,
    fanouts: _EstimateFanouts = "10,10,10",
    batch_size: _EstimateBatch = 1024,
    disk_speed: _DiskSpeed = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a packed store would hold, take and cost, before anything of it is written."""
    if not estimated and (samples is None or disk is None):
        missing = "SAMPLES" if samples is None else "--disk"
        raise ArgumentError(f"{missing} is missing", hint="give it, or --estimate without samples")
    require_writable(output)
    most = sys.maxsize if disk is None else bytes_of(disk)
    host_bytes, device_bytes = map(bytes_of, (host_memory, device_memory))

    from fivefold.cli._gnn_work import check_graph, graph_size, speed_of_disk
    from fivefold.gnn.data import Dataset
    from fivefold.gnn.planning import Budgets, make_plan
    from fivefold.gnn.planning.estimate import estimate
    from fivefold.gnn.sampling import SampleFile
    from fivefold.gnn.storage import probe_disk
    from fivefold.runs import ProgressBar

    budgets = Budgets(host_bytes=host_bytes, device_bytes=device_bytes, disk_bytes=most)
    if estimated:
        hops = numbers_of(fanouts, "fanouts", example="10,10,10")
        read, write = speed_of_disk(disk_speed)
        found = estimate(
            graph_size(dataset), hops, batch_size, budgets,
            read_bytes_per_s=read, write_bytes_per_s=write,
        )  # fmt: skip
        if as_json:
            more = {"memory_bytes": found.memory_bytes, "disk_bytes": found.disk_bytes}
            write_json(dataclasses.asdict(found) | more)
        else:
            typer.echo(found.explain())
        return
    assert samples is not None, "refused above"
    with Dataset.open(dataset) as data, SampleFile.open(samples) as sampled, ProgressBar() as show:
        check_graph(data, sampled)
        plan = make_plan(
            sampled,
            data.features,
            budgets,
            probe_disk(samples.parent.absolute()),
            policy=policy,
            segment_batches=segment_batches,
            progress=show,
        )
    if output is not None:
        plan.write(output)
    if not as_json:
        typer.echo(plan.explain())
        return
    facts = {
        "policy": plan.policy, "segment_batches": plan.segment_batches,
        "device_rows": len(plan.device_rows), "host_rows": plan.num_host_slots,
        "predicted": plan.predicted.to_json(), "fingerprint": plan.fingerprint,
    }  # fmt: skip
    write_json(facts)


def pack_command(  # noqa: PLR0913 - the command's options
    dataset: DatasetArgument,
    samples: SamplesArgument,
    plan: Annotated[
        Path, typer.Argument(help="File written by plan --output.", exists=True, dir_okay=False)
    ],
    store: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    memory: Annotated[
        str | None, typer.Option(help="Memory for packing; left out, the plan's host memory.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="How rows are moved: resident, passes or spill; left out, the cheapest."),
    ] = None,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the feature rows of every batch next to one another, as a plan says.

    Killed at any moment and started again, it goes on where it was.
    """
    from fivefold.cli._gnn_work import check_graph
    from fivefold.gnn.data import Dataset
    from fivefold.gnn.packing import pack
    from fivefold.gnn.planning import Plan
    from fivefold.gnn.sampling import SampleFile
    from fivefold.gnn.storage import probe_disk
    from fivefold.runs import ProgressBar

    made = Plan.open(plan)
    memory_bytes = made.budgets.host_bytes if memory is None else bytes_of(memory)
    with Dataset.open(dataset) as data, SampleFile.open(samples) as sampled, ProgressBar() as show:
        check_graph(data, sampled)
        packed = pack(
            data.features,
            sampled,
            made,
            store,
            memory_bytes=memory_bytes,
            progress=show,
            resume=not fresh,
            profile=lambda: probe_disk(store.absolute()),
            strategy=strategy,
        )
    with packed:
        facts = {
            "folder": str(packed.folder),
            "batches": packed.num_batches,
            "bytes": packed.nbytes,
            **packed.manifest["packing"],
        }
    _write_result(facts, as_json=as_json)


def _write_result(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_json(facts)
        return
    for name, value in facts.items():
        typer.echo(f"{name}: {value}")
