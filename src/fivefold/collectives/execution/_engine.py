"""The backend itself, free of how torch wants to call it: an engine for each group and rank.

It asks for an algorithm by collective and size, compiles it for this rank once, and runs it over
the group's messages; what has no algorithm goes to the inner group, and that is said once. The
group's first rank chooses for all, through the group's store: nothing is decided by what only one
rank sees. Groups that were given a software aggregation switch reduce through it.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from fivefold.collectives.execution._calls import (
    CallKind,
    CallLog,
    CollectiveError,
    FivefoldWork,
    InnerWork,
    WorkQueue,
    c10d,
    dist,
    inner_method,
    profiler_event,
)
from fivefold.collectives.execution._plan import RankPlan, plan_rank
from fivefold.collectives.execution._run import ReceiveThreads, RoundRunner, RunContext, Runner
from fivefold.collectives.execution._settings import (
    CHOOSABLE,
    Settings,
    current_settings,
    runs_own,
    topology_of,
)
from fivefold.collectives.execution.choose import Choice, choose, clock_of, size_class
from fivefold.errors import CommunicationError, ConfigurationError
from fivefold.network.aggregation import AggregationClient
from fivefold.network.aggregation.wire import ordered_sum
from fivefold.network.topology import Topology, read_topology

_SWITCHABLE = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
}
_ADDABLE = _SWITCHABLE | {torch.uint8, torch.int8, torch.int16}
_TAG = (1 << 29) - 1  # the user's own messages on the same group have smaller ones
_PIECE_BYTES = 1 << 20
_Operations = dist.ReduceOp.RedOpType
_SUMS = (_Operations.SUM, _Operations.AVG)


class GlooHosts:
    """Minima and sums by the hosts, over a gloo group: what a switch falls back to.

    A sum is cut into one share for each rank: the shares are exchanged, each rank adds its own in
    the order of ranks, and the sums are gathered. Every rank sends 2 (n - 1) / n of the buffer, as
    in a ring, and the bits are those of the switch.

    Args:
        group: ``dist.ProcessGroupGloo``, or a process group whose CPU backend it is.
    """

    def __init__(self, group: Any) -> None:
        has_backends = hasattr(group, "_get_backend") and not isinstance(
            group, dist.ProcessGroupGloo
        )
        self._group = group._get_backend(torch.device("cpu")) if has_backends else group  # noqa: SLF001 - torch's way
        self._size, self._rank = int(group.size()), int(group.rank())

    def minimum(self, flags: np.ndarray) -> np.ndarray:
        """Return the element-wise minimum over all ranks."""
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        least = torch.from_numpy(flags.copy())
        self._group.allreduce([least], options).wait()
        return least.numpy()

    def sum(self, values: np.ndarray, dtype: str) -> np.ndarray:
        """Return the sum over all ranks, added in their order."""
        width = -(-values.size // self._size)
        own = np.zeros(width * self._size, values.dtype)
        own[: values.size] = values
        parts, sums = np.empty_like(own), np.empty_like(own)
        self._exchange(_bytes(parts), _bytes(own))
        share = ordered_sum(list(parts.reshape(self._size, width)), dtype)
        gather = inner_method(self._group, "_allgather_base", "all_gather_single")
        gather(_bytes(sums), _bytes(share), c10d.AllgatherOptions()).wait()
        return sums[: values.size]

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Exchange in pieces: gloo moves long messages one direction at a time for a while."""
        arriving = received.view(self._size, -1)
        leaving = sent.view(self._size, -1)
        works = []
        for first in range(0, leaving.shape[1], _PIECE_BYTES):
            piece = slice(first, first + _PIECE_BYTES)
            for step in range(1, self._size):
                target, source = (self._rank + step) % self._size, (self._rank - step) % self._size
                works.append(self._group.send([leaving[target, piece]], target, _TAG))
                works.append(self._group.recv([arriving[source, piece]], source, _TAG))
        arriving[self._rank] = leaving[self._rank]
        for work in works:
            work.wait()


class SwitchRoute:
    """One group's way through the switch.

    A group of gloo's own carries the hosts' half: the agreement on which chunks all ranks have, and
    the sums that the switch did not make. Messages of the inner group may be under way meanwhile.
    """

    def __init__(
        self, store: Any, *, rank: int, size: int, timeout: Any, settings: Settings
    ) -> None:
        assert settings.aggregation is not None, "the engine asks only where there is a switch"
        if rank == 0:  # jobs that share a switch need names that no other has
            store.set("aggregation job", uuid.uuid4().hex)
        job = store.get("aggregation job").decode()
        self.group = dist.ProcessGroupGloo(
            dist.PrefixStore("aggregation", store), rank, size, timeout=timeout
        )
        self._size, self._least_bytes = size, settings.aggregation_min_bytes
        self.client = AggregationClient(
            settings.aggregation,
            job=job,
            rank=rank,
            size=size,
            fallback=GlooHosts(self.group),
            options=settings.aggregation_options,
        )

    def takes(self, call: Call) -> bool:
        """Return whether such a collective goes through the switch: the same on all ranks."""
        return (
            call.name == "all_reduce"
            and call.kind.operation in _SUMS
            and call.inputs.device.type == "cpu"
            and call.inputs.dtype in _SWITCHABLE
            and call.inputs.nbytes >= self._least_bytes
        )

    def all_reduce(self, call: Call, label: int) -> None:
        """Sum a call's buffer in the switch, or by the hosts where that cannot."""
        tensor = call.outputs
        if tensor.dtype is torch.bfloat16:  # numpy has none
            bits = tensor.view(torch.int16).numpy().view(np.uint16)
            self.client.all_reduce(bits, dtype="bfloat16", label=label)
        else:
            self.client.all_reduce(tensor, label=label)
        if call.kind.operation == _Operations.AVG:
            tensor.div_(self._size)


def _bytes(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.uint8))


_log = logging.getLogger(__name__)
_REFUSED = b"refused: "
_POLL_S = (0.0005, 0.05)  # shortest and longest sleep while the first rank chooses
_STORE_TIMEOUT = timedelta(seconds=30)  # of a store that should answer at once
_COMBINE: dict[Any, Callable[..., Any]] = {
    _Operations.SUM: torch.add,
    _Operations.AVG: torch.add,  # and divided at the end
    _Operations.PRODUCT: torch.mul,
    _Operations.MIN: torch.minimum,
    _Operations.MAX: torch.maximum,
}


@dataclass(frozen=True)
class Call:
    """One collective on flat, contiguous buffers."""

    kind: CallKind
    inputs: torch.Tensor
    outputs: torch.Tensor  # output buffer; the same as ``inputs`` for an all-reduce or a broadcast
    unit: int  # elements of the unit that is cut into chunks; see :meth:`Layout.offsets`
    size_bytes: int  # size as :meth:`Collective.chunk_bytes` counts it
    agreed: bool = True  # whether every rank sees this size; else they tell each other first

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def root(self) -> int:
        return max(self.kind.root, 0)


class Engine:
    """Algorithms of one group on one rank."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int],
        world_size: int,
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store = dist.PrefixStore("fivefold", store)
        # Background threads wait on this connection; on torch's own they would hold up the caller.
        self._own_store = self._store.clone()
        self._own_store.set_timeout(_STORE_TIMEOUT)
        self._settings, whole, known = self._as_first_rank(current_settings(), world_size)
        self._topology: Topology = whole.subset(ranks) if len(ranks) < world_size else whole
        self._inner: dict[str, Any] = {}
        self._messages: Any = None
        self._chosen: dict[tuple[str, int, int], tuple[Choice, RankPlan | None]] = {}
        self._said: set[str] = set()
        self._queue = WorkQueue(name=f"fivefold rank {rank}")
        self._threads = ReceiveThreads(f"fivefold rank {rank}")
        self._kept: list[Any] = []
        self._switch: SwitchRoute | None = None
        self._calls = CallLog(self._own_store, rank=rank, size=size, groups=self._gloo_groups)
        self.inner("cpu")
        if size > 1 and any(self._settings.algorithm_of(name) != "inner" for name in CHOOSABLE):
            # Apart from the inner group: the user's messages may have any tag there.
            self._messages = self._gloo("messages")
        if self._settings.aggregation is not None and size > 1:
            self._switch = SwitchRoute(
                self._store, rank=rank, size=size, timeout=timeout, settings=self._settings
            )
        if not known and size > 1:
            self.say(
                "topology",
                "no topology is known: equal links are assumed (see FIVEFOLD_TOPOLOGY)",
                level=logging.INFO,
            )

    def _as_first_rank(
        self, settings: Settings, world_size: int
    ) -> tuple[Settings, Topology, bool]:
        """Return the settings and topology of the group's first rank, which all must share."""
        whole, known = topology_of(settings, world_size)
        names = ("inner", "message_s", "aggregation_min_bytes", "aggregation")
        text = whole.to_toml()
        facts = {name: getattr(settings, name) for name in names}
        facts["algorithms"] = {
            name: "inner" if not runs_own(settings, name) else settings.algorithm_of(name)
            for name in ("all_to_all", *settings.algorithms)
        }
        own = [facts, known, zlib.crc32(text.encode())]
        if self.rank == 0:
            self._store.set("topology", text)
            self._store.set("settings", json.dumps(own))
            return replace(settings, **facts), whole, known
        facts, known, checksum = json.loads(self._store.get("settings"))
        if facts["aggregation"] is not None:  # the same switch may have another address here
            facts["aggregation"] = settings.aggregation or facts["aggregation"]
        if checksum != own[2]:
            whole = read_topology(self._store.get("topology").decode())
        return replace(settings, **facts), whole, known

    def inner(self, device_type: str) -> Any:
        """Return the group that does what has no algorithm here, for tensors on a device."""
        kind = self._settings.inner or ("nccl" if device_type == "cuda" else "gloo")
        if device_type == "cpu":
            kind = "gloo"
        if kind not in self._inner:
            if kind == "nccl":
                store = dist.PrefixStore(f"inner {kind}", self._store)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self.timeout  # noqa: SLF001 - torch sets it so itself
                self._inner[kind] = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            else:
                self._inner[kind] = self._gloo(f"inner {kind}")
        return self._inner[kind]

    def _gloo(self, name: str) -> Any:
        store = dist.PrefixStore(name, self._store)
        return dist.ProcessGroupGloo(store, self.rank, self.size, timeout=self.timeout)

    def _gloo_groups(self) -> list[Any]:
        switched = [] if self._switch is None else [self._switch.group]
        groups = [*self._inner.values(), self._messages, *switched]
        return [group for group in groups if isinstance(group, dist.ProcessGroupGloo)]

    def say(self, key: str, message: str, *, level: int = logging.WARNING) -> None:
        """Log something once, on the group's first rank."""
        if key not in self._said:
            self._said.add(key)
            _log.log(level if self.rank == 0 else logging.DEBUG, "fivefold: %s", message)

    def can_combine(self, tensor: torch.Tensor, operation: Any) -> bool:
        """Return whether the engine's algorithms can reduce such tensors in this way."""
        # Torch does not say how a mean of integers is rounded: backends differ, or refuse it.
        divisible = operation != _Operations.AVG or tensor.is_floating_point()
        return tensor.dtype in _ADDABLE and operation in _COMBINE and divisible

    def choice(self, name: str, size_bytes: int, *, root: int = 0) -> Choice:
        """Return what runs a collective of a size: the same on all ranks."""
        return self._choose(name, size_bytes, root)[0]

    def _choose(self, name: str, size_bytes: int, root: int) -> tuple[Choice, RankPlan | None]:
        """Return also this rank's plan; None where the inner group does it."""
        key = (name, root, size_class(size_bytes))
        if key not in self._chosen:
            choice, plan = self._agree(key), None
            if choice.program is not None:
                clock = clock_of(choice.program, self._topology, self._settings, choice.size_bytes)
                plan = plan_rank(choice.program, rank=self.rank, arrival_s=clock)
            self._chosen[key] = choice, plan
        return self._chosen[key]

    def _agree(self, key: tuple[str, int, int]) -> Choice:
        """Return what the first rank chooses; it tells the others."""
        name, root, size_bytes = key
        entry = f"choice {name} {root} {size_bytes}"
        if self.rank > 0:
            said = self._said_by_first(entry, f"{name} of {size_bytes} bytes")
            if said.startswith(_REFUSED):
                raise ConfigurationError(f"rank 0: {said.removeprefix(_REFUSED).decode()}")
            return Choice.from_bytes(said)
        network, settings = self._topology, self._settings
        try:
            chosen = choose(
                name, topology=network, settings=settings, size_bytes=size_bytes, root=root
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

    def _said_by_first(self, entry: str, what: str) -> bytes:
        """Ask for what rank 0 writes, again and again, as calls may turn out to differ."""
        limit_s = self.timeout.total_seconds()
        end_s = time.monotonic() + limit_s
        pause_s = _POLL_S[0]
        while not self._has_said(entry):
            self._calls.check_reason()
            if time.monotonic() > end_s:
                raise CollectiveError(
                    f"rank 0 did not say within {limit_s:g} s how to run {what}, which rank "
                    f"{self.rank} has called",
                    hint="rank 0 ended, is stuck, or called another collective or size",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        return bytes(self._own_store.get(entry))

    def _has_said(self, entry: str) -> bool:
        try:
            return bool(self._own_store.check([entry]))
        except RuntimeError as error:
            raise CollectiveError(
                f"the group's store is gone: {error}", hint="the process that serves it has ended"
            ) from error

    def run(
        self,
        kind: CallKind,
        call: Call | None,
        inner: Callable[[], Any],
        tensors: Sequence[torch.Tensor],
        results: list[Any],
        opts: Any,
        finish: Callable[[], None] | None = None,
    ) -> Any:
        """Run a collective by an algorithm of its own, or else by the inner group."""
        tag = self._calls.begin(kind)
        end_event = profiler_event(kind.name, tensors)
        if end_event is None and not self._needs_job(call, finish):
            return self._direct(inner, kind)
        work = FivefoldWork(results, what=kind)
        limit = opts.timeout if opts.timeout > timedelta(0) else self.timeout
        # Work on a GPU belongs to the stream on which it was asked for, whatever the thread.
        on_gpu = bool(tensors) and tensors[0].device.type == "cuda"
        stream = torch.cuda.current_stream(tensors[0].device) if on_gpu else None

        def job() -> None:
            try:
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    self._carry_out(kind, call, inner, tag=tag, timeout=limit)
                    if finish is not None:
                        finish()
            finally:
                if end_event is not None:
                    end_event()

        self._calls.watch(work.is_completed)
        # Profiled calls, too, run in the thread: an event that begins and ends in different ones
        # is drawn apart from the caller's stack, as those of torch's backends are.
        in_thread = end_event is not None or bool(getattr(opts, "asyncOp", True))
        self._queue.submit(job, work, in_thread=in_thread)
        return work

    def _needs_job(self, call: Call | None, finish: Callable[[], None] | None) -> bool:
        """Return whether the call needs more than the inner group's own, or has to wait first."""
        if finish is not None or self._queue.is_busy:
            return True
        if call is None or not self._has_own(call):
            return False
        if self._switch is not None or not call.agreed:
            return True
        chosen = self._chosen.get((call.name, call.root, size_class(call.size_bytes)))
        return chosen is None or chosen[1] is not None

    def _has_own(self, call: Call) -> bool:
        """Return whether an algorithm may run a call: the same on all ranks."""
        nothing = call.agreed and not call.size_bytes
        asked = self._settings.algorithm_of(call.name)
        return self.size > 1 and not nothing and (asked != "inner" or self._switch is not None)

    def _direct(self, inner: Callable[[], Any], what: CallKind) -> InnerWork:
        try:
            work = inner()
        except BaseException:
            self._calls.undo()
            raise
        self._calls.watch(work.is_completed)
        return InnerWork(work, what=what, explain=self._calls.explain)

    def _carry_out(
        self,
        kind: CallKind,
        call: Call | None,
        inner: Callable[[], Any],
        *,
        tag: int,
        timeout: timedelta,
    ) -> None:
        """Run a collective to its end."""
        self._calls.check()
        planned = None
        if call is not None and self._has_own(call):
            try:
                if self._switch is not None and self._switch.takes(call):
                    self._switch.all_reduce(call, tag)
                    return
                planned = self._planned(call)
            except CommunicationError as error:
                failed = CollectiveError(error.message, hint=error.hint)
                raise self._calls.explain(failed) from error
        if call is None or planned is None:
            work = inner()  # what it refuses at once has sent nothing: the group lives on
            InnerWork(work, what=kind, explain=self._calls.explain).wait()
            return
        try:
            self._execute(call, *planned, tag=tag, timeout=timeout)
        except BaseException as error:
            raise self._calls.explain(error) from error

    def _planned(self, call: Call) -> tuple[Choice, RankPlan] | None:
        """Return the plan of a call; None where the inner group should do it."""
        if self._settings.algorithm_of(call.name) == "inner":
            return None
        if not call.agreed and not self._all_see(call):
            self.say("all_to_allv", "all-to-alls of uneven shares run on the inner backend")
            return None
        if not call.size_bytes:
            return None
        choice, plan = self._choose(call.name, call.size_bytes, call.root)
        if plan is None:
            return None
        if plan.layout.even_only and call.unit % plan.layout.parts:
            self.say(
                f"uneven {choice.label}",
                f"{choice.label} cannot cut {call.unit} elements into {plan.layout.parts} equal "
                f"chunks; such {call.name} run on the inner backend",
            )
            return None
        return choice, plan

    def _all_see(self, call: Call) -> bool:
        """Return whether the call has the same size on all ranks, which tell each other."""
        mine = torch.full((self.size,), call.size_bytes, device=call.inputs.device)
        theirs = torch.empty_like(mine)
        exchange = inner_method(self.inner(mine.device.type), "alltoall_base", "all_to_all_single")
        what = "agreement on the sizes of an all_to_all"
        work = exchange(theirs, mine, [], [], c10d.AllToAllOptions())
        InnerWork(work, what=what, explain=self._calls.explain).wait()
        return call.size_bytes >= 0 and bool((theirs == call.size_bytes).all())

    def _execute(
        self, call: Call, choice: Choice, plan: RankPlan, *, tag: int, timeout: timedelta
    ) -> None:
        device_type = call.inputs.device.type
        inner = self.inner(device_type)
        by_gloo = isinstance(inner, dist.ProcessGroupGloo)
        staged = by_gloo and device_type != "cpu"
        inputs, outputs = call.inputs, call.outputs
        if staged:  # gloo's messages are in the memory of the CPU
            same = outputs.data_ptr() == inputs.data_ptr()
            inputs = inputs.cpu()
            outputs = inputs if same else torch.empty_like(outputs, device="cpu")
        context = RunContext(
            inner=self._messages if by_gloo else inner,
            inputs=inputs,
            outputs=outputs,
            unit=call.unit,
            combine=_COMBINE.get(call.kind.operation),
            timeout=timeout,
            what=f"{call.name} of {call.size_bytes} bytes by {choice.label} on rank {self.rank}",
            tag=tag,
            threads=self._threads,
            keep=self._kept,
        )
        (Runner if by_gloo else RoundRunner)(plan, context).run()
        if call.kind.operation == _Operations.AVG:
            outputs.div_(self.size)
        if staged:
            call.outputs.copy_(outputs)

    def close(self) -> None:
        self._calls.close()
        self._queue.close()
        self._threads.close()
        if self._switch is not None:
            self._switch.client.close()
        self._inner.clear()
        self._messages = None
