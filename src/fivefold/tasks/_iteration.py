"""Graphs of whole iterations from the costs of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.errors import ConfigurationError
from fivefold.tasks._graph import CommunicationTask, ComputeTask, Task, TaskGraph


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What a layer computes and sends in one iteration, for one rank.

    Args:
        forward_s: Seconds of its forward pass.
        backward_s: Seconds of its backward pass.
        gradient_bytes: Bytes of its gradients, all-reduced after its backward pass; 0 for none.
        all_to_all_bytes: Bytes of one all-to-all (an expert layer does two per pass: tokens out
            and back); 0 for none.

    Examples:
        >>> LayerCost(forward_s=1e-3, backward_s=2e-3, gradient_bytes=4_000_000).gradient_bytes
        4000000
    """

    forward_s: float
    backward_s: float
    gradient_bytes: int = 0
    all_to_all_bytes: int = 0


def iteration_graph(
    layers: Sequence[LayerCost],
    *,
    cost_s_per_byte: float,
    latency_s: float = 0.0,
    bucket_bytes: int | None = None,
    iterations: int = 3,
    split_channels: bool = False,
) -> TaskGraph:
    """Data-parallel iterations one after the other, layer by layer.

    The forward pass of a layer waits for its gradients of the iteration before; the all-to-alls of
    an expert layer stand between the halves of its passes. Gradients are fused into buckets as
    DDP fuses them: in the order of the backward pass, until a bucket is full.

    Args:
        layers: From the input to the output.
        cost_s_per_byte: Seconds per byte of a communication.
        latency_s: Seconds of each beside its bytes.
        bucket_bytes: Bytes from which a bucket is full; None reduces each layer by itself.
        iterations: How many to unroll; three reach the steady state.
        split_channels: Whether all-to-alls have a channel of their own.

    Returns:
        The graph; its marks are the ends of the backward passes.

    Raises:
        ConfigurationError: There is no layer or no iteration, or the bucket is not positive.

    Examples:
        >>> layer = LayerCost(forward_s=1.0, backward_s=2.0, gradient_bytes=4)
        >>> graph = iteration_graph([layer, layer], cost_s_per_byte=0.5, iterations=1)
        >>> [task.task_id for task in graph.communication]
        ['reduce 1 of 0', 'reduce 0 of 0']
    """
    if not layers or iterations < 1:
        raise ConfigurationError(
            f"a graph needs layers and iterations; got {len(layers)} and {iterations}"
        )
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ConfigurationError(
            f"bucket_bytes must be at least 1; got {bucket_bytes}", hint="None for no buckets"
        )
    builder = _Builder(layers, cost_s_per_byte, latency_s, bucket_bytes, split_channels)
    for number in range(iterations):
        builder.add(number)
    return TaskGraph(tuple(builder.tasks), marks=tuple(builder.marks))


class _Builder:
    def __init__(
        self,
        layers: Sequence[LayerCost],
        cost_s_per_byte: float,
        latency_s: float,
        bucket_bytes: int | None,
        split_channels: bool,  # noqa: FBT001 - private
    ) -> None:
        self._layers = layers
        self._cost, self._latency = cost_s_per_byte, latency_s
        self._bucket_bytes = bucket_bytes
        self._exchange_channel = "exchange" if split_channels else "network"
        self.tasks: list[Task] = []
        self.marks: list[str] = []
        self._last: str | None = None
        self._reduced: dict[int, str] = {}  # layer to the task that brings its gradients

    def add(self, number: int) -> None:
        """One more iteration."""
        for index, layer in enumerate(self._layers):
            awaited = self._reduced.get(index)
            self._pass(f"forward {index} of {number}", layer, layer.forward_s, awaited)
        self._reduced = {}
        bucket: list[int] = []
        for index in reversed(range(len(self._layers))):
            layer = self._layers[index]
            self._pass(f"backward {index} of {number}", layer, layer.backward_s, None)
            if layer.gradient_bytes:
                bucket.append(index)
            held = sum(self._layers[i].gradient_bytes for i in bucket)
            if bucket and (self._bucket_bytes is None or held >= self._bucket_bytes or index == 0):
                self._reduce(bucket, held, number)
                bucket = []
        if bucket:  # the first layers have no gradients
            self._reduce(bucket, sum(self._layers[i].gradient_bytes for i in bucket), number)
        assert self._last is not None, "a pass was added"
        self.marks.append(self._last)

    def _pass(self, name: str, layer: LayerCost, duration_s: float, awaited: str | None) -> None:
        first = tuple(task for task in (self._last, awaited) if task is not None)
        if not layer.all_to_all_bytes:
            self._compute(name, duration_s, first)
            return
        half_s = duration_s / 2
        self._compute(f"{name}, before", half_s / 2, first)
        self._exchange(f"{name}, dispatch", layer)
        self._compute(f"{name}, experts", half_s, (self._last,))
        self._exchange(f"{name}, combine", layer)
        self._compute(name, half_s / 2, (self._last,))

    def _compute(self, name: str, duration_s: float, after: tuple[str | None, ...]) -> None:
        names = tuple(task for task in after if task is not None)
        self.tasks.append(ComputeTask(task_id=name, duration_s=duration_s, depends_on=names))
        self._last = name

    def _exchange(self, name: str, layer: LayerCost) -> None:
        assert self._last is not None, "tokens come from a compute task"
        self.tasks.append(
            CommunicationTask(
                task_id=name,
                kind="all_to_all",
                size_bytes=layer.all_to_all_bytes,
                cost_s_per_byte=self._cost,
                latency_s=self._latency,
                resource=self._exchange_channel,
                depends_on=(self._last,),
            )
        )
        self._last = name

    def _reduce(self, bucket: list[int], size_bytes: int, number: int) -> None:
        assert self._last is not None, "gradients come from a backward pass"
        name = f"reduce {'-'.join(map(str, _ends(bucket)))} of {number}"
        self.tasks.append(
            CommunicationTask(
                task_id=name,
                kind="all_reduce",
                size_bytes=size_bytes,
                cost_s_per_byte=self._cost,
                latency_s=self._latency,
                depends_on=(self._last,),
            )
        )
        self._reduced |= dict.fromkeys(bucket, name)


def _ends(bucket: list[int]) -> list[int]:
    return [bucket[0]] if len(bucket) == 1 else [bucket[0], bucket[-1]]
