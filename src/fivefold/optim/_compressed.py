"""The sum over ranks of payloads that travel encoded.

References:
    Karimireddy et al., arXiv 1901.09847 (error feedback); Tang et al., arXiv 1905.05957
    (residuals on both sides).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import ConfigurationError
from fivefold.optim._comm_thread import CommunicationThread, Job
from fivefold.optim.codecs import Codec, is_exact

_STAGES = 3  # a bucket is being sent, summed or received; as many are under way at once
# Ten buckets hide encoding behind sending and keep the links even: measured at 4 ranks and
# 200 Mbit/s, where one bucket of 10 MB took 1.4 times as long. More of them would only add
# round trips, and so would smaller ones.
_BUCKETS_PER_PAYLOAD = 10
_SMALLEST_BUCKET_BYTES = 2**20


def ring_bytes(payload_bytes: int, *, world_size: int) -> int:
    """Return bytes that each rank sends in a ring all-reduce: 2 (G - 1) / G times the payload."""
    return round(2 * (world_size - 1) * payload_bytes / world_size)


def slice_bounds(num_elements: int, *, world_size: int, granule: int) -> list[int]:
    """Cut elements into one slice per rank; their numbers of granules differ by one at most."""
    granules, more = divmod(-(-num_elements // granule), world_size)
    sizes = [(granules + (rank < more)) * granule for rank in range(world_size)]
    return [min(bound, num_elements) for bound in accumulate(sizes, initial=0)]


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """One bucket of a payload as one rank sees it: a slice per rank."""

    start: int
    bounds: list[int]
    owned_start: int
    own_elements: int

    def wire_bytes(self, codec: Codec) -> list[int]:
        """Return the encoded bytes of every slice."""
        return [codec.encoded_bytes(b - a) for a, b in pairwise(self.bounds)]

    def slices(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return one view of a flat payload per rank."""
        at = self.start
        return [flat[at + a : at + b] for a, b in pairwise(self.bounds)]

    def owned(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's own slice in a buffer of all own slices."""
        return flat[self.owned_start :][: self.own_elements]


@dataclass(kw_only=True)
class _Feedback:
    """Residuals of one payload: e of all that is sent, f of the slices that this rank owns."""

    buckets: list[_Bucket]
    sent: torch.Tensor
    owned: torch.Tensor
    kept: bool = False  # whether there may be anything in them

    @torch.no_grad()
    def release_into(self, payload: torch.Tensor, *, rank: int) -> None:
        """Add what was kept to a payload that is sent as it is."""
        if not self.kept:
            return
        payload.add_(self.sent)
        for bucket in self.buckets:
            bucket.slices(payload)[rank].add_(bucket.owned(self.owned))
        self.clear()

    def clear(self) -> None:
        """Forget what was kept."""
        self.sent.zero_()
        self.owned.zero_()
        self.kept = False


# Every rank owns a slice of every bucket. A rank encodes each slice and sends it to its owner; the
# owner decodes, adds in rank order in float32, encodes the sum and sends it to all; everybody
# decodes the same bytes, so that the result is equal on all ranks bit for bit. Both encodings keep
# what they could not express in a residual and add it the next time:
#
#     send     v = e + d;                     e <- v - decode(Q(v))    Q(v): to the slice's owner
#     own      w = f + decode(Q_0) + ...;     f <- w - decode(Q(w))    Q(w): to all ranks
#     receive  payload <- decode(Q(w))
#
# so after any number of rounds the sum of all results, plus all residuals, is the sum of all
# payloads. Both exchanges are ``all_to_all_single``: gloo and NCCL have it, and it takes slices of
# unequal sizes.
class CompressedExchange:
    """Compressed sums over one process group, with residuals for each fragment.

    ``codec`` may be changed between launches, to one of ``others``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        thread: CommunicationThread,
        *,
        codec: Codec,
        others: Sequence[Codec] = (),
        bucket_bytes: int,
    ) -> None:
        self._group = group
        self._thread = thread
        self.codec = codec
        self._codecs = [codec, *(other for other in others if other.name != codec.name)]
        self._granule = math.lcm(*(each.granule for each in self._codecs))
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._bucket_bytes = bucket_bytes
        self._feedback: dict[int, list[_Feedback]] = {}  # of what travels encoded, by fragment
        self._rooms: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(
        self, payloads: Sequence[torch.Tensor], *, fragment: int, num_exact: int = 0
    ) -> None:
        """Make a fragment's residuals, all zero; a second call with the same sizes does nothing."""
        payloads = payloads[: len(payloads) - num_exact]
        for payload in payloads:
            if payload.dtype != torch.float32 or payload.dim() != 1 or not payload.is_contiguous():
                message = (
                    f"codec {self._codecs[-1].name} takes flat contiguous float32 payloads; got "
                    f"{payload.dtype} of shape {tuple(payload.shape)}"
                )
                raise ConfigurationError(
                    message, hint='codec="fp32" sends every data type as it is'
                )
        sizes = [payload.numel() for payload in payloads]
        known = self._feedback.get(fragment)
        if known is None:
            self._feedback[fragment] = [self._new_feedback(payload) for payload in payloads]
        elif [feedback.sent.numel() for feedback in known] != sizes:
            before = [feedback.sent.numel() for feedback in known]
            message = f"fragment {fragment} had payloads of {before} elements, now {sizes}"
            raise ConfigurationError(message, hint="give every fragment a number of its own")

    def launch(
        self, payloads: Sequence[torch.Tensor], *, metadata: torch.Tensor, fragment: int, what: str
    ) -> Job:
        """Queue the sum of a prepared fragment; see ``Transport.launch``."""
        if fragment not in self._feedback:
            message = f"fragment {fragment} was launched before prepare(payloads, fragment=...)"
            raise ConfigurationError(message, hint="prepare every fragment once, at the start")
        feedback = self._feedback[fragment]
        encoded, exact = payloads[: len(feedback)], payloads[len(feedback) :]
        self.prepare(encoded, fragment=fragment)
        return self._submit(self.codec, encoded, [metadata, *exact], feedback, what=what)

    def launch_exactly(
        self, payloads: Sequence[torch.Tensor], *, metadata: torch.Tensor, fragment: int, what: str
    ) -> Job:
        """Queue a sum that nothing is rounded in, after which the fragment has no residuals."""

        def run() -> None:
            for part in self._feedback.get(fragment, ()):
                part.clear()
            self._sum(self.codec, [], [*payloads, metadata], [])

        num_bytes = sum(tensor.nbytes for tensor in (*payloads, metadata))
        sent_bytes = ring_bytes(num_bytes, world_size=self._world_size)
        return self._thread.submit(
            run, tensors=[*payloads, metadata], what=what, sent_bytes=sent_bytes
        )

    def try_codec(self, codec: Codec, payload: torch.Tensor, *, what: str) -> Job:
        """Queue the sum of a payload that belongs to no fragment."""
        metadata = torch.zeros(1, dtype=torch.float64, device=payload.device)
        return self._submit(codec, [payload], [metadata], [self._new_feedback(payload)], what=what)

    def _submit(
        self,
        codec: Codec,
        payloads: Sequence[torch.Tensor],
        exact: Sequence[torch.Tensor],
        feedback: Sequence[_Feedback],
        *,
        what: str,
    ) -> Job:
        plain, encoded_bytes = [*exact], 0
        if is_exact(codec):
            plain += payloads
        else:
            for sizes in (b.wire_bytes(codec) for f in feedback for b in f.buckets):
                # The others' slices to their owners, then its own to each.
                own_bytes = sizes[self._rank]
                encoded_bytes += sum(sizes) + (self._world_size - 2) * own_bytes
        plain_bytes = sum(tensor.nbytes for tensor in plain)
        sent_bytes = ring_bytes(plain_bytes, world_size=self._world_size) + encoded_bytes
        return self._thread.submit(
            lambda: self._sum(codec, payloads, exact, feedback),
            tensors=[*payloads, *exact],
            what=what,
            sent_bytes=sent_bytes,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, by fragment and payload, as live tensors."""
        return {
            str(fragment): {
                str(index): {"sent": part.sent, "owned": part.owned}
                for index, part in enumerate(parts)
            }
            for fragment, parts in self._feedback.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy saved residuals into the prepared ones."""
        current = self.state_dict()
        if _sizes(state) != _sizes(current):
            message = (
                f"the saved residuals have sizes {_sizes(state)}, this run has {_sizes(current)}"
            )
            hint = "resume with the model, fragments, codec, bucket_bytes and ranks of the save"
            raise ConfigurationError(message, hint=hint)
        for fragment, parts in current.items():
            for index, part in parts.items():
                for name, residual in part.items():
                    residual.copy_(state[fragment][index][name])
        for part in (part for parts in self._feedback.values() for part in parts):
            part.kept = True

    # -- on the communication thread --------------------------------------------------------------

    @torch.no_grad()
    def _sum(
        self,
        codec: Codec,
        payloads: Sequence[torch.Tensor],
        exact: Sequence[torch.Tensor],
        feedback: Sequence[_Feedback],
    ) -> None:
        together = list(zip(payloads, feedback, strict=True))
        plain = [*exact]
        if is_exact(codec):
            for payload, part in together:
                part.release_into(payload, rank=self._rank)
            plain += payloads
            together = []
        pieces = [
            piece
            for tensor in plain
            if tensor.numel()
            for piece in torch.split(tensor, max(self._bucket_bytes // tensor.element_size(), 1))
        ]
        works = [dist.all_reduce(p, group=self._group, async_op=True) for p in pieces]
        parts = [(a, part, bucket) for a, part in together for bucket in part.buckets]
        for _, part, _ in parts:
            part.kept = True
        underway = [
            self._bucket_stages(codec, payload, part, bucket, slot=index % _STAGES)
            for index, (payload, part, bucket) in enumerate(parts)
        ]
        # While one bucket is on the network the next is encoded. The order of the collectives
        # follows from the sizes alone, so it is the same on all ranks.
        for tick in range(len(underway) + _STAGES - 1):
            for index in range(tick, tick - _STAGES, -1):
                if 0 <= index < len(underway):
                    next(underway[index], None)
        for work in works:
            work.wait()

    def _bucket_stages(
        self,
        codec: Codec,
        payload: torch.Tensor,
        feedback: _Feedback,
        bucket: _Bucket,
        *,
        slot: int,
    ) -> Iterator[None]:
        world, wire_bytes = self._world_size, bucket.wire_bytes(codec)
        all_bytes, own_bytes = sum(wire_bytes), wire_bytes[self._rank]
        # For all encoded slices, or the own one of every rank.
        num_bytes = max(all_bytes, world * own_bytes)
        outgoing, incoming = self._room(payload.device, slot, num_bytes=num_bytes)

        send, receive = outgoing[:all_bytes], incoming[: world * own_bytes]
        slices = zip(bucket.slices(payload), bucket.slices(feedback.sent), strict=True)
        wires = torch.split(send, wire_bytes)
        for (values, residual), wire in zip(slices, wires, strict=True):
            codec.encode_with_feedback_(residual, wire, values=values)
        work = self._exchange(receive, [own_bytes] * world, send, wire_bytes)
        yield
        work.wait()
        owned = bucket.owned(feedback.owned)
        for wire in torch.split(receive, [own_bytes] * world):
            codec.decode_(wire, owned, accumulate=True)
        send, receive = outgoing[: world * own_bytes], incoming[:all_bytes]
        copies = torch.split(send, [own_bytes] * world)
        codec.encode_with_feedback_(owned, copies[0])
        for copy in copies[1:]:
            copy.copy_(copies[0])
        work = self._exchange(receive, wire_bytes, send, [own_bytes] * world)
        yield
        work.wait()
        wires = torch.split(receive, wire_bytes)
        for values, wire in zip(bucket.slices(payload), wires, strict=True):
            codec.decode_(wire, values)

    def _exchange(
        self,
        receive: torch.Tensor,
        receive_bytes: list[int],
        send: torch.Tensor,
        send_bytes: list[int],
    ) -> dist.Work:
        work: dist.Work | None = dist.all_to_all_single(
            receive, send, receive_bytes, send_bytes, group=self._group, async_op=True
        )
        assert work is not None, "this rank is a member of the group"
        return work

    def _room(
        self, device: torch.device, slot: int, *, num_bytes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two wires, kept between calls; made here so that CUDA's belong to our stream."""
        room = self._rooms.get((device, slot))
        if room is None or room[0].numel() < num_bytes:
            outgoing = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            room = self._rooms[device, slot] = (outgoing, torch.empty_like(outgoing))
        return room

    def _new_feedback(self, payload: torch.Tensor) -> _Feedback:
        buckets: list[_Bucket] = []
        owned = 0
        wanted_bytes = max(4 * payload.numel() // _BUCKETS_PER_PAYLOAD, _SMALLEST_BUCKET_BYTES)
        granules = min(wanted_bytes, self._bucket_bytes) // 4 // self._granule
        bucket_elements = max(granules, 1) * self._granule
        for start in range(0, payload.numel(), bucket_elements):
            size = min(bucket_elements, payload.numel() - start)
            bounds = slice_bounds(size, world_size=self._world_size, granule=self._granule)
            own = bounds[self._rank + 1] - bounds[self._rank]
            buckets.append(_Bucket(start=start, bounds=bounds, owned_start=owned, own_elements=own))
            owned += own
        sent = torch.zeros_like(payload)
        return _Feedback(buckets=buckets, sent=sent, owned=payload.new_zeros(owned))


def _sizes(state: dict[str, Any]) -> dict[str, list[list[int]]]:
    return {
        fragment: [[part["sent"].numel(), part["owned"].numel()] for part in parts.values()]
        for fragment, parts in state.items()
    }
