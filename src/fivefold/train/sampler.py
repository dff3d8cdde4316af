"""Which tokens each rank reads at each step: a pure function of seed, step and rank.

Tokens are cut into windows that do not overlap. Every epoch shifts the cut by a random offset
and visits the windows in a random order; the ranks take turns in that order, so within an epoch
no window is read twice by anyone. The order comes from a keyed permutation that is computed
element by element (a Feistel network with cycle walking), so nothing is stored, any step can be
asked for at once, and a resumed run needs no state but its step. No generator of NumPy or torch
is involved: the order is the same on every version and platform.

References:
    Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (cycle walking).

This module knows nothing of files, models or communication.
"""

from __future__ import annotations

import numpy as np
import torch

from fivefold.errors import DataError, require_whole

_MASK_64 = (1 << 64) - 1
_NUM_ROUNDS = 8


class ShardedSampler:
    """Disjoint, seeded, resumable batches of window starts for one rank.

    An epoch has W windows of ``sequence_length`` tokens (inputs; each target is the next token)
    and ``W // (batch_size * world_size)`` steps. The windows of the permutation's tail that do
    not fill a step of all ranks are left out of that epoch; which windows they are is random and
    differs from epoch to epoch.

    Args:
        num_tokens: Tokens in the training split.
        sequence_length: Tokens per window.
        batch_size: Windows per rank and step.
        rank: This process, from 0.
        world_size: Number of processes.
        seed: Seed of order and offsets.

    Raises:
        ConfigurationError: A number is out of range.
        DataError: There are too few tokens for one step of all ranks.

    References:
        The module's docstring.

    Examples:
        >>> sampler = ShardedSampler(1000, sequence_length=10, batch_size=2, rank=0, world_size=2,
        ...                          seed=0)
        >>> sampler.steps_per_epoch, sampler.batch_starts(0).shape
        (24, (2,))
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        sequence_length: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        _require_shares(sequence_length, batch_size, rank, world_size)
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = require_whole("seed", seed, least=0)
        # One window less than fits at offset 0, so that every offset below a window's length fits.
        self.windows_per_epoch = max(0, (num_tokens - sequence_length) // sequence_length)
        self.steps_per_epoch = self.windows_per_epoch // (batch_size * world_size)
        if self.steps_per_epoch == 0:
            needed = (batch_size * world_size + 1) * sequence_length
            raise DataError(
                f"{num_tokens} training tokens are too few for one step of {world_size} ranks x "
                f"{batch_size} sequences x {sequence_length} tokens, which needs {needed}",
                hint="use more text, or lower data.sequence_length or optim.batch_size",
            )

    def batch_starts(self, step: int) -> np.ndarray:
        """Return the first token of each window that this rank reads at a step.

        Args:
            step: Micro-batch number since the beginning of training, from 0. With gradient
                accumulation that is ``optimizer_step * accumulation + micro_batch``.

        Returns:
            int64 array of shape [batch_size]. A window is ``tokens[start : start + L + 1]``.

        Raises:
            ConfigurationError: The step is negative.
        """
        require_whole("step", step, least=0)
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        # Per step, the ranks' batches lie side by side in the epoch's order.
        first = (step_of_epoch * self.world_size + self.rank) * self.batch_size
        places = np.arange(first, first + self.batch_size, dtype=np.uint64)
        windows = _permute(places, size=self.windows_per_epoch, key=_mix(self.seed, epoch, 1))
        offset = _mix(self.seed, epoch, 2) % self.sequence_length
        return windows.astype(np.int64) * self.sequence_length + offset


def sequential_starts(
    num_tokens: int,
    *,
    sequence_length: int,
    batch_size: int,
    num_batches: int,
    rank: int,
    world_size: int,
) -> list[np.ndarray]:
    """Return fixed batches for validation, evenly spread over the tokens and disjoint by rank.

    The ``num_batches * batch_size`` windows (or as many as there are) do not depend on the
    number of ranks, so the same validation is done on 1 rank and on 8. Rank r takes every
    ``world_size``-th of them. The last batch of a rank may be smaller, and a rank may get none.
    """
    _require_shares(sequence_length, batch_size, rank, world_size)
    available = (num_tokens - 1) // sequence_length
    if available < 1:
        raise DataError(
            f"{num_tokens} validation tokens are too few for one sequence of {sequence_length}",
            hint="use more text, raise data.validation_fraction or lower data.sequence_length",
        )
    count = min(available, num_batches * batch_size)
    windows = np.arange(count, dtype=np.int64) * available // count
    mine = windows[rank::world_size] * sequence_length
    return [mine[first : first + batch_size] for first in range(0, len(mine), batch_size)]


def gather_batch(
    tokens: np.ndarray, starts: np.ndarray, sequence_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read windows of tokens as inputs and next-token targets."""
    places = starts[:, None] + np.arange(sequence_length + 1)
    windows = torch.from_numpy(tokens[places].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _require_shares(sequence_length: int, batch_size: int, rank: int, world_size: int) -> None:
    require_whole("sequence_length", sequence_length)
    require_whole("batch_size", batch_size)
    require_whole("world_size", world_size)
    require_whole("rank", rank, least=0, most=world_size - 1)


def _mix(*words: int) -> int:
    """Hash integers to 64 bits (splitmix64's finaliser, chained)."""
    state = 0
    for word in words:
        state = (state ^ (word & _MASK_64)) + 0x9E3779B97F4A7C15 & _MASK_64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK_64
        state ^= state >> 31
    return state


def _permute(places: np.ndarray, *, size: int, key: int) -> np.ndarray:
    """Return the image of some places under a keyed permutation of ``range(size)``."""
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    result = _feistel(places, half_bits=half_bits, key=key)
    # The network permutes a power of 4 that is at least size and below 4 * size; walking on from
    # an image outside stays a permutation of the inside and needs fewer than 4 tries on average.
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], half_bits=half_bits, key=key)
    return result


def _feistel(values: np.ndarray, *, half_bits: int, key: int) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for number in range(_NUM_ROUNDS):
        hashed = right + np.uint64(_mix(key, number))  # wraps around, as a hash may
        hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((hashed ^ (hashed >> np.uint64(31))) & mask)
    return (left << shift) | right
