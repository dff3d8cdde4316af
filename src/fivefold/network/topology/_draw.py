"""Pictures of a topology: nodes by kind, links by capacity, and what they carry by colour."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError, optional_module, require_one_of
from fivefold.network.topology._graph import FloatArray
from fivefold.network.topology._topology import Topology
from fivefold.units import format_bytes, format_bytes_per_s

_GRID_NAME = re.compile(r"(?:mesh|torus):(\d+(?:x\d+)+)\b")
_DETAILED_NODES = 150  # beyond, a host is one mark
_ROW_OF_UNITS = 40  # beyond, the hosts of a rack stand in several rows
_TIERS = {"nic": 0, "pcie": 0, "nvswitch": 0, "switch": 1, "tor": 1, "agg": 2, "core": 3}
_DEPTH = (0.42, 0.31)  # how far back a third dimension goes, right and up


@dataclass(frozen=True)
class Box:
    """The outline of a host."""

    label: str
    x: float
    y: float
    width: float
    height: float


@dataclass
class Layout:
    """A place for each node."""

    places: FloatArray
    marks: list[int]
    boxes: list[Box] = field(default_factory=list)
    grid: bool = False


def lay_out(topology: Topology) -> Layout:
    """Choose the layout that suits a topology."""
    if bool(topology.is_rank.all()) and len(topology.hosts) < 2:
        return _regular(topology)
    fabric = [n for n, node in enumerate(topology.nodes) if not node.is_rank and node.host is None]
    if _among_themselves(topology, fabric):
        return _circle_of_routers(topology, fabric)
    return _tiers(topology, fabric)


def _regular(topology: Topology) -> Layout:
    marks = list(range(topology.num_nodes))
    named = _GRID_NAME.match(topology.name)
    shape = tuple(map(int, named[1].split("x"))) if named else ()
    if math.prod(shape) == topology.num_nodes and len(shape) in (2, 3):
        places = np.array([_grid_place(place) for place in itertools.product(*map(range, shape))])
        return Layout(places, marks, grid=True)
    if topology.num_nodes == 8 and topology.name.startswith("hypercube"):
        return Layout(
            np.array([_grid_place(place) for place in itertools.product((0, 1), repeat=3)]), marks
        )
    if topology.name.startswith("star") and topology.num_nodes > 2:
        return Layout(np.vstack([[[0.0, 0.0]], _circle(topology.num_nodes - 1)]), marks)
    return Layout(_circle(topology.num_nodes), marks)


def _grid_place(place: Sequence[int]) -> tuple[float, float]:
    if len(place) == 2:
        return float(place[1]), -float(place[0])
    back, row, column = place
    size = 1.0
    return column * size + back * _DEPTH[0], -row * size + back * _DEPTH[1]


def _circle(number: int, *, radius: float | None = None) -> FloatArray:
    around = radius if radius is not None else max(1.0, number / 7)
    angles = math.pi / 2 - 2 * math.pi * np.arange(number) / max(number, 1)
    return np.column_stack([around * np.cos(angles), around * np.sin(angles)])


def _among_themselves(topology: Topology, fabric: Sequence[int]) -> bool:
    """Return whether switches of one tier are joined to each other, as in a dragonfly."""
    tier = np.full(topology.num_nodes, -1)
    tier[list(fabric)] = [_TIERS.get(topology.nodes[node].kind, 0) for node in fabric]
    first, second = tier[topology.link_sources], tier[topology.link_targets]
    return bool(((first >= 0) & (first == second)).any())


def _circle_of_routers(topology: Topology, fabric: Sequence[int]) -> Layout:
    places = np.zeros((topology.num_nodes, 2))
    inner = _circle(len(fabric), radius=max(2.0, len(fabric) / 6))
    places[list(fabric)] = inner
    around = dict(zip(fabric, inner, strict=True))
    children: dict[int, list[int]] = {}
    for node in set(range(topology.num_nodes)) - set(fabric):
        out = [int(t) for t in topology.link_targets[topology.out_links(node)]]
        children.setdefault(next((t for t in out if t in around), fabric[0]), []).append(node)
    for router, nodes in children.items():
        angle = math.atan2(around[router][1], around[router][0])
        width = 2 * math.pi / max(len(fabric), 1) * 0.8
        radius = float(np.hypot(*around[router])) * 1.25 + 0.3
        for index, node in enumerate(sorted(nodes)):
            turn = angle - width * ((index + 0.5) / len(nodes) - 0.5)
            places[node] = radius * math.cos(turn), radius * math.sin(turn)
    return Layout(places, list(range(topology.num_nodes)))


@dataclass
class _Unit:
    """A host, or a rank that belongs to none: what stands at the bottom."""

    label: str
    nodes: list[int]
    above: frozenset[int]


def _units(topology: Topology, fabric: Sequence[int]) -> list[_Unit]:
    inside: dict[str, list[int]] = {}
    above = set(fabric)
    for index, node in enumerate(topology.nodes):
        if index not in above:
            inside.setdefault(node.host or f"\0{index}", []).append(index)
    units = []
    for host, nodes in inside.items():
        targets = np.concatenate([topology.link_targets[topology.out_links(n)] for n in nodes])
        switches = frozenset(int(t) for t in targets if int(t) in above)
        units.append(_Unit(host if host[0] != "\0" else "", nodes, switches))
    return units


def _tiers(topology: Topology, fabric: Sequence[int]) -> Layout:
    units = _units(topology, fabric)
    layout = Layout(np.zeros((topology.num_nodes, 2)), list(range(topology.num_nodes)))
    detailed = topology.num_nodes <= _DETAILED_NODES
    racks: dict[frozenset[int], list[_Unit]] = {}
    for unit in units:
        racks.setdefault(unit.above, []).append(unit)
    right = top = 0.0
    for rack in racks.values():
        if detailed:
            for unit in rack:
                width, height = _place_inside(topology, unit, layout, right)
                right, top = right + width + 0.5, max(top, height)
        else:
            right = _place_block(rack, layout, right, many=len(units) > _ROW_OF_UNITS) + 1.0
    _place_fabric(topology, fabric, layout, (right, top))
    return layout


def _place_block(rack: Sequence[_Unit], layout: Layout, left: float, *, many: bool) -> float:
    """Place hosts of one rack as marks, several rows deep where many; return the right end."""
    columns = math.ceil(math.sqrt(len(rack))) if many else len(rack)
    for index, unit in enumerate(rack):
        row, column = divmod(index, columns)
        layout.places[unit.nodes] = left + column, -float(row)
        for node in unit.nodes:
            layout.marks[node] = unit.nodes[0]
    return left + columns


def _place_inside(
    topology: Topology, unit: _Unit, layout: Layout, left: float
) -> tuple[float, float]:
    """Place all devices of a host; return the width and height that it takes."""
    ranks = [n for n in unit.nodes if topology.nodes[n].is_rank]
    others: dict[str, list[int]] = {}
    for node in unit.nodes:
        if not topology.nodes[node].is_rank:
            others.setdefault(topology.nodes[node].kind, []).append(node)
    inside = set(ranks)
    wired = any(
        int(t) in inside for n in ranks for t in topology.link_targets[topology.out_links(n)]
    )
    if wired and len(ranks) > 2:
        places = _circle(len(ranks), radius=max(1.0, len(ranks) / 6))
        places -= places.min(axis=0)
    else:
        places = np.column_stack([np.arange(len(ranks), dtype=float), np.zeros(len(ranks))])
    low = 0.0
    if "nvswitch" in others:
        low = 1.2
        _spread(others["nvswitch"], layout, left, (float(places[:, 0].max(initial=0.0)), 0.0))
    layout.places[ranks] = places + np.array([left, low])
    width = float(places[:, 0].max(initial=0.0))
    height = low + float(places[:, 1].max(initial=0.0))
    for kind in ("pcie", "switch", "nic"):
        if kind in others:
            height += 0.9
            _spread(others[kind], layout, left, (width, height))
    if len(unit.nodes) > 1:
        layout.boxes.append(Box(unit.label, left - 0.4, -0.4, width + 0.8, height + 0.8))
    return width + 0.8, height


def _spread(nodes: Sequence[int], layout: Layout, left: float, size: tuple[float, float]) -> None:
    width, height = size
    for index, node in enumerate(nodes):
        layout.places[node] = left + width * (index + 0.5) / len(nodes), height


def _place_fabric(
    topology: Topology, fabric: Sequence[int], layout: Layout, corner: tuple[float, float]
) -> None:
    """Place each tier above the one below, every switch over the middle of what hangs on it."""
    right, height = corner
    width = max(right - 1.0, 1.0)
    tiers: dict[int, list[int]] = {}
    for node in fabric:
        tiers.setdefault(_TIERS.get(topology.nodes[node].kind, 0), []).append(node)
    placed = np.ones(topology.num_nodes, np.bool_)
    placed[list(fabric)] = False
    step = max(1.6, width / 7)
    for level in sorted(tiers):
        height += step
        middles = []
        for node in tiers[level]:
            below = topology.link_targets[topology.out_links(node)]
            below = below[placed[below]]
            middles.append(float(layout.places[below, 0].mean()) if len(below) else width / 2)
        order = np.argsort(middles, kind="stable")
        for place, position in enumerate(order.tolist()):
            even = width * (place + 0.5) / len(order)
            # Over what hangs on it where that leaves room, evenly where it does not.
            own = middles[position] if _spaced(middles, width) else even
            layout.places[tiers[level][position]] = own, height
        placed[tiers[level]] = True


def _spaced(middles: Sequence[float], width: float) -> bool:
    gaps = np.diff(np.sort(middles))
    return bool(len(gaps) == 0 or gaps.min() > 0.35 * width / len(middles))


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {  # marker, colour
    "gpu": ("s", "#2a78d6"),
    "cpu": ("s", "#4b5b76"),
    "nvswitch": ("D", "#1baf7a"),
    "pcie": ("v", "#8a8a85"),
    "nic": ("^", "#b07a12"),
    "tor": ("o", "#d1603d"),
    "agg": ("o", "#a23e83"),
    "core": ("o", "#5a4fcf"),
    "switch": ("o", "#d1603d"),
}
_NAMES = {"tor": "rack switch", "agg": "aggregation switch", "core": "core switch", "nic": "NIC"}
_LINK = "#9aa0a6"
_WRAP = "#c3c7cb"
_LABELLED = 80  # marks; beyond, names would lie on one another
_ASIDE = 0.07  # how far a direction's line keeps to the right
_WHOLE = 1.0 + 1e-9  # loads up to here are shares
_MAX_ARROWS = 300
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def draw_topology(
    topology: Topology,
    path: str | Path | None = None,
    *,
    link_loads: npt.ArrayLike | None = None,
    title: str | None = None,
    size_inches: tuple[float, float] | None = None,
) -> Figure:
    """Draw a topology, with what its links carry if that is given.

    Many hosts are drawn as one mark each, links that then lie on one another as one line. The width
    of a line follows its capacity. With loads every direction has its own line, to the right of the
    straight one as seen by the traffic; a single direction without loads has an arrow.

    Args:
        topology: What to draw.
        path: Where to save it (``.png``, ``.svg`` or ``.pdf``); None to save nothing.
        link_loads: Per link, bytes or (where none is above 1) the share of its capacity in use.
        title: Heading; None for name and counts.
        size_inches: Width and height; None chooses.

    Returns:
        The figure.

    Raises:
        ConfigurationError: ``link_loads`` has the wrong length, or the file's ending is unknown.
        UnsupportedError: matplotlib is not installed.

    Examples:
        >>> from fivefold.network.topology import ring
        >>> len(draw_topology(ring(4), link_loads=[1.0] * 4 + [0.0] * 4).axes)
        2
    """
    figure_class = optional_module("matplotlib.figure", extra="network", use="a picture").Figure
    loads = _checked_loads(topology, link_loads)
    layout = lay_out(topology)
    size = size_inches or _size(layout)
    figure: Figure = figure_class(figsize=size, layout="constrained", dpi=120)
    axes = figure.add_subplot()
    _draw_boxes(axes, layout)
    _draw_links(figure, axes, topology, layout, loads)
    _draw_nodes(figure, axes, topology, layout)
    axes.set_title(title or _heading(topology), fontsize=9.5, loc="left", pad=14)
    axes.set_aspect("equal")
    axes.axis("off")
    if path is not None:
        _save(figure, Path(path))
    return figure


def _checked_loads(topology: Topology, link_loads: npt.ArrayLike | None) -> FloatArray | None:
    if link_loads is None:
        return None
    loads = np.asarray(link_loads, np.float64)
    if loads.shape != (topology.num_links,) or not np.isfinite(loads).all() or (loads < 0).any():
        raise ConfigurationError(
            f"link_loads must be {topology.num_links} numbers from 0 up, one per link; "
            f"got shape {loads.shape}",
            hint="give bytes or the share of the capacity for every link of the topology",
        )
    return loads


def _size(layout: Layout) -> tuple[float, float]:
    spans = np.ptp(layout.places, axis=0) + 1.5
    scale = min(14 / spans[0], 10 / spans[1], 1.2)
    return max(6.0, spans[0] * scale), max(4.0, spans[1] * scale + 1.4)


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
    from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415 - as above

    for box in layout.boxes:
        style = "round,pad=0.02,rounding_size=0.15"
        axes.add_patch(
            FancyBboxPatch(
                (box.x, box.y),
                box.width,
                box.height,
                boxstyle=style,
                facecolor="#f4f5f7",
                edgecolor="#d5d8dc",
                linewidth=1.0,
                zorder=0,
            )
        )
        axes.text(box.x + 0.05, box.y - 0.12, box.label, fontsize=8, va="top", color="#4b5b76")


def _draw_links(
    figure: Figure, axes: Axes, topology: Topology, layout: Layout, loads: FloatArray | None
) -> None:
    ends, capacities, carried = _merged(topology, layout, loads)
    if not len(ends):
        return
    starts, stops = layout.places[ends[:, 0]], layout.places[ends[:, 1]]
    widths = 0.5 + 3.0 * np.sqrt(capacities / capacities.max()) / (1 + len(ends) / 400)
    wraps = _is_wrap(starts, stops) if layout.grid else np.zeros(len(ends), np.bool_)
    if carried is None:
        # Thousands of lines lie on one another, but in a grid: let each shine through.
        alpha = 1.0 if layout.grid else float(np.clip(1800 / len(ends), 0.25, 1.0))
        _draw_plain(axes, ends, (starts, stops, wraps), widths, alpha=alpha)
    else:
        top = 1.0 if carried.max(initial=0.0) <= _WHOLE else float(carried.max())
        lines = [*_curves(starts[~wraps], stops[~wraps]), *_stubs(starts[wraps], stops[wraps])]
        values = np.concatenate([carried[~wraps], carried[wraps], carried[wraps]])
        wide = np.concatenate([widths[~wraps], widths[wraps], widths[wraps]])
        order = np.argsort(values, kind="stable").tolist()  # the busiest on top
        collection = _lines(axes, [lines[index] for index in order], np.maximum(wide[order], 1.2))
        collection.set_cmap("YlOrRd")
        collection.set_array(values[order])
        collection.set_clim(-0.12 * top, top)  # an idle link stays visible
        _colour_bar(figure, axes, collection, top)
    axes.autoscale_view()


def _draw_plain(
    axes: Axes,
    ends: npt.NDArray[np.int64],
    geometry: tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]],
    widths: FloatArray,
    *,
    alpha: float,
) -> None:
    """Draw one line for both directions of a link, an arrow where there is only one."""
    starts, stops, wraps = geometry
    both = {tuple(pair) for pair in ends.tolist()}
    alone = np.array([(second, first) not in both for first, second in ends.tolist()])
    once = ~wraps & (alone | (ends[:, 0] < ends[:, 1]))
    stubs = _stubs(starts[wraps], stops[wraps], aside=0.0)
    _lines(axes, stubs, np.ones(len(stubs)), color=_WRAP)
    straight = np.stack([starts[once], stops[once]], axis=1)
    _lines(axes, straight, widths[once], color=_LINK, alpha=alpha)
    if alone.sum() <= _MAX_ARROWS:
        _arrows(axes, starts[alone & ~wraps], stops[alone & ~wraps])


def _lines(axes: Axes, lines: Any, widths: FloatArray, **style: Any) -> Any:
    from matplotlib.collections import LineCollection  # noqa: PLC0415 - as above

    collection = LineCollection(lines, linewidths=widths.tolist(), zorder=1, **style)
    axes.add_collection(collection)
    return collection


def _merged(
    topology: Topology, layout: Layout, loads: FloatArray | None
) -> tuple[npt.NDArray[np.int64], FloatArray, FloatArray | None]:
    """Merge links between the same two marks: capacities added, bytes added, shares at most."""
    marks = np.array(layout.marks, np.int64)
    pairs = np.column_stack([marks[topology.link_sources], marks[topology.link_targets]])
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


def _is_wrap(starts: FloatArray, stops: FloatArray) -> npt.NDArray[np.bool_]:
    lengths = np.hypot(*(stops - starts).T)
    return np.asarray(lengths > 1.05 * np.maximum(1.0, lengths.min(initial=1.0)))


def _stubs(starts: FloatArray, stops: FloatArray, *, aside: float = _ASIDE) -> FloatArray:
    """Return wrap-around links as short lines: all that leave the grid, then all that come back."""
    steps = stops - starts
    steps = 0.35 * steps / np.maximum(np.hypot(*steps.T), 1e-9)[:, None]
    shift = aside / 0.35 * np.column_stack([-steps[:, 1], steps[:, 0]])  # right of the way out
    leaving = np.stack([starts, starts - steps], axis=1)
    returning = np.stack([stops + steps, stops], axis=1)
    both = np.concatenate([leaving, returning]) + np.concatenate([shift, shift])[:, None]
    return np.asarray(both)


def _curves(starts: FloatArray, stops: FloatArray) -> FloatArray:
    """Return lines from start to stop that keep to the right, as seen from the start."""
    steps = stops - starts
    right = np.column_stack([steps[:, 1], -steps[:, 0]])
    right *= (_ASIDE / np.maximum(np.hypot(*right.T), 1e-9))[:, None]
    turns = (starts + stops) / 2 + 2 * right
    along = np.linspace(0, 1, 9)[None, :, None]
    curved = (
        (1 - along) ** 2 * starts[:, None]
        + 2 * along * (1 - along) * turns[:, None]
        + along**2 * stops[:, None]
    )
    return np.asarray(curved)


def _arrows(axes: Axes, starts: FloatArray, stops: FloatArray) -> None:
    for start, stop in zip(starts, stops, strict=True):
        middle = start + 0.55 * (stop - start)
        style = {"arrowstyle": "-|>", "color": _LINK, "lw": 0}
        axes.annotate("", middle, start + 0.53 * (stop - start), arrowprops=style, zorder=1)


def _colour_bar(figure: Figure, axes: Axes, collection: Any, top: float) -> None:
    share = top == 1.0
    bar = figure.colorbar(collection, ax=axes, shrink=0.6, aspect=30, pad=0.01)
    ticks = np.linspace(0, top, 5)
    labels = [f"{100 * tick:.0f} %" if share else format_bytes(float(tick)) for tick in ticks]
    bar.set_ticks(ticks.tolist(), labels=labels)
    bar.ax.set_ylim(0, top)
    bar.set_label("share of the capacity in use" if share else "carried per link")


def _draw_nodes(figure: Figure, axes: Axes, topology: Topology, layout: Layout) -> None:
    first = [node for node, mark in enumerate(layout.marks) if node == mark]
    size = max(12.0, min(260.0, 9000.0 / len(first)))
    sizes = np.bincount(layout.marks, minlength=topology.num_nodes)
    by_kind: dict[str, list[int]] = {}
    for node in first:
        by_kind.setdefault(topology.nodes[node].kind, []).append(node)
    hosts = bool((sizes > 1).any())
    for kind, nodes in sorted(by_kind.items(), key=lambda item: list(_KINDS).index(item[0])):
        marker, colour = _KINDS[kind]
        name = _NAMES.get(kind, kind.upper() if kind in ("gpu", "cpu") else kind)
        if hosts and topology.nodes[nodes[0]].is_rank:
            name = "host"
        x, y = layout.places[nodes].T
        axes.scatter(
            x,
            y,
            s=size,
            marker=marker,
            c=colour,
            edgecolors="white",
            linewidths=0.6,
            zorder=3,
            label=f"{name} ({len(nodes)})",
        )
    if len(first) <= _LABELLED:
        _label_nodes(axes, topology, layout, first, above_points=math.sqrt(size) / 2 + 5)
    width_inches = float(figure.get_size_inches()[0])
    legend = axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, -0.04),
        ncols=max(1, int(width_inches / 1.8)),
        fontsize=8,
        frameon=False,
        borderpad=0.2,
    )
    for handle in filter(None, legend.legend_handles):
        handle.set(sizes=[40.0])  # the marks of a large picture are too small for a legend


def _label_nodes(
    axes: Axes, topology: Topology, layout: Layout, first: list[int], *, above_points: float
) -> None:
    hosts = len(first) < topology.num_nodes
    for node in first:
        entry = topology.nodes[node]
        rank = int(topology.rank_of_node[node])
        inside = rank >= 0 and not hosts
        below = entry.kind == "nvswitch"  # its links go up
        text = str(rank) if inside else entry.name.rpartition("/")[2]
        if hosts and rank >= 0:
            text = (entry.host or entry.name).rpartition("/")[2]
        axes.annotate(
            text,
            layout.places[node],
            xytext=(0, 0 if inside else -above_points if below else above_points),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=7,
            color="white" if inside else "#33383f",
            zorder=4,
        )


def _save(figure: Figure, path: Path) -> None:
    endings = (".png", ".svg", ".pdf")
    require_one_of(path.suffix.lower(), endings, f"a picture cannot be saved as {path.name!r}")
    import matplotlib as mpl  # noqa: PLC0415 - as above

    path.parent.mkdir(parents=True, exist_ok=True)
    # The same picture is the same file: no date, and ids that do not depend on the run.
    with mpl.rc_context({"svg.hashsalt": "fivefold"}):
        figure.savefig(
            path, bbox_inches="tight", pad_inches=0.15, metadata=_UNDATED.get(path.suffix.lower())
        )
