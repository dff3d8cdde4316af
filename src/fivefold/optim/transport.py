"""The outside of the engine: one asynchronous sum over the ranks of a process group.

With a payload travels metadata, a few float64 numbers (norms, replica hashes). Their sum is the
same bit for bit on every rank, so decisions made from it are made alike everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.errors import ConfigurationError, require_whole
from fivefold.measured import NOISE
from fivefold.optim._comm_thread import CommunicationThread, named_errors
from fivefold.optim._compressed import CompressedExchange, ring_bytes
from fivefold.optim._round_choice import CODECS_TO_CHOOSE, MessageTimes
from fivefold.optim.codecs import Codec, is_exact, named_codec, resolve_codec

_PROBE_BYTES = 1 << 20
_LEAST_PROBE = 1 << 14  # elements; the time of fewer is all latency
_PROBES = 5
_PROBE_PATIENCE_S = 1.0

# Of the multiprocessors (an H200 has 132) that a sum of NCCL may hold while it travels; it has a
# round of time, and what it holds the local steps do without. NCCL_MAX_CTAS overrides it.
_MOST_CTAS = 8

OWN_GROUP = "fivefold outer synchronisation"
"""What the groups that an engine makes for itself are called."""


class PendingAllReduce(Protocol):
    """One sum over the ranks on its way."""

    launched_at_s: float  # ``time.perf_counter()`` at the launch
    completed_at_s: float | None  # the same at completion; None while under way
    sent_bytes: int  # that this rank sends over the network for it, by the formula

    def wait(self) -> bool:
        """Block until the sums are there; with CUDA tensors the current stream is made to wait."""
        ...


class Transport(Protocol):
    """Collectives and membership as the engine needs them.

    ``world_size`` is the number of slots that ranks can have; a transport whose membership
    changes keeps it and leaves slots empty.
    """

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Return the number of ranks that are summed over."""
        ...

    def prepare(
        self, payloads: Sequence[torch.Tensor], *, fragment: int, num_exact: int = 0
    ) -> None:
        """Learn a fragment's payloads, once and before its first launch.

        They are of the sizes, data types and devices that will be launched; from then on
        ``state_dict()`` has its final structure. The last ``num_exact`` of them are no
        pseudo-gradients (buffers such as BatchNorm's variances): they are never rounded.
        """
        ...

    def launch(
        self, payloads: Sequence[torch.Tensor], *, metadata: torch.Tensor, fragment: int, what: str
    ) -> PendingAllReduce:
        """Start summing the tensors in place over all ranks; return at once.

        Args:
            payloads: Flat buffers that nobody touches until the all-reduce has been waited for. A
                transport may send those that were not prepared as exact compressed; their sums are
                then approximate, and equal on all ranks bit for bit.
            metadata: A few float64 numbers, always summed exactly as they are.
            fragment: Which part of the model the payloads are, from 0; at most one all-reduce of a
                fragment is under way at a time.
            what: What is sent, for error messages.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint (error feedback); its shape never varies."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        ...

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""
        ...

    def gather_objects(self, value: object) -> list[Any]:
        """Return every rank's value, in rank order."""
        ...


class ProcessGroupTransport:
    """A transport over ``torch.distributed`` (gloo or NCCL) in a process group of its own.

    Args:
        process_group: Ranks that take part, as a group or a one-dimensional ``DeviceMesh``; None
            for all. Only its membership is used.
        timeout_s: Longest wait for a collective, in seconds.
        codec: How payloads are written on the wire: ``"fp32"`` (every data type as it is),
            ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"topk"``, or a codec; ``"auto"`` for
            fp32 until ``use_codec`` says otherwise.
        bucket_bytes: Payloads are sent in parts of at most this size.

    Raises:
        ConfigurationError: ``torch.distributed`` is not initialised, or an argument is not
            allowed.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None,
        *,
        timeout_s: float,
        codec: str | Codec = "fp32",
        bucket_bytes: int = 32 * 2**20,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            message = "torch.distributed is not initialised"
            hint = "call torch.distributed.init_process_group first, or start with torchrun"
            raise ConfigurationError(message, hint=hint)
        self.chooses_codec = codec == "auto"
        self.codec = resolve_codec("fp32" if codec == "auto" else codec)
        hint = "the default is 32 MiB"
        self._bucket_bytes = require_whole("bucket_bytes", bucket_bytes, hint=hint)
        # Collectives of one group are matched by their order, and the trainer's own come at other
        # moments on different ranks: in a shared group they could be matched with a payload.
        group = as_group(process_group, name="process_group", dimension="replicate")
        members = dist.get_process_group_ranks(group)
        with named_errors(dist.get_rank(), "the set-up of the engine's process group"):
            self._group = dist.new_group(
                members,
                timeout=timedelta(seconds=timeout_s),
                pg_options=_options(timeout_s),
                use_local_synchronization=process_group is not None,
                group_desc=OWN_GROUP,
            )
        self._global_root = members[0]
        self._thread = CommunicationThread(
            rank=self.rank, issues_at_once="nccl" in dist.get_backend_config(self._group)
        )
        self._exchange: CompressedExchange | None = None
        if self.chooses_codec or not is_exact(self.codec):
            names = CODECS_TO_CHOOSE if self.chooses_codec else ()
            self._exchange = CompressedExchange(
                self._group,
                self._thread,
                codec=self.codec,
                others=[named_codec(name) for name in names],
                bucket_bytes=bucket_bytes,
            )

    @property
    def rank(self) -> int:
        """This rank's number within the group."""
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the group."""
        return dist.get_world_size(self._group)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Return the group's ranks as the default group numbers them."""
        return tuple(dist.get_process_group_ranks(self._group))

    def prepare(
        self, payloads: Sequence[torch.Tensor], *, fragment: int, num_exact: int = 0
    ) -> None:
        """Make the residuals of a fragment, where the codec needs them; see ``Transport.prepare``.

        Raises:
            ConfigurationError: The codec does not take such payloads.
        """
        if self._exchange is not None:
            self._exchange.prepare(payloads, fragment=fragment, num_exact=num_exact)

    def launch(
        self, payloads: Sequence[torch.Tensor], *, metadata: torch.Tensor, fragment: int, what: str
    ) -> PendingAllReduce:
        """Start summing; see ``Transport.launch``.

        Raises:
            CommunicationError: The collective could not be started.
            ConfigurationError: The codec does not take such payloads.
        """
        if self._exchange is not None:
            return self._exchange.launch(payloads, metadata=metadata, fragment=fragment, what=what)
        tensors = [*payloads, metadata]
        buckets = [part for tensor in tensors for part in self._buckets(tensor)]
        with named_errors(self.rank, what):
            works = [dist.all_reduce(part, group=self._group, async_op=True) for part in buckets]

        # The thread waits and stamps the end: on CUDA a work's own callback runs when it has been
        # queued, not when it has ended.
        def wait() -> None:
            for work in works:
                work.wait()

        sent_bytes = ring_bytes(sum(t.nbytes for t in tensors), world_size=self.world_size)
        return self._thread.submit(wait, tensors=tensors, what=what, sent_bytes=sent_bytes)

    def launch_exactly(
        self, payloads: Sequence[torch.Tensor], *, metadata: torch.Tensor, fragment: int, what: str
    ) -> PendingAllReduce:
        """Start a sum that no codec rounds, and forget what one has kept of this fragment.

        Raises:
            CommunicationError: The collective could not be started.
        """
        launch = self.launch if self._exchange is None else self._exchange.launch_exactly
        return launch(payloads, metadata=metadata, fragment=fragment, what=what)

    def use_codec(self, name: str) -> None:
        """Send what is launched from now on in this codec; for a transport with ``codec="auto"``.

        All ranks call it between the same launches. What a codec before has kept goes out with the
        next message, whatever that one's codec.

        Raises:
            ConfigurationError: The transport has a codec of its own.
        """
        if self._exchange is None or not self.chooses_codec:
            message = f"this transport sends {self.codec.name}, and nothing else; got {name!r}"
            raise ConfigurationError(message, hint='make it with codec="auto"')
        self.codec = self._exchange.codec = named_codec(name)

    def measure_link(self, num_bytes: int, *, device: torch.device) -> MessageTimes:
        """Time messages of nothing and of up to 1 MiB, in each codec that it could use; collective.

        Args:
            num_bytes: Size of a whole payload, to which the times are carried on.
            device: Where payloads are.

        Returns:
            The same times on all ranks.

        Raises:
            CommunicationError: A peer ended or the network failed.
        """
        names = CODECS_TO_CHOOSE if self.chooses_codec else (self.codec.name,)
        fixed_s, whole_s, busy_s = {}, {}, {}
        elements = max(min(num_bytes, _PROBE_BYTES) // 4, _LEAST_PROBE)
        for name in names:
            codec = named_codec(name) if self.chooses_codec else self.codec
            short_s, long_s = (self._message_s(codec, n, device) for n in (1, elements))
            fixed_s[name] = min(short_s, long_s)
            beside_s = max(long_s - short_s, NOISE * long_s)  # noise can hide it
            whole_s[name] = beside_s * num_bytes / (4 * elements)
            slowest_s = max(self.gather_objects(encoding_s(codec, elements, device)))
            busy_s[name] = slowest_s * num_bytes / (4 * elements)
        return MessageTimes(fixed_s=fixed_s, whole_s=whole_s, busy_s=busy_s)

    def _message_s(self, codec: Codec, elements: int, device: torch.device) -> float:
        """Return the least seconds of a message, on the rank that waits for no other."""
        payload = torch.zeros(elements, device=device)
        times_s: list[float] = []
        what = f"a message of {elements} elements to measure the link"
        while len(times_s) < _PROBES and sum(times_s) < _PROBE_PATIENCE_S:
            self.gather_objects(None)  # all begin together
            started_s = time.perf_counter()
            if self._exchange is None:
                nothing = torch.zeros(0, dtype=torch.float64)
                self.launch([payload], metadata=nothing, fragment=0, what=what).wait()
            else:
                self._exchange.try_codec(codec, payload, what=what).wait()
            if payload.is_cuda:
                torch.cuda.current_stream(device).synchronize()
            times_s.append(min(self.gather_objects(time.perf_counter() - started_s)))
        return min(times_s)

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of the codec, live; nothing where payloads travel as they are.

        Call it when all all-reduces have been waited for.
        """
        return {} if self._exchange is None else self._exchange.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()`` of the same fragments, codec and number of ranks.

        Raises:
            ConfigurationError: It is of others.
        """
        if self._exchange is not None:
            self._exchange.load_state_dict(state)
        elif state:
            message = 'the saved transport has residuals of a codec, this run has codec="fp32"'
            raise ConfigurationError(message, hint="resume with the codec of the save")

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with the group's first rank's.

        Raises:
            CommunicationError: A peer ended or the network failed.
        """

        def run() -> None:
            for tensor in tensors:
                broadcast_bytes(tensor, source=self._global_root, group=self._group)

        what = "broadcast of the initial parameters"
        self._thread.submit(run, tensors=tensors, what=what).wait()

    def gather_objects(self, value: object) -> list[Any]:
        """Return every rank's value, in rank order.

        Raises:
            CommunicationError: A peer ended or the network failed.
        """
        values: list[Any] = [None] * self.world_size

        def run() -> None:
            dist.all_gather_object(values, value, group=self._group)

        self._thread.submit(run, tensors=(), what="comparison of the ranks' settings").wait()
        return values

    def close(self) -> None:
        """End the thread, after what it has been given, and the process group."""
        self._thread.close()
        end_group(self._group)

    def _buckets(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return views of a tensor that cover it once; a collective on nothing is left out."""
        if tensor.nbytes <= self._bucket_bytes:
            return [tensor] if tensor.numel() else []
        if not tensor.is_contiguous():
            message = f"payloads must be contiguous; got strides {tensor.stride()}"
            raise ConfigurationError(message, hint="launch tensor.contiguous()")
        return torch.split(tensor.view(-1), max(self._bucket_bytes // tensor.element_size(), 1))


def _options(timeout_s: float) -> Any:
    """Return NCCL's options for sums behind training steps; None where NCCL sums nothing."""
    if not dist.is_nccl_available() or "nccl" not in dist.get_backend_config():
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = False  # the steps are what somebody waits for
    options.config.max_ctas = _MOST_CTAS
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 - torch warns where it differs
    return options


def encoding_s(codec: Codec, elements: int, device: torch.device) -> float:
    """Return the seconds in which a rank encodes and decodes what a sum of elements takes."""
    if is_exact(codec):
        return 0.0
    values = torch.linspace(-1.0, 1.0, elements, device=device)
    residual, decoded = torch.zeros_like(values), torch.empty_like(values)
    wire = torch.empty(codec.encoded_bytes(elements), dtype=torch.uint8, device=device)
    times_s = []
    for _ in range(_PROBES):
        started_s = time.perf_counter()
        codec.encode_with_feedback_(residual, wire, values=values)
        for _ in range(2):  # the other ranks' parts of its slice, and the sums
            codec.decode_(wire, decoded)
        if values.is_cuda:
            torch.cuda.current_stream(device).synchronize()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)


def end_group(group: dist.ProcessGroup) -> None:
    """End a process group, unless it went with ``dist.destroy_process_group()``."""
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:  # noqa: SLF001 - torch has no public way to ask
        dist.destroy_process_group(group)


@torch.no_grad()
def broadcast_bytes(tensor: torch.Tensor, *, source: int, group: dist.ProcessGroup) -> None:
    """Overwrite a tensor with the bits that a global rank has, whatever its data type."""
    own = tensor.detach()
    for dimension, (size, stride) in enumerate(zip(own.shape, own.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded: one element stands for all
            own = own.narrow(dimension, 0, 1)
    whole = own.contiguous()
    if whole.numel():
        dist.broadcast(whole.reshape(-1).view(torch.uint8), src=source, group=group)
        if whole is not own:
            own.copy_(whole)


def as_group(
    given: dist.ProcessGroup | DeviceMesh | None, *, name: str, dimension: str
) -> dist.ProcessGroup:
    """Return the group that an argument means; None is all ranks."""
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            message = f"{name} must have one dimension; got a mesh of {given.ndim}"
            raise ConfigurationError(message, hint=f'choose one: mesh["{dimension}"]')
        return given.get_group()
    group = dist.group.WORLD if given is None else given
    if not isinstance(group, dist.ProcessGroup):
        message = f"{name} must be a process group that has this rank; got {group!r}"
        raise ConfigurationError(message, hint="make one with torch.distributed.new_group(ranks)")
    return group
