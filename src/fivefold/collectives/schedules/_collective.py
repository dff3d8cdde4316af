"""What a collective asks for: which chunks are where at first, and where they must be at last.

``pre`` says which rank holds a numbered chunk at first, or contributes to it where chunks are
reduced; ``post`` which rank must hold it at last, reduced over all contributors. Sizes, buffer
addresses and the inverse follow. Reference: SCCL, arXiv 2008.08708, section 3.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fivefold.collectives.schedules.arrays import (
    Array,
    Floats,
    Ints,
    Longs,
    frozen,
    offsets_of,
    require_pairs,
)
from fivefold.errors import ConfigurationError, require_whole

_INVERSES = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "scatter": "gather",
    "gather": "scatter",
}
_SUMS = ("all_reduce", "reduce_scatter", "reduce")
_PAIRWISE = ("all_to_all", "all_to_allv")


@dataclass(frozen=True, kw_only=True, eq=False)
class Collective:
    """A collective over numbered chunks; `all_gather` and its like make it, or `custom_collective`.

    Args:
        name: ``"all_gather"``, ..., or ``"custom"``.
        num_ranks: Ranks that take part.
        num_chunks: Chunks; they are numbered from 0.
        reducing: Whether chunks are sums of contributions rather than copies.
        pre_chunks: With ``pre_ranks`` the pairs (chunk, rank) that hold the chunk at first, or
            contribute to it; int32, sorted by chunk, then rank.
        pre_ranks: See ``pre_chunks``.
        post_chunks: With ``post_ranks`` the pairs (chunk, rank) that must hold the chunk at last,
            summed over all who contribute to it; int32, sorted in the same way.
        post_ranks: See ``post_chunks``.
        chunk_weights: Relative sizes of the chunks, float64 [num_chunks]; None for equal sizes.
        root: The root of a broadcast, reduce, scatter or gather; None for all others.

    Raises:
        ConfigurationError: A number is out of range, a pair is named twice, or a chunk that must
            arrive somewhere starts nowhere.

    Examples:
        >>> from fivefold.collectives.schedules import all_gather
        >>> collective = all_gather(4)
        >>> collective.num_chunks, collective.inverted().name
        (4, 'reduce_scatter')
        >>> collective.chunk_bytes(1024).tolist()
        [256.0, 256.0, 256.0, 256.0]
    """

    name: str
    num_ranks: int
    num_chunks: int
    reducing: bool
    pre_chunks: Ints = field(repr=False)
    pre_ranks: Ints = field(repr=False)
    post_chunks: Ints = field(repr=False)
    post_ranks: Ints = field(repr=False)
    chunk_weights: Floats = field(default=None, repr=False)  # type: ignore[arg-type]
    root: int | None = None

    def __post_init__(self) -> None:
        require_pairs("ranks", require_whole("num_ranks", self.num_ranks))
        require_pairs("chunks", require_whole("num_chunks", self.num_chunks, least=0))
        if not isinstance(self.reducing, bool):
            message = f"reducing is {self.reducing!r}"
            raise ConfigurationError(message, hint="say True where chunks are sums, else False")
        for side in ("pre", "post"):
            try:
                chunks = frozen(getattr(self, f"{side}_chunks"), np.int32)
                ranks = frozen(getattr(self, f"{side}_ranks"), np.int32)
            except (TypeError, ValueError, OverflowError) as error:
                message = f"{side}_chunks and {side}_ranks are no lists of numbers: {error}"
                raise ConfigurationError(message, hint="give int32 arrays") from None
            _check_pairs(side, chunks, ranks, self)
            object.__setattr__(self, f"{side}_chunks", chunks)
            object.__setattr__(self, f"{side}_ranks", ranks)
        if self.root is not None and require_whole("root", self.root, least=0) >= self.num_ranks:
            raise ConfigurationError(
                f"root is {self.root}", hint=f"choose a root from 0 to {self.num_ranks - 1}"
            )
        weights = _checked_weights(self.chunk_weights, self.num_chunks)
        object.__setattr__(self, "chunk_weights", frozen(weights, np.float64))
        held, asked = np.diff(self.pre_offsets) > 0, np.diff(self.post_offsets) > 0
        if (asked & ~held).any():
            raise ConfigurationError(
                f"chunk {np.argmax(asked & ~held)} must arrive, but no rank holds it at first",
                hint="name at least one rank for it in pre",
            )

    # Made anew in another process: arrays would come back writable, equal weights as a list.
    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return functools.partial(Collective, **fields), ()

    def replaced(self, **changes: Any) -> Collective:
        """Return the same collective with some fields changed, as `dataclasses.replace` does it."""
        return dataclasses.replace(self, **changes)

    # -- where chunks are ----------------------------------------------------------------------

    @cached_property
    def pre_offsets(self) -> Longs:
        """Return where each chunk's pairs begin in ``pre_ranks``; int64 [num_chunks + 1]."""
        return offsets_of(self.pre_chunks, self.num_chunks)

    @cached_property
    def post_offsets(self) -> Longs:
        """Return where each chunk's pairs begin in ``post_ranks``; int64 [num_chunks + 1]."""
        return offsets_of(self.post_chunks, self.num_chunks)

    def holders(self, chunk: int) -> Ints:
        """Return the ranks that hold the chunk at first, or contribute to it."""
        return self.pre_ranks[self.pre_offsets[chunk] : self.pre_offsets[chunk + 1]]

    def receivers(self, chunk: int) -> Ints:
        """Return the ranks that must hold the chunk at last."""
        return self.post_ranks[self.post_offsets[chunk] : self.post_offsets[chunk + 1]]

    @cached_property
    def has_equal_chunks(self) -> bool:
        """Return whether all chunks have one size; the weights are then one number, repeated."""
        return self.num_chunks < 2 or self.chunk_weights.strides == (0,)

    @cached_property
    def single_source(self) -> bool:
        """Return whether every chunk starts, or is contributed, at one rank only."""
        return bool((np.diff(self.pre_offsets) <= 1).all())

    @cached_property
    def single_target(self) -> bool:
        """Return whether every chunk must arrive at one rank only."""
        return bool((np.diff(self.post_offsets) <= 1).all())

    # -- sizes ---------------------------------------------------------------------------------

    @cached_property
    def buffer_weight(self) -> float:
        """Weight of the buffer that a size in bytes speaks of.

        The largest input or output of a rank: the gathered output of an all-gather, the input of
        a reduce-scatter, the buffer of an all-reduce or broadcast; for the all-to-alls the largest
        input, own share included.
        """
        weights = self.chunk_weights
        sides = [np.bincount(self.pre_ranks, weights[self.pre_chunks], self.num_ranks)]
        if self.name not in _PAIRWISE:
            sides.append(np.bincount(self.post_ranks, weights[self.post_chunks], self.num_ranks))
        return float(max(side.max() for side in sides))

    def chunk_bytes(self, size_bytes: float) -> Floats:
        """Return the bytes of each chunk when the collective's buffer has ``size_bytes``.

        Args:
            size_bytes: The collective's size as `buffer_weight` counts it.

        Returns:
            float64 [num_chunks]; not rounded, for a buffer need not divide evenly.

        Raises:
            ConfigurationError: The size is no number, negative or not finite.
        """
        number = isinstance(size_bytes, Real) and not isinstance(size_bytes, bool)
        if not number or not 0 <= size_bytes < np.inf:
            raise ConfigurationError(
                f"size_bytes is {size_bytes!r:.40}", hint="give a finite size of at least 0 bytes"
            )
        if self.num_chunks == 0 or self.buffer_weight == 0:
            return np.zeros(self.num_chunks)
        if self.has_equal_chunks:  # one number for all: keep it one number
            share = self.chunk_weights[0] * size_bytes / self.buffer_weight
            return np.broadcast_to(np.float64(share), (self.num_chunks,))
        return self.chunk_weights * (size_bytes / self.buffer_weight)

    # -- buffers -------------------------------------------------------------------------------

    @cached_property
    def input_slots(self) -> Ints:
        """Chunk slots in the input buffer of each rank, int32 [num_ranks]."""
        return np.bincount(self.pre_ranks, minlength=self.num_ranks).astype(np.int32)

    @cached_property
    def output_slots(self) -> Ints:
        """Chunk slots in the output buffer of each rank, int32 [num_ranks]."""
        return np.bincount(self.post_ranks, minlength=self.num_ranks).astype(np.int32)

    @cached_property
    def _input_keys(self) -> Longs:
        return _address_keys(self.pre_chunks, self.pre_ranks, self.num_chunks)

    @cached_property
    def _output_keys(self) -> Longs:
        return _address_keys(self.post_chunks, self.post_ranks, self.num_chunks)

    def input_address(self, chunk: ArrayLike, rank: ArrayLike) -> Array:
        """Return the slot of the chunk in the rank's input buffer, -1 where it has none.

        A rank's buffer holds its chunks in ascending order, which is how MSCCL counts: slot
        ``chunk`` of an all-reduce, slot ``i`` of the owner's ``i``-th chunk of an all-gather,
        slot ``destination * C + i`` of an all-to-all.

        Args:
            chunk: Chunk or array of chunks.
            rank: Rank or array of ranks, of the same shape or one that broadcasts.

        Returns:
            int64 array of the common shape (0-dimensional for two numbers).
        """
        return _address(self._input_keys, self.num_chunks, chunk, rank)

    def output_address(self, chunk: ArrayLike, rank: ArrayLike) -> Array:
        """Return the slot of the chunk in the rank's output buffer, -1 where it has none."""
        return _address(self._output_keys, self.num_chunks, chunk, rank)

    # -- identity and inverse ------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Name of the collective by its contents, for caches; 32 hexadecimal digits."""
        digest = hashlib.sha256()
        head = (self.name, self.num_ranks, self.num_chunks, self.reducing, self.root)
        digest.update(repr(head).encode())
        for array in (self.pre_chunks, self.pre_ranks, self.post_chunks, self.post_ranks):
            digest.update(np.ascontiguousarray(array).data)
        weights = self.chunk_weights
        digest.update(weights[:1].tobytes() if self.has_equal_chunks else weights.tobytes())
        return digest.hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Collective):
            return NotImplemented
        return self is other or self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @cached_property
    def inverse_numbering(self) -> Ints | None:
        """Number that each chunk has in the inverse; None where numbers stay.

        Only the all-to-alls renumber: what went from s to d now goes from d to s.
        """
        if self.name not in _PAIRWISE:
            return None
        per_pair = self.num_chunks // self.num_ranks**2
        grid = np.arange(self.num_chunks, dtype=np.int32)
        cube = grid.reshape(self.num_ranks, self.num_ranks, per_pair)
        return np.ascontiguousarray(cube.transpose(1, 0, 2)).reshape(-1)

    def inverted(self) -> Collective:
        """Return the collective that runs this one backwards.

        All-gather and reduce-scatter, broadcast and reduce, scatter and gather are each other's
        inverse; an all-to-all is inverted by the transposed one. A copy to many becomes a sum
        over many; where every chunk has one source and one target it stays a copy.

        Returns:
            The inverse; inverting twice gives back an equal collective.

        Raises:
            ConfigurationError: A copied chunk starts at several ranks, or a summed chunk must
                arrive at several: these have no inverse.
        """
        targets = self.single_target
        if not (targets if self.reducing else self.single_source):
            raise ConfigurationError(
                f"{self.name} has no inverse: a chunk has several "
                + ("targets of one sum" if self.reducing else "holders at first"),
                hint="invert its parts one by one",
            )
        name = _INVERSES.get(self.name, self.name)
        # One rank alone is single in every sense; the names still say which one sums.
        reducing = name in _SUMS or (self.name == "custom" and not self.reducing and not targets)
        weights = self.chunk_weights
        pre, post = (self.post_chunks, self.post_ranks), (self.pre_chunks, self.pre_ranks)
        if (numbers := self.inverse_numbering) is not None:
            pre, post = _renumbered(pre, numbers), _renumbered(post, numbers)
            if not self.has_equal_chunks:
                weights = weights[np.argsort(numbers)]
        return self.replaced(
            name=name,
            reducing=reducing,
            pre_chunks=pre[0],
            pre_ranks=pre[1],
            post_chunks=post[0],
            post_ranks=post[1],
            chunk_weights=weights,
        )

    def replicated(self, pieces: int) -> Collective:
        """Return the same collective with each chunk cut into equal pieces.

        Args:
            pieces: Pieces; piece i of chunk c is chunk ``c * pieces + i``.

        Returns:
            The finer collective, numbered as its constructor would.
        """
        count = require_whole("pieces", pieces)

        def cut(chunks: Ints, ranks: Ints) -> tuple[Ints, Ints]:
            finer: Ints = np.repeat(chunks * np.int32(count), count)
            finer += np.tile(np.arange(count, dtype=np.int32), chunks.size)
            order = np.argsort(finer, kind="stable")
            return finer[order], np.repeat(ranks, count)[order]

        pre, post = cut(self.pre_chunks, self.pre_ranks), cut(self.post_chunks, self.post_ranks)
        return self.replaced(
            num_chunks=self.num_chunks * count,
            pre_chunks=pre[0],
            pre_ranks=pre[1],
            post_chunks=post[0],
            post_ranks=post[1],
            chunk_weights=(
                np.broadcast_to(self.chunk_weights[:1], (self.num_chunks * count,))
                if self.has_equal_chunks
                else np.repeat(self.chunk_weights / count, count)
            ),
        )


def _renumbered(pairs: tuple[Ints, Ints], numbers: Ints) -> tuple[Ints, Ints]:
    chunks, ranks = pairs
    new = numbers[chunks]
    order = np.lexsort((ranks, new))
    return new[order], ranks[order]


def _address_keys(chunks: Ints, ranks: Ints, num_chunks: int) -> Longs:
    """Return rank * num_chunks + chunk of all pairs in order, with an end that no pair reaches."""
    keys = np.sort(ranks.astype(np.int64) * num_chunks + chunks)
    return np.append(keys, np.iinfo(np.int64).max)


def _address(keys: Longs, num_chunks: int, chunk: ArrayLike, rank: ArrayLike) -> Array:
    first = np.asarray(rank, dtype=np.int64) * num_chunks
    wanted = first + np.asarray(chunk, dtype=np.int64)
    place = np.searchsorted(keys, wanted)
    return np.where(keys[place] == wanted, place - np.searchsorted(keys, first), -1)


def _check_pairs(side: str, chunks: Ints, ranks: Ints, collective: Collective) -> None:
    if chunks.ndim != 1 or chunks.shape != ranks.shape:
        raise ConfigurationError(
            f"{side}_chunks and {side}_ranks have shapes {chunks.shape} and {ranks.shape}",
            hint="give two lists of the same length, one entry for each pair (chunk, rank)",
        )
    if chunks.size == 0:
        return
    for what, values, count in (
        ("chunk", chunks, collective.num_chunks),
        ("rank", ranks, collective.num_ranks),
    ):
        if values.min() < 0 or values.max() >= count:
            bad = values.min() if values.min() < 0 else values.max()
            raise ConfigurationError(
                f"{side} names {what} {bad} of {count}", hint=f"{what}s are 0 to {count - 1}"
            )
    ordered = (chunks[1:] > chunks[:-1]) | ((chunks[1:] == chunks[:-1]) & (ranks[1:] > ranks[:-1]))
    if not ordered.all():
        at = int(np.argmin(ordered)) + 1
        raise ConfigurationError(
            f"pair {at} of {side} (chunk {chunks[at]}, rank {ranks[at]}) is out of order or twice",
            hint="sort the pairs by chunk, then rank, each once; custom_collective() does it",
        )


def _checked_weights(weights: ArrayLike | None, num_chunks: int) -> Floats:
    """Return all weights; equal ones become one number that is repeated without memory."""
    try:
        given = np.asarray(1.0 if weights is None else weights, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        message = f"chunk_weights are no numbers: {error}"
        raise ConfigurationError(message, hint=f"give {num_chunks} weights") from None
    if given.shape not in ((), (num_chunks,)):
        raise ConfigurationError(
            f"chunk_weights has the shape {given.shape}", hint=f"give {num_chunks} weights"
        )
    fine = np.isfinite(given) & (given >= 0)
    if not fine.all():
        bad = int(np.argmin(fine))
        raise ConfigurationError(
            f"the weight of chunk {bad} is {given.reshape(-1)[bad]}",
            hint="weights are finite and >= 0",
        )
    if given.size and (given == given.reshape(-1)[0]).all():
        given = given.reshape(-1)[0]
    return np.broadcast_to(given, (num_chunks,))
