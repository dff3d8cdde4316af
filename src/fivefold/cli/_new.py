"""``fivefold new``: a small commented configuration for a problem, and what to type next.

The configurations lie in ``templates/``, a folder for each problem.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer

from fivefold.cli._options import require_writable
from fivefold.errors import ConfigurationError
from fivefold.files import write_atomically

Problem = Literal["network", "experts", "graph", "topology", "cluster"]
Launcher = Literal["slurm", "kubernetes"]
_TRAIN = "fivefold train {name}/train.toml --nproc 2"
_SHARED = "--cluster fat_tree:4,gpus=2,bandwidth=12.5GB/s"
_NEXT: dict[str, tuple[str, ...]] = {
    "network": (_TRAIN, "fivefold explain runs/{name}"),
    "experts": (_TRAIN, "fivefold report runs/{name}"),
    "graph": (
        "fivefold gnn generate graphs/{name} --nodes 20000 --dim 64",
        "fivefold gnn train {name}/gnn.toml",
        "fivefold report runs/{name}",
    ),
    "topology": (
        f"fivefold explain {{name}}/jobs.toml {_SHARED}",
        f"fivefold simulate {{name}}/jobs.toml {_SHARED}",
    ),
    "cluster": (
        "fivefold plan {name}/job.toml --cluster {name}/cluster.toml",
        "fivefold explain {name}/job.toml --cluster {name}/cluster.toml",
        "fivefold plan {name}/job.toml --compare {name}/cluster.toml h100-nemo",
    ),
}
_TEMPLATES = files("fivefold.cli") / "templates"
_LAUNCHERS = {
    "slurm": ("run.sbatch", ("sbatch {name}/run.sbatch",)),
    "kubernetes": (
        "kubernetes.yaml",
        (
            "kubectl create configmap {label} --from-file={name}/{config}",
            "kubectl apply -f {name}/kubernetes.yaml",
        ),
    ),
}
_LABEL = re.compile("[a-z][a-z0-9-]{0,49}")  # of services; pods have more behind it, 63 in all
_COMMANDS = {"train.toml": "train", "gnn.toml": "gnn train"}


def new_command(
    name: Annotated[str, typer.Argument(help="Folder to make, and name of the run.")],
    *,
    problem: Annotated[
        Problem,
        typer.Option(
            "--for",
            help="Your problem: a slow network, idle experts, a graph larger than memory, "
            "jobs that share a topology, a cluster to choose.",
        ),
    ],
    launcher: Annotated[
        Launcher | None,
        typer.Option(help="Also write the file that runs it on several machines, by torchrun."),
    ] = None,
) -> None:
    """Write a small commented configuration that runs, and say what to type next.

    Examples:
        $ fivefold new first --for network
        $ fivefold new first --for experts --launcher slurm
    """
    if not name.replace("-", "").replace("_", "").isalnum() or name.startswith("-"):
        message = f"the name must be letters, digits, - (not first) and _; got {name!r:.60}"
        raise ConfigurationError(message, hint="fivefold new first --for network")
    folder = Path(name)
    require_writable(folder)
    texts = {
        file.name: file.read_text(encoding="utf-8").replace("{name}", name)
        for file in sorted((_TEMPLATES / problem).iterdir(), key=str)
    }
    lines = [line.format(name=name) for line in _NEXT[problem]]
    if launcher is not None:
        file, text, lines = _launched(launcher, problem, name=name, lines=lines)
        texts[file] = text
    for file in texts:
        if (folder / file).exists():
            message = f"{folder / file} already exists"
            raise ConfigurationError(message, hint="choose another name, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        write_atomically(folder / file, text)
        typer.echo(f"written: {folder / file}", err=True)
    typer.echo("next:", err=True)
    for line in lines:
        typer.echo(line)


def _launched(
    launcher: Launcher, problem: Problem, *, name: str, lines: list[str]
) -> tuple[str, str, list[str]]:
    """Return the launcher's file, its text, and the lines to type with it."""
    config = next((file for file in _COMMANDS if (_TEMPLATES / problem / file).is_file()), None)
    if config is None:
        message = f"--launcher is for training runs, which --for {problem} does not write"
        raise ConfigurationError(message, hint="use --for network, experts or graph")
    file, submit = _LAUNCHERS[launcher]
    command = _COMMANDS[config]
    shown = ", ".join(command.split()) if launcher == "kubernetes" else command
    label = name.lower().replace("_", "-").strip("-")
    if launcher == "kubernetes" and not _LABEL.fullmatch(label):
        message = f"Kubernetes takes no job of the name {label!r:.60}"
        hint = "a letter first, then letters, digits and -, all ASCII, 50 of them at most"
        raise ConfigurationError(message, hint=hint)
    text = (_TEMPLATES / "launchers" / file).read_text(encoding="utf-8")
    words = {"name": name, "label": label, "config": config, "command": shown}
    for key, value in words.items():
        text = text.replace(f"{{{key}}}", value)
    started = [line.startswith(f"fivefold {command} ") for line in lines]
    at = started.index(True)
    sent = [line.format(**words) for line in submit]
    return file, text, [*lines[:at], *sent, *lines[at + 1 :]]
