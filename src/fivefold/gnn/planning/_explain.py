"""A plan as a table that a person reads before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivefold.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    from fivefold.gnn.planning._plan import Plan
    from fivefold.gnn.planning._prediction import SegmentCost

_MOST_CHOICES = 9


def explain(plan: Plan) -> str:
    """The plan as text: what goes where, why this segment size, time and space."""
    parts = [_title(plan), _places(plan), _sizes(plan), _epoch(plan), _space(plan)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(plan: Plan) -> str:
    order = {
        "static": "the most used rows are cached; batches may come in any order",
        "belady": "the rows needed soonest are cached; batches come in the order of the samples",
    }
    return (
        f"Plan {plan.fingerprint[:8]}: {_count(plan.num_batches)} batches over "
        f"{_count(plan.num_nodes)} rows of {_count(plan.row_bytes)} bytes "
        f"({format_bytes(plan.num_nodes * plan.row_bytes)})\n"
        f"{plan.policy} policy: {order[plan.policy]}"
    )


def _places(plan: Plan) -> str:
    predicted, rates = plan.predicted, plan.predicted.hit_rates
    levels = [
        ("device cache", plan.num_device_slots, rates["device"], ""),
        ("host cache", plan.num_host_slots, rates["host"], ""),
        ("disk", predicted.packed_rows, rates["disk"], f"{predicted.blow_up:.2f} x the features"),
    ]
    rows = [
        [name, _count(number), format_bytes(number * plan.row_bytes), _percent(rate), remark]
        for name, number, rate, remark in levels
    ]
    return _table(["What goes where", "rows", "bytes", "rows served", ""], rows)


def _sizes(plan: Plan) -> str:
    """The segment sizes around the chosen one."""
    if not plan.choices:
        return ""
    passes = plan.training_epochs / plan.predicted.sampled_epochs
    chosen = plan.segment_batches
    cold_bytes = max(1, plan.predicted.cold_rows * plan.row_bytes)
    rows = [
        [
            f"{'>' if cost.segment_batches == chosen else ' '} {_count(cost.segment_batches)}",
            format_bytes(cost.packed_rows * plan.row_bytes),
            f"{cost.read_bytes / cold_bytes:.3f}",
            _count(cost.requests),
            format_duration_s(cost.read_seconds / plan.predicted.sampled_epochs),
            format_duration_s(cost.packing_seconds),
            format_duration_s(cost.total_seconds(passes)),
            "counted" if cost.exact else "estimated",
        ]
        for cost in _nearest(plan.choices, chosen)
    ]
    total = f"{_count(plan.training_epochs)} epochs"
    head = [
        "Batches per segment",
        "on disk",
        "amplification",
        "requests",
        "epoch",
        "packing",
        total,
        "",
    ]
    remark = (
        f"{plan.layout} layout. amplification: bytes read over bytes needed. Larger segments "
        "share more rows,\nwhich saves space, and scatter them more, which costs requests and "
        "bytes. "
        "Of the sizes within\n2 % of the least time the one of least space is taken."
    )
    return f"{_table(head, rows)}\n{remark}"


def _nearest(choices: Sequence[SegmentCost], chosen: int) -> list[SegmentCost]:
    """The chosen size, its neighbours, and sizes at growing distances on both sides."""
    by_size = {cost.segment_batches: cost for cost in choices}
    wanted = {chosen, chosen - 1, chosen + 1, 1, max(by_size)}
    wanted |= {size for size, cost in by_size.items() if cost.exact}
    wanted |= {chosen // 2, chosen * 2, chosen * 4}
    sizes = [size for size in by_size if size in wanted]
    while len(sizes) > _MOST_CHOICES:
        sizes.remove(max(sizes, key=lambda size: abs(size - chosen)))
    return [by_size[size] for size in sorted(sizes)]


def _epoch(plan: Plan) -> str:
    predicted = plan.predicted
    gaps = (
        f"gaps of up to {format_bytes(plan.max_gap_bytes)} are read through"
        if plan.max_gap_bytes
        else "no gap is read through"
    )
    rows = [
        [
            "read from disk",
            format_bytes(predicted.read_bytes_per_epoch),
            format_duration_s(predicted.read_seconds),
            f"{_count(predicted.requests_per_epoch)} requests; {gaps}",
        ],
        [
            "without packing",
            "",
            format_duration_s(predicted.online_seconds),
            "the same rows gathered from the features, each page once per batch",
        ],
        [
            "packing, once",
            format_bytes(predicted.packing.moved_bytes),
            format_duration_s(predicted.packing_seconds),
            _PACKING[predicted.packing.strategy],
        ],
        [
            "caches, once",
            format_bytes(predicted.cache_bytes),
            format_duration_s(predicted.fill_seconds),
            "fill in one sequential read",
        ],
    ]
    table = _table(["Each epoch", "bytes", "disk time", ""], rows, left_from=3)
    return f"{table}\n{_break_even(predicted.break_even_epochs)}"


_PACKING = {
    "resident": "the features fit the memory: read once, written in order",
    "spill": "one pass over the features into buckets on disk, then bucket by bucket",
    "passes": "a pass over the features for each part of the output that fits the memory",
}


def _break_even(epochs: float) -> str:
    if epochs == float("inf"):
        return "Packing does not pay here: gathering online is as fast."
    if epochs <= 1:
        return "Packing has paid for itself within the first epoch."
    return f"Packing has paid for itself after {epochs:.1f} epochs."


def _space(plan: Plan) -> str:
    predicted, budgets = plan.predicted, plan.budgets
    device = plan.num_device_slots * plan.row_bytes
    host = plan.num_host_slots * plan.row_bytes + predicted.buffer_bytes
    if device:
        device += predicted.buffer_bytes
    disk = (
        f"rows {format_bytes(predicted.packed_bytes)}, caches "
        f"{format_bytes(predicted.cache_bytes)}, records {format_bytes(predicted.record_bytes)}, "
        f"scratch {format_bytes(predicted.scratch_bytes)}"
    )
    buffers = f"cache and {format_bytes(predicted.buffer_bytes)} for batches in flight"
    rows = [
        ["device memory", format_bytes(device), format_bytes(budgets.device_bytes), ""],
        ["host memory", format_bytes(host), format_bytes(budgets.host_bytes), buffers],
        ["disk", format_bytes(predicted.disk_bytes), format_bytes(budgets.disk_bytes), disk],
    ]
    return _table(["Space", "taken", "budget", ""], rows, left_from=3)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left_from: int = 9) -> str:
    """Columns side by side: the first and those from ``left_from`` on to the left."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = []
    for line in lines:
        cells = [
            cell.ljust(width) if column == 0 or column >= left_from else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])


def _count(number: int) -> str:
    return f"{number:,}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
