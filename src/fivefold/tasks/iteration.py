"""Graphs of data-parallel iterations from the costs of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fivefold.collectives.pricing.fabric import Quote
from fivefold.errors import ConfigurationError, require_whole
from fivefold.tasks.graph import CommunicationTask, ComputeTask, Task, TaskGraph


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Compute and messages of a layer in one iteration, for one rank.

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
    if bucket_bytes is not None:
        require_whole("bucket_bytes", bucket_bytes, hint="None for no buckets")
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
    """Return the name of a bucket by its first and last layer."""
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
        """Add the forward passes; with ``overlap`` each waits for its own gradients alone."""
        everything = tuple(dict.fromkeys(self._reduced.values()))
        for index, layer in enumerate(self._layers):
            own = (self._reduced[index],) if index in self._reduced else ()
            awaited = own if overlap else everything
            self._pass(f"forward {index}{suffix}", layer, layer.forward_s, awaited)

    def backward(self, suffix: str = "") -> None:
        """Add the layers' backward passes and the all-reduces of their gradients, by bucket."""
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


Phase = Literal["forward", "backward", "reduce", "gather"]
STATE_AXES = ("data", "shard", "replica", "expert_data", "expert_shard", "expert_replica")
"""Axes over which gradients and parameters travel; they share a channel."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A collective that a run of layers needs.

    Attributes:
        axis: Axis of the mesh, as ``ParallelPlan.group`` names it.
        kind: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"all_to_all"``,
            ``"send"`` (to the next stage) or ``"return"`` (to the one before).
        size_bytes: The logical buffer per GPU; of an all-gather its output.
        phase: Once per micro-batch in ``"forward"`` or ``"backward"``; once per iteration after
            the last backward (``"reduce"``) or before the first forward (``"gather"``).
        hidden: Whether it runs beside compute instead of holding it up; of local updates, beside
            the whole iteration.
    """

    axis: str
    kind: str
    size_bytes: int
    phase: Phase
    hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class IterationDemand:
    """Compute and messages of one rank in one iteration of a split job.

    A rank runs ``micro_batches`` times through ``segments`` equal runs of layers.

    Attributes:
        segments: How many runs of layers.
        micro_batches: How many micro-batches a rank works on.
        forward_s: Compute of a segment's forward, per micro-batch.
        backward_s: Compute of its backward, recomputation included.
        messages: What each segment sends.
        p2p: What the last segment sends to its neighbour stage, per micro-batch.
        bubble_s: Waiting in the pipeline, on free links.
        optimizer_s: The optimizer's step.
        overhead_s: Everything else, such as transfers to the host.
    """

    segments: int
    micro_batches: int
    forward_s: float
    backward_s: float
    messages: tuple[Message, ...]
    p2p: tuple[Message, ...] = ()
    bubble_s: float = 0.0
    optimizer_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Return seconds of an iteration in which the rank does not wait for links."""
        once_s = self.segments * (self.forward_s + self.backward_s)
        return self.micro_batches * once_s + self.bubble_s + self.optimizer_s + self.overhead_s


def mesh_iteration(
    demand: IterationDemand, quote: Quote, *, bucket_bytes: int | None, overlap_forward: bool
) -> TaskGraph:
    """Return the rotated iteration of a split job.

    Args:
        demand: What a rank computes and sends.
        quote: Price of a collective, named by kind and axis, such as ``"all_reduce over data"``.
        bucket_bytes: Bytes from which a bucket of gradients is full; None sends each run of layers
            by itself, 0 all of them together.
        overlap_forward: Whether a forward pass waits for its own gradients only.

    Examples:
        >>> send = Message(axis="data", kind="all_reduce", size_bytes=8, phase="reduce")
        >>> demand = IterationDemand(segments=1, micro_batches=1, forward_s=0.1, backward_s=0.2,
        ...                          messages=(send,), optimizer_s=0.1)
        >>> graph = mesh_iteration(demand, lambda kind, size: 0.0, bucket_bytes=None,
        ...                        overlap_forward=True)
        >>> [task.task_id for task in graph.tasks]
        ['backward 0', 'reduce 0 data', 'update 0', 'forward 0']
    """
    return _MeshBuilder(demand, quote, bucket_bytes, overlap_forward=overlap_forward).graph()


class _MeshBuilder:
    def __init__(
        self,
        demand: IterationDemand,
        quote: Quote,
        bucket_bytes: int | None,
        *,
        overlap_forward: bool,
    ) -> None:
        self._demand, self._quote, self._bucket_bytes = demand, quote, bucket_bytes
        self._overlap_forward = overlap_forward
        self._tasks: list[ComputeTask | CommunicationTask] = []
        self._last: tuple[str, ...] = ()
        self._reduced: dict[int, list[str]] = {i: [] for i in range(demand.segments)}
        self._states = [m for m in demand.messages if m.phase in {"reduce", "gather"}]
        self._updated: dict[int, list[str]] = {}

    def graph(self) -> TaskGraph:
        """Return backward, reductions, update, forward and the other micro-batches."""
        demand = self._demand
        segments = range(demand.segments)
        last_of_all = demand.segments - 1
        for m in self._states:
            if m.hidden:
                self._message(f"{m.phase} beside, {m.axis} {m.kind}", m, demand.segments, ())
        self._states = [m for m in self._states if not m.hidden]
        if demand.micro_batches == 1:
            self._p2p("return")
        bucket: list[int] = []
        for i in reversed(segments):
            self._block(f"backward {i}", demand.backward_s, "backward")
            bucket.append(i)
            if i == 0 or self._is_full(bucket):
                self._reduce(bucket)
                bucket = []
        self._update()
        for i in segments:
            awaited = self._updated[i]
            if not self._overlap_forward:
                awaited = [name for names in self._updated.values() for name in names]
            self._block(f"forward {i}", demand.forward_s, "forward", awaited=awaited)
        others = demand.micro_batches - 1
        if others:
            self._others(others)
        else:
            self._p2p("send")
        waiting_s = demand.bubble_s + demand.overhead_s
        if waiting_s:
            self._compute(f"wait after {last_of_all}", waiting_s, self._last)
        return TaskGraph(tuple(self._tasks))

    def _others(self, count: int) -> None:
        """Add forward and backward of the micro-batches between the first and the last."""
        demand = self._demand
        before = self._last
        p2p = [
            self._message(f"p2p {m.phase}", m, demand.micro_batches, before)
            for m in demand.p2p
            if m.hidden
        ]
        for i in range(demand.segments):
            self._block(f"forward {i}, others", count * demand.forward_s, "forward", times=count)
        for m in demand.p2p:
            if not m.hidden:
                name = f"p2p {m.phase}"
                self._last = (self._message(name, m, demand.micro_batches, self._last),)
        for i in reversed(range(demand.segments)):
            self._block(f"backward {i}, others", count * demand.backward_s, "backward", times=count)
        self._last = (*self._last, *p2p)

    def _p2p(self, kind: str) -> None:
        for m in self._demand.p2p:
            if m.kind == kind:
                self._last = (self._message(f"p2p {m.phase}", m, 1, self._last),)

    def _block(
        self, name: str, seconds: float, phase: str, *, times: int = 1, awaited: Sequence[str] = ()
    ) -> None:
        """Compute of a run of layers, what it sends beside that, and what it waits for after."""
        before = (*self._last, *awaited)
        own = [m for m in self._demand.messages if m.phase == phase]
        beside = [
            self._message(f"{name}, {m.axis} {m.kind}", m, times, before) for m in own if m.hidden
        ]
        self._compute(name, seconds, before)
        for m in own:
            if not m.hidden:
                message = self._message(f"{name}, {m.axis} {m.kind}", m, times, self._last)
                self._last = (message,)
        self._last = (*self._last, *beside)

    def _is_full(self, bucket: Sequence[int]) -> bool:
        each = sum(m.size_bytes for m in self._states if m.phase == "reduce")
        return bucket_is_full(self._bucket_bytes, len(bucket) * each)

    def _reduce(self, bucket: Sequence[int]) -> None:
        after: tuple[str, ...] = self._last
        for m in self._states:
            if m.phase != "reduce":
                continue
            name = self._message(f"reduce {bucket_name(bucket)} {m.axis}", m, len(bucket), after)
            if m.kind == "reduce_scatter" and m.axis == "shard":
                after = (name,)  # replicas sum what was scattered
            for i in bucket:
                self._reduced[i].append(name)

    def _update(self) -> None:
        """Add the optimizer: all at once, or run by run where forward waits for its own only."""
        demand, segments = self._demand, range(self._demand.segments)
        together = not self._overlap_forward
        everything = tuple(dict.fromkeys(n for names in self._reduced.values() for n in names))
        share_s = demand.optimizer_s / demand.segments
        for i in segments:
            awaited = everything if together else tuple(self._reduced[i])
            self._updated[i] = list(awaited)
            if share_s:
                name = f"update {i}"
                # Beside the compute stream's order: an update waits for nothing but its sums.
                self._tasks.append(
                    ComputeTask(task_id=name, duration_s=share_s, resource="compute",
                                depends_on=(*self._last, *awaited))
                )  # fmt: skip
                self._updated[i] = [name]
            for m in self._states:
                if m.phase == "gather":
                    after = (*self._last, *self._updated[i])
                    self._updated[i].append(self._message(f"gather {i} {m.axis}", m, 1, after))

    def _compute(self, name: str, seconds: float, after: Sequence[str]) -> None:
        self._tasks.append(
            ComputeTask(task_id=name, duration_s=seconds, depends_on=tuple(dict.fromkeys(after)))
        )
        self._last = (name,)

    def _message(self, name: str, message: Message, times: int, after: Sequence[str]) -> str:
        kind, size = f"{message.kind} over {message.axis}", times * message.size_bytes
        channel = "network" if message.axis in STATE_AXES else f"network {message.axis}"
        self._tasks.append(
            CommunicationTask(
                task_id=name,
                kind=kind,
                size_bytes=size,
                cost_s_per_byte=0.0,
                latency_s=self._quote(kind, size),
                resource=channel,
                depends_on=tuple(dict.fromkeys(after)),
            )
        )
        return name
