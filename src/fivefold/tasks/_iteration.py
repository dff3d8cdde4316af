"""Graphs of data-parallel iterations from the costs of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fivefold.collectives.pricing.fabric import Quote
from fivefold.errors import ConfigurationError
from fivefold.tasks._graph import CommunicationTask, ComputeTask, Task, TaskGraph


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What a layer computes and sends in one iteration, for one rank.

    Args:
        forward_s: Seconds of its forward pass.
        backward_s: Seconds of its backward pass.
        gradient_bytes: Bytes of its gradients, all-reduced after its backward pass; 0 for none.
        all_to_all_bytes: Bytes of one all-to-all (an expert layer does two per pass: dispatch and
            combine); 0 for none.
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
) -> TaskGraph:
    """Return data-parallel iterations one after the other, layer by layer.

    The forward pass of a layer waits for its gradients of the iteration before; the all-to-alls of
    an expert layer stand between the parts of its passes. Gradients are fused into buckets as
    DDP fuses them: in the order of the backward pass, until a bucket is full.

    Args:
        layers: From the input to the output.
        cost_s_per_byte: Seconds per byte of a communication.
        latency_s: Seconds of each beside its bytes.
        bucket_bytes: Bytes from which a bucket is full; None reduces each layer by itself.
        iterations: How many to unroll; three reach the steady state.

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
    builder = _Builder(layers, lambda _kind, _size: (latency_s, cost_s_per_byte), bucket_bytes)
    marks = []
    for number in range(iterations):
        builder.forward(f" of {number}", overlap=True)
        builder.backward(f" of {number}")
        marks.append(builder.last)
    return TaskGraph(tuple(builder.tasks), marks=tuple(marks))


def rotated_iteration(
    layers: Sequence[LayerCost], quote: Quote, *, bucket_bytes: int | None, overlap_forward: bool
) -> TaskGraph:
    """Return one iteration that begins with the backward pass and ends with the forward pass.

    So the overlap of reductions with the next forward pass lies within one iteration, and
    iterations can simply follow one another.

    Args:
        layers: From the input to the output.
        quote: Price of a collective.
        bucket_bytes: Bytes from which a bucket is full; None reduces each layer by itself, 0 all
            of them together.
        overlap_forward: Whether a layer's forward pass waits for its own gradients only.

    Examples:
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10)
        >>> graph = rotated_iteration([layer] * 2, lambda kind, size: 0.0, bucket_bytes=None,
        ...                           overlap_forward=True)
        >>> [task.task_id for task in graph.tasks]
        ['backward 1', 'reduce 1', 'backward 0', 'reduce 0', 'forward 0', 'forward 1']
    """
    builder = _Builder(layers, lambda kind, size: (quote(kind, size), 0.0), bucket_bytes)
    builder.backward()
    builder.forward(overlap=overlap_forward)
    return TaskGraph(tuple(builder.tasks))


def bucket_is_full(bucket_bytes: int | None, held_bytes: int) -> bool:
    """Return whether gradients that wait are sent now: None always, 0 never."""
    return bucket_bytes is None or 0 < bucket_bytes <= held_bytes


def bucket_name(bucket: Sequence[int]) -> str:
    """First and last layer of a bucket."""
    return f"{bucket[0]}" if len(bucket) == 1 else f"{bucket[0]}-{bucket[-1]}"


class _Builder:
    """Adds passes, each waiting for the one before.

    ``price`` has latency and cost per byte of a communication.
    """

    def __init__(
        self,
        layers: Sequence[LayerCost],
        price: Callable[[str, int], tuple[float, float]],
        bucket_bytes: int | None,
    ) -> None:
        self._layers, self._price, self._bucket_bytes = layers, price, bucket_bytes
        self.tasks: list[Task] = []
        self.last = ""
        self._reduced: dict[int, str] = {}  # layer to the task that brings its gradients

    def forward(self, suffix: str = "", *, overlap: bool) -> None:
        everything = tuple(dict.fromkeys(self._reduced.values()))
        for index, layer in enumerate(self._layers):
            own = (self._reduced[index],) if index in self._reduced else ()
            awaited = own if overlap else everything
            self._pass(f"forward {index}{suffix}", layer, layer.forward_s, awaited)

    def backward(self, suffix: str = "") -> None:
        self._reduced = {}
        bucket: list[int] = []
        for index in reversed(range(len(self._layers))):
            layer = self._layers[index]
            self._pass(f"backward {index}{suffix}", layer, layer.backward_s)
            if layer.gradient_bytes:
                bucket.append(index)
            held = sum(self._layers[i].gradient_bytes for i in bucket)
            if bucket and (index == 0 or bucket_is_full(self._bucket_bytes, held)):
                name = f"reduce {bucket_name(bucket)}{suffix}"
                self._communicate(name, "all_reduce", held)
                self._reduced |= dict.fromkeys(bucket, name)
                bucket = []

    def _pass(
        self, name: str, layer: LayerCost, seconds: float, awaited: tuple[str, ...] = ()
    ) -> None:
        if not layer.all_to_all_bytes:
            self._compute(name, seconds, awaited)
            return
        self._compute(f"{name}, before", seconds / 4, awaited)
        self._exchange(f"{name}, dispatch", layer)
        self._compute(f"{name}, experts", seconds / 2)
        self._exchange(f"{name}, combine", layer)
        self._compute(name, seconds / 4)

    def _exchange(self, name: str, layer: LayerCost) -> None:
        self._communicate(name, "all_to_all", layer.all_to_all_bytes)
        self.last = name

    def _compute(self, name: str, seconds: float, awaited: tuple[str, ...] = ()) -> None:
        after = ((self.last,) if self.last else ()) + awaited
        self.tasks.append(ComputeTask(task_id=name, duration_s=seconds, depends_on=after))
        self.last = name

    def _communicate(self, name: str, kind: str, size_bytes: int) -> None:
        latency_s, cost_s_per_byte = self._price(kind, size_bytes)
        self.tasks.append(
            CommunicationTask(
                task_id=name,
                kind=kind,
                size_bytes=size_bytes,
                cost_s_per_byte=cost_s_per_byte,
                latency_s=latency_s,
                depends_on=(self.last,),
            )
        )
