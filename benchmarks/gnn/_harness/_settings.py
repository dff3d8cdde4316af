"""What is measured: settings of graph, rows, memory, and who takes part."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["BY_DEFAULT", "SETTINGS", "Setting", "quick"]

ALL = (
    "in memory", "mmap", "mmap + degree cache", "PyG mmap", "online LRU", "Ginex",
    "MariusGNN sequential", "MariusGNN dispersed", "DiskGNN", "ours static", "ours belady",
)  # fmt: skip
SOME = ("mmap", "PyG mmap", "online LRU", "Ginex", "DiskGNN", "ours static")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One table of the benchmark.

    Attributes:
        name: In the results.
        nodes: Of the generated graph.
        dim: float32 values per row.
        batches: Mini-batches per epoch, which sets the number of training nodes.
        share: Of the features that the cache holds.
        systems: Who takes part.
        fanouts: Per hop.
        batch_size: Seeds per batch.
        train: Whether GraphSAGE is trained, or batches are only fetched.
        speed_up: Target against Ginex and the memory map; None for none.
        plain_rows: Whether the trap of a plain memory map is shown, on few rows.
    """

    name: str
    nodes: int
    dim: int
    batches: int
    share: float = 0.1
    systems: tuple[str, ...] = SOME
    fanouts: tuple[int, ...] = (10, 10, 10)
    batch_size: int = 1024
    train: bool = False
    speed_up: float | None = None
    plain_rows: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return 4 * self.dim

    @property
    def graph(self) -> str:
        """Name of the generated graph: settings of equal names have the same nodes and rows."""
        return f"{self.nodes}-{self.dim}"

    @property
    def case(self) -> str:
        """How the results call it."""
        what = "full epoch" if self.train else "data path"
        return (
            f"{what}, {self.row_bytes} B rows, {self.nodes / 1e6:g} M nodes, {self.batches} "
            f"batches of {self.batch_size}, fan-out {','.join(map(str, self.fanouts))}, "
            f"cache {100 * self.share:g} %"
        )


SETTINGS = (
    Setting(
        name="published", nodes=10_000_000, dim=128, batches=195, systems=ALL, speed_up=8.0,
        plain_rows=True,
    ),
    Setting(
        name="more-memory", nodes=10_000_000, dim=128, batches=195, share=0.2,
        systems=("Ginex", "DiskGNN", "ours static"),
    ),
    Setting(
        name="full-epoch", nodes=10_000_000, dim=128, batches=195, fanouts=(10, 10), train=True,
        systems=("in memory", "online LRU", "Ginex", "DiskGNN", "ours static"),
    ),
    # Batches are smaller where rows are larger: a few of them must fit the 512 MB.
    Setting(name="rows-1k", nodes=4_000_000, dim=256, batches=192, batch_size=192),
    Setting(name="rows-2k", nodes=4_000_000, dim=512, batches=256, batch_size=80),
    Setting(
        name="rows-4k", nodes=4_000_000, dim=1024, batches=288, batch_size=40, speed_up=3.0
    ),
)  # fmt: skip
BY_DEFAULT = ("published", "more-memory", "full-epoch", "rows-1k", "rows-4k")


def quick(setting: Setting) -> Setting:
    """The same on a small graph, where nothing is out of core: for a look at the script."""
    return replace(setting, nodes=min(setting.nodes, 30_000), batches=10, batch_size=32)
