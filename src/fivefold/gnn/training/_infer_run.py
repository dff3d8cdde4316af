"""Inference of a run of ``fivefold gnn train``: its newest checkpoint, all nodes, its accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fivefold.errors import CheckpointError, DataError
from fivefold.gnn.storage import Container
from fivefold.gnn.training._graph import Graph, model_for, open_graph
from fivefold.gnn.training._inference import InferenceResult, infer_layers
from fivefold.gnn.training.config import Backend, GnnConfig, load_gnn_config
from fivefold.gnn.training.models import LayeredModel, TypedSAGE
from fivefold.runs import write_json
from fivefold.runs.checkpoints import newest_checkpoint, read_checkpoint

_CHUNK_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInference:
    """Outputs and accuracy of inference over a whole graph.

    Args:
        outputs: Where the class scores of all nodes are, and what each layer took.
        accuracy: Accuracy per split, from all neighbours; splits without labels are left out.
        step: Optimizer step of the checkpoint.
    """

    outputs: InferenceResult
    accuracy: dict[str, float]
    step: int

    def record(self) -> dict[str, Any]:
        """Return the content of inference.json."""
        layers = [dataclasses.asdict(layer) for layer in self.outputs.layers]
        facts = {"step": self.step, "accuracy": self.accuracy, "layers": layers}
        return {"schema": 1, "path": str(self.outputs.path), **facts}


def infer_run(
    run: str | Path,
    folder: str | Path | None = None,
    *,
    memory_bytes: int = 1_000_000_000,
    keep_layers: bool = False,
    backend: Backend = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> RunInference:
    """Compute the class scores of all nodes by a run's newest checkpoint, out of core.

    Args:
        run: The run's folder.
        folder: Where the outputs go; None for ``inference/step-N`` in the run's folder. The same
            call resumes what is unfinished there.
        memory_bytes: Budget of rows, sums and buffers.
        keep_layers: Keep the hidden layers' outputs.
        backend: Reading engine.
        progress: Called with targets done and targets in all.

    Returns:
        Outputs and accuracy; also written to ``inference.json`` beside the outputs.

    Raises:
        CheckpointError: There is no checkpoint, or none is whole.
        DataError: The run or its data set is missing, or the data set is another one.
        InfeasibleError: The budget is too small.
        StorageError: The disk is full or refuses; the same call goes on afterwards.
    """
    run = Path(run)
    if not (run / "config.toml").exists():
        message = f"{run} holds no run of fivefold gnn train"
        raise DataError(message, hint="give the folder of a run, the run.output of its config")
    config = load_gnn_config(run / "config.toml")
    if not config.data.path.is_absolute() and not config.data.path.exists():
        raise DataError(
            f"the run's data set {config.data.path} is not in the current folder",
            hint=f"run this where the run was started, or set data.path in {run / 'config.toml'}",
        )
    torch.set_num_threads(config.run.threads)
    with open_graph(config) as dataset:
        model, step = load_model(config, dataset)
        place = run / "inference" / f"step-{step:08d}" if folder is None else Path(folder)
        outputs = infer_layers(
            model,
            dataset,
            place,
            memory_bytes=memory_bytes,
            mapped=config.data.mapped,
            keep_layers=keep_layers,
            backend=backend,
            progress=progress,
        )
        accuracy = _accuracy(outputs.path, dataset)
    result = RunInference(outputs=outputs, accuracy=accuracy, step=step)
    write_json(place / "inference.json", result.record())
    return result


def load_model(config: GnnConfig, dataset: Graph) -> tuple[LayeredModel | TypedSAGE, int]:
    """Load the model of a run's newest checkpoint, in evaluation mode, and its step."""
    found = newest_checkpoint(config.run.output)
    if found is None:
        message = f"{config.run.output} has no checkpoint"
        raise CheckpointError(message, hint="train first, or give another run")
    path, description = found[0], found[1]["description"]
    written = config.model_dump(mode="json", include={"model"})["model"]
    if description["model"] != written:
        message = f"{path} was written with model {description['model']}; now it is {written}"
        raise CheckpointError(message, hint="use the config.toml that the run was started with")
    if description["data"]["fingerprint"] != dataset.fingerprint:
        message = f"{path} was trained on other data than {dataset.folder}"
        raise DataError(message, hint="set data.path in the run's config.toml to its data set")
    model = model_for(dataset, config)
    model.load_state_dict(read_checkpoint(path, rank=0)["model"])
    return model.eval(), int(found[1]["step"])


def _accuracy(path: Path, dataset: Graph) -> dict[str, float]:
    if not dataset.has_labels:
        return {}
    count = len(dataset.labels)
    right = np.zeros(count, np.bool_)
    with Container.open(path) as outputs:
        for low in range(0, count, _CHUNK_ROWS):
            rows = outputs.read("x", low, min(low + _CHUNK_ROWS, count))
            right[low : low + len(rows)] = rows.argmax(1) == dataset.labels[low : low + len(rows)]
    splits = {"train": dataset.train, "valid": dataset.valid, "test": dataset.test}
    known = {name: ids[dataset.labels[ids] >= 0] for name, ids in splits.items()}
    return {name: float(right[ids].mean()) for name, ids in known.items() if len(ids)}
