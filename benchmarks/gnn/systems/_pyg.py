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

    def prepare(self) -> Preparation:
        """Do nothing: the page cache is all it has."""
        return Preparation()

    def seek(self, start: int) -> None:
        """Take the batch before, so that the page cache holds something."""
        if start:
            for _ in self.epoch(0, start=start - 1, stop=start):
                pass

    def epoch(
        self, number: int, *, start: int = 0, stop: int | None = None
    ) -> Iterator[SystemBatch]:
        """Hand out batches in the order of the sample file."""
        import torch  # noqa: PLC0415 - the other systems' processes do without it
        from torch.utils.data import DataLoader  # noqa: PLC0415 - as above

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecations in torch, on import
            from torch_geometric.loader.utils import index_select  # noqa: PLC0415 - as above

        del number
        work, samples = self.workload, self.workload.samples
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the map is only read
            x = torch.from_numpy(work.features.memory_map(work.section, advice="random"))

        def collate(batch: list[int]) -> tuple[int, int, Any, Any, Any]:
            sample = samples.batch(batch[0])
            ids = torch.from_numpy(sample.node_ids)
            edges = torch.from_numpy(sample.edge_index())
            return sample.number, sample.batch_size, ids, index_select(x, ids), edges

        loader: Any = DataLoader(
            range(start, samples.num_batches if stop is None else stop),  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=_WORKERS,
            prefetch_factor=_WAITING,
            worker_init_fn=lambda _: torch.set_num_threads(max(1, work.threads // _WORKERS)),
            multiprocessing_context="fork",
        )
        for place, batch_size, ids, rows, edges in loader:
            self._statistics.rows_requested += len(ids)
            yield SystemBatch(place, ids.numpy(), rows.numpy(), batch_size, edges.numpy)

    def work(self, start: int, stop: int) -> int:
        """Rows."""
        return requested_rows(self.workload, start, stop)

    def statistics(self) -> SystemStatistics:
        """Return the running totals; what the kernel read for the map is not known to us."""
        return self._statistics

    def close(self) -> None:
        """Do nothing: the map goes with the epoch."""
