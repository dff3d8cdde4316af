"""Makes torch know the backend "fivefold": its collectives in terms of the engine's flat buffers.

Every method has the name and the arguments with which torch calls it, in C++ or in Python. The
names changed between releases, so all known ones are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from fivefold.collectives.execution._calls import CallKind, FivefoldWork, c10d, dist, inner_method
from fivefold.collectives.execution._engine import Call, Engine

BACKEND = "fivefold"
_ProcessGroup: Any = dist.ProcessGroup
_Tensor = torch.Tensor
_Tensors = list[torch.Tensor]
_INNER = {  # the inner backend's methods over time, where the collective has another name
    "all_reduce": ("allreduce",),
    "all_gather": ("_allgather_base", "all_gather_single"),
    "reduce_scatter": ("_reduce_scatter_base", "reduce_scatter_single"),
    "all_to_all": ("alltoall_base", "all_to_all_single"),
}
_LISTED = {"all_gather": ("allgather",), "reduce_scatter": ("reduce_scatter",)}
_Finish = Callable[[], None] | None  # what brings results to where the caller wants them


class Collectives:
    """Mixed into a process group or a backend class of torch; both hold an engine."""

    engine: Engine

    # -- one buffer: all-reduce and broadcast --------------------------------------------------

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceOptions()
        kind = _kind("all_reduce", *tensors, operation=opts.reduceOp)
        return self._in_place(kind, tensors, opts, tensors)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Combine several tensors over all ranks, as one where they are of one kind."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        plain = c10d.AllreduceOptions()
        for name in ("reduceOp", "timeout", "asyncOp"):
            if hasattr(opts, name):
                setattr(plain, name, getattr(opts, name))
        if _differ(tensors):
            return _all_of([self.allreduce([tensor], plain) for tensor in tensors], tensors)
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])

        def unpack() -> None:
            _copy_parts(tensors, torch.split(joined, [tensor.numel() for tensor in tensors]))

        kind = _kind("all_reduce", joined, operation=opts.reduceOp)
        return self._in_place(kind, [joined], plain, tensors, unpack)

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.BroadcastOptions()
        kind = _kind("broadcast", *tensors, root=opts.rootRank)
        return self._in_place(kind, tensors, opts, tensors)

    def _in_place(
        self,
        kind: CallKind,
        tensors: _Tensors,
        opts: Any,
        results: _Tensors,
        unpack: _Finish = None,
    ) -> Any:
        (tensor,) = tensors
        cut = (tensor.numel(), tensor.nbytes) if self._fits(kind, tensor) else None
        return self._submit(
            kind, [tensors], opts, results=results, sent=results, cut=cut, unpack=unpack
        )

    # -- all-gather and reduce-scatter ---------------------------------------------------------

    def all_gather_single(self, output: _Tensor, input: _Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        opts = opts or c10d.AllgatherOptions()
        kind = _kind("all_gather", output)
        return self._out_of_place(kind, output, input, opts, results=[output])

    def allgather(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        (listed,), (tensor,) = outputs, inputs
        kind = _kind("all_gather", *listed)
        equal = all(other.numel() == tensor.numel() for other in listed)
        if not equal or not self._fits(kind, tensor):
            return self._submit(kind, [outputs, inputs], opts, results=outputs)
        gathered = tensor.new_empty(tensor.numel() * self.engine.size)

        def unpack() -> None:
            _copy_parts(listed, gathered.chunk(len(listed)))

        return self._out_of_place(
            kind, gathered, tensor.reshape(-1), opts, results=outputs, sent=inputs, unpack=unpack
        )

    def all_gather_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return _all_of([self.all_gather_single(out, own, opts) for out, own in pairs], outputs)

    def allgather_coalesced(
        self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None
    ) -> Any:
        """Do several all-gathers into lists, as one where they are of one kind."""
        opts = opts or c10d.AllgatherOptions()
        if _differ(inputs):
            works = [
                self.allgather([[listed[at] for listed in outputs]], [own], opts)
                for at, own in enumerate(inputs)
            ]
            return _all_of(works, outputs)
        joined = torch.cat([tensor.reshape(-1) for tensor in inputs])
        gathered = joined.new_empty(self.engine.size, joined.numel())

        def unpack() -> None:
            sizes = [tensor.numel() for tensor in inputs]
            for listed, row in zip(outputs, gathered, strict=True):
                _copy_parts(listed, torch.split(row, sizes))

        kind = _kind("all_gather", gathered)
        return self._out_of_place(
            kind, gathered.view(-1), joined, opts, results=outputs, sent=inputs, unpack=unpack
        )

    def reduce_scatter_single(self, output: _Tensor, input: _Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        opts = opts or c10d.ReduceScatterOptions()
        kind = _kind("reduce_scatter", input, operation=opts.reduceOp)
        return self._out_of_place(kind, output, input, opts, results=[output])

    def reduce_scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        (output,), (listed,) = outputs, inputs
        kind = _kind("reduce_scatter", *listed, operation=opts.reduceOp)
        equal = all(part.numel() == output.numel() for part in listed)
        if not equal or not self._fits(kind, output):
            return self._submit(kind, [outputs, inputs], opts, results=outputs)
        flat = torch.cat([part.reshape(-1) for part in listed])
        return self._out_of_place(kind, output, flat, opts, results=outputs, sent=listed)

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return _all_of([self.reduce_scatter_single(out, own, opts) for out, own in pairs], outputs)

    def _out_of_place(
        self,
        kind: CallKind,
        output: _Tensor,
        source: _Tensor,
        opts: Any,
        *,
        results: list[Any],
        sent: _Tensors | None = None,
        unpack: _Finish = None,
    ) -> Any:
        """Run an all-gather or a reduce-scatter of one tensor into one other."""
        gathers = kind.name == "all_gather"
        share, whole = (source, output) if gathers else (output, source)
        fits = self._fits(kind, source, output)
        fits = fits and whole.numel() == share.numel() * self.engine.size
        cut = (share.numel(), whole.nbytes) if fits else None
        return self._submit(
            kind, [output, source], opts, results=results, sent=sent, cut=cut, unpack=unpack
        )

    # -- all-to-all ----------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: _Tensor,
        input: _Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        """Send a share from everyone to everyone; how much may differ from rank to rank."""
        splits = [list(output_split_sizes), list(input_split_sizes)]
        return self._all_to_all(output, input, splits, opts, [output])

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        flat = torch.cat([tensor.reshape(-1) for tensor in inputs])
        sizes = [tensor.numel() for tensor in outputs]
        received = flat.new_empty(sum(sizes))

        def unpack() -> None:
            _copy_parts(outputs, torch.split(received, sizes))

        splits = [sizes, [tensor.numel() for tensor in inputs]]
        return self._all_to_all(received, flat, splits, opts, outputs, unpack)

    def _all_to_all(
        self,
        output: _Tensor,
        source: _Tensor,
        splits: list[list[int]],
        opts: Any,
        results: _Tensors,
        unpack: _Finish = None,
    ) -> Any:
        kind, cut = CallKind("all_to_all", dtype=source.dtype), None
        if self._fits(kind, source, output):
            rows, rest = divmod(source.size(0) if source.dim() else 1, self.engine.size)
            equal = {rows} >= {*splits[0], *splits[1]}
            even = equal and not rest and output.numel() == source.numel()
            cut = (source.numel() // self.engine.size, source.nbytes if even else -1)
        return self._submit(
            kind,
            [output, source],
            opts or c10d.AllToAllOptions(),
            results=results,
            cut=cut,
            unpack=unpack,
            splits=splits,
        )

    # -- what the inner backend does -----------------------------------------------------------

    def reduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceOptions()
        return self._to_root("reduce", [tensors], tensors, opts, operation=opts.reduceOp)

    def gather(self, outputs: list[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        return self._to_root("gather", [outputs, inputs], inputs, opts or c10d.GatherOptions())

    def scatter(self, outputs: _Tensors, inputs: list[_Tensors], opts: Any = None) -> Any:
        return self._to_root("scatter", [outputs, inputs], outputs, opts or c10d.ScatterOptions())

    def _to_root(self, name: str, lists: list[Any], own: _Tensors, opts: Any, **fields: Any) -> Any:
        (tensor,) = own
        self.engine.say(name, f"{name} has no algorithm here and runs on the inner backend")
        kind = _kind(name, tensor, root=opts.rootRank, **fields)
        return self._submit(kind, lists, opts, results=lists[0], sent=own)

    def barrier(self, opts: Any = None) -> Any:
        opts = opts or c10d.BarrierOptions()
        inner = partial(self.engine.inner("cpu").barrier, opts)
        return self.engine.run(CallKind("barrier"), None, inner, [], [], opts)

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Run on the inner backend; ``dist.monitored_barrier`` asks for gloo by its name."""
        limit = timeout if timeout is not None else self.engine.timeout
        return self.engine.inner("cpu").monitored_barrier(limit, wait_all_ranks)

    def _submit(  # noqa: PLR0913 - what a call is made of
        self,
        kind: CallKind,
        tensors: Sequence[Any],
        opts: Any,
        *,
        results: list[Any],
        sent: _Tensors | None = None,
        cut: tuple[int, int] | None = None,
        unpack: _Finish = None,
        splits: Sequence[Any] = (),
    ) -> Any:
        """Run a collective of the inner backend, or an algorithm in its place.

        ``tensors`` are its arguments, the first what is written; a profiler sees ``sent``, or the
        last. ``cut`` is the unit and the bytes of an algorithm's call, None where there is none.
        """
        (to, copy_back), own = _packed(tensors[0]), [_packed(one)[0] for one in tensors[1:]]
        call = None
        if cut is not None:
            written = to[0] if isinstance(to, list) else to
            read = own[0] if own else written
            agreed = kind.name != "all_to_all"
            call = Call(kind, _flat(read), _flat(written), *cut, agreed=agreed)
        seen = sent or _leaves(tensors[-1])
        names = _INNER.get(kind.name, (kind.name,))
        if isinstance(to, list):
            names = _LISTED.get(kind.name, names)
        inner = partial(inner_method(self._inner(seen[0]), *names), to, *own, *splits, opts)
        return self.engine.run(kind, call, inner, seen, results, opts, unpack or copy_back)

    # -- messages: not collectives, and not numbered -------------------------------------------

    def send(self, tensors: _Tensors, dst: int, tag: int = 0) -> Any:
        return self._inner(tensors[0]).send(tensors, dst, tag)

    def recv(self, tensors: _Tensors, src: int, tag: int = 0) -> Any:
        return self._inner(tensors[0]).recv(tensors, src, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> Any:
        return self._inner(tensors[0]).recv_anysource(tensors, tag)

    # -- common --------------------------------------------------------------------------------

    def _inner(self, tensor: _Tensor) -> Any:
        return self.engine.inner(tensor.device.type)

    def _fits(self, kind: CallKind, *tensors: _Tensor) -> bool:
        if any(tensor.layout is not torch.strided for tensor in tensors):
            name = kind.name
            self.engine.say(f"{name} sparse", f"{name} of sparse tensors runs on the inner backend")
            return False
        if len({tensor.dtype for tensor in tensors}) > 1:  # for the inner backend to refuse
            return False
        if kind.operation is not None and not self.engine.can_combine(tensors[0], kind.operation):
            what = f"{kind.name} of {tensors[0].dtype} by {kind.operation}"
            self.engine.say(what, f"{what} runs on the inner backend")
            return False
        return True

    # -- names with which torch asks; all but those of backends stand in FivefoldGroup ---------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    name = getBackendName

    def shutdown(self) -> None:
        self.engine.close()

    abort = shutdown


# torch's older names of the same methods.
for _old, _new in {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}.items():
    setattr(Collectives, _old, getattr(Collectives, _new))


def _kind(name: str, *tensors: _Tensor, operation: Any = None, root: int = -1) -> CallKind:
    """Return what all ranks must call alike."""
    dense = all(tensor.layout is torch.strided for tensor in tensors)
    size_bytes = sum(tensor.nbytes for tensor in tensors) if dense else -1
    return CallKind(name, size_bytes, tensors[0].dtype, getattr(operation, "op", operation), root)


def _leaves(tensors: Any) -> _Tensors:
    if isinstance(tensors, list):
        return [leaf for part in tensors for leaf in _leaves(part)]
    return [tensors]


def _copy_parts(places: Sequence[_Tensor], parts: Sequence[_Tensor]) -> None:
    for place, part in zip(places, parts, strict=True):
        place.copy_(part.view(place.shape))


def _flat(tensor: _Tensor) -> _Tensor:
    """Return the elements in a row, as they are in memory: a view where that is possible."""
    if tensor.numel() != 1 and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
        return tensor.detach().view(-1)
    # Conjugated and negated tensors hold other bits than they show.
    found = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element counts as contiguous, whatever its stride.
    return found.as_strided((found.numel(),), (1,))


def _packed(tensors: Any) -> tuple[Any, _Finish]:
    """Return nested lists of tensors, contiguous, and what brings back the copies among them.

    Gloo reads and writes memory from a tensor's first element on, whatever the strides.
    """
    copies: list[tuple[_Tensor, _Tensor]] = []

    def pack(one: Any) -> Any:
        if isinstance(one, list):
            return [pack(part) for part in one]
        if one.layout is not torch.strided or (flat := _flat(one)).data_ptr() == one.data_ptr():
            return one
        copies.append((one, flat.view(one.shape)))
        return copies[-1][1]

    def finish() -> None:
        for tensor, copy in copies:
            tensor.copy_(copy)

    packed = pack(tensors)
    return packed, finish if copies else None


def _differ(tensors: _Tensors) -> bool:
    return len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1


def _all_of(works: list[Any], results: list[Any]) -> FivefoldWork:
    """Return the work that is over when all are."""
    whole = FivefoldWork(results, what="several calls")

    def after(collected: Any) -> None:
        try:
            for future in collected.value():
                future.value()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            whole.finish(error)
        else:
            whole.finish()

    if works:
        futures = [work.get_future() for work in works]
        torch.futures.collect_all(futures).add_done_callback(after)
    else:
        whole.finish()
    return whole


class FivefoldGroup(Collectives, _ProcessGroup):
    """A process group whose collectives are run by an engine."""

    def __init__(self, engine: Engine) -> None:
        _ProcessGroup.__init__(self, engine.rank, engine.size)
        self.engine = engine
        self._name = ""

    # Names with which C++ asks; they are torch's.
    def getRank(self) -> int:  # noqa: N802 - torch's name
        return self.engine.rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        return self.engine.size

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self.group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:
        return self._name or str(c10d._world.pg_names[self])  # noqa: SLF001 - torch keeps it there

    def _get_backend(self, device: torch.device) -> Any:
        return self.engine.inner(device.type)

    _get_backend_name = Collectives.getBackendName

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: calls between start and end are run as they come."""

    def _end_coalescing(self, device: torch.device) -> FivefoldWork:
        del device
        return _all_of([], [])

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: only torch's debug wrapper, never put around this group, needs a number."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def set_timeout(self, timeout: Any) -> None:
        self.engine.timeout = timeout


def _made_for(engine: Engine) -> Any:
    """Return a backend, where torch's class can be subclassed in Python; else a group.

    Until torch 2.13 a creator may return a Python subclass of ``ProcessGroup``, which torch then
    uses as the group itself. From 2.14 on the group stays an ordinary one.
    """
    base: Any = getattr(dist, "_Backend", object)
    try:
        base(0, 1)
    except TypeError:  # no constructor is defined: torch up to 2.13
        return FivefoldGroup(engine)

    class FivefoldBackend(Collectives, base):
        def __init__(self) -> None:
            base.__init__(self, engine.rank, engine.size)
            self.engine = engine

    return FivefoldBackend()


def _create(options: Any, backend_options: Any = None) -> Any:
    """Make a group for torch; ``options`` are its ``_DistributedBackendOptions``."""
    del backend_options
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    world = c10d._world.default_pg  # noqa: SLF001 - None while the default group is being made
    return _made_for(
        Engine(
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout,
            ranks=ranks,
            world_size=options.group_size if world is None else world.size(),
        )
    )


def register_backend() -> None:
    """Make ``init_process_group(backend="fivefold")`` work; done by importing the package."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
