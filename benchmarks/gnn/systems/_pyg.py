"""PyG's own way out of memory: ``data.x`` is a tensor over a memory map, under a ``DataLoader``.

``NeighborLoader`` is torch's ``DataLoader``, whose worker processes sample a batch and take its
rows with PyG's ``index_select`` into shared memory. Its sampler needs extensions that have no
wheels, so the samples come from the file, as for all systems; the rest is PyG's and torch's own
code. PyG gives no advice for the map; ours is ``MADV_RANDOM``, without which a row costs megabytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from benchmarks.gnn.systems._simple import requested_rows
from benchmarks.gnn.systems._system import Preparation, SystemBatch, SystemStatistics, Workload

__all__ = ["PygMappedSystem"]

# With three batches waiting for each: as many in flight as the other peers' pipelines hold.
_WORKERS, _WAITING = 2, 3


class PygMappedSystem:
    """Rows taken by PyG in the worker processes of a ``DataLoader``.

    Args:
        workload: What to run on; the processes share its threads.

    Example:
        >>> PygMappedSystem.__name__
        'PygMappedSystem'
    """

    name = "PyG mmap"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._statistics = SystemStatistics()
        self._places: list[int] = []
        self._loader: Any = None

    def prepare(self) -> Preparation:
        """Do nothing: the page cache is all it has."""
        return Preparation()

    def seek(self, start: int) -> None:
        """Start the processes, and take the batch before, so that the page cache holds something.

        They end with the epoch: pages that are mapped would survive a drop of the page cache.
        """
        self._loader = self._make_loader()
        for _ in self._run(range(max(0, start - 1), start)):
            pass

    def epoch(
        self, number: int, *, start: int = 0, stop: int | None = None
    ) -> Iterator[SystemBatch]:
        """Hand out batches in the order of the sample file."""
        del number
        if self._loader is None:
            self.seek(0)
        yield from self._run(
            range(start, self.workload.samples.num_batches if stop is None else stop)
        )
        self._loader = None

    def _run(self, places: range) -> Iterator[SystemBatch]:
        self._places[:] = places
        for place, batch_size, ids, rows, edges in self._loader:
            self._statistics.rows_requested += len(ids)
            yield SystemBatch(place, ids.numpy(), rows.numpy(), batch_size, edges.numpy)

    def _make_loader(self) -> Any:
        import torch  # noqa: PLC0415 - the other systems' processes do without it
        from torch.utils.data import DataLoader  # noqa: PLC0415 - as above

        work, samples = self.workload, self.workload.samples
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is deprecated, and that the map is only read
            from torch_geometric.loader.utils import index_select  # noqa: PLC0415 - as above

            x = torch.from_numpy(work.features.memory_map(work.section, advice="random"))

        def collate(batch: list[int]) -> tuple[int, int, Any, Any, Any]:
            sample = samples.batch(batch[0])
            ids = torch.from_numpy(sample.node_ids)
            edges = torch.from_numpy(sample.edge_index())
            return sample.number, sample.batch_size, ids, index_select(x, ids), edges

        return DataLoader(
            range(samples.num_batches),  # type: ignore[arg-type]
            sampler=self._places,
            collate_fn=collate,
            num_workers=_WORKERS,
            prefetch_factor=_WAITING,
            persistent_workers=True,
            worker_init_fn=lambda _: torch.set_num_threads(max(1, work.threads // _WORKERS)),
            multiprocessing_context="fork",
        )

    def work(self, start: int, stop: int) -> int:
        """Rows."""
        return requested_rows(self.workload, start, stop)

    def statistics(self) -> SystemStatistics:
        """Return the running totals; what the kernel read for the map is not known to us."""
        return self._statistics

    def close(self) -> None:
        """End the processes, and with them the map."""
        self._loader = None
