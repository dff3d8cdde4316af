"""torch's collectives in terms of the engine: flat buffers, sizes, and what is left to the inner.

Every method has the name and the arguments with which torch calls it, in C++ or in Python. The
names changed between releases, so all known ones are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from fivefold.collectives.execution._calls import CallKind
from fivefold.collectives.execution._engine import Call, Engine
from fivefold.collectives.execution._torch import c10d as dist
from fivefold.collectives.execution._torch import inner_method
from fivefold.collectives.execution._work import FivefoldWork

_Tensor = torch.Tensor


class Collectives:
    """Mixed into a process group or a backend class of torch; both hold an engine."""

    engine: Engine

    # -- all-reduce ----------------------------------------------------------------------------

    def allreduce(self, tensors: list[_Tensor], opts: Any = None) -> Any:
        """Sum, or otherwise combine, one tensor over all ranks."""
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        kind = self._kind("all_reduce", tensor, operation=opts.reduceOp)
        inner = partial(self._inner(tensor).allreduce, tensors, opts)
        if not self._fits(kind, tensors):
            return self._run(kind, None, inner, tensors, tensors, opts)
        flat, finish = _flat_in_out(tensor)
        call = self._reduce_call(flat, opts)
        if finish is not None:
            inner = partial(self._inner(flat).allreduce, [flat], opts)
        return self._run(kind, call, inner, tensors, tensors, opts, finish)

    def allreduce_coalesced(self, tensors: list[_Tensor], opts: Any = None) -> Any:
        """Combine several tensors over all ranks, as one where they are of one kind."""
        opts = opts or dist.AllreduceCoalescedOptions()
        same = {(tensor.dtype, tensor.device) for tensor in tensors}
        plain = _options_like(dist.AllreduceOptions(), opts)
        if len(same) > 1:
            return _all_of([self.allreduce([tensor], plain) for tensor in tensors], tensors)
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])

        def finish() -> None:
            parts = torch.split(joined, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

        kind = self._kind("all_reduce", joined, operation=opts.reduceOp)
        call = self._reduce_call(joined, opts) if self._fits(kind, [joined]) else None
        inner = partial(self._inner(joined).allreduce, [joined], plain)
        return self._run(kind, call, inner, tensors, tensors, plain, finish)

    def _reduce_call(self, flat: _Tensor, opts: Any) -> Call:
        return Call(
            name="all_reduce",
            inputs=flat,
            outputs=flat,
            unit=flat.numel(),
            size_bytes=flat.nbytes,
            operation=opts.reduceOp,
        )

    # -- all-gather ----------------------------------------------------------------------------

    def all_gather_single(self, output: _Tensor, input: _Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        """Gather everyone's tensor, one after another, in one tensor."""
        opts = opts or dist.AllgatherOptions()
        kind = self._kind("all_gather", output)
        call, finish, to, own = None, None, output, input
        if self._fits(kind, [input, output]) and output.numel() == input.numel() * self.engine.size:
            to, finish = _output(output)
            own = _flat(input)
            call = self._gather_call(to.view(-1), own)
        gather = inner_method(self._inner(input), "_allgather_base", "all_gather_single")
        inner = partial(gather, to, own.view(input.shape), opts)
        return self._run(kind, call, inner, [input], [output], opts, finish)

    def _gather_call(self, output: _Tensor, flat: _Tensor) -> Call:
        return Call(
            name="all_gather",
            inputs=flat,
            outputs=output,
            unit=flat.numel(),
            size_bytes=flat.nbytes * self.engine.size,
        )

    def allgather(
        self, outputs: list[list[_Tensor]], inputs: list[_Tensor], opts: Any = None
    ) -> Any:
        """Gather everyone's tensor in a list."""
        opts = opts or dist.AllgatherOptions()
        (listed,), (tensor,) = outputs, inputs
        kind = self._kind("all_gather", *listed)
        equal = all(other.numel() == tensor.numel() for other in listed)
        if not equal or not self._fits(kind, [tensor]):
            inner = partial(self._inner(tensor).allgather, outputs, inputs, opts)
            return self._run(kind, None, inner, inputs, outputs, opts)
        flat = _flat(tensor)
        gathered = flat.new_empty(flat.numel() * self.engine.size)

        def finish() -> None:
            for place, part in zip(listed, gathered.chunk(len(listed)), strict=True):
                place.copy_(part.view(place.shape))

        gather = inner_method(self._inner(tensor), "_allgather_base", "all_gather_single")
        call, inner = self._gather_call(gathered, flat), partial(gather, gathered, flat, opts)
        return self._run(kind, call, inner, inputs, outputs, opts, finish)

    def all_gather_single_coalesced(
        self, outputs: list[_Tensor], inputs: list[_Tensor], opts: Any = None
    ) -> Any:
        """Do several all-gathers."""
        pairs = zip(outputs, inputs, strict=True)
        return _all_of([self.all_gather_single(out, own, opts) for out, own in pairs], outputs)

    def allgather_coalesced(
        self, outputs: list[list[_Tensor]], inputs: list[_Tensor], opts: Any = None
    ) -> Any:
        """Do several all-gathers into lists, as one where they are of one kind."""
        opts = opts or dist.AllgatherOptions()
        if len({(tensor.dtype, tensor.device) for tensor in inputs}) > 1:
            works = [
                self.allgather([[listed[at] for listed in outputs]], [own], opts)
                for at, own in enumerate(inputs)
            ]
            return _all_of(works, outputs)
        joined = torch.cat([tensor.reshape(-1) for tensor in inputs])
        gathered = joined.new_empty(self.engine.size, joined.numel())

        def finish() -> None:
            sizes = [tensor.numel() for tensor in inputs]
            for listed, row in zip(outputs, gathered, strict=True):
                for place, part in zip(listed, row.split(sizes), strict=True):
                    place.copy_(part.view(place.shape))

        kind = self._kind("all_gather", gathered)
        call = self._gather_call(gathered.view(-1), joined)
        gather = inner_method(self._inner(joined), "_allgather_base", "all_gather_single")
        inner = partial(gather, gathered.view(-1), joined, opts)
        return self._run(kind, call, inner, inputs, outputs, opts, finish)

    # -- reduce-scatter ------------------------------------------------------------------------

    def reduce_scatter_single(self, output: _Tensor, input: _Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        """Give everyone one share of the sum."""
        opts = opts or dist.ReduceScatterOptions()
        kind = self._kind("reduce_scatter", input, operation=opts.reduceOp)
        call, finish, to, own = None, None, output, input
        if self._fits(kind, [input, output]) and input.numel() == output.numel() * self.engine.size:
            to, finish = _output(output)
            own = _flat(input)
            call = self._scatter_call(to.view(-1), own, opts)
        scatter = inner_method(self._inner(input), "_reduce_scatter_base", "reduce_scatter_single")
        inner = partial(scatter, to, own.view(input.shape), opts)
        return self._run(kind, call, inner, [input], [output], opts, finish)

    def _scatter_call(self, output: _Tensor, flat: _Tensor, opts: Any) -> Call:
        return Call(
            name="reduce_scatter",
            inputs=flat,
            outputs=output,
            unit=output.numel(),
            size_bytes=flat.nbytes,
            operation=opts.reduceOp,
        )

    def reduce_scatter(
        self, outputs: list[_Tensor], inputs: list[list[_Tensor]], opts: Any = None
    ) -> Any:
        """Give everyone one of a list of sums."""
        opts = opts or dist.ReduceScatterOptions()
        (output,), (listed,) = outputs, inputs
        kind = self._kind("reduce_scatter", *listed, operation=opts.reduceOp)
        equal = all(part.numel() == output.numel() for part in listed)
        if not equal or not self._fits(kind, [output]):
            inner = partial(self._inner(output).reduce_scatter, outputs, inputs, opts)
            return self._run(kind, None, inner, listed, outputs, opts)
        flat = torch.cat([part.reshape(-1) for part in listed])
        place, finish = _output(output)
        call = self._scatter_call(place.view(-1), flat, opts)
        scatter = inner_method(self._inner(output), "_reduce_scatter_base", "reduce_scatter_single")
        inner = partial(scatter, place.view(-1), flat, opts)
        return self._run(kind, call, inner, listed, outputs, opts, finish)

    def reduce_scatter_single_coalesced(
        self, outputs: list[_Tensor], inputs: list[_Tensor], opts: Any = None
    ) -> Any:
        """Do several reduce-scatters."""
        pairs = zip(outputs, inputs, strict=True)
        return _all_of([self.reduce_scatter_single(out, own, opts) for out, own in pairs], outputs)

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
        opts = opts or dist.AllToAllOptions()
        kind = self._kind("all_to_all", dtype=input.dtype)
        call, finish, to, own = None, None, output, input
        if self._fits(kind, [input, output]):
            to, finish = _output(output)
            own = _flat(input).view(input.shape)
            flat = own.view(-1)
            rows, rest = divmod(input.size(0) if input.dim() else 1, self.engine.size)
            equal = {rows} >= {*output_split_sizes, *input_split_sizes}
            even = equal and not rest and output.numel() == input.numel()
            call = Call(
                name="all_to_all",
                inputs=flat,
                outputs=to.view(-1),
                unit=flat.numel() // self.engine.size,
                size_bytes=flat.nbytes if even else -1,
                agreed=False,
            )
        exchange = inner_method(self._inner(input), "alltoall_base", "all_to_all_single")
        splits = list(output_split_sizes), list(input_split_sizes)
        inner = partial(exchange, to, own, *splits, opts)
        return self._run(kind, call, inner, [input], [output], opts, finish)

    def alltoall(self, outputs: list[_Tensor], inputs: list[_Tensor], opts: Any = None) -> Any:
        """Send one of a list from everyone to everyone."""
        flat = torch.cat([tensor.reshape(-1) for tensor in inputs])
        sizes = [tensor.numel() for tensor in outputs]
        received = flat.new_empty(sum(sizes))

        def finish() -> None:
            for place, part in zip(outputs, torch.split(received, sizes), strict=True):
                place.copy_(part.view(place.shape))

        sent = [tensor.numel() for tensor in inputs]
        return _then(self.all_to_all_single(received, flat, sizes, sent, opts), outputs, finish)

    # -- broadcast -----------------------------------------------------------------------------

    def broadcast(self, tensors: list[_Tensor], opts: Any = None) -> Any:
        """Give all ranks one rank's tensor."""
        opts = opts or dist.BroadcastOptions()
        (tensor,) = tensors
        kind = self._kind("broadcast", tensor, root=opts.rootRank)
        if not self._fits(kind, tensors):
            inner = partial(self._inner(tensor).broadcast, tensors, opts)
            return self._run(kind, None, inner, tensors, tensors, opts)
        flat, finish = _flat_in_out(tensor)
        call = Call(
            name="broadcast",
            inputs=flat,
            outputs=flat,
            unit=flat.numel(),
            size_bytes=flat.nbytes,
            root=opts.rootRank,
        )
        sent = tensors if finish is None else [flat]
        inner = partial(self._inner(tensor).broadcast, sent, opts)
        return self._run(kind, call, inner, tensors, tensors, opts, finish)

    # -- what the inner backend does -----------------------------------------------------------

    def reduce(self, tensors: list[_Tensor], opts: Any = None) -> Any:
        """Run on the inner backend."""
        opts = opts or dist.ReduceOptions()
        (tensor,) = tensors
        self._say_inner("reduce")
        kind = self._kind("reduce", tensor, operation=opts.reduceOp, root=opts.rootRank)
        inner = partial(self._inner(tensor).reduce, tensors, opts)
        return self._run(kind, None, inner, tensors, tensors, opts)

    def gather(self, outputs: list[list[_Tensor]], inputs: list[_Tensor], opts: Any = None) -> Any:
        """Run on the inner backend."""
        opts = opts or dist.GatherOptions()
        (tensor,) = inputs
        self._say_inner("gather")
        kind = self._kind("gather", tensor, root=opts.rootRank)
        inner = partial(self._inner(tensor).gather, outputs, inputs, opts)
        return self._run(kind, None, inner, inputs, outputs, opts)

    def scatter(self, outputs: list[_Tensor], inputs: list[list[_Tensor]], opts: Any = None) -> Any:
        """Run on the inner backend."""
        opts = opts or dist.ScatterOptions()
        (tensor,) = outputs
        self._say_inner("scatter")
        kind = self._kind("scatter", tensor, root=opts.rootRank)
        inner = partial(self._inner(tensor).scatter, outputs, inputs, opts)
        return self._run(kind, None, inner, outputs, outputs, opts)

    def barrier(self, opts: Any = None) -> Any:
        """Run on the inner backend."""
        opts = opts or dist.BarrierOptions()
        inner = partial(self.engine.inner("cpu").barrier, opts)
        return self._run(CallKind("barrier"), None, inner, [], [], opts)

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Run on the inner backend; ``dist.monitored_barrier`` asks for gloo by its name."""
        limit = timeout if timeout is not None else self.engine.timeout
        return self.engine.inner("cpu").monitored_barrier(limit, wait_all_ranks)

    # -- messages: not collectives, and not numbered -------------------------------------------

    def send(self, tensors: list[_Tensor], dst: int, tag: int = 0) -> Any:
        """Run on the inner backend."""
        return self._inner(tensors[0]).send(tensors, dst, tag)

    def recv(self, tensors: list[_Tensor], src: int, tag: int = 0) -> Any:
        """Run on the inner backend."""
        return self._inner(tensors[0]).recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[_Tensor], tag: int = 0) -> Any:
        """Run on the inner backend."""
        return self._inner(tensors[0]).recv_anysource(tensors, tag)

    # -- common --------------------------------------------------------------------------------

    def _inner(self, tensor: _Tensor) -> Any:
        return self.engine.inner(tensor.device.type)

    def _say_inner(self, name: str) -> None:
        self.engine.say(name, f"{name} has no algorithm here and runs on the inner backend")

    def _kind(self, name: str, *tensors: _Tensor, dtype: Any = None, **fields: Any) -> CallKind:
        """Return what all ranks must call alike."""
        size_bytes = -1
        if tensors:
            dtype = tensors[0].dtype
            dense = all(tensor.layout is torch.strided for tensor in tensors)
            size_bytes = sum(tensor.nbytes for tensor in tensors) if dense else -1
        operation = fields.pop("operation", None)
        return CallKind(name, size_bytes, dtype, getattr(operation, "op", operation), **fields)

    def _fits(self, kind: CallKind, tensors: Sequence[_Tensor]) -> bool:
        if any(tensor.layout is not torch.strided for tensor in tensors):
            name = kind.name
            self.engine.say(f"{name} sparse", f"{name} of sparse tensors runs on the inner backend")
            return False
        if kind.operation is not None and not self.engine.can_combine(tensors[0], kind.operation):
            what = f"{kind.name} of {tensors[0].dtype} by {kind.operation}"
            self.engine.say(what, f"{what} runs on the inner backend")
            return False
        return True

    def _run(
        self,
        kind: CallKind,
        call: Call | None,
        inner: Callable[[], Any],
        sent: Sequence[_Tensor],
        results: list[Any],
        opts: Any,
        finish: Callable[[], None] | None = None,
    ) -> Any:
        return self.engine.run(
            kind, call, inner, tensors=sent, results=results, opts=opts, finish=finish
        )


# torch's older names of the same methods.
for _old, _new in {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}.items():
    setattr(Collectives, _old, getattr(Collectives, _new))


def _flat(tensor: _Tensor) -> _Tensor:
    """Return the elements in a row, as they are in memory: a view where that is possible."""
    if tensor.numel() != 1 and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
        return tensor.detach().view(-1)
    # Conjugated and negated tensors hold other bits than they show.
    found = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element counts as contiguous, whatever its stride.
    return found.as_strided((found.numel(),), (1,))


def _flat_in_out(tensor: _Tensor) -> tuple[_Tensor, Callable[[], None] | None]:
    """Return a flat view, or a flat copy and what brings it back."""
    flat = _flat(tensor)
    if flat.data_ptr() == tensor.data_ptr():
        return flat, None

    def finish() -> None:
        tensor.copy_(flat.view(tensor.shape))

    return flat, finish


def _output(tensor: _Tensor) -> tuple[_Tensor, Callable[[], None] | None]:
    """Return the tensor itself, or a contiguous one to be filled and what brings it back."""
    flat, finish = _flat_in_out(tensor)
    return flat.view(tensor.shape), finish


def _options_like(options: Any, given: Any) -> Any:
    options.reduceOp = given.reduceOp
    options.timeout = given.timeout
    if hasattr(given, "asyncOp"):
        options.asyncOp = given.asyncOp
    return options


def _then(work: Any, results: list[Any], finish: Callable[[], None]) -> Any:
    """Return a work that does something more when the first one is over."""

    def after(future: Any) -> list[Any]:
        future.value()  # raises what went wrong
        finish()
        return results

    return _chained(work.get_future().then(after), results)


def _all_of(works: list[Any], results: list[Any]) -> Any:
    if not works:
        done = FivefoldWork(results, what="nothing")
        done.finish(None)
        return done
    futures = torch.futures.collect_all([work.get_future() for work in works])

    def after(collected: Any) -> list[Any]:
        for future in collected.value():
            future.value()
        return results

    return _chained(futures.then(after), results)


def _chained(future: Any, results: list[Any]) -> FivefoldWork:
    work = FivefoldWork(results, what="collective")

    def done(ended: Any) -> None:
        try:
            ended.value()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            work.finish(error)
        else:
            work.finish(None)

    future.add_done_callback(done)
    return work
