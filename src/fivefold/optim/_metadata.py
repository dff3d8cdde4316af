"""What the ranks tell one another with each all-reduce, and what of it the user is told."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from fivefold.errors import ConfigurationError, NonFiniteError, ReplicaMismatchError
from fivefold.optim._flat import FlatGroup
from fivefold.optim._update import Number, read_numbers
from fivefold.optim.transport import Transport

_LOG = logging.getLogger(__name__)


def require_weight(weight: object, *, before: bool | None) -> None:
    """Refuse a step's weight that is no number, or that only some steps have.

    Args:
        weight: What ``OuterSync.step`` was given; None for equal weights.
        before: Whether the steps before had one; None where there were none.
    """
    number = hasattr(weight, "__float__")  # also a tensor of one element
    if weight is not None and not (number and 0 <= weight < float("inf")):  # type: ignore[operator]
        message = f"weight must be finite and not negative; got {weight!r}"
        raise ConfigurationError(message, hint="pass the step's number of tokens")
    if before not in {None, weight is not None}:
        message = "some steps have a weight and others have none"
        raise ConfigurationError(message, hint="call step(weight=...) at every step or nowhere")


@dataclass(frozen=True, kw_only=True)
class MetadataReading:
    """Entries of all ranks in the metadata of one all-reduce, in slot order.

    Each rank has a slot of its own, so the sum is a table of what each wrote, the same bit for bit
    everywhere: all decisions of the engine are made from it.
    """

    weight: list[float]  # weight of each rank's payload; 0 where a slot is empty
    weighted: list[float]  # 1 where the user gave the weight, 0 where it stands for itself
    hash: list[float]  # replica hash of each rank's anchor, 0 where it was not taken
    move: list[float]  # norm of the anchor's last movement, as each rank computed it
    delta: list[float]  # norm of the mean pseudo-gradient applied last, as each rank computed it
    step_s: list[float]  # seconds per local step that an all-reduce can hide behind
    all_reduce_s: list[float]  # seconds of each rank's last all-reduce
    pending: list[float]  # what of the model's parameters each rank would adopt; 0 for nothing
    frozen: list[float]  # what of this fragment each rank has frozen; 0 for nothing
    # Number, from 1, of the first tensor in which each rank had a not-a-number or an infinity:
    # its payload is zeros of weight 0. 0 where all numbers are finite.
    non_finite: list[float]
    # Norm of each rank's payload per weight, where outlying ones are to be left out.
    norm: list[float]
    # How many times the usual norm that is, where it was left out for this; else 0.
    outlying: list[float]
    # Hashes of each rank's first payload, which differ where ranks train apart, of the parameters
    # of the optimizers' groups 0, 4, 8, ..., of 1, 5, ..., and so on; else 0.
    work_0: list[float]
    work_1: list[float]
    work_2: list[float]
    work_3: list[float]
    fixed: list[float]  # digest of each rank's fixed tensors; 0 where none was taken
    rule: list[float]  # digest of each rank's rule; 0 where a slot is empty
    # Number, from 1, of an optimizer that communicates by itself on each rank; 0 for none.
    communicates: list[float]

    @property
    def total_weight(self) -> float:
        """Sum of the weights."""
        return math.fsum(self.weight)  # sum() rounds by Python's version

    def fits(self, world_size: int) -> bool:
        """Return whether it has this many slots; not so after a resume on other workers."""
        return len(self.weight) == world_size

    def require_weights_alike(self) -> None:
        """Refuse a sum in which some ranks count their tokens and others count 1."""
        taken = [slot for slot, weight in enumerate(self.weight) if weight > 0]
        plain = [slot for slot in taken if not self.weighted[slot]]
        if plain and len(plain) < len(taken):
            ranks = ", ".join(map(str, plain))
            message = f"rank(s) {ranks} gave no weight to step(), the others did"
            raise ConfigurationError(message, hint="call step(weight=...) on every rank or nowhere")

    def require_rules_alike(self) -> None:
        """Refuse rounds of ranks of which some have called ``set_rule()`` otherwise."""
        there = {slot: value for slot, value in enumerate(self.rule) if value}
        _, different = _minority(there)
        if different:
            message = f"rank(s) {', '.join(map(str, different))} have another rule than the others"
            hint = "call set_rule() with the same rule on all ranks, after the same step"
            raise ConfigurationError(message, hint=hint)

    def agreed(self, values: list[float]) -> float:
        """Return the mean over the ranks that took part; the values are equal up to rounding."""
        taken = [v for v, weight in zip(values, self.weight, strict=True) if weight > 0]
        return math.fsum(taken) / len(taken) if taken else 0.0

    def tell_non_finite(self, names: Callable[[], list[str]], *, round_number: int) -> int:
        """Warn of payloads that were left out as not finite; return how many."""
        if not any(self.non_finite):
            return 0
        known = names()
        left_out = {slot: known[int(n) - 1] for slot, n in enumerate(self.non_finite) if n}
        who = ", ".join(f"rank {slot} in {name}" for slot, name in left_out.items())
        message = f"not-a-number or infinity in round {round_number}: {who}"
        if self.total_weight == 0:
            raise NonFiniteError(
                f"{message}; no other rank has a payload that counts",
                hint="go on from the last checkpoint with a smaller learning rate, clipped "
                "gradients, or without the data of that round",
            )
        _LOG.warning("%s; the round counts without it, and it goes on from the anchor", message)
        return len(left_out)

    def tell_outlying(self, what: str, *, round_number: int) -> int:
        """Warn of payloads that were left out for their size; return how many."""
        left_out = {slot: times for slot, times in enumerate(self.outlying) if times}
        who = ", ".join(f"rank {slot}'s is {times:.3g} times" for slot, times in left_out.items())
        if left_out:
            _LOG.warning(
                "outlying payload %sin round %d: %s as large as usual; the round counts without "
                "it, and it goes on from the anchor", what, round_number, who,
            )  # fmt: skip
        return len(left_out)

    def tell_same_work(self) -> bool:
        """Warn where gradients are averaged beside the engine: then all ranks do the same steps."""
        together = apart = 0
        for hashes in (self.work_0, self.work_1, self.work_2, self.work_3):
            taken = [h for h, weight in zip(hashes, self.weight, strict=True) if weight]
            if sum(map(bool, taken)) > 1:
                together += len(set(taken)) == 1
                apart += len(set(taken)) > 1
        if together:
            _LOG.warning(
                "all ranks sent the same pseudo-gradient in the first round%s: gradients are "
                "already averaged by something else, an optimizer shares its work out over the "
                "ranks (ZeRO, a distributed Muon), or all ranks read the same data. Take away "
                "DistributedDataParallel (integrations.disable_ddp, use_outer_sync, "
                "lightning_strategy), take an optimizer that does not communicate (MuonAdamW), and "
                "give each rank data of its own (DistributedSampler)",
                " for some of the optimizers' groups" if apart else "",
            )
        return together > 0

    @classmethod
    def empty(cls, world_size: int) -> MetadataReading:
        """Return a reading in which nobody took part."""
        return cls(**{name: [0.0] * world_size for name in _FIELDS})


_FIELDS = tuple(each.name for each in fields(MetadataReading))


class Metadata:
    """The tensor that travels, float64, one slot per rank and field."""

    def __init__(self, world_size: int, *, device: torch.device) -> None:
        self._world_size = world_size
        size = len(_FIELDS) * world_size
        self.tensor = torch.zeros(size, dtype=torch.float64, device=device)
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.float64, pin_memory=True) if pinned else None

    def write(self, rank: int, **values: Number) -> None:
        """Fill this rank's slot, and nothing else."""
        numbers = [0.0] * self.tensor.numel()
        places = {name: _FIELDS.index(name) * self._world_size + rank for name in values}
        for name, value in values.items():
            numbers[places[name]] = 0.0 if isinstance(value, torch.Tensor) else value
        # One copy, for which the host does not wait; what is pinned lives until it has been made.
        pinned = self._host is not None
        written = torch.tensor(numbers, dtype=torch.float64)
        self.tensor.copy_(written.pin_memory() if pinned else written, non_blocking=pinned)
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self.tensor[places[name]] = value

    def fetch(self) -> None:
        """Queue the copy to the host on the current stream; nothing to do on a CPU."""
        if self._host is not None:
            self._host.copy_(self.tensor, non_blocking=True)

    def read(self) -> MetadataReading:
        """Return what arrived; on a GPU what was fetched."""
        values = (self.tensor if self._host is None else self._host).tolist()
        size = self._world_size
        columns = {n: values[i * size : (i + 1) * size] for i, n in enumerate(_FIELDS)}
        return MetadataReading(**columns)


_MODULUS = (1 << 26) - 5  # prime: products of two residues fit int64
_ROW = 4093  # prime row length, so that a moved block changes the weighted sum
_ROWS_AT_ONCE = 64
_ROWS_ON_DEVICE = 1024  # 32 MiB as int64, in three launches
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def replica_hash(tensors: Sequence[torch.Tensor]) -> int:
    """Hash the bits of contiguous tensors, in integers: no device's order of sums matters.

    The result is below 2**52, so that metadata in float64 carries it exactly.
    """
    found = []
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
        sums = _column_sums(bits)
        weights = torch.arange(1, sums.numel() + 1, device=sums.device)
        found += [sums.sum(), (sums * weights % _MODULUS).sum()]
    plain, weighted = 0, 0
    numbers = read_numbers(found)
    for index, (one, other) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
        plain = (plain * 31 + one + index) % _MODULUS
        weighted = (weighted * 31 + other + index) % _MODULUS
    return plain * (1 << 26) + weighted


def payload_hash(parts: Sequence[torch.Tensor]) -> int:
    """Hash the parts of a payload; 0 where they are all zeros."""
    return replica_hash(parts) if any(read_numbers([part.any() for part in parts])) else 0


def _column_sums(bits: torch.Tensor) -> torch.Tensor:
    """Sum equal residues of the position modulo the row length, each modulo the modulus."""
    whole = bits.numel() // _ROW * _ROW
    sums = torch.zeros(_ROW, dtype=torch.int64, device=bits.device)
    # In parts: summing into int64 makes an int64 copy first, twice the size of the model in all.
    rows = _ROWS_AT_ONCE if bits.device.type == "cpu" else _ROWS_ON_DEVICE
    for part in torch.split(bits[:whole], rows * _ROW):
        sums += part.view(-1, _ROW).sum(dim=0, dtype=torch.int64)  # wraps alike everywhere
    tail = bits[whole:].to(torch.int64)
    sums[: tail.numel()].add_(tail)
    return sums.remainder_(_MODULUS)


def require_equal(
    hashes: Mapping[int, int],
    *,
    round_number: int,
    apart: Callable[[], str] = str,
    of_gradients: bool = False,
) -> None:
    """Check that all ranks sent the same hash of their anchors.

    Args:
        hashes: Hash by rank.
        round_number: The round with which they came.
        apart: Finds the names of what differs, where all ranks ask.
        of_gradients: Whether every rank takes the optimizer's step for itself.

    Raises:
        ReplicaMismatchError: Names the ranks and the tensors that differ.
    """
    majority, different = _minority(hashes)
    if different:
        first = next(rank for rank, value in hashes.items() if value == majority)
        message = (
            f"the replicas' anchors differ at round {round_number}: rank(s) "
            f"{', '.join(map(str, different))} differ from rank {first}{apart()}"
        )
        causes = [
            "something wrote into parameters or the outer state on some ranks only",
            "ranks have processors or library versions that round differently",
            "a fault of memory",
        ]
        if of_gradients:
            step = (
                "the optimizers step differently: another learning rate or schedule, a step that "
                "is skipped, or one that hooks take, on some ranks only"
            )
            causes.insert(0, step)
        hint = f"likely, in this order: {'; '.join(causes)}. Restart from the last checkpoint"
        raise ReplicaMismatchError(message, hint=hint)


def names_apart(
    names: Callable[[], list[str]],
    groups: Sequence[FlatGroup],
    transport: Transport,
) -> str:
    """Return which tensors' anchors are not equal on all ranks; all ranks ask at once."""
    views = (view for group in groups for view in group.shaped(group.anchor))
    tables = transport.gather_objects([replica_hash([view]) for view in views])
    found = [
        name
        for name, *hashes in zip(names(), *tables, strict=False)  # names go on with buffers
        if len(set(hashes)) > 1
    ]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f", in {', '.join(found[:3])}{more}" if found else ""


def require_equal_inside(hashes: Mapping[int, int], *, round_number: int) -> None:
    """Check that all ranks of one worker hold the same parameters."""
    _, different = _minority(hashes)
    if different:
        message = (
            f"the parameters inside one worker differ at the end of round {round_number}: place(s) "
            f"{', '.join(map(str, different))} of shard_group differ from the others"
        )
        hint = (
            "ranks of one worker must take the same steps: average their gradients, for example "
            "with DistributedDataParallel(model, process_group=shard_group)"
        )
        raise ReplicaMismatchError(message, hint=hint)


def _minority(hashes: Mapping[int, float]) -> tuple[float | None, list[int]]:
    found = list(hashes.values())
    majority = max(found, key=lambda value: (found.count(value), -found.index(value)), default=None)
    return majority, [rank for rank, value in hashes.items() if value != majority]
