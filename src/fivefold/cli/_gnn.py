"""``fivefold gnn``: graph neural networks whose features do not fit in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli import _gnn_data, _gnn_store
from fivefold.cli._later import later
from fivefold.cli._options import (
    ConfigArgument,
    bytes_of,
    command_group,
    output_option,
    require_writable,
)

with later():
    from fivefold.gnn.training import load_gnn_config, train_graph
    from fivefold.runs import ProgressBar, rank_process


def train_command(
    config: ConfigArgument,
    *,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key, such as run.epochs=5 or budgets.host='2 GB'; repeatable.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was reached as JSON on standard output.")
    ] = False,
) -> None:
    """Train a graph neural network as CONFIG says, or resume where a run stopped.

    With mode "disk" whatever is missing is made first, in the data set's folder or data.store:
    the mini-batches are sampled, a plan is made for the budgets and shown, and the rows are
    packed. Each of these goes on where a killed run stopped.

    Of a graph of several node and edge types the nodes of one are classified: data.node_type.

    Several processes: torchrun --nproc-per-node 2 -m fivefold gnn train config.toml.
    They share one packed store; budgets are per process.

    The same command resumes a run from its newest whole checkpoint, in the middle of an epoch.
    SIGTERM or Ctrl-C writes a checkpoint on all ranks and ends with exit code 0; a second Ctrl-C
    aborts.
    """
    with rank_process():
        loaded = load_gnn_config(config, overrides or [])
        result = train_graph(loaded, show=lambda text: typer.echo(text, err=True))
    if as_json and os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps({"output": str(result.output), **result.record()}, indent=1))


def infer_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run of fivefold gnn train.")],
    *,
    output: Annotated[
        Path | None,
        output_option("The outputs; default: inference/step-N in the run.", metavar="FOLDER"),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="Budget of rows, sums and buffers, such as '2 GB'.")
    ] = "1 GB",
    keep_layers: Annotated[
        bool, typer.Option("--keep-layers", help="Keep the outputs of the hidden layers.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print accuracy and costs as JSON on standard output.")
    ] = False,
) -> None:
    """Compute the class scores of every node from all of its neighbours, out of core.

    Of a graph of several types these are the nodes of the type that was trained on.

    Layer by layer: each layer's outputs are a file that the next one reads, so that memory stays
    within --memory whatever the size of the graph. The same command goes on where a killed one
    stopped. The outputs are output.fvf, one row of scores per node.
    """
    from fivefold.gnn.training import infer_run  # noqa: PLC0415 - loads torch

    require_writable(output)
    memory_bytes = bytes_of(memory)
    with ProgressBar() as progress:
        result = infer_run(
            run,
            output,
            memory_bytes=memory_bytes,
            keep_layers=keep_layers,
            progress=lambda done, total: progress("inference", done, total),
        )
    if as_json:
        typer.echo(json.dumps(result.record(), indent=1))
        return
    typer.echo(result.outputs.explain())
    for split, accuracy in result.accuracy.items():
        typer.echo(f"{split} accuracy {accuracy:.4f}")
    typer.echo(str(result.outputs.path))


app = command_group(
    "gnn",
    help="Train graph neural networks whose features are many times larger than memory.",
    commands={  # as one uses them
        "ingest": _gnn_data.ingest_command,
        "generate": _gnn_data.generate_command,
        "info": _gnn_data.info_command,
        "verify": _gnn_data.verify_command,
        "probe": _gnn_store.probe_command,
        "sample": _gnn_store.sample_command,
        "plan": _gnn_store.plan_command,
        "pack": _gnn_store.pack_command,
        "train": train_command,
        "infer": infer_command,
    },
)
