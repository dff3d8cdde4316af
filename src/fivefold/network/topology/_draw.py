"""Pictures of a topology: nodes by kind, links by capacity, and what they carry by colour."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, optional_module, require_one_of
from fivefold.network.topology._topology import Topology
from fivefold.network.topology.arrays import FloatArray
from fivefold.units import format_bytes, format_bytes_per_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GRID_NAME = re.compile(r"(?:mesh|torus):(\d+(?:x\d+)+)\b")
_DETAILED_NODES = 150  # beyond, a host is one mark
_ROW_OF_HOSTS = 40  # beyond, the hosts of a rack stand in several rows
_TIERS = {"nic": 0, "pcie": 0, "nvswitch": 0, "switch": 1, "tor": 1, "agg": 2, "core": 3}
_DEPTH = (0.42, 0.31)  # how far back a third dimension goes, right and up
_RANKS = "ranks"


class Box(NamedTuple):
    """The outline of a host."""

    label: str
    x: float
    y: float
    width: float
    height: float


@dataclass
class Layout:
    """A place for each node, and the node in whose place it is drawn."""

    places: FloatArray
    marks: npt.NDArray[np.int64]
    boxes: list[Box] = field(default_factory=list)
    grid: bool = False


def lay_out(topology: Topology) -> Layout:
    """Choose the layout that suits a topology."""
    layout = Layout(np.zeros((topology.num_nodes, 2)), np.arange(topology.num_nodes))
    fabric = [n for n, node in enumerate(topology.nodes) if not node.is_rank and node.host is None]
    tier = np.full(topology.num_nodes, -1)
    tier[fabric] = [_TIERS.get(topology.nodes[node].kind, 0) for node in fabric]
    first, second = tier[topology.link_sources], tier[topology.link_targets]
    if bool(topology.is_rank.all()) and len(topology.hosts) < 2:
        _place_regular(topology, layout)
    elif bool(((first >= 0) & (first == second)).any()):  # joined to each other: a dragonfly
        _place_around(topology, fabric, layout)
    else:
        corner = _place_hosts(topology, set(fabric), layout)
        _place_fabric(topology, tier, layout, corner)
    return layout


def _circle(number: int, *, radius: float | None = None) -> FloatArray:
    around = radius if radius is not None else max(1.0, number / 7)
    angles = math.pi / 2 - 2 * math.pi * np.arange(number) / max(number, 1)
    return np.column_stack([around * np.cos(angles), around * np.sin(angles)])


def _place_regular(topology: Topology, layout: Layout) -> None:
    """Place ranks without switches on a grid, around the first one, or in a circle."""
    named, count = _GRID_NAME.match(topology.name), topology.num_nodes
    shape = tuple(map(int, named[1].split("x"))) if named else ()
    if topology.name.startswith("hypercube"):
        shape = (2, 2, 2)
    if len(shape) in (2, 3) and math.prod(shape) == count:
        back, row, column = np.indices((1, *shape)[-3:]).reshape(3, -1)
        layout.places[:] = np.column_stack([column, -row]) + back[:, None] * _DEPTH
        layout.grid = True
    elif topology.name.startswith("star") and count > 2:
        layout.places[1:] = _circle(count - 1)
    else:
        layout.places[:] = _circle(count)


def _place_around(topology: Topology, fabric: Sequence[int], layout: Layout) -> None:
    """Place routers in a circle, and what hangs on each in an arc outside of it."""
    radius = max(2.0, len(fabric) / 6)
    layout.places[list(fabric)] = _circle(len(fabric), radius=radius)
    number = {node: place for place, node in enumerate(fabric)}
    hanging: list[list[int]] = [[] for _ in fabric]
    for node in sorted(set(range(topology.num_nodes)) - set(fabric)):
        out = topology.link_targets[topology.out_links(node)].tolist()
        hanging[next((number[target] for target in out if target in number), 0)].append(node)
    for place, nodes in enumerate(hanging):
        aside = 0.8 * ((np.arange(len(nodes)) + 0.5) / max(len(nodes), 1) - 0.5)
        angles = math.pi / 2 - 2 * math.pi / len(fabric) * (place + aside)
        arc = np.column_stack([np.cos(angles), np.sin(angles)])
        layout.places[nodes] = (1.25 * radius + 0.3) * arc


def _place_hosts(topology: Topology, fabric: set[int], layout: Layout) -> tuple[float, float]:
    """Place the hosts of each rack side by side; return where the last ends, and the height."""
    hosts: dict[str, list[int]] = {}
    for index, node in enumerate(topology.nodes):
        if index not in fabric:
            hosts.setdefault(node.host or f"\0{index}", []).append(index)
    racks: dict[frozenset[int], list[str]] = {}
    for host, nodes in hosts.items():
        targets = np.concatenate([topology.link_targets[topology.out_links(n)] for n in nodes])
        racks.setdefault(frozenset(fabric & set(targets.tolist())), []).append(host)
    right = top = 0.0
    for rack in racks.values():
        if topology.num_nodes <= _DETAILED_NODES:
            for host in rack:
                width, height = _place_inside(topology, host, hosts[host], layout, right)
                right, top = right + width + 0.5, max(top, height)
            continue
        columns = math.ceil(math.sqrt(len(rack))) if len(hosts) > _ROW_OF_HOSTS else len(rack)
        for index, host in enumerate(rack):
            layout.places[hosts[host]] = right + index % columns, -float(index // columns)
            layout.marks[hosts[host]] = hosts[host][0]
        right += columns + 1.0
    return right, top


def _place_inside(
    topology: Topology, host: str, nodes: Sequence[int], layout: Layout, left: float
) -> tuple[float, float]:
    """Place the devices of a host, row by row; return the width and height that it takes."""
    rows: dict[str, list[int]] = {}
    for node in nodes:
        entry = topology.nodes[node]
        rows.setdefault(_RANKS if entry.is_rank else entry.kind, []).append(node)
    ranks = rows.get(_RANKS, [])
    out = [topology.link_targets[topology.out_links(rank)] for rank in ranks]
    shape = np.column_stack([np.arange(len(ranks), dtype=float), np.zeros(len(ranks))])
    if len(ranks) > 2 and np.isin(np.concatenate(out), ranks).any():  # wired to each other
        shape = _circle(len(ranks), radius=max(1.0, len(ranks) / 6))
        shape -= shape.min(axis=0)
    width, tall = shape.max(axis=0, initial=0.0).tolist()
    height = top = 0.0
    for kind in ("nvswitch", _RANKS, "pcie", "switch", "nic"):
        if kind in rows:
            number = len(rows[kind])
            even = np.column_stack([width * (np.arange(number) + 0.5) / number, np.zeros(number)])
            layout.places[rows[kind]] = (left, height) + (shape if kind == _RANKS else even)
            top = height + (tall if kind == _RANKS else 0.0)
            height = top + (1.2 if kind == "nvswitch" else 0.9)
    if len(nodes) > 1:
        layout.boxes.append(Box(host, left - 0.4, -0.4, width + 0.8, top + 0.8))
    return width + 0.8, top


def _place_fabric(
    topology: Topology, tier: npt.NDArray[np.int64], layout: Layout, corner: tuple[float, float]
) -> None:
    """Place each tier above the one below, every switch over the middle of what hangs on it."""
    width, height = max(corner[0] - 1.0, 1.0), corner[1]
    placed = tier < 0
    for level in np.unique(tier[~placed]).tolist():
        height += max(1.6, width / 7)
        nodes = np.flatnonzero(tier == level)
        middles = np.full(len(nodes), width / 2)
        for place, node in enumerate(nodes.tolist()):
            below = topology.link_targets[topology.out_links(node)]
            if placed[below].any():
                middles[place] = layout.places[below[placed[below]], 0].mean()
        order = np.argsort(middles, kind="stable")
        # Over what hangs on them where that leaves room, evenly where it does not.
        apart = np.diff(middles[order]).min(initial=np.inf) > 0.35 * width / len(nodes)
        even = width * (np.arange(len(nodes)) + 0.5) / len(nodes)
        layout.places[nodes[order], 0] = middles[order] if apart else even
        layout.places[nodes, 1] = height
        placed[nodes] = True


_KINDS = {  # marker, colour, name
    "gpu": ("s", "#2a78d6", "GPU"),
    "cpu": ("s", "#4b5b76", "CPU"),
    "nvswitch": ("D", "#1baf7a", "nvswitch"),
    "pcie": ("v", "#8a8a85", "pcie"),
    "nic": ("^", "#b07a12", "NIC"),
    "tor": ("o", "#d1603d", "rack switch"),
    "agg": ("o", "#a23e83", "aggregation switch"),
    "core": ("o", "#5a4fcf", "core switch"),
    "switch": ("o", "#d1603d", "switch"),
}
_LINK, _WRAP = "#9aa0a6", "#c3c7cb"
_LABELLED = 80  # marks; beyond, names would lie on one another
_ASIDE = 0.05  # how far a direction's line keeps to the right
_STUB = 0.35  # of a link that goes round the back of a grid
_WHOLE = 1.0 + 1e-9  # loads up to here are shares
_MOST_ARROWS = 300
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def draw_topology(
    topology: Topology,
    path: str | Path | None = None,
    *,
    link_loads: npt.ArrayLike | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a topology, with what its links carry if that is given.

    Many hosts are drawn as one mark each, links that then lie on one another as one line. The width
    of a line follows its capacity. With loads every direction has its own line, to the right of the
    middle as seen by the traffic; a single direction without loads has an arrow.

    Args:
        topology: What to draw.
        path: Where to save it (``.png``, ``.svg`` or ``.pdf``); None to save nothing.
        link_loads: Per link, bytes or (where none is above 1) the share of its capacity in use.
        title: Heading; None for name and counts.

    Raises:
        ConfigurationError: ``link_loads`` has the wrong length, or the file's ending is unknown.
        UnsupportedError: matplotlib is not installed.

    Examples:
        >>> from fivefold.network.topology import ring
        >>> len(draw_topology(ring(4), link_loads=[1.0] * 4 + [0.0] * 4).axes)
        2
    """
    figure_class = optional_module("matplotlib.figure", extra="network", use="a picture").Figure
    loads = None if link_loads is None else _checked_loads(topology, link_loads)
    layout = lay_out(topology)
    spans = np.ptp(layout.places, axis=0) + 1.5
    scale = min(14 / spans[0], 10 / spans[1], 1.2)
    size = (max(6.0, spans[0] * scale), max(4.0, spans[1] * scale + 1.4))
    figure: Figure = figure_class(figsize=size, layout="constrained", dpi=120)
    axes = figure.add_subplot()
    _draw_boxes(axes, layout)
    _draw_links(figure, axes, topology, layout, loads)
    _draw_nodes(axes, topology, layout, columns=max(1, int(size[0] / 1.8)))
    axes.set_title(title or _heading(topology), fontsize=9.5, loc="left", pad=14)
    axes.set_aspect("equal")
    axes.axis("off")
    if path is not None:
        _save(figure, Path(path))
    return figure


def _checked_loads(topology: Topology, link_loads: npt.ArrayLike) -> FloatArray:
    try:
        loads = np.asarray(link_loads, np.float64)
    except (TypeError, ValueError):
        loads = np.zeros(0)
    if loads.shape != (topology.num_links,) or not np.isfinite(loads).all() or (loads < 0).any():
        raise ConfigurationError(
            f"link_loads must be {topology.num_links} numbers from 0 up, one per link; "
            f"got {link_loads!r:.60}",
            hint="give bytes or the share of the capacity for every link of the topology",
        )
    return loads


def _heading(topology: Topology) -> str:
    ranks = f"{topology.num_ranks} rank{'s' if topology.num_ranks != 1 else ''}"
    rates = sorted(set(topology.capacities_bytes_per_s.tolist()))
    shown = ", ".join(format_bytes_per_s(rate) for rate in rates[:4])
    more = ", ..." if len(rates) > 4 else ""
    links = f"{topology.num_links} directed links" + (f" ({shown}{more})" if rates else "")
    others = topology.num_nodes - topology.num_ranks
    forwarding = f", {others} forwarding node{'s' if others != 1 else ''}" if others else ""
    return f"{topology.name}\n{ranks}{forwarding}\n{links}"


def _draw_boxes(axes: Axes, layout: Layout) -> None:
    from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415 - heavy and optional

    style = {"boxstyle": "round,pad=0.02,rounding_size=0.15", "fc": "#f4f5f7", "ec": "#d5d8dc"}
    for box in layout.boxes:
        outline = FancyBboxPatch((box.x, box.y), box.width, box.height, zorder=0, **style)  # type: ignore[arg-type]
        axes.add_patch(outline)
        axes.text(box.x + 0.05, box.y - 0.12, box.label, fontsize=8, va="top", color="#4b5b76")


def _draw_links(
    figure: Figure, axes: Axes, topology: Topology, layout: Layout, loads: FloatArray | None
) -> None:
    from matplotlib.collections import LineCollection  # noqa: PLC0415 - heavy and optional

    ends, capacities, carried = _merged(topology, layout, loads)
    if not len(ends):
        return
    lines, link, wraps = _lines(layout, ends, aside=0.0 if carried is None else _ASIDE)
    widths = 0.5 + 3.0 * np.sqrt(capacities / capacities.max()) / (1 + len(ends) / 400)
    if carried is None:
        alone = ~np.isin(ends @ [1, topology.num_nodes], ends @ [topology.num_nodes, 1])
        once = (alone | (ends[:, 0] < ends[:, 1]))[link]  # one line for both directions
        lines, link = lines[once], link[once]
        colours = np.where(wraps, _WRAP, _LINK)[link].tolist()
        # Thousands of lines lie on one another, but in a grid: let each shine through.
        alpha = 1.0 if layout.grid else float(np.clip(1800 / len(ends), 0.25, 1.0))
        drawn = LineCollection(list(lines), color=colours, alpha=alpha)
        for start, stop in layout.places[ends[alone & ~wraps][:_MOST_ARROWS]]:
            style = {"arrowstyle": "-|>", "color": _LINK, "lw": 0}
            tip, tail = start + 0.55 * (stop - start), start + 0.53 * (stop - start)
            axes.annotate("", tip, tail, arrowprops=style, zorder=1)
    else:
        order = np.argsort(carried[link], kind="stable")  # the busiest on top
        lines, link = lines[order], link[order]
        top = 1.0 if carried.max(initial=0.0) <= _WHOLE else float(carried.max())
        drawn = LineCollection(list(lines), cmap="YlOrRd", array=carried[link])
        drawn.set_clim(-0.12 * top, top)  # an idle link stays visible
        _draw_scale(figure, axes, drawn, top)
    widths = np.where(wraps, 1.0, widths) if carried is None else np.maximum(widths, 1.2)
    drawn.set(linewidths=widths[link].tolist(), zorder=1)
    axes.add_collection(drawn)
    axes.autoscale_view()


def _merged(
    topology: Topology, layout: Layout, loads: FloatArray | None
) -> tuple[npt.NDArray[np.int64], FloatArray, FloatArray | None]:
    """Merge links between the same two marks: capacities added, bytes added, shares at most."""
    ends = np.stack([topology.link_sources, topology.link_targets], axis=1)
    pairs = layout.marks[ends]
    outside = pairs[:, 0] != pairs[:, 1]
    found, where = np.unique(pairs[outside], axis=0, return_inverse=True)
    where = where.reshape(-1)
    capacities = np.bincount(where, topology.capacities_bytes_per_s[outside], len(found))
    carried = None
    if loads is not None:
        carried = np.zeros(len(found))
        add = np.maximum if loads.max(initial=0.0) <= _WHOLE else np.add
        add.at(carried, where, loads[outside])
    return found.astype(np.int64), capacities.astype(np.float64), carried


def _lines(
    layout: Layout, ends: npt.NDArray[np.int64], *, aside: float
) -> tuple[FloatArray, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return lines, the link of each, and which links go round the back of a grid.

    Of those one short line leaves the grid and another comes back to it on the other side.
    """
    starts, stops = layout.places[ends[:, 0]], layout.places[ends[:, 1]]
    lengths = np.hypot(*(stops - starts).T)
    ahead = (stops - starts) / np.maximum(lengths, 1e-9)[:, None]
    wraps = layout.grid & (lengths > 1.05 * max(1.0, lengths.min()))
    ahead[wraps] *= -1
    right = aside * np.column_stack([ahead[:, 1], -ahead[:, 0]])
    starts, stops = starts + right, stops + right
    out = np.where(wraps[:, None], starts + _STUB * ahead, stops)
    whole = np.stack([starts, out], axis=1)
    back = np.stack([stops - _STUB * ahead, stops], axis=1)[wraps]
    link = np.concatenate([np.arange(len(ends)), np.flatnonzero(wraps)])
    return np.concatenate([whole, back]), link, np.asarray(wraps)


def _draw_scale(figure: Figure, axes: Axes, drawn: Any, top: float) -> None:
    share = top == 1.0
    bar = figure.colorbar(drawn, ax=axes, shrink=0.6, aspect=30, pad=0.01)
    ticks = np.linspace(0, top, 5)
    labels = [f"{100 * tick:.0f} %" if share else format_bytes(float(tick)) for tick in ticks]
    bar.set_ticks(ticks.tolist(), labels=labels)
    bar.ax.set_ylim(0, top)
    bar.set_label("share of the capacity in use" if share else "carried per link")


def _draw_nodes(axes: Axes, topology: Topology, layout: Layout, *, columns: int) -> None:
    first = np.flatnonzero(layout.marks == np.arange(topology.num_nodes)).tolist()
    hosts = len(first) < topology.num_nodes
    size = max(12.0, min(260.0, 9000.0 / len(first)))
    for kind, (marker, colour, plain) in _KINDS.items():
        nodes = [node for node in first if topology.nodes[node].kind == kind]
        if nodes:
            name = "host" if hosts and topology.nodes[nodes[0]].is_rank else plain
            x, y = layout.places[nodes].T
            axes.scatter(
                x, y, s=size, marker=marker, c=colour, edgecolors="white",
                linewidths=0.6, zorder=3, label=f"{name} ({len(nodes)})",
            )  # fmt: skip
    for node in first if len(first) <= _LABELLED else ():
        _label(axes, topology, layout, node, hosts=hosts, above_points=math.sqrt(size) / 2 + 5)
    style: dict[str, Any] = {"fontsize": 8, "frameon": False, "borderpad": 0.2}
    legend = axes.legend(loc="upper left", bbox_to_anchor=(0, -0.04), ncols=columns, **style)
    for handle in filter(None, legend.legend_handles):
        handle.set(sizes=[40.0])  # the marks of a large picture are too small for a legend


def _label(
    axes: Axes, topology: Topology, layout: Layout, node: int, *, hosts: bool, above_points: float
) -> None:
    entry, rank = topology.nodes[node], int(topology.rank_of_node[node])
    inside = rank >= 0 and not hosts
    name = (entry.host or entry.name) if rank >= 0 else entry.name
    away = -above_points if entry.kind == "nvswitch" else above_points  # its links go up
    axes.annotate(
        str(rank) if inside else name.rpartition("/")[2], layout.places[node],
        xytext=(0, 0 if inside else away), textcoords="offset points", ha="center", va="center",
        fontsize=7, color="white" if inside else "#33383f", zorder=4,
    )  # fmt: skip


def _save(figure: Figure, path: Path) -> None:
    endings = (".png", ".svg", ".pdf")
    require_one_of(path.suffix.lower(), endings, f"a picture cannot be saved as {path.name!r}")
    import matplotlib as mpl  # noqa: PLC0415 - heavy and optional

    path.parent.mkdir(parents=True, exist_ok=True)
    # The same picture is the same file: no date, and ids that do not depend on the run.
    with mpl.rc_context({"svg.hashsalt": "fivefold"}):
        figure.savefig(
            path, bbox_inches="tight", pad_inches=0.15, metadata=_UNDATED.get(path.suffix.lower())
        )
