"""A hash of tensors' bits, cheap enough to be taken every few rounds on every rank.

Integer arithmetic only: the result depends on the bits and their positions, never on the order
in which a device sums. Values stay below 2**52, so that a float64 metadata carries them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fivefold.errors import ReplicaMismatchError

_MODULUS = (1 << 26) - 5  # prime: products of two residues fit int64
_ROW = 4093  # prime row length, so that a moved block changes the weighted sum
_ROWS_AT_ONCE = 64
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def replica_hash(tensors: Sequence[torch.Tensor]) -> int:
    """Hash the bits of contiguous tensors into an integer below 2**52."""
    plain, weighted = 0, 0
    for index, tensor in enumerate(tensors):
        bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
        sums = _column_sums(bits)
        weights = torch.arange(1, sums.numel() + 1, device=sums.device)
        plain = (plain * 31 + int(sums.sum()) + index) % _MODULUS
        weighted = (weighted * 31 + int((sums * weights % _MODULUS).sum()) + index) % _MODULUS
    return plain * (1 << 26) + weighted


def _column_sums(bits: torch.Tensor) -> torch.Tensor:
    """Sum equal residues of the position modulo the row length, each modulo the modulus."""
    whole = bits.numel() // _ROW * _ROW
    sums = torch.zeros(_ROW, dtype=torch.int64, device=bits.device)
    # In parts: summing into int64 makes an int64 copy first, twice the size of the model in all.
    for part in torch.split(bits[:whole], _ROWS_AT_ONCE * _ROW):
        sums += part.view(-1, _ROW).sum(dim=0, dtype=torch.int64)  # wraps alike everywhere
    tail = bits[whole:].to(torch.int64)
    sums[: tail.numel()] += tail
    return sums.remainder_(_MODULUS)


def require_equal(hashes: Mapping[int, int], *, round_number: int) -> None:
    """Check that all ranks sent the same hash."""
    if not hashes:
        return
    majority, different = _minority(hashes)
    if not different:
        return
    first = next(rank for rank, value in hashes.items() if value == majority)
    message = (
        f"the replicas' anchors differ at round {round_number}: rank(s) "
        f"{', '.join(map(str, different))} differ from rank {first}"
    )
    hint = (
        "something changed the outer state or the reduced values on those ranks (memory fault, "
        "mixed library versions, a write into the anchor); restart from the last checkpoint"
    )
    raise ReplicaMismatchError(message, hint=hint)


def require_equal_inside(hashes: Mapping[int, int], *, round_number: int) -> None:
    """Check that all ranks of one worker hold the same parameters."""
    _, different = _minority(hashes)
    if not different:
        return
    message = (
        f"the parameters inside one worker differ at the end of round {round_number}: place(s) "
        f"{', '.join(map(str, different))} of shard_group differ from the others"
    )
    hint = (
        "ranks of one worker must take the same steps: average their gradients, for example with "
        "DistributedDataParallel(model, process_group=shard_group)"
    )
    raise ReplicaMismatchError(message, hint=hint)


def _minority(hashes: Mapping[int, int]) -> tuple[int, list[int]]:
    found = list(hashes.values())
    majority = max(set(found), key=lambda value: (found.count(value), -found.index(value)))
    return majority, [rank for rank, value in hashes.items() if value != majority]
