"""The backend itself, free of how torch wants to call it.

One engine belongs to one process group and one rank. It asks for an algorithm by collective and
size, compiles it for this rank once, and runs it over the inner group; what it has no algorithm
for goes to the inner group as it is, and that is said once. All ranks must take the same
algorithm, so rank 0 chooses and tells the others through the group's store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from fivefold.collectives.execution._aggregation import SwitchRoute
from fivefold.collectives.execution._choose import Choice, choose, size_class
from fivefold.collectives.execution._cost import LinkClock
from fivefold.collectives.execution._lanes import Lanes
from fivefold.collectives.execution._plan import RankPlan, plan_rank
from fivefold.collectives.execution._rounds import run_in_rounds
from fivefold.collectives.execution._run import CollectiveError, Transfers, run_plan
from fivefold.collectives.execution._settings import Settings, topology_of
from fivefold.collectives.execution._torch import dist
from fivefold.collectives.execution._work import FivefoldWork, WorkQueue
from fivefold.errors import CommunicationError, ConfigurationError
from fivefold.network.topology import Topology

__all__ = ["Call", "Engine"]

_log = logging.getLogger(__name__)
_REFUSED = b"refused: "
_Operations = dist.ReduceOp.RedOpType
_COMBINE: dict[Any, Callable[..., Any]] = {
    _Operations.SUM: torch.add,
    _Operations.AVG: torch.add,  # and divided at the end
    _Operations.PRODUCT: torch.mul,
    _Operations.MIN: torch.minimum,
    _Operations.MAX: torch.maximum,
}
_ADDABLE = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective on flat, contiguous buffers.

    Args:
        name: Name of the collective.
        inputs: Input buffer.
        outputs: Output buffer; the same as ``inputs`` for an all-reduce or a broadcast.
        unit: Elements of the unit that is cut into chunks; see :meth:`Layout.offsets`.
        size_bytes: Size as :meth:`Collective.chunk_bytes` counts it.
        operation: How values are combined; None where they are not.
        root: Root of a broadcast.

    Example:
        >>> data = torch.ones(4)
        >>> Call(name="broadcast", inputs=data, outputs=data, unit=4, size_bytes=16).root
        0
    """

    name: str
    inputs: torch.Tensor
    outputs: torch.Tensor
    unit: int
    size_bytes: int
    operation: Any = None
    root: int = 0


class Engine:
    """Algorithms of one group on one rank.

    Args:
        store: The group's store.
        rank: Rank in the group.
        size: Ranks of the group.
        timeout: Longest wait for one message.
        ranks: Global rank of each rank of the group.
        world_size: Ranks of the job.
        settings: Settings of the backend.

    Example:
        See ``examples/collectives_backend.py``: it takes several processes.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int],
        world_size: int,
        settings: Settings,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._store = dist.PrefixStore("fivefold", store)
        self._settings = settings
        whole, self._known = topology_of(settings, world_size)
        self._topology: Topology = whole.subset(ranks) if len(ranks) < world_size else whole
        self._inner: dict[str, Any] = {}
        self._choices: dict[tuple[str, int, int], Choice] = {}
        self._plans: dict[tuple[str, int, int], RankPlan] = {}
        self._said: set[str] = set()
        self._queue = WorkQueue(name=f"fivefold rank {rank}")
        self._lanes = Lanes(f"fivefold rank {rank}")
        self._kept: list[Any] = []
        self.inner("cpu")
        self._switch: SwitchRoute | None = None
        if settings.aggregation is not None and size > 1:
            self._switch = SwitchRoute(
                self._store, rank=rank, size=size, timeout=timeout, settings=settings
            )
        if not self._known and size > 1:
            self.say(
                "topology",
                "no topology is known: equal links are assumed (see FIVEFOLD_TOPOLOGY)",
                level=logging.INFO,
            )

    # -- the inner group -----------------------------------------------------------------------

    def inner(self, device_type: str) -> Any:
        """The group that carries messages of tensors on a device."""
        kind = self._settings.inner or ("nccl" if device_type == "cuda" else "gloo")
        if device_type == "cpu":
            kind = "gloo"
        if kind not in self._inner:
            store = dist.PrefixStore(f"inner {kind}", self._store)
            if kind == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self.timeout  # noqa: SLF001 - torch sets it so itself
                self._inner[kind] = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            else:
                self._inner[kind] = dist.ProcessGroupGloo(
                    store, self.rank, self.size, timeout=self.timeout
                )
        return self._inner[kind]

    def say(self, key: str, message: str, *, level: int = logging.WARNING) -> None:
        """Log something once, on the group's first rank."""
        if key not in self._said:
            self._said.add(key)
            _log.log(level if self.rank == 0 else logging.DEBUG, "fivefold: %s", message)

    def can_combine(self, tensor: torch.Tensor, operation: Any) -> bool:
        """Whether the engine's algorithms can reduce such tensors in this way."""
        kind = _kind_of(operation)
        # Torch does not say how a mean of integers is rounded: backends differ, or refuse it.
        divisible = kind != _Operations.AVG or tensor.is_floating_point()
        return tensor.dtype in _ADDABLE and kind in _COMBINE and divisible

    # -- choosing ------------------------------------------------------------------------------

    def choice(self, name: str, size_bytes: int, *, root: int = 0) -> Choice:
        """What runs a collective of a size: the same on all ranks.

        Raises:
            CollectiveError: Rank 0 did not say in time what it chose.
        """
        key = (name, root, size_class(size_bytes))
        if key not in self._choices:
            self._choices[key] = self._agree(key)
        return self._choices[key]

    def _agree(self, key: tuple[str, int, int]) -> Choice:
        name, root, size_bytes = key
        entry = f"choice {name} {root} {size_bytes}"
        if self.rank == 0:
            return self._choose_for_all(key, entry)
        try:
            self._store.wait([entry], self.timeout)
            said = self._store.get(entry)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank 0 did not say within {self.timeout.total_seconds():g} s how to run {name} "
                f"of {size_bytes} bytes, which rank {self.rank} has called",
                hint="rank 0 ended, is stuck, or called another collective or size",
            ) from error
        if said.startswith(_REFUSED):
            raise ConfigurationError(f"rank 0: {said.removeprefix(_REFUSED).decode()}")
        return Choice.from_bytes(said)

    def _choose_for_all(self, key: tuple[str, int, int], entry: str) -> Choice:
        name, root, size_bytes = key
        try:
            chosen = choose(
                name,
                topology=self._topology,
                settings=self._settings,
                size_bytes=size_bytes,
                root=root,
            )
        except Exception as error:
            self._store.set(entry, _REFUSED + str(error).encode())  # or the others would wait
            raise
        self._store.set(entry, chosen.to_bytes())
        _log.info(
            "fivefold: %s of up to %d bytes runs as %s (predicted %.3g s, inner %.3g s)",
            name,
            size_bytes,
            chosen.label,
            chosen.predicted_s,
            chosen.inner_s,
        )
        return chosen

    def _plan(self, call: Call, choice: Choice) -> RankPlan:
        key = (call.name, call.root, choice.size_bytes)
        if key not in self._plans:
            program = choice.program
            assert program is not None, "the inner backend needs no plan"
            chunk_bytes = float(program.collective.chunk_bytes(choice.size_bytes).max())
            clock = LinkClock(self._topology, chunk_bytes, self._settings.message_s)
            self._plans[key] = plan_rank(program, rank=self.rank, arrival_s=clock)
        return self._plans[key]

    # -- running -------------------------------------------------------------------------------

    def run(
        self,
        call: Call,
        *,
        results: list[Any],
        asynchronous: bool,
        timeout: timedelta,
        finish: Callable[[], None] | None = None,
    ) -> FivefoldWork | None:
        """Run a collective by an algorithm of its own.

        Args:
            call: The collective.
            results: What the work's future resolves to.
            asynchronous: Whether the caller goes on at once.
            timeout: Longest wait for one message; zero or less takes the group's.
            finish: Called when the buffers are done, before the work is.

        Returns:
            The work; None where the inner backend should do it.
        """
        if not call.size_bytes or self.size == 1:
            return None
        if (route := self._route(call)) is not None:
            work = FivefoldWork(results, what=call.name)
            switched = self._switched(route, call, finish)
            self._queue.submit(switched, work, in_thread=asynchronous)
            return work
        choice = self.choice(call.name, call.size_bytes, root=call.root)
        if choice.program is None:
            return None
        plan = self._plan(call, choice)
        if plan.layout.even_only and call.unit % plan.layout.parts:
            self.say(
                f"uneven {choice.label}",
                f"{choice.label} cannot cut {call.unit} elements into {plan.layout.parts} equal "
                f"chunks; such {call.name} run on the inner backend",
            )
            return None
        limit = timeout if timeout > timedelta(0) else self.timeout
        work = FivefoldWork(results, what=call.name)
        device = call.inputs.device
        # Work on a GPU belongs to the stream on which it was asked for, whatever the thread.
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def job() -> None:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                self._execute(call, plan, choice, limit)
                if finish is not None:
                    finish()

        self._queue.submit(job, work, in_thread=asynchronous)
        return work

    def _route(self, call: Call) -> SwitchRoute | None:
        """The switch, where the call goes there."""
        operation = _kind_of(call.operation)
        if self._switch is None or not self._switch.takes(call.name, call.inputs, operation):
            return None
        return self._switch

    def _switched(
        self, route: SwitchRoute, call: Call, finish: Callable[[], None] | None
    ) -> Callable[[], None]:
        """What sums a call's buffer in the switch, or by the hosts where that cannot."""

        def job() -> None:
            try:
                route.all_reduce(call.outputs)
            except CommunicationError as error:
                raise CollectiveError(error.message, hint=error.hint) from error
            if _kind_of(call.operation) == _Operations.AVG:
                call.outputs.div_(self.size)
            if finish is not None:
                finish()

        return job

    def _execute(self, call: Call, plan: RankPlan, choice: Choice, timeout: timedelta) -> None:
        inner = self.inner(call.inputs.device.type)
        staged = call.inputs.device.type != "cpu" and isinstance(inner, dist.ProcessGroupGloo)
        inputs, outputs = call.inputs, call.outputs
        if staged:  # gloo's messages are in the memory of the CPU
            same = outputs.data_ptr() == inputs.data_ptr()
            inputs = inputs.cpu()
            outputs = inputs if same else torch.empty_like(outputs, device="cpu")
        transfers = Transfers(
            inner=inner,
            inputs=inputs,
            outputs=outputs,
            unit=call.unit,
            combine=_COMBINE.get(_kind_of(call.operation)),
            timeout=timeout,
            what=f"{call.name} of {call.size_bytes} bytes by {choice.label} on rank {self.rank}",
            lanes=self._lanes,
            keep=self._kept,
        )
        grouped = not isinstance(inner, dist.ProcessGroupGloo)
        (run_in_rounds if grouped else run_plan)(plan, transfers)
        if _kind_of(call.operation) == _Operations.AVG:
            outputs.div_(self.size)
        if staged:
            call.outputs.copy_(outputs)

    def close(self) -> None:
        """End the thread and let go of the inner groups."""
        self._queue.close()
        self._lanes.close()
        if self._switch is not None:
            self._switch.close()
        self._inner.clear()


def _kind_of(operation: Any) -> Any:
    """``ReduceOp.SUM`` and an object made of it are told apart by torch, but not here."""
    if operation is None:
        return None
    return getattr(operation, "op", operation)
