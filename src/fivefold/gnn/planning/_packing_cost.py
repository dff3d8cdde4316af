"""What packing costs, by each of the ways that rows can take.

With F the bytes of the features, R those of the output and M of memory:

* ``resident`` (F fits M): read F, write R;
* ``passes``: the output in windows that fit M, a pass over the features for each: read
  ceil(R / M) F, write R, no scratch space;
* ``spill``: one pass over the features into buckets of up to M / 2, then each bucket is read, put
  in order and written: read F + R, write 2 R, scratch space R. What a bucket gets of a range of the
  features begins on a page, so each pair of them adds up to a page to the scratch space.

The published batched packing reads F once and appends to a file per batch and range of the
features; it knows no shared rows, for which a place in the output depends on the whole segment.
"""

from __future__ import annotations

from fivefold.gnn.planning._budgets import FeatureInfo
from fivefold.gnn.planning._pages import PAGE_BYTES
from fivefold.gnn.planning._prediction import PackingCost
from fivefold.gnn.planning._sources import DiskCost

_INDEX_BYTES_PER_ROW = 40  # numbers that are kept for each row in memory while it is on its way


def packing_ways(
    features: FeatureInfo, *, output_rows: int, memory_bytes: int, disk: DiskCost
) -> list[PackingCost]:
    """Every way in which so many rows can be packed within the memory, cheapest first.

    Examples:
        >>> class Disk:
        ...     sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9
        ...     def seconds(self, requests: float, size_bytes: float) -> float:
        ...         return size_bytes / 1e9
        >>> features = FeatureInfo(num_nodes=10**6, row_bytes=512, fingerprint="")
        >>> [way.strategy for way in packing_ways(
        ...     features, output_rows=2 * 10**6, memory_bytes=10**8, disk=Disk())]
        ['spill', 'passes']
    """
    per_row = features.row_bytes + _INDEX_BYTES_PER_ROW
    source, output = features.nbytes, output_rows * features.row_bytes
    # A quarter of the memory goes to the pieces that are read and written at a time.
    window_rows = max(1, memory_bytes * 3 // 4 // per_row)
    bucket_rows = max(1, window_rows // 2)
    windows, buckets = -(-output_rows // window_rows), -(-output_rows // bucket_rows)
    scratch = output + buckets * -(-features.num_nodes // bucket_rows) * PAGE_BYTES
    ways = [
        ("spill", source + scratch, output + scratch, scratch),
        ("passes", windows * source, output, 0),
    ]
    if source * 4 <= memory_bytes * 3:
        ways.insert(0, ("resident", source, output, 0))
    costs = [
        PackingCost(
            strategy=strategy,
            read_bytes=read,
            written_bytes=written,
            scratch_bytes=scratch,
            seconds=read / disk.sequential_read_bytes_per_s
            + written / disk.sequential_write_bytes_per_s,
        )
        for strategy, read, written, scratch in ways
    ]
    return sorted(costs, key=lambda cost: cost.seconds)
