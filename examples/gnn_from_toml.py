"""The whole way through the command line's own functions: graph, packing, training, inference.

python examples/gnn_from_toml.py

The same as the four commands at the top of examples/gnn_train.toml, in a temporary folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fivefold.gnn.data import generate_graph
from fivefold.gnn.training import infer_run, load_gnn_config, train_graph


def main() -> None:
    """Generate a small graph, train on its packed rows, then score all nodes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate_graph(folder / "graph", nodes=20_000, dim=64, seed=0).close()
        config = load_gnn_config(
            Path(__file__).parent / "gnn_train.toml",
            [f"data.path={folder / 'graph'}", f"run.output={folder / 'run'}"],
        )
        result = train_graph(config, show=print)
        print(result.summary().partition(";")[0])

        everything = infer_run(folder / "run", memory_bytes=50_000_000)
        print(everything.outputs.explain())
        print(f"test accuracy from all neighbours: {everything.accuracy['test']:.4f}")


if __name__ == "__main__":
    main()
