"""``fivefold new``: a small commented configuration for a problem, and what to type next.

The configurations lie in ``templates/``, a folder for each problem.
"""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli._outputs import require_writable
from fivefold.errors import ConfigurationError
from fivefold.files import write_atomically


class Problem(StrEnum):
    """What someone comes with."""

    NETWORK = "network"
    EXPERTS = "experts"
    GRAPH = "graph"
    TOPOLOGY = "topology"
    CLUSTER = "cluster"


_NEXT: dict[Problem, tuple[str, ...]] = {
    Problem.NETWORK: ("fivefold train {name}/train.toml --nproc 2", "fivefold explain runs/{name}"),
    Problem.EXPERTS: ("fivefold train {name}/train.toml --nproc 2", "fivefold report runs/{name}"),
    Problem.GRAPH: (
        "fivefold gnn generate graphs/{name} --nodes 20000 --dim 64",
        "fivefold gnn train {name}/gnn.toml",
        "fivefold report runs/{name}",
    ),
    Problem.TOPOLOGY: (
        "fivefold explain {name}/jobs.toml --cluster fat_tree:4,gpus=2,bandwidth=12.5GB/s",
        "fivefold simulate {name}/jobs.toml --cluster fat_tree:4,gpus=2,bandwidth=12.5GB/s",
    ),
    Problem.CLUSTER: (
        "fivefold plan {name}/job.toml --cluster {name}/cluster.toml",
        "fivefold explain {name}/job.toml --cluster {name}/cluster.toml",
        "fivefold plan {name}/job.toml --compare {name}/cluster.toml h100-nemo",
    ),
}


def new_command(
    name: Annotated[str, typer.Argument(help="Folder to make, and name of the run.")],
    *,
    problem: Annotated[
        Problem,
        typer.Option(
            "--for",
            help="What you come with: a slow network, idle experts, a graph that does not fit, "
            "jobs that share a topology, a cluster to choose.",
        ),
    ],
) -> None:
    """Write a small commented configuration that runs, and say what to type next.

    Examples:
        $ fivefold new first --for network

    Raises:
        ConfigurationError: The name is no plain word, or a file is there already.
    """
    if not name.replace("-", "").replace("_", "").isalnum():
        message = f"the name must be letters, digits, - and _; got {name!r:.60}"
        raise ConfigurationError(message, hint="fivefold new first --for network")
    folder = Path(name)
    require_writable(folder)
    templates = sorted((files("fivefold.cli") / "templates" / problem).iterdir(), key=str)
    for file in templates:
        if (folder / file.name).exists():
            message = f"{folder / file.name} is there already"
            raise ConfigurationError(message, hint="choose another name, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for file in templates:
        text = file.read_text(encoding="utf-8")
        write_atomically(folder / file.name, text.replace("{name}", name))
        typer.echo(f"written: {folder / file.name}", err=True)
    typer.echo("next:", err=True)
    for line in _NEXT[problem]:
        typer.echo(line.format(name=name))
