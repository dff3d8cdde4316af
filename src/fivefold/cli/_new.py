"""``fivefold new``: a small commented configuration for a problem, and what to type next."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli._outputs import require_writable
from fivefold.errors import ConfigurationError
from fivefold.files import write_atomically

_NETWORK = """\
# A small language model that hides its communication over a slow network.
[run]
output = "runs/{name}"   # metrics, checkpoints, report
steps = 100

[data]
path = "stdlib"          # or a folder of your texts
sequence_length = 128

[model]
layers = 4
width = 192
heads = 4

[optim]
batch_size = 8           # sequences of a rank in a step

[sync]
method = "delay_corrected"   # "ddp" for the usual all-reduce in every step
tau = 8                  # steps between synchronisations; "auto" for as few as hide the all-reduce
codec = "fp32"           # or "bf16", "int8": smaller messages
"""
_EXPERTS = """\
# A small mixture of experts, its experts shared out over two ranks.
[run]
output = "runs/{name}"
steps = 100

[data]
sequence_length = 128

[model]
layers = 4
width = 128
heads = 4

[model.moe]
experts = 8
top_k = 2                # experts of a token
expert_parallel = 2      # ranks that share the experts out
balance_loss = 0.01      # more of it keeps experts from being idle

[optim]
batch_size = 4

[sync]
method = "ddp"
"""
_GRAPH = """\
# A graph neural network whose features stay on disk.
[data]
path = "graphs/{name}"   # what fivefold gnn generate or ingest wrote

[run]
output = "runs/{name}"
mode = "disk"            # "memory" to compare
epochs = 2

[sampling]
fanouts = [5, 5]         # neighbours per hop
batch_size = 256

[budgets]
host = "8 MB"            # memory for rows and buffers: what your machine can spare
disk = "1 GB"

[model]
name = "sage"            # "gat", "gcn"
hidden_dim = 64
"""
_TOPOLOGY = """\
# Two jobs that share a network.
[placement]
policy = "packed"        # or "random"

[[jobs]]
id = "large"
gpus = 8
compute = "0.4 s"        # of an iteration, forward and backward
gradients = "3 GB"       # all-reduced in an iteration
iterations = 20

[[jobs]]
id = "small"
gpus = 4
compute = "0.2 s"
gradients = "0.8 GB"
iterations = 20
"""
_JOB = """\
# What is trained, and on which clusters it could be: see cluster.toml.
model = "llama3-8b"      # a preset, a Hugging Face config.json, or a [model] table
gpus = 64
global_batch = 256       # samples of an iteration

[search]
zero = [1, 3]            # left out: all
recompute = ["none", "selective"]
"""
_CLUSTER = """\
# A cluster: a known GPU and its software, and what differs.
base = "h100-nemo"
gpus = 64

[[tier]]
name = "cluster"
bandwidth = "3.125 GB/s" # of each GPU between nodes: 200 Gbit/s shared by eight
"""


class Problem(StrEnum):
    """What someone comes with."""

    NETWORK = "network"
    EXPERTS = "experts"
    GRAPH = "graph"
    TOPOLOGY = "topology"
    CLUSTER = "cluster"


_FILES: dict[Problem, dict[str, str]] = {
    Problem.NETWORK: {"train.toml": _NETWORK},
    Problem.EXPERTS: {"train.toml": _EXPERTS},
    Problem.GRAPH: {"gnn.toml": _GRAPH},
    Problem.TOPOLOGY: {"jobs.toml": _TOPOLOGY},
    Problem.CLUSTER: {"job.toml": _JOB, "cluster.toml": _CLUSTER},
}
_NEXT: dict[Problem, tuple[str, ...]] = {
    Problem.NETWORK: (
        "fivefold train {name}/train.toml --nproc 2",
        "fivefold explain runs/{name}",
    ),
    Problem.EXPERTS: (
        "fivefold train {name}/train.toml --nproc 2",
        "fivefold report runs/{name}",
    ),
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
    for file in _FILES[problem]:
        if (folder / file).exists():
            message = f"{folder / file} is there already"
            raise ConfigurationError(message, hint="choose another name, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in _FILES[problem].items():
        write_atomically(folder / file, text.replace("{name}", name))
        typer.echo(f"written: {folder / file}", err=True)
    typer.echo("next:", err=True)
    for line in _NEXT[problem]:
        typer.echo(line.format(name=name))
