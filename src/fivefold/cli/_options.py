"""Options and arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

TopologyArgument = Annotated[
    str,
    typer.Argument(
        metavar="TOPOLOGY",
        help="Such as dgx_a100:2, torus:4x4, fat_tree:8,gpus=8, lingjun:topo.csv, taccl:ndv2_1MB:2 "
        'or cluster.toml; "fivefold topology list" names them all.',
    ),
]
BandwidthOption = Annotated[
    str | None, typer.Option(help="Bandwidth of a generator's links, such as '50 GB/s'.")
]
LatencyOption = Annotated[
    str | None, typer.Option(help="Latency of a generator's links, such as '1 us'.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write the result as JSON.")]
JobsArgument = Annotated[
    Path,
    typer.Argument(
        metavar="JOBS",
        help="TOML file with \\[\\[jobs]]; see the guide.",
        exists=True,
        dir_okay=False,
    ),
]
_CLUSTER_HELP = (
    "Machines and what joins them: a TOML file (fivefold profile writes one), a known GPU with its "
    "software such as h100-nemo:16, or where links are enough fat_tree:4,gpus=2."
)
ClusterOption = Annotated[str, typer.Option("--cluster", metavar="FILE|NAME", help=_CLUSTER_HELP)]
OptionalClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="FILE|NAME", help=_CLUSTER_HELP)
]


def output_option(what: str, *, metavar: str = "FILE") -> Any:
    """Declare --output: the one file or folder that the command makes."""
    return typer.Option("--output", "-o", metavar=metavar, help=what)


ConfigArgument = Annotated[
    Path,
    typer.Argument(help="TOML file; the guide lists the keys.", exists=True, dir_okay=False),
]
PathSeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of hashed paths.")]
PageOption = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="HTML page to write: pictures, charts, reasons."
    ),
]
DatasetArgument = Annotated[
    Path, typer.Argument(help="Folder of the data set.", exists=True, file_okay=False)
]
