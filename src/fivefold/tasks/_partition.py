"""The chunk size of the shortest iteration, by trying sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.errors import ConfigurationError
from fivefold.tasks._graph import TaskGraph
from fivefold.tasks._ordering import Ordering
from fivefold.tasks._schedule import TaskSchedule
from fivefold.tasks._scheduler import schedule_tasks


@dataclass(frozen=True)
class PartitionChoice:
    """The best chunk size and what was tried.

    Attributes:
        chunk_bytes: Largest chunk; None for whole tensors.
        schedule: Its schedule.
        tried: Iteration seconds by chunk size.

    Examples:
        >>> PartitionChoice(None, None, {None: 1.0}).tried[None]
        1.0
    """

    chunk_bytes: int | None
    schedule: TaskSchedule
    tried: dict[int | None, float]


def best_partition(
    graph: TaskGraph,
    *,
    ordering: Ordering = "priority",
    sizes: Sequence[int] | None = None,
    max_chunks: int = 20_000,
) -> PartitionChoice:
    """Try chunk sizes and keep the one of the shortest iteration; whole tensors are tried too.

    Args:
        graph: The tasks.
        ordering: Which of several waiting communications goes first.
        sizes: Chunk sizes in bytes; None tries halves of the largest communication.
        max_chunks: Sizes that would make more chunks than this are left out.

    Returns:
        The choice; of equal ones the largest chunks, which cost the least.

    Raises:
        ConfigurationError: A size is not positive.

    Examples:
        >>> from fivefold.tasks import LayerCost, iteration_graph
        >>> layer = LayerCost(forward_s=1.0, backward_s=2.0, gradient_bytes=8)
        >>> graph = iteration_graph([layer] * 3, cost_s_per_byte=0.5, latency_s=0.1)
        >>> best_partition(graph).chunk_bytes
        4
    """
    largest = max((task.size_bytes for task in graph.communication), default=0)
    if sizes is None:
        sizes = [largest >> shift for shift in range(largest.bit_length())]
    if any(size < 1 for size in sizes):
        raise ConfigurationError(f"chunk sizes must be positive; got {list(sizes)}")
    tried: dict[int | None, float] = {}
    best: tuple[int | None, TaskSchedule] | None = None
    for size in [None, *sorted(set(sizes), reverse=True)]:
        chunks = sum(len(task.chunks(size)) for task in graph.communication)
        if size is not None and chunks > max_chunks:
            break
        schedule = schedule_tasks(graph, ordering=ordering, chunk_bytes=size)
        tried[size] = schedule.iteration_s
        if best is None or schedule.iteration_s < best[1].iteration_s:
            best = size, schedule
    assert best is not None, "whole tensors are always tried"
    return PartitionChoice(best[0], best[1], tried)
