"""Graphs of data-parallel iterations from the costs of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fivefold.collectives.pricing.fabric import Quote
from fivefold.errors import ConfigurationError, require_number, require_whole
from fivefold.tasks.graph import CommunicationTask, ComputeTask, Task, TaskGraph

Price = Callable[[str, int], tuple[float, float]]
"""Latency and cost per byte of a communication, by its kind and bytes."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Compute and messages of a layer in one iteration, for one rank.

    Args:
        forward_s: Seconds of its forward pass.
        backward_s: Seconds of its backward pass.
        gradient_bytes: Bytes of its gradients, all-reduced after its backward pass; 0 for none.
        all_to_all_bytes: Bytes of one all-to-all (an expert layer does two per pass: dispatch and
            combine); 0 for none.

    Raises:
        ConfigurationError: A number is not from 0, or not finite.
    """

    forward_s: float
    backward_s: float
    gradient_bytes: int = 0
    all_to_all_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "gradient_bytes", "all_to_all_bytes"):
            require_number(f"{name} of a layer", getattr(self, name))


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
    require_whole("iterations", iterations)
    if not layers:
        message = "a graph needs layers"
        raise ConfigurationError(message, hint="give a LayerCost for each")
    if bucket_bytes is not None:
        require_whole("bucket_bytes", bucket_bytes, hint="None for no buckets")
    program = _Layers(layers, lambda _kind, _size: (latency_s, cost_s_per_byte), bucket_bytes)
    marks: list[str] = []
    for number in range(iterations):
        program.forward(f" of {number}", overlap=True)
        program.backward(f" of {number}")
        marks += program.last
    return TaskGraph(tuple(program.tasks), marks=tuple(marks))


def rotated_iteration(
    layers: Sequence[LayerCost], price: Price, *, bucket_bytes: int | None, overlap_forward: bool
) -> TaskGraph:
    """Return one iteration from its backward pass to the next forward pass.

    So reductions overlap with the forward pass behind them within one iteration. Buckets are full
    from ``bucket_bytes``: None reduces each layer by itself, 0 all of them together.

    Examples:
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10)
        >>> graph = rotated_iteration([layer] * 2, lambda kind, size: (0.0, 0.0),
        ...                           bucket_bytes=None, overlap_forward=True)
        >>> [task.task_id for task in graph.tasks]
        ['backward 1', 'reduce 1', 'backward 0', 'reduce 0', 'forward 0', 'forward 1']
    """
    program = _Layers(layers, price, bucket_bytes)
    program.backward()
    program.forward(overlap=overlap_forward)
    return TaskGraph(tuple(program.tasks))


def _is_full(bucket_bytes: int | None, held_bytes: int) -> bool:
    """Return whether gradients that wait are sent now: None always, 0 never."""
    return bucket_bytes is None or 0 < bucket_bytes <= held_bytes


def _bucket_name(bucket: Sequence[int]) -> str:
    return f"{bucket[0]}" if len(bucket) == 1 else f"{bucket[0]}-{bucket[-1]}"


class _Program:
    """Tasks in the order of the program; compute waits for what came last."""

    def __init__(self, price: Price) -> None:
        self.tasks: list[Task] = []
        self.last: tuple[str, ...] = ()
        self._price = price

    def compute(self, name: str, seconds: float, awaited: Sequence[str] = ()) -> None:
        """Add compute behind what came last and what else it waits for."""
        after = tuple(dict.fromkeys((*self.last, *awaited)))
        self.tasks.append(ComputeTask(task_id=name, duration_s=seconds, depends_on=after))
        self.last = (name,)

    def send(
        self, name: str, kind: str, size_bytes: int, after: Sequence[str], channel: str = "network"
    ) -> str:
        """Add a communication; gives its name back."""
        latency_s, cost_s_per_byte = self._price(kind, size_bytes)
        self.tasks.append(
            CommunicationTask(
                task_id=name,
                kind=kind,
                size_bytes=size_bytes,
                cost_s_per_byte=cost_s_per_byte,
                latency_s=latency_s,
                resource=channel,
                depends_on=tuple(dict.fromkeys(after)),
            )
        )
        return name


class _Layers(_Program):
    """Passes over layers that differ, each waiting for the one before."""

    def __init__(self, layers: Sequence[LayerCost], price: Price, bucket_bytes: int | None) -> None:
        super().__init__(price)
        self._layers, self._bucket_bytes = layers, bucket_bytes
        self._reduced: dict[int, str] = {}  # layer to the task that brings its gradients

    def forward(self, suffix: str = "", *, overlap: bool) -> None:
        """Add the forward passes; with ``overlap`` each waits for its own gradients alone."""
        for index, layer in enumerate(self._layers):
            awaited = [self._reduced[index]] if index in self._reduced else []
            if not overlap:
                awaited = list(self._reduced.values())
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
            if bucket and (index == 0 or _is_full(self._bucket_bytes, held)):
                name = f"reduce {_bucket_name(bucket)}{suffix}"
                self.send(name, "all_reduce", held, self.last)
                self._reduced |= dict.fromkeys(bucket, name)
                bucket = []

    def _pass(
        self, name: str, layer: LayerCost, seconds: float, awaited: Sequence[str] = ()
    ) -> None:
        size_bytes = layer.all_to_all_bytes
        if not size_bytes:
            self.compute(name, seconds, awaited)
            return
        self.compute(f"{name}, before", seconds / 4, awaited)
        self.last = (self.send(f"{name}, dispatch", "all_to_all", size_bytes, self.last),)
        self.compute(f"{name}, experts", seconds / 2)
        self.last = (self.send(f"{name}, combine", "all_to_all", size_bytes, self.last),)
        self.compute(name, seconds / 4)


Phase = Literal["forward", "backward", "reduce", "gather"]
STATE_AXES = ("data", "shard", "replica", "expert_data", "expert_shard", "expert_replica")
"""Axes over which gradients and parameters travel; they share a channel."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A collective that a run of layers needs."""

    axis: str  # of the mesh, as ``ParallelPlan.group`` names it
    kind: str  # a collective, "send" (to the next stage) or "return" (to the one before)
    size_bytes: int  # the logical buffer per GPU; of an all-gather its output
    # Once per micro-batch in "forward" or "backward"; once per iteration after the last backward
    # ("reduce") or before the first forward ("gather").
    phase: Phase
    hidden: bool = False  # beside compute; of local updates, beside the whole iteration


@dataclass(frozen=True, kw_only=True)
class IterationDemand:
    """Compute and messages of one rank in one iteration of a split job.

    A rank runs ``micro_batches`` times through ``segments`` equal runs of layers.
    """

    segments: int
    micro_batches: int
    forward_s: float  # of a segment, per micro-batch
    backward_s: float  # recomputation included
    messages: tuple[Message, ...]  # of each segment
    p2p: tuple[Message, ...] = ()  # of the last segment to the neighbour stage, per micro-batch
    bubble_s: float = 0.0  # waiting in the pipeline, on free links
    optimizer_s: float = 0.0
    overhead_s: float = 0.0  # everything else, such as transfers to the host

    @property
    def compute_s(self) -> float:
        """Return seconds of an iteration in which the rank does not wait for links."""
        once_s = self.segments * (self.forward_s + self.backward_s)
        return self.micro_batches * once_s + self.bubble_s + self.optimizer_s + self.overhead_s


def mesh_iteration(
    demand: IterationDemand, quote: Quote, *, bucket_bytes: int | None, overlap_forward: bool
) -> TaskGraph:
    """Return the rotated iteration of a split job.

    ``quote`` prices collectives by kind and axis, such as ``"all_reduce over data"``; buckets are
    full as in :func:`rotated_iteration`, a run of layers being what a layer is there.

    Examples:
        >>> send = Message(axis="data", kind="all_reduce", size_bytes=8, phase="reduce")
        >>> demand = IterationDemand(segments=1, micro_batches=1, forward_s=0.1, backward_s=0.2,
        ...                          messages=(send,), optimizer_s=0.1)
        >>> graph = mesh_iteration(demand, lambda kind, size: 0.0, bucket_bytes=None,
        ...                        overlap_forward=True)
        >>> [task.task_id for task in graph.tasks]
        ['backward 0', 'reduce 0 data', 'update 0', 'forward 0']
    """
    program = _Segments(demand, quote)
    program.iteration(bucket_bytes, overlap_forward=overlap_forward)
    return TaskGraph(tuple(program.tasks))


class _Segments(_Program):
    """Passes over equal runs of layers with the messages of their axes."""

    def __init__(self, demand: IterationDemand, quote: Quote) -> None:
        super().__init__(lambda kind, size: (quote(kind, size), 0.0))
        self._demand = demand
        # Of gradients and parameters: those beside the whole iteration, and all others.
        states = [m for m in demand.messages if m.phase in {"reduce", "gather"}]
        self._beside = [m for m in states if m.hidden]
        self._reductions = [m for m in states if m.phase == "reduce" and not m.hidden]
        self._gathers = [m for m in states if m.phase == "gather" and not m.hidden]

    def iteration(self, bucket_bytes: int | None, *, overlap_forward: bool) -> None:
        """Add backward, reductions, update, forward and the other micro-batches."""
        demand, last = self._demand, self._demand.segments - 1
        for m in self._beside:
            self._message(f"{m.phase} beside, {m.axis} {m.kind}", m, demand.segments, ())
        if demand.micro_batches == 1:
            self._p2p("return")
        each = sum(m.size_bytes for m in self._reductions)
        reduced: dict[int, list[str]] = {}
        bucket: list[int] = []
        for i in range(last, -1, -1):
            self._block(f"backward {i}", demand.backward_s, "backward")
            bucket.append(i)
            if i == 0 or _is_full(bucket_bytes, len(bucket) * each):
                reduced |= dict.fromkeys(bucket, self._reduce(bucket))
                bucket = []
        updated = self._update(reduced, overlap_forward=overlap_forward)
        for i in range(demand.segments):
            awaited = updated[i] if overlap_forward else [n for u in updated for n in u]
            self._block(f"forward {i}", demand.forward_s, "forward", awaited=awaited)
        if demand.micro_batches > 1:
            self._others(demand.micro_batches - 1)
        else:
            self._p2p("send")
        if demand.bubble_s + demand.overhead_s:
            self.compute(f"wait after {last}", demand.bubble_s + demand.overhead_s)

    def _others(self, count: int) -> None:
        """Add forward and backward of the micro-batches between the first and the last."""
        demand = self._demand
        times = demand.micro_batches
        p2p = [self._message(f"p2p {m.phase}", m, times, self.last) for m in demand.p2p if m.hidden]
        for i in range(demand.segments):
            self._block(f"forward {i}, others", count * demand.forward_s, "forward", times=count)
        for m in demand.p2p:
            if not m.hidden:
                self.last = (self._message(f"p2p {m.phase}", m, times, self.last),)
        for i in reversed(range(demand.segments)):
            self._block(f"backward {i}, others", count * demand.backward_s, "backward", times=count)
        self.last = (*self.last, *p2p)

    def _p2p(self, kind: str) -> None:
        for m in self._demand.p2p:
            if m.kind == kind:
                self.last = (self._message(f"p2p {m.phase}", m, 1, self.last),)

    def _block(
        self, name: str, seconds: float, phase: str, *, times: int = 1, awaited: Sequence[str] = ()
    ) -> None:
        """Compute of a run of layers, what it sends beside that, and what it waits for after."""
        before = (*self.last, *awaited)
        own = [m for m in self._demand.messages if m.phase == phase]
        beside = [
            self._message(f"{name}, {m.axis} {m.kind}", m, times, before) for m in own if m.hidden
        ]
        self.compute(name, seconds, awaited)
        for m in own:
            if not m.hidden:
                message = self._message(f"{name}, {m.axis} {m.kind}", m, times, self.last)
                self.last = (message,)
        self.last = (*self.last, *beside)

    def _reduce(self, bucket: Sequence[int]) -> list[str]:
        after, names = self.last, []
        for m in self._reductions:
            name = f"reduce {_bucket_name(bucket)} {m.axis}"
            names.append(self._message(name, m, len(bucket), after))
            if m.kind == "reduce_scatter" and m.axis == "shard":
                after = (name,)  # replicas sum what was scattered
        return names

    def _update(
        self, reduced: Mapping[int, list[str]], *, overlap_forward: bool
    ) -> list[list[str]]:
        """Add the optimizer: all at once, or run by run where forward waits for its own only.

        Gives what brings the parameters of each run.
        """
        demand, before = self._demand, self.last
        everything = [name for i in range(demand.segments) for name in reduced[i]]
        updated = []
        for i in range(demand.segments):
            brought = list(reduced[i] if overlap_forward else everything)
            if demand.optimizer_s:
                self.compute(f"update {i}", demand.optimizer_s / demand.segments, brought)
                brought, self.last = [f"update {i}"], before  # updates wait for their sums only
            for m in self._gathers:
                after = (*before, *brought)
                brought.append(self._message(f"gather {i} {m.axis}", m, 1, after))
            updated.append(brought)
        return updated

    def _message(self, name: str, message: Message, times: int, after: Sequence[str]) -> str:
        kind, size = f"{message.kind} over {message.axis}", times * message.size_bytes
        channel = "network" if message.axis in STATE_AXES else f"network {message.axis}"
        return self.send(name, kind, size, after, channel)
