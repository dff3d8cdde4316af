"""Where the nodes of a picture go. Pure geometry: pictures are made in ``_draw``.

A regular graph of ranks is laid out as the grid that its name says, or on a circle. A network with
switches stands in tiers, hosts at the bottom; where there are many, a host becomes one mark, and
the hosts of one rack a block of marks. Routers that are joined among themselves (a dragonfly) stand
on a circle with their ranks outside.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fivefold.network.topology._graph import FloatArray
from fivefold.network.topology._topology import Topology

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
    """A place for each node.

    Args:
        places: x and y of each node, float64 [num_nodes, 2].
        marks: The mark that each node is drawn as; nodes of one mark share a place.
        boxes: Outlines of hosts.
        grid: Whether links longer than one step wrap around the picture.
    """

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
