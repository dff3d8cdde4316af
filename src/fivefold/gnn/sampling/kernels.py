"""Compiled inner loops of the sampler; every one runs without the interpreter lock.

A hop draws positions in the edge array, then numbers the sources of the chosen edges: apart, many
cache misses are under way at once. A slot of the hash table is ``(node + 1) << 30 | local number``,
0 where it is empty: one cache line a look-up; 2**33 nodes in a graph, 2**30 in a batch.
"""

from __future__ import annotations

from math import frexp
from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold._compiler import njit
from fivefold.gnn.storage.pages import Array, Ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOCAL_BITS = 30

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
_S11, _S27, _S30, _S31, _S32 = (np.uint64(bits) for bits in (11, 27, 30, 31, 32))
_LOW_32 = np.uint64(0xFFFFFFFF)
_LOCAL_MASK = (1 << LOCAL_BITS) - 1
_HALF_SQRT = 0.7071067811865476
_LN_2 = 0.6931471805599453
_UNIT = 1.0 / (1 << 53)
_BLOCK = 256  # edges whose cache misses are under way together
_SMALL = 48  # up to here a scan of the chosen positions is cheaper than a bitmap


@njit(inline="always")
def mix_bits(value: Any) -> Any:
    """Return the finaliser of SplitMix64, of one ``uint64`` or of every one in an array."""
    value = (value ^ (value >> _S30)) * _FIRST
    value = (value ^ (value >> _S27)) * _SECOND
    return value ^ (value >> _S31)


@njit(inline="always")
def _below(random: Any, bound: Any) -> Any:
    """Return the upper 64 bits of ``random * bound``, uniform below ``bound`` to within 2**-32."""
    high = (random >> _S32) * bound
    low = (random & _LOW_32) * bound
    return np.int64((high + (low >> _S32)) >> _S32)


@njit
def _exponential(random: Any) -> float:
    """Return ``-log(u)``, u in (0, 1], by sums and products: libraries' logarithms differ."""
    fraction, exponent = frexp((np.float64(random >> _S11) + 1.0) * _UNIT)
    if fraction < _HALF_SQRT:
        fraction *= 2.0
        exponent -= 1
    s = (fraction - 1.0) / (fraction + 1.0)
    z = s * s
    series = 0.0
    for odd in range(23, 0, -2):  # atanh series; |s| <= 0.1716, so the rest is below 1e-18
        series = series * z + 1.0 / odd
    return -(exponent * _LN_2 + 2.0 * s * series)


@njit
def most_edges(indptr: Ids, nodes: Ids, fanout: int) -> int:
    """Return the most edges that the nodes of a frontier can give."""
    total = 0
    for place in range(nodes.shape[0]):
        degree = indptr[nodes[place] + 1] - indptr[nodes[place]]
        total += degree if fanout < 0 else min(degree, fanout)
    return total


@njit
def _floyd_small(stream: Any, degree: int, fanout: int, chosen: Ids) -> None:
    for count in range(fanout):
        limit = degree - fanout + count
        pick = _below(mix_bits(stream + np.uint64(count + 1) * _GOLDEN), np.uint64(limit + 1))
        for before in range(count):
            if chosen[before] == pick:
                pick = limit
                break
        chosen[count] = pick


@njit
def _floyd_large(stream: Any, degree: int, fanout: int, chosen: Ids) -> None:
    taken = np.zeros((degree >> 6) + 1, np.uint64)
    for count in range(fanout):
        limit = degree - fanout + count
        pick = _below(mix_bits(stream + np.uint64(count + 1) * _GOLDEN), np.uint64(limit + 1))
        if taken[pick >> 6] >> np.uint64(pick & 63) & _ONE:
            pick = limit
        taken[pick >> 6] |= _ONE << np.uint64(pick & 63)
        chosen[count] = pick


@njit
def draw(
    indptr: Ids, nodes: Ids, fanout: int, key: Any, positions: Ids, degrees: NDArray[np.int32]
) -> int:
    """Choose up to ``fanout`` edges of each node, by Floyd's algorithm; return how many."""
    written = 0
    for place in range(nodes.shape[0]):
        start = indptr[nodes[place]]
        degree = indptr[nodes[place] + 1] - start
        taken = degree
        if fanout < 0 or degree <= fanout:
            for offset in range(degree):
                positions[written + offset] = start + offset
        else:
            taken = fanout
            chosen = positions[written : written + fanout]
            stream = mix_bits(key + np.uint64(nodes[place]) * _GOLDEN)
            if fanout <= _SMALL:
                _floyd_small(stream, degree, fanout, chosen)
            else:
                _floyd_large(stream, degree, fanout, chosen)
            for offset in range(fanout):
                chosen[offset] += start
        degrees[place] = taken
        written += taken
    return written


@njit
def _sift_down(keys: NDArray[np.float64], picks: Ids, size: int, hole: int) -> None:
    """Restore the heap (greatest (key, pick) on top) below ``hole``."""
    key, pick = keys[hole], picks[hole]
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        if child + 1 < size and (
            keys[child + 1] > keys[child]
            or (keys[child + 1] == keys[child] and picks[child + 1] > picks[child])
        ):
            child += 1
        if keys[child] < key or (keys[child] == key and picks[child] < pick):
            break
        keys[hole], picks[hole] = keys[child], picks[child]
        hole = child
    keys[hole], picks[hole] = key, pick


@njit
def _least_keys(
    stream: Any, weights: NDArray[np.float32], keys: NDArray[np.float64], picks: Ids
) -> int:
    """Write the picks with the least exponential keys, ascending; return how many."""
    size = 0
    room = keys.shape[0]
    for offset in range(weights.shape[0]):
        if not weights[offset] > 0.0:
            continue
        random = mix_bits(stream + np.uint64(offset + 1) * _GOLDEN)
        key = _exponential(random) / np.float64(weights[offset])
        if size < room:
            keys[size], picks[size] = key, offset
            size += 1
            if size == room:
                for hole in range(room // 2 - 1, -1, -1):
                    _sift_down(keys, picks, size, hole)
        elif key < keys[0]:
            keys[0], picks[0] = key, offset
            _sift_down(keys, picks, size, 0)
    if size < room:
        for hole in range(size // 2 - 1, -1, -1):
            _sift_down(keys, picks, size, hole)
    for end in range(size - 1, 0, -1):  # heap sort: smallest key first
        keys[0], keys[end] = keys[end], keys[0]
        picks[0], picks[end] = picks[end], picks[0]
        _sift_down(keys, picks, end, 0)
    return size


@njit
def draw_weighted(
    indptr: Ids,
    weights: NDArray[np.float32],
    nodes: Ids,
    fanout: int,
    key: Any,
    positions: Ids,
    degrees: NDArray[np.int32],
) -> int:
    """Choose as :func:`draw`, in proportion to the weights without replacement; never weight 0."""
    written = 0
    keys = np.empty(max(fanout, 0), np.float64)
    for place in range(nodes.shape[0]):
        start, stop = indptr[nodes[place]], indptr[nodes[place] + 1]
        taken = 0
        if fanout < 0 or stop - start <= fanout:
            for position in range(start, stop):
                if weights[position] > 0.0:
                    positions[written + taken] = position
                    taken += 1
        elif fanout > 0:
            stream = mix_bits(key + np.uint64(nodes[place]) * _GOLDEN)
            picks = positions[written : written + fanout]
            taken = _least_keys(stream, weights[start:stop], keys, picks)
            for offset in range(taken):
                picks[offset] += start
        degrees[place] = taken
        written += taken
    return written


@njit
def draw_in_time(  # noqa: PLR0913, PLR0917 - a kernel takes its arrays one by one
    indptr: Ids,
    indices: Array,
    times: Array,
    of_nodes: bool,  # noqa: FBT001
    nodes: Ids,
    trees: Ids,
    limits: Array,
    weights: NDArray[np.float32],
    fanout: int,
    latest: bool,  # noqa: FBT001
    key: Any,
    positions: Ids,
    degrees: NDArray[np.int32],
) -> int:
    """Choose as :func:`draw` among the edges whose time is at most the limit of the node's tree.

    Where there are weights, in proportion to them, and never an edge of weight 0.
    """
    written = 0
    weighted = weights.shape[0] > 0
    keys = np.empty(max(fanout, 0) if weighted else 0, np.float64)
    for place in range(nodes.shape[0]):
        start, stop = indptr[nodes[place]], indptr[nodes[place] + 1]
        limit = limits[trees[place]]
        early = np.empty(stop - start, np.int64)
        count = 0
        for position in range(start, stop):
            in_time = times[indices[position] if of_nodes else position] <= limit
            if in_time and (not weighted or weights[position] > 0.0):
                early[count] = position
                count += 1
        taken = count
        if fanout < 0 or count <= fanout:
            positions[written : written + count] = early[:count]
        else:
            taken = fanout
            chosen = positions[written : written + fanout]
            if latest:
                when = np.empty(count, times.dtype)
                for offset in range(count):
                    when[offset] = times[indices[early[offset]] if of_nodes else early[offset]]
                chosen[:] = np.argsort(when, kind="mergesort")[count - fanout :]
            else:
                node_stream = mix_bits(key + np.uint64(nodes[place]) * _GOLDEN)
                stream = mix_bits(node_stream + np.uint64(trees[place] + 1) * _GOLDEN)
                if weighted:
                    _least_keys(stream, weights[early[:count]], keys, chosen)
                elif fanout <= _SMALL:
                    _floyd_small(stream, count, fanout, chosen)
                else:
                    _floyd_large(stream, count, fanout, chosen)
            for offset in range(fanout):
                chosen[offset] = early[chosen[offset]]
        degrees[place] = taken
        written += taken
    return written


@njit(inline="always")
def _find(table: Ids, node: int) -> int:
    """Return the slot of a node, or the free one where it belongs."""
    mask = table.shape[0] - 1
    slot = np.int64(mix_bits(np.uint64(node)) & np.uint64(mask))
    while table[slot] != 0 and table[slot] >> LOCAL_BITS != node + 1:
        slot = (slot + 1) & mask
    return int(slot)


@njit
def refill_table(table: Ids, nodes: Ids, count: int) -> None:
    """Empty the table and enter nodes 0 to ``count``."""
    table[:] = 0
    for local in range(count):
        table[_find(table, nodes[local])] = (nodes[local] + 1) << LOCAL_BITS | local


@njit
def number_sources(  # noqa: PLR0913, PLR0917 - a kernel takes its arrays one by one
    indices: Array,
    positions: Ids,
    begin: int,
    end: int,
    table: Ids,
    nodes: Ids,
    count: int,
    num_sources: int,
    sources: NDArray[np.int32],
) -> tuple[int, int]:
    """Write the local numbers of the sources; return (edges done, nodes known).

    It stops where the table must be enlarged, and returns -1 nodes where a source is out of range.
    """
    mask = table.shape[0] - 1
    room = min(nodes.shape[0], table.shape[0] // 2)
    block = np.empty(_BLOCK, np.int64)
    seen = np.empty(_BLOCK, np.int64)
    for start in range(begin, end, _BLOCK):
        size = min(_BLOCK, end - start)
        # Two loops without branches first: their cache misses overlap.
        for offset in range(size):
            block[offset] = indices[positions[start + offset]]
        for offset in range(size):
            seen[offset] = table[np.int64(mix_bits(np.uint64(block[offset])) & np.uint64(mask))]
        for offset in range(size):
            node = block[offset]
            if node < 0 or node >= num_sources:
                return start + offset, -1
            entry = seen[offset]
            if entry >> LOCAL_BITS != node + 1:
                slot = _find(table, node)
                entry = table[slot]
                if entry == 0:
                    if count >= room:
                        return start + offset, count
                    nodes[count] = node
                    entry = (node + 1) << LOCAL_BITS | count
                    table[slot] = entry
                    count += 1
            sources[start + offset] = entry & _LOCAL_MASK
    return end, count
