"""The collectives by name, and custom ones, with the numbering that all of fivefold shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules.arrays import Floats, Ints, frozen, require_pairs
from fivefold.errors import ConfigurationError, require_one_of, require_whole

Pairs = tuple[Ints, Ints]


def _made(
    name: str,
    num_ranks: int,
    per: int,
    *,
    pre: str,
    post: str,
    root: int | None = None,
    reducing: bool = False,
) -> Collective:
    """Return a collective whose chunks are, before and after, at "owner", "all" or "root".

    Of those with an owner there are ``per`` for each rank, else ``per`` in all.
    """
    count = require_whole("num_ranks", num_ranks)
    owned = "owner" in {pre, post}
    share = require_whole("chunks_per_rank" if owned else "chunks", per)
    if root is not None and require_whole("root", root, least=0) >= count:
        raise ConfigurationError(
            f"root is {root}, but there are {count} ranks",
            hint=f"choose a root from 0 to {count - 1}",
        )
    chunks = count * share if owned else share

    def pairs(where: str) -> Pairs:
        require_pairs("pairs of chunk and rank", chunks * (count if where == "all" else 1))
        numbers = np.arange(chunks, dtype=np.int32)
        if where == "all":
            return np.repeat(numbers, count), np.tile(np.arange(count, dtype=np.int32), chunks)
        ranks = numbers // np.int32(share) if where == "owner" else np.full_like(numbers, root)
        return numbers, ranks

    (pre_chunks, pre_ranks), (post_chunks, post_ranks) = pairs(pre), pairs(post)
    return Collective(
        name=name,
        num_ranks=count,
        num_chunks=chunks,
        reducing=reducing,
        pre_chunks=pre_chunks,
        pre_ranks=pre_ranks,
        post_chunks=post_chunks,
        post_ranks=post_ranks,
        root=root,
    )


def all_gather(num_ranks: int, chunks_per_rank: int = 1) -> Collective:
    """Give every rank the chunks of every rank; chunk ``owner * C + i`` starts at its owner.

    Args:
        num_ranks: Ranks N.
        chunks_per_rank: Chunks C that each rank's share is cut into.

    Returns:
        The collective, of N * C chunks.

    Examples:
        >>> all_gather(3, 2).holders(5).tolist()
        [2]
    """
    return _made("all_gather", num_ranks, chunks_per_rank, pre="owner", post="all")


def reduce_scatter(num_ranks: int, chunks_per_rank: int = 1) -> Collective:
    """Give every rank its own chunks, summed over all ranks; numbered as in `all_gather`."""
    name, per = "reduce_scatter", chunks_per_rank
    return _made(name, num_ranks, per, pre="all", post="owner", reducing=True)


def all_reduce(num_ranks: int, chunks: int | None = None) -> Collective:
    """Give every rank every chunk, summed over all ranks.

    Args:
        num_ranks: Ranks N.
        chunks: Chunks that the buffer is cut into; None for N.
    """
    count = num_ranks if chunks is None else chunks
    return _made("all_reduce", num_ranks, count, pre="all", post="all", reducing=True)


def all_to_all(num_ranks: int, chunks_per_pair: int = 1) -> Collective:
    """Send something else from every rank to every rank: chunk ``(source * N + target) * C + i``.

    Args:
        num_ranks: Ranks N.
        chunks_per_pair: Chunks C that what goes from one rank to another is cut into.

    Returns:
        The collective, of N * N * C chunks; a rank's own share is among them and stays put.
    """
    count = require_whole("num_ranks", num_ranks)
    per_pair = require_whole("chunks_per_pair", chunks_per_pair)
    require_pairs("chunks", count * count * per_pair)
    chunks = np.arange(count * count * per_pair, dtype=np.int32)
    pairs = chunks // np.int32(per_pair)
    return Collective(
        name="all_to_all",
        num_ranks=count,
        num_chunks=chunks.size,
        reducing=False,
        pre_chunks=chunks,
        pre_ranks=pairs // np.int32(count),
        post_chunks=chunks,
        post_ranks=pairs % np.int32(count),
    )


def all_to_allv(sizes: ArrayLike) -> Collective:
    """Send uneven sizes from all to all; chunk ``source * N + target`` has size [source, target].

    Pairs of size zero send nothing and appear in neither condition.

    Args:
        sizes: What each rank (row) sends to each rank (column), [N, N]; bytes or any other unit.

    Returns:
        The collective. With sizes in bytes, its ``buffer_weight`` is the size that
        `Collective.chunk_bytes` turns into just these bytes.

    Raises:
        ConfigurationError: The sizes are no square matrix of finite numbers >= 0.

    Examples:
        >>> collective = all_to_allv([[0, 3], [1, 2]])
        >>> collective.chunk_bytes(collective.buffer_weight).tolist()
        [0.0, 3.0, 1.0, 2.0]
    """
    try:
        matrix = np.asarray(sizes, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        message = f"the sizes are no matrix of numbers: {error}"
        raise ConfigurationError(message, hint="give one row for each rank") from None
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ConfigurationError(
            f"sizes has the shape {matrix.shape}", hint="give one row and one column for each rank"
        )
    count = matrix.shape[0]
    chunks = np.flatnonzero(matrix != 0).astype(np.int32)
    return Collective(
        name="all_to_allv",
        num_ranks=count,
        num_chunks=count * count,
        reducing=False,
        pre_chunks=chunks,
        pre_ranks=chunks // np.int32(count),
        post_chunks=chunks,
        post_ranks=chunks % np.int32(count),
        chunk_weights=matrix.reshape(-1),
    )


def broadcast(num_ranks: int, chunks: int = 1, *, root: int = 0) -> Collective:
    """Give every rank the chunks of the root.

    Args:
        num_ranks: Ranks N.
        chunks: Chunks that the buffer is cut into.
        root: The rank that holds them at first.
    """
    return _made("broadcast", num_ranks, chunks, pre="root", post="all", root=root)


def reduce(num_ranks: int, chunks: int = 1, *, root: int = 0) -> Collective:
    """Give the root every chunk, summed over all ranks; arguments as of `broadcast`."""
    return _made("reduce", num_ranks, chunks, pre="all", post="root", root=root, reducing=True)


def scatter(num_ranks: int, chunks_per_rank: int = 1, *, root: int = 0) -> Collective:
    """Give every rank its chunks ``rank * C + i`` from the root.

    Args:
        num_ranks: Ranks N.
        chunks_per_rank: Chunks C for each rank.
        root: The rank that holds all of them at first.

    Returns:
        The collective, of N * C chunks.
    """
    return _made("scatter", num_ranks, chunks_per_rank, pre="root", post="owner", root=root)


def gather(num_ranks: int, chunks_per_rank: int = 1, *, root: int = 0) -> Collective:
    """Give the root the chunks ``rank * C + i`` of every rank; arguments as of `scatter`."""
    return _made("gather", num_ranks, chunks_per_rank, pre="owner", post="root", root=root)


def custom_collective(
    num_ranks: int,
    pre: Iterable[tuple[int, int]],
    *,
    post: Iterable[tuple[int, int]],
    reducing: bool = False,
    chunk_weights: Floats | None = None,
) -> Collective:
    """Return a collective of one's own, from its conditions.

    Args:
        num_ranks: Ranks N.
        pre: Pairs (chunk, rank) that hold a chunk at first, or contribute to it.
        post: Pairs (chunk, rank) that must hold it at last.
        reducing: Whether chunks are summed over all who contribute.
        chunk_weights: Relative sizes of the chunks; None for equal sizes.

    Returns:
        The collective; it has as many chunks as the largest number named, plus one.

    Examples:
        >>> custom_collective(3, [(0, 0)], post=[(0, 2)]).num_chunks
        1
    """
    first, last = _sorted_pairs(pre), _sorted_pairs(post)
    largest = max(int(first[0].max(initial=-1)), int(last[0].max(initial=-1)))
    return Collective(
        name="custom",
        num_ranks=require_whole("num_ranks", num_ranks),
        num_chunks=largest + 1 if chunk_weights is None else max(largest + 1, len(chunk_weights)),
        reducing=reducing,
        pre_chunks=first[0],
        pre_ranks=first[1],
        post_chunks=last[0],
        post_ranks=last[1],
        chunk_weights=chunk_weights,  # type: ignore[arg-type]
    )


def _sorted_pairs(pairs: Iterable[tuple[int, int]]) -> Pairs:
    try:
        listed = np.array(list(pairs))
    except (TypeError, ValueError, OverflowError):
        listed = np.array(["no numbers"])
    whole = listed.dtype.kind in "iu" and listed.ndim == 2 and listed.shape[1] == 2
    if listed.size and not (whole and listed.min() >= 0 and listed.max() < 2**31):
        message = "the conditions are no list of pairs (chunk, rank)"
        raise ConfigurationError(
            message, hint="give pairs of whole numbers from 0, such as [(0, 1), (1, 1)]"
        )
    table = listed.reshape(-1, 2).astype(np.int32)
    ordered = table[np.lexsort((table[:, 1], table[:, 0]))]
    return ordered[:, 0], ordered[:, 1]


_MAKERS: dict[str, Callable[..., Collective]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "reduce": reduce,
    "scatter": scatter,
    "gather": gather,
}
COLLECTIVES = tuple(_MAKERS)
_ROOTED = ("broadcast", "reduce", "scatter", "gather")


def named_collective(
    name: str, num_ranks: int, *, chunks: int | None = None, root: int = 0
) -> Collective:
    """Return the collective of this name, as files and the command line spell it.

    Args:
        name: One of `COLLECTIVES`; hyphens count as underscores.
        num_ranks: Ranks N.
        chunks: Chunks in the sense of the collective's own constructor; None for its default.
        root: The root, where the collective has one.

    Raises:
        ConfigurationError: There is no such collective, or an argument is out of range.

    Examples:
        >>> named_collective("all-gather", 4, chunks=2).num_chunks
        8
    """
    plain = str(name).strip().lower().replace("-", "_").replace(" ", "_")
    require_one_of(plain, _MAKERS, f"there is no collective {name!r}")
    sizes = () if chunks is None else (chunks,)
    return _MAKERS[plain](num_ranks, *sizes, **({"root": root} if plain in _ROOTED else {}))


def collective_to_data(collective: Collective) -> dict[str, Any]:
    """Return a collective as plain data, by its name where it has one."""
    data: dict[str, Any] = {"name": collective.name, "num_ranks": collective.num_ranks}
    if collective.name in COLLECTIVES:
        per = {"all_to_all": collective.num_ranks**2}.get(collective.name, collective.num_ranks)
        if collective.name in ("all_reduce", "broadcast", "reduce"):
            per = 1
        root = 0 if collective.root is None else collective.root
        chunks = collective.num_chunks // per
        made = named_collective(collective.name, collective.num_ranks, chunks=chunks, root=root)
        if made == collective:
            return {**data, "chunks": chunks, "root": root}
    weights = collective.chunk_weights  # one number where all are that number
    short = weights.size > 0 and collective.has_equal_chunks
    return data | {
        "num_chunks": collective.num_chunks,
        "reducing": collective.reducing,
        "root": collective.root,
        "pre": np.stack([collective.pre_chunks, collective.pre_ranks], axis=1).tolist(),
        "post": np.stack([collective.post_chunks, collective.post_ranks], axis=1).tolist(),
        "weights": float(weights[0]) if short else weights.tolist() or None,
    }


def collective_from_data(data: dict[str, Any]) -> Collective:
    """Return the collective of what `collective_to_data` gives."""
    if "pre" not in data:
        return named_collective(
            data["name"], data["num_ranks"], chunks=data["chunks"], root=data["root"]
        )
    pre, post = (frozen(data[side], np.int32).reshape(-1, 2) for side in ("pre", "post"))
    return Collective(
        name=data["name"],
        num_ranks=data["num_ranks"],
        num_chunks=data["num_chunks"],
        reducing=data["reducing"],
        pre_chunks=pre[:, 0],
        pre_ranks=pre[:, 1],
        post_chunks=post[:, 0],
        post_ranks=post[:, 1],
        chunk_weights=data["weights"],
        root=data["root"],
    )
