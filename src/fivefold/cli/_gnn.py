"""``fivefold gnn``: data sets on disk, and training where features do not fit in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.cli import _gnn_store
from fivefold.cli._options import (
    ArgumentError,
    ConfigArgument,
    DatasetArgument,
    JsonOption,
    bytes_of,
    command_group,
    output_option,
    require_writable,
    write_json,
)
from fivefold.units import format_bytes

OutputArgument = Annotated[Path, typer.Argument(help="Folder to write; made if missing.")]
MemoryOption = Annotated[str, typer.Option(help='What buffers may take, such as "1 GB".')]
SourceArgument = Annotated[str, typer.Argument(help="File or folder to read.")]
KindOption = Annotated[
    str | None,
    typer.Option(help="npy, ogb, mag240m, igb, dgl, pyg or table; left out, found from the path."),
]
ArrayOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=FILE",
        help="A .npy file: features, labels, weights, train, valid or test. May be repeated.",
    ),
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=NAME",
        help="A column of a table: source, target, weight or edge (whatever else edges carry); "
        "node, label, split or features. Of edge and features names with commas between.",
    ),
]
NodesOption = Annotated[
    Path | None, typer.Option(help="Table with a row per node, beside edge tables.", exists=True)
]
HeaderOption = Annotated[
    str | None,
    typer.Option(metavar="yes|no", help="Whether CSV files begin with a line of names."),
]
QuoteOption = Annotated[
    str | None,
    typer.Option(metavar="CHAR", help="What stands around fields of CSV files, or none."),
]
CommentOption = Annotated[
    str | None,
    typer.Option(metavar="CHAR", help="What comments in CSV files begin with, or none."),
]
MissingOption = Annotated[
    list[str] | None,
    typer.Option(metavar="WORD", help="A word that stands for an empty field. May be repeated."),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", help="Say of every file and column what became of it.")
]
IdsOption = Annotated[str, typer.Option(help="Ids in tables: auto, number or text.")]
NumNodesOption = Annotated[
    int | None, typer.Option(min=0, help="Number of nodes; left out, found.")
]
SplitOption = Annotated[
    int | None,
    typer.Option(min=0, help="Which one, where masks of nodes have several columns; from 0."),
]
LeaveOutOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="Features of edges to leave out, such as edge_attr. May be repeated."
    ),
]
ReverseOption = Annotated[
    bool | None,
    typer.Option(
        "--undirected/--directed",
        "--add-reverse/--no-add-reverse",
        help="Store every edge in both directions; left out, as the source wants.",
    ),
]
SelfLoopsOption = Annotated[
    bool, typer.Option("--drop-self-loops", help="Leave out edges from a node to itself.")
]
DuplicatesOption = Annotated[
    bool, typer.Option("--drop-duplicates", help="Keep one of equal edges.")
]
GraphOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="classes, p_in, signal, mean_degree, label_noise, train, valid, test (shares), "
        "neighbors (drawn, drawing or both) or random_ids. May be repeated.",
    ),
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads; left out, one per core.")]
_GRAPH_OPTIONS: dict[str, Callable[[str], Any]] = {
    "classes": int,
    **dict.fromkeys(("p_in", "signal", "mean_degree", "label_noise"), float),
    **dict.fromkeys(("train", "valid", "test"), float),
    "neighbors": str,
    "random_ids": lambda text: {"true": True, "false": False}[text.lower()],
}
_SPLITS = ("train", "valid", "test")


def ingest_command(  # noqa: PLR0913 - the command's options
    source: SourceArgument,
    output: OutputArgument,
    *,
    kind: KindOption = None,
    array: ArrayOption = None,
    column: ColumnOption = None,
    nodes: NodesOption = None,
    header: HeaderOption = None,
    quote: QuoteOption = None,
    comment: CommentOption = None,
    missing: MissingOption = None,
    ids: IdsOption = "auto",
    num_nodes: NumNodesOption = None,
    split: SplitOption = None,
    leave_out: LeaveOutOption = None,
    add_reverse: ReverseOption = None,
    drop_self_loops: SelfLoopsOption = False,
    drop_duplicates: DuplicatesOption = False,
    memory: MemoryOption = "1 GB",
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a graph from a file or a folder as a data set.

    The source is read in blocks: it may be much larger than memory. A run that was stopped goes
    on where it was when it is started again with the same options. Edges keep their direction:
    messages flow from source to target.
    """
    from fivefold.cli._gnn_work import columns_of_pairs, table_columns, write_facts
    from fivefold.gnn.data import EdgeRules, SourceOptions, find_source, ingest
    from fivefold.runs import ProgressBar

    arrays = columns_of_pairs(
        array, "array", ("features", "labels", "weights", "edge_features", *_SPLITS)
    )
    options = SourceOptions(
        kind=kind,
        arrays={name: Path(path) for name, path in arrays.items() if name not in _SPLITS},
        splits={name: Path(path) for name, path in arrays.items() if name in _SPLITS},
        nodes=nodes,
        columns=table_columns(
            column, header=header, quote=quote, comment=comment, missing=tuple(missing or ())
        ),
        ids=ids,
        num_nodes=num_nodes,
        split=split,
        leave_out=tuple(leave_out or ()),
    )
    memory_bytes = bytes_of(memory)
    found, wants_reverse = find_source(source, options)
    rules = EdgeRules(
        add_reverse=wants_reverse if add_reverse is None else add_reverse,
        drop_self_loops=drop_self_loops,
        drop_duplicates=drop_duplicates,
    )
    with ProgressBar() as show:
        written: Any = ingest(
            found,
            output,
            rules=rules,
            memory_bytes=memory_bytes,
            # The rest counts as one where nobody knows how much there is.
            progress=lambda stage, done, total: show(stage, done, total or done + 1),
        )
    reading = getattr(found, "reading", None)
    if reading is not None and not reading.names():
        reading = None
    hint = getattr(found, "gaps_hint", None)
    with written:
        write_facts(written, as_json=as_json, reading=reading, verbose=verbose, gaps_hint=hint)


def generate_command(  # noqa: PLR0913 - the command's options
    output: OutputArgument,
    *,
    nodes: Annotated[int, typer.Option(min=0, help="Number of nodes.")],
    dim: Annotated[int, typer.Option(min=1, help="Elements of a feature row.")] = 128,
    dtype: Annotated[str, typer.Option(help="float16, float32 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    option: GraphOption = None,
    threads: ThreadsOption = None,
    memory: MemoryOption = "1 GB",
    as_json: JsonOption = False,
) -> None:
    """Write a graph with classes, skewed degrees and noisy features, of any size.

    The result depends on these options, not on threads or memory. A run that was stopped goes on
    where it was.
    """
    options = _graph_options(option)

    from fivefold.cli._gnn_work import write_facts
    from fivefold.gnn.data import generate_graph
    from fivefold.runs import ProgressBar

    with ProgressBar() as show:
        dataset = generate_graph(
            output,
            nodes=nodes,
            dim=dim,
            dtype=dtype,
            seed=seed,
            threads=threads,
            memory_bytes=bytes_of(memory),
            progress=show,
            **options,
        )
    with dataset:
        write_facts(dataset, as_json=as_json)


def _graph_options(values: list[str] | None) -> dict[str, Any]:
    options = {}

    from fivefold.cli._gnn_work import columns_of_pairs

    for name, text in columns_of_pairs(values, "option", tuple(_GRAPH_OPTIONS)).items():
        try:
            options[name] = _GRAPH_OPTIONS[name](text)
        except (ValueError, KeyError) as error:
            raise ArgumentError(
                f"--option {name} got {text!r}", hint="see fivefold gnn generate --help"
            ) from error
    return options


def info_command(folder: DatasetArgument, *, as_json: JsonOption = False) -> None:
    """Show what is in a data set: nodes, edges, degrees, classes, sizes, fingerprints."""
    from fivefold.cli._gnn_work import write_facts
    from fivefold.gnn.data import open_dataset

    with open_dataset(folder) as dataset:
        write_facts(dataset, as_json=as_json)


def verify_command(folder: DatasetArgument, *, as_json: JsonOption = False) -> None:
    """Read every byte of a data set and compare its checksums."""
    from fivefold.gnn.data import open_dataset
    from fivefold.gnn.data.statistics import verify
    from fivefold.runs import ProgressBar

    with open_dataset(folder) as dataset, ProgressBar() as show:
        read_bytes = verify(dataset, show)
    if as_json:
        write_json({"folder": str(folder), "whole": True, "bytes": read_bytes})
    else:
        typer.echo(f"{folder} is whole: {format_bytes(read_bytes)} read")


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
    as_json: JsonOption = False,
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
    from fivefold.gnn.training import load_gnn_config  # not train_graph, which loads torch
    from fivefold.runs import rank_process

    with rank_process():
        loaded = load_gnn_config(config, overrides or [])
        from fivefold.gnn.training import train_graph

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
    as_json: JsonOption = False,
) -> None:
    """Compute the class scores of every node from all of its neighbours, out of core.

    Of a graph of several types these are the nodes of the type that was trained on.

    Layer by layer: each layer's outputs are a file that the next one reads, so that memory stays
    within --memory whatever the size of the graph. The same command goes on where a killed one
    stopped. The outputs are output.fvf, one row of scores per node.
    """
    require_writable(output)
    memory_bytes = bytes_of(memory)

    from fivefold.gnn.training import infer_run
    from fivefold.runs import ProgressBar

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
        "ingest": ingest_command,
        "generate": generate_command,
        "info": info_command,
        "verify": verify_command,
        "probe": _gnn_store.probe_command,
        "sample": _gnn_store.sample_command,
        "plan": _gnn_store.plan_command,
        "pack": _gnn_store.pack_command,
        "train": train_command,
        "infer": infer_command,
    },
)
