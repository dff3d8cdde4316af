"""What an iteration does: compute and communication tasks with what each waits for.

A graph is for one rank of a class of equal ranks: the others do the same at the same time. Tasks
of one resource (a compute stream, a communication channel) run one at a time. This module knows
nothing of orderings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from fivefold.errors import ConfigurationError, require_number, require_whole


@dataclass(frozen=True, kw_only=True)
class ComputeTask:
    """Work on a device.

    Args:
        task_id: Its name, one of its kind in the graph.
        duration_s: Seconds on its resource.
        resource: The stream that it occupies.
        depends_on: Names of the tasks that must have ended before.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    task_id: str
    duration_s: float
    resource: str = "compute"
    depends_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, "duration_s")


@dataclass(frozen=True, kw_only=True)
class CommunicationTask:
    """One communication operation, which may be cut into chunks.

    Its time is ``latency_s + size_bytes * cost_s_per_byte``, each chunk paying the latency again:
    the form in which ``collectives`` quotes a price.

    Args:
        task_id: Its name, one of its kind in the graph.
        kind: ``"all_reduce"``, ``"all_to_all"``, ``"all_gather"`` and so on.
        size_bytes: Logical bytes of the operation.
        latency_s: Seconds of one chunk beside its bytes.
        cost_s_per_byte: Seconds per byte.
        resource: The channel that it occupies.
        depends_on: Names of the tasks that must have ended before.

    Raises:
        ConfigurationError: A value is not allowed.

    Examples:
        >>> task = CommunicationTask(
        ...     task_id="reduce 0", kind="all_reduce", size_bytes=10**6, cost_s_per_byte=1e-9
        ... )
        >>> round(task.time_s(task.size_bytes) * 1e3, 3)
        1.0
    """

    task_id: str
    kind: str
    size_bytes: int
    cost_s_per_byte: float
    latency_s: float = 0.0
    resource: str = "network"
    depends_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self, "size_bytes", "cost_s_per_byte", "latency_s")

    @property
    def duration_s(self) -> float:
        """Return seconds where it is sent in one piece."""
        return self.time_s(self.size_bytes)

    def time_s(self, size_bytes: float) -> float:
        """Return seconds of a chunk."""
        return self.latency_s + size_bytes * self.cost_s_per_byte

    def chunks(self, chunk_bytes: int | None) -> tuple[int, ...]:
        """Return the sizes of its chunks: all of ``chunk_bytes``, the last one smaller.

        Args:
            chunk_bytes: Largest chunk; None for one piece.

        Raises:
            ConfigurationError: ``chunk_bytes`` is below 1 or no whole number.
        """
        if chunk_bytes is None or self.size_bytes <= require_whole("chunk_bytes", chunk_bytes):
            return (self.size_bytes,)
        whole, rest = divmod(self.size_bytes, chunk_bytes)
        return (chunk_bytes,) * whole + ((rest,) if rest else ())


Task = ComputeTask | CommunicationTask


@dataclass(frozen=True)
class TaskGraph:
    """Tasks and what each waits for, without cycles.

    The order of the tasks is the program's: where nothing else decides, the earlier one goes
    first.

    Args:
        tasks: The tasks; one that is waited for may stand anywhere.
        marks: Names of the task that ends each unrolled iteration; the last two give the steady
            iteration time. Empty for one iteration.

    Raises:
        ConfigurationError: A name stands twice, a dependency does not exist, there is a cycle.

    Examples:
        >>> graph = TaskGraph((
        ...     ComputeTask(task_id="a", duration_s=1.0),
        ...     ComputeTask(task_id="b", duration_s=2.0, depends_on=("a",)),
        ... ))
        >>> graph.tails_s
        {'b': 2.0, 'a': 3.0}
    """

    tasks: tuple[Task, ...]
    marks: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if len(self.by_id) != len(self.tasks):
            names = [task.task_id for task in self.tasks]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigurationError(
                f"two tasks are called {twice!r}", hint="give each task a name of its own"
            )
        for name in self.marks:
            if name not in self.by_id:
                raise ConfigurationError(
                    f"the mark {name!r} is no task", hint="marks name tasks of the graph"
                )
        for task in self.tasks:
            for name in task.depends_on:
                if name not in self.by_id:
                    raise ConfigurationError(
                        f"task {task.task_id!r} waits for {name!r}, which does not exist",
                        hint="add that task, or leave the dependency out",
                    )
        _ = self.order

    @cached_property
    def by_id(self) -> dict[str, Task]:
        """Return the tasks by name."""
        return {task.task_id: task for task in self.tasks}

    @cached_property
    def followers(self) -> dict[str, tuple[str, ...]]:
        """Return which tasks wait for each, in the order of the program."""
        found: dict[str, list[str]] = {task.task_id: [] for task in self.tasks}
        for task in self.tasks:
            for name in dict.fromkeys(task.depends_on):
                found[name].append(task.task_id)
        return {name: tuple(names) for name, names in found.items()}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names, each after what it waits for; otherwise as the program has them.

        Raises:
            ConfigurationError: There is a cycle.
        """
        waiting = {task.task_id: len(set(task.depends_on)) for task in self.tasks}
        ready = [name for name, number in waiting.items() if number == 0]
        ordered: list[str] = []
        for name in ready:  # grows while it is read
            ordered.append(name)
            for follower in self.followers[name]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    ready.append(follower)
        if len(ordered) < len(self.tasks):
            stuck = next(name for name, number in waiting.items() if number > 0)
            raise ConfigurationError(
                f"the tasks wait for one another in a circle that {stuck!r} is in or behind",
                hint="leave one of the dependencies out",
            )
        return tuple(ordered)

    @property
    def compute(self) -> tuple[ComputeTask, ...]:
        """Return the compute tasks."""
        return tuple(task for task in self.tasks if isinstance(task, ComputeTask))

    @property
    def communication(self) -> tuple[CommunicationTask, ...]:
        """Return the communication tasks."""
        return tuple(task for task in self.tasks if isinstance(task, CommunicationTask))

    @cached_property
    def tails_s(self) -> dict[str, float]:
        """Return seconds from each task's start to the end of the longest chain that it begins."""
        tails: dict[str, float] = {}
        for name in reversed(self.order):
            after = max((tails[follower] for follower in self.followers[name]), default=0.0)
            tails[name] = self.by_id[name].duration_s + after
        return tails


def _check(task: Task, *numbers: str) -> None:
    """Check what all tasks have, and numbers that are not negative."""
    if not isinstance(task.task_id, str) or not task.task_id:
        message = "a task needs a name"
        raise ConfigurationError(message, hint="give task_id")
    who = f"task {task.task_id!r}"
    if not task.resource:
        message = f"{who} names no resource"
        raise ConfigurationError(message, hint='such as "compute" or "network"')
    names = task.depends_on
    if isinstance(names, Iterable) and not isinstance(names, str):
        names = tuple(names)
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"depends_on of {who} must be names; got {task.depends_on!r}",
            hint='write a tuple, such as ("forward 0",)',
        )
    object.__setattr__(task, "depends_on", names)
    for name in numbers:
        require_number(f"{name} of {who}", getattr(task, name))
