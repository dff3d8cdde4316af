"""Graphs on a GPU: seconds of an epoch from disk, beside ours and others with all in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu._stage import Metric, Part, Report, Stage

__all__ = ["GRAPHS"]

_EPOCH, _PREPARE, _RIGHT = "seconds of an epoch", "seconds of preparation", "test accuracy"
_SHARE = "bytes read in a second of the epochs, over the disk's rate"
_DRAWS = "pyg_lib or torch_sparse"  # what NeighborLoader draws with
_MODES = {"disk": "from disk, a cache on the device", "memory": "features in memory"}
_REAL = {
    "nodes": 2_000_000, "dim": 128, "batch_size": 1024, "fanouts": (10, 10), "epochs": 4,
    "hidden_dim": 128, "device": "cuda", "device_bytes": 200_000_000, "host_bytes": 600_000_000,
    "workers": 8,
}  # fmt: skip
_TINY = {
    "nodes": 3000, "dim": 16, "batch_size": 64, "fanouts": (4, 3), "epochs": 3, "hidden_dim": 32,
    "device": "cpu", "device_bytes": 0, "host_bytes": 4_000_000,
    "workers": 0,
}  # fmt: skip


def _train(report: Report, sizes: Mapping[str, Any]) -> None:
    if "loader" in sizes:
        _train_peer(report, sizes)
        return
    from fivefold.gnn.data import generate_graph  # noqa: PLC0415 - not in the parent
    from fivefold.gnn.storage import probe_disk  # noqa: PLC0415
    from fivefold.gnn.training import GnnConfig, train_graph  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph = folder / "graph"
        generate_graph(graph, nodes=sizes["nodes"], dim=sizes["dim"], classes=8).close()
        disk = probe_disk(folder)
        for mode, words in _MODES.items():
            tables = {
                "run": {
                    "output": folder / mode, "device": sizes["device"], "epochs": sizes["epochs"],
                    "mode": mode, "validate_every_epochs": 0,
                },
                "data": {"path": graph, "store": str(folder / "store")},
                "sampling": {"fanouts": sizes["fanouts"], "batch_size": sizes["batch_size"]},
                "budgets": {
                    "device": sizes["device_bytes"], "host": sizes["host_bytes"],
                    "disk": 40_000_000_000,
                },
                "model": {"hidden_dim": sizes["hidden_dim"]},
            }  # fmt: skip
            config = GnnConfig.model_validate(tables)
            result = train_graph(config)
            case = f"{report.step}, {words}"
            report.row(_RIGHT, result.test_accuracy or 0.0, case=case)
            apart = ("validation", "checkpoint")
            trained_s = result.wall_s - sum(result.seconds.get(name, 0.0) for name in apart)
            report.row(
                _EPOCH, trained_s / result.epochs, case=case, seconds=result.seconds,
                data=result.data,
            )  # fmt: skip
            report.row(_PREPARE, sum(result.prepare_s.values()), case=case)
            bytes_read = result.data.get("bytes_read")
            if bytes_read is not None:
                rate = bytes_read / trained_s / disk.sequential_read_bytes_per_s
                report.row(_SHARE, rate, case=case)


def _train_peer(report: Report, sizes: Mapping[str, Any]) -> None:
    from benchmarks.gpu._graph_peers import train_in_memory  # noqa: PLC0415 - not in the parent
    from fivefold.gnn.data import generate_graph  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as name:
        made = generate_graph(
            Path(name, "graph"), nodes=sizes["nodes"], dim=sizes["dim"], classes=8
        )
        with made as dataset:
            found = train_in_memory(dataset, sizes["loader"], sizes)
    report.row(_RIGHT, found.test_accuracy)
    for seconds in found.seconds[1:]:  # the first warms up
        report.row(_EPOCH, seconds)


def _parts(name: str, sizes: Mapping[str, Any]) -> list[Part]:
    """Return ours, then the peers that are there."""
    peers = {"numpy's sampler": (), "PyG's NeighborLoader": ("torch_geometric", _DRAWS)}
    return [Part(name=f"{name}, ours", limit_s=240.0, sizes=sizes)] + [
        Part(
            name=f"{name}, {loader}, features in memory", limit_s=180.0, packages=packages,
            sizes={**sizes, "loader": loader},
        )
        for loader, packages in peers.items()
    ]  # fmt: skip


GRAPHS = Stage(
    key="graphs",
    minutes=3.0,
    decides="Is a GPU fed from disk as fast as from memory: GraphSAGE, fan-out 10 and 10, "
    "2 million nodes of 128 features?",
    topic="gpu/graphs",
    run=_train,
    real=_parts("2 M nodes", _REAL),
    tiny=_parts("3000 nodes", _TINY),
    metrics=[
        Metric(name=_EPOCH, unit="s"),
        Metric(name=_PREPARE, unit="s"),
        Metric(name=_SHARE, unit="ratio"),
        Metric(name=_RIGHT, unit="ratio", right=(0.2, 1.0)),  # of 8 classes: chance is 0.125
    ],
    packages=("numpy", "pydantic", "numba", "scipy", "pyarrow"),
)
