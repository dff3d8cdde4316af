"""``fivefold gnn``: graph neural networks whose features do not fit in memory."""

from __future__ import annotations

from fivefold.cli import _gnn_data, _gnn_store, _gnn_train
from fivefold.cli._options import command_group

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
        "train": _gnn_train.train_command,
        "infer": _gnn_train.infer_command,
    },
)
