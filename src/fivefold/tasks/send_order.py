"""The order in which the chunks of gradient buckets are sent, planned and equal on all ranks.

Collectives must be issued in one order everywhere, or they meet the wrong partners. So the order is
not decided while sending, when ranks see different moments, but planned before from one rank's
measurements; every rank then follows the plan and waits where its gradients are late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fivefold.errors import ConfigurationError
from fivefold.tasks.graph import CommunicationTask, ComputeTask, Task, TaskGraph
from fivefold.tasks.scheduler import Ordering, schedule_tasks


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """Size and times of a gradient bucket."""

    size_bytes: int
    ready_s: float
    forward_s: float = 0.0


@dataclass(frozen=True)
class SendOrder:
    """Chunks in the order in which all ranks send them."""

    chunks: tuple[tuple[int, int], ...]
    chunk_bytes: int | None
    predicted_s: float


def plan_send_order(
    buckets: Sequence[BucketCost],
    *,
    cost_s_per_byte: float,
    latency_s: float = 0.0,
    ordering: Ordering = "priority",
    chunk_bytes: int | None = None,
    overlap_forward: bool = True,
) -> SendOrder:
    """Plan the order from what was measured."""
    in_order = all(before.ready_s <= after.ready_s for before, after in pairwise(buckets))
    if not buckets or not in_order:
        message = "buckets must be given in the order in which they become ready"
        raise ConfigurationError(message, hint="the last layers of the model come first")
    graph = _graph(buckets, cost_s_per_byte, latency_s, overlap_forward=overlap_forward)
    schedule = schedule_tasks(graph, ordering=ordering, chunk_bytes=chunk_bytes)
    sends = sorted(
        (span for span in schedule.spans if span.resource == "network"),
        key=lambda span: (span.start_s, span.end_s),
    )
    chunks = tuple((int(span.task_id.removeprefix("reduce ")), span.chunk) for span in sends)
    return SendOrder(chunks, chunk_bytes, schedule.end_s)


def _graph(
    buckets: Sequence[BucketCost],
    cost_s_per_byte: float,
    latency_s: float,
    *,
    overlap_forward: bool,
) -> TaskGraph:
    """Return a backward pass, the reductions, and the forward pass behind it."""
    last = len(buckets) - 1
    tasks: list[Task] = []
    ready_s = 0.0
    for number, bucket in enumerate(buckets):
        before = (f"backward {number - 1}",) if number else ()
        tasks.append(
            ComputeTask(
                task_id=f"backward {number}", duration_s=bucket.ready_s - ready_s, depends_on=before
            )
        )
        ready_s = bucket.ready_s
    reductions = tuple(f"reduce {number}" for number in range(len(buckets)))
    for number in reversed(range(len(buckets))):  # the forward pass needs the last bucket first
        needed = (f"reduce {number}",) if overlap_forward else reductions
        before = (f"forward {number + 1}",) if number < last else (f"backward {last}",)
        tasks.append(
            ComputeTask(
                task_id=f"forward {number}",
                duration_s=buckets[number].forward_s,
                depends_on=(*before, *needed),
            )
        )
    tasks += [
        CommunicationTask(
            task_id=f"reduce {number}",
            kind="all_reduce",
            size_bytes=bucket.size_bytes,
            cost_s_per_byte=cost_s_per_byte,
            latency_s=latency_s,
            depends_on=(f"backward {number}",),
        )
        for number, bucket in enumerate(buckets)
    ]
    return TaskGraph(tuple(tasks))
