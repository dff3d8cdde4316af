"""torch's collectives in terms of the engine: flat buffers, sizes, and what is left to the inner.

Every method has the name and the arguments with which torch calls it, in C++ or in Python. The
names changed between releases, so all known ones are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from fivefold.collectives.execution._engine import Call, Engine
from fivefold.collectives.execution._torch import c10d as dist
from fivefold.collectives.execution._work import FivefoldWork

__all__ = ["Collectives"]

_Tensor = torch.Tensor


class Collectives:
    """Mixed into a process group or a backend class of torch; both hold an engine.

    Example:
        >>> callable(Collectives.allreduce)
        True
    """

    engine: Engine

    # -- all-reduce ----------------------------------------------------------------------------

    def allreduce(self, tensors: list[_Tensor], opts: Any = None) -> Any:
        """Sum, or otherwise combine, one tensor over all ranks."""
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        if not self._fits("all_reduce", tensors, opts.reduceOp):
            return self._inner(tensor).allreduce(tensors, opts)
        flat, finish = _flat_in_out(tensor)
        call = Call(
            name="all_reduce",
            inputs=flat,
            outputs=flat,
            unit=flat.numel(),
            size_bytes=flat.nbytes,
            operation=opts.reduceOp,
        )
        work = self._run(call, tensors, opts, finish)
        return work or self._inner(tensor).allreduce(tensors, opts)

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

        return _then(self.allreduce([joined], plain), tensors, finish)

    # -- all-gather ----------------------------------------------------------------------------

    def all_gather_single(self, output: _Tensor, input: _Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        """Everyone's tensor, one after another, in one tensor."""
        opts = opts or dist.AllgatherOptions()
        if self._fits("all_gather", [input, output]) and output.is_contiguous():
            call = self._gather_call(output.view(-1), input.contiguous().view(-1))
            if (work := self._run(call, [output], opts)) is not None:
                return work
        return _first_of(self._inner(input), "_allgather_base", "all_gather_single")(
            output, input, opts
        )

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
        """Everyone's tensor, in a list."""
        opts = opts or dist.AllgatherOptions()
        (listed,), (tensor,) = outputs, inputs
        equal = all(other.numel() == tensor.numel() for other in listed)
        if equal and self._fits("all_gather", [tensor]):
            flat = tensor.contiguous().view(-1)
            gathered = flat.new_empty(flat.numel() * self.engine.size)

            def finish() -> None:
                for place, part in zip(listed, gathered.chunk(len(listed)), strict=True):
                    place.copy_(part.view(place.shape))

            work = self._run(self._gather_call(gathered, flat), outputs, opts, finish)
            if work is not None:
                return work
        return self._inner(tensor).allgather(outputs, inputs, opts)

    def all_gather_single_coalesced(
        self, outputs: list[_Tensor], inputs: list[_Tensor], opts: Any = None
    ) -> Any:
        """Several all-gathers."""
        pairs = zip(outputs, inputs, strict=True)
        return _all_of([self.all_gather_single(out, own, opts) for out, own in pairs], outputs)

    def allgather_coalesced(
        self, outputs: list[list[_Tensor]], inputs: list[_Tensor], opts: Any = None
    ) -> Any:
        """Several all-gathers into lists."""
        works = [
            self.allgather([[listed[at] for listed in outputs]], [own], opts)
            for at, own in enumerate(inputs)
        ]
        return _all_of(works, outputs)

    # -- reduce-scatter ------------------------------------------------------------------------

    def reduce_scatter_single(self, output: _Tensor, input: _Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        """Everyone gets one share of the sum."""
        opts = opts or dist.ReduceScatterOptions()
        if self._fits("reduce_scatter", [input, output], opts.reduceOp) and output.is_contiguous():
            call = self._scatter_call(output.view(-1), input.contiguous().view(-1), opts)
            if (work := self._run(call, [output], opts)) is not None:
                return work
        return _first_of(self._inner(input), "_reduce_scatter_base", "reduce_scatter_single")(
            output, input, opts
        )

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
        """Everyone gets one of a list of sums."""
        opts = opts or dist.ReduceScatterOptions()
        (output,), (listed,) = outputs, inputs
        equal = all(part.numel() == output.numel() for part in listed)
        if equal and self._fits("reduce_scatter", [output], opts.reduceOp):
            flat = torch.cat([part.reshape(-1) for part in listed])
            place, finish = _flat_in_out(output)
            work = self._run(self._scatter_call(place, flat, opts), outputs, opts, finish)
            if work is not None:
                return work
        return self._inner(output).reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[_Tensor], inputs: list[_Tensor], opts: Any = None
    ) -> Any:
        """Several reduce-scatters."""
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
        """Everyone sends a share to everyone."""
        opts = opts or dist.AllToAllOptions()
        splits = [*output_split_sizes, *input_split_sizes]
        if len(set(splits)) > 1:
            self.engine.say("all_to_allv", "all-to-alls of uneven shares run on the inner backend")
        elif self._fits("all_to_all", [input, output]) and output.is_contiguous():
            flat = input.contiguous().view(-1)
            call = Call(
                name="all_to_all",
                inputs=flat,
                outputs=output.view(-1),
                unit=flat.numel() // self.engine.size,
                size_bytes=flat.nbytes,
            )
            if (work := self._run(call, [output], opts)) is not None:
                return work
        return _first_of(self._inner(input), "alltoall_base", "all_to_all_single")(
            output, input, list(output_split_sizes), list(input_split_sizes), opts
        )

    def alltoall(self, outputs: list[_Tensor], inputs: list[_Tensor], opts: Any = None) -> Any:
        """Everyone sends one of a list to everyone."""
        opts = opts or dist.AllToAllOptions()
        if len({tensor.numel() for tensor in [*outputs, *inputs]}) == 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in inputs])
            received = torch.empty_like(flat)

            def finish() -> None:
                for place, part in zip(outputs, received.chunk(len(outputs)), strict=True):
                    place.copy_(part.view(place.shape))

            work = self.all_to_all_single(received, flat, opts=opts)
            return _then(work, outputs, finish)
        return self._inner(inputs[0]).alltoall(outputs, inputs, opts)

    # -- broadcast -----------------------------------------------------------------------------

    def broadcast(self, tensors: list[_Tensor], opts: Any = None) -> Any:
        """One rank's tensor on all ranks."""
        opts = opts or dist.BroadcastOptions()
        (tensor,) = tensors
        if self._fits("broadcast", tensors):
            flat, finish = _flat_in_out(tensor)
            call = Call(
                name="broadcast",
                inputs=flat,
                outputs=flat,
                unit=flat.numel(),
                size_bytes=flat.nbytes,
                root=opts.rootRank,
            )
            if (work := self._run(call, tensors, opts, finish)) is not None:
                return work
        return self._inner(tensor).broadcast(tensors, opts)

    # -- what the inner backend does -----------------------------------------------------------

    def reduce(self, tensors: list[_Tensor], opts: Any = None) -> Any:
        """Left to the inner backend."""
        self._say_inner("reduce")
        return self._inner(tensors[0]).reduce(tensors, opts or dist.ReduceOptions())

    def gather(self, outputs: list[list[_Tensor]], inputs: list[_Tensor], opts: Any = None) -> Any:
        """Left to the inner backend."""
        self._say_inner("gather")
        return self._inner(inputs[0]).gather(outputs, inputs, opts or dist.GatherOptions())

    def scatter(self, outputs: list[_Tensor], inputs: list[list[_Tensor]], opts: Any = None) -> Any:
        """Left to the inner backend."""
        self._say_inner("scatter")
        return self._inner(outputs[0]).scatter(outputs, inputs, opts or dist.ScatterOptions())

    def send(self, tensors: list[_Tensor], dst: int, tag: int = 0) -> Any:
        """Left to the inner backend."""
        return self._inner(tensors[0]).send(tensors, dst, tag)

    def recv(self, tensors: list[_Tensor], src: int, tag: int = 0) -> Any:
        """Left to the inner backend."""
        return self._inner(tensors[0]).recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[_Tensor], tag: int = 0) -> Any:
        """Left to the inner backend."""
        return self._inner(tensors[0]).recv_anysource(tensors, tag)

    def barrier(self, opts: Any = None) -> Any:
        """Left to the inner backend."""
        return self.engine.inner("cpu").barrier(opts or dist.BarrierOptions())

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Left to the inner backend."""
        limit = timeout if timeout is not None else self.engine.timeout
        return self.engine.inner("cpu").monitored_barrier(limit, wait_all_ranks)

    # -- common --------------------------------------------------------------------------------

    def _inner(self, tensor: _Tensor) -> Any:
        return self.engine.inner(tensor.device.type)

    def _say_inner(self, name: str) -> None:
        self.engine.say(name, f"{name} has no algorithm here and runs on the inner backend")

    def _fits(self, name: str, tensors: Sequence[_Tensor], operation: Any = None) -> bool:
        if any(tensor.layout is not torch.strided for tensor in tensors):
            self.engine.say(f"{name} sparse", f"{name} of sparse tensors runs on the inner backend")
            return False
        if operation is not None and not self.engine.can_combine(tensors[0], operation):
            what = f"{name} of {tensors[0].dtype} by {operation}"
            self.engine.say(what, f"{what} runs on the inner backend")
            return False
        return True

    def _run(
        self,
        call: Call,
        results: list[Any],
        opts: Any,
        finish: Callable[[], None] | None = None,
    ) -> FivefoldWork | None:
        return self.engine.run(
            call,
            results=results,
            asynchronous=bool(getattr(opts, "asyncOp", True)),
            timeout=opts.timeout,
            finish=finish,
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


def _flat_in_out(tensor: _Tensor) -> tuple[_Tensor, Callable[[], None] | None]:
    """A flat view, or a flat copy and what brings it back."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1), None
    flat = tensor.detach().contiguous().view(-1)

    def finish() -> None:
        tensor.copy_(flat.view(tensor.shape))

    return flat, finish


def _first_of(inner: Any, *names: str) -> Callable[..., Any]:
    found: Callable[..., Any] = next(getattr(inner, name) for name in names if hasattr(inner, name))
    return found


def _options_like(options: Any, given: Any) -> Any:
    options.reduceOp = given.reduceOp
    options.timeout = given.timeout
    if hasattr(given, "asyncOp"):
        options.asyncOp = given.asyncOp
    return options


def _then(work: Any, results: list[Any], finish: Callable[[], None]) -> Any:
    """A work that does something more when the first one is over."""

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
