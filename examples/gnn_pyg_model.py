"""An unchanged PyTorch Geometric model, trained from disk: only the loader is another one.

At the end all nodes are judged by all of their neighbours, layer by layer, in 3 MB of memory.

python examples/gnn_pyg_model.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.nn import functional
from torch_geometric.nn import GraphSAGE

from fivefold.gnn.data import Dataset, generate_graph
from fivefold.gnn.loading import DiskLoader
from fivefold.gnn.storage import Container
from fivefold.gnn.training import infer_layers

EPOCHS = 5


def main() -> None:
    """Train PyG's own GraphSAGE on batches that come from disk."""
    torch.manual_seed(0)
    with (
        tempfile.TemporaryDirectory() as name,
        generate_graph(Path(name) / "graph", nodes=20_000, dim=64, seed=0) as dataset,
    ):
        model = GraphSAGE(64, 64, num_layers=2, out_channels=dataset.num_classes)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with DiskLoader.from_dataset(dataset, [5, 5], batch_size=256, budgets="3 MB") as loader:
            for epoch in range(EPOCHS):
                total = 0.0
                for batch in loader:
                    out = model(batch.x, batch.edge_index)[: batch.batch_size]
                    loss = functional.cross_entropy(out, batch.y[: batch.batch_size])
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    total += loss.item()
                print(f"epoch {epoch + 1}  loss {total / len(loader):.4f}")
            statistics = loader.statistics()
        print(
            f"read {statistics.bytes_read / 1e6:.1f} MB, {statistics.amplification:.2f} times the "
            f"cold rows; {statistics.hit_rates['host']:.0%} of all rows came from memory"
        )
        judge(model, dataset, Path(name))


def judge(model: torch.nn.Module, dataset: Dataset, folder: Path) -> None:
    """The class of every node, from all of its neighbours."""
    scores = infer_layers(model, dataset, folder / "scores", memory_bytes=3_000_000)
    with Container.open(scores.path) as file:
        found = file.read("x").argmax(axis=1)
    right = (found == dataset.labels)[dataset.test]
    print(f"{scores.explain()}\ntest accuracy {right.mean():.3f}")


if __name__ == "__main__":
    main()
