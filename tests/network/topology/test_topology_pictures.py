"""Pictures: every layout gives each node its own readable place, and files are written."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fivefold.errors import ConfigurationError
from fivefold.network.topology import Link, Node, Topology, draw_topology, parse_topology, ring
from fivefold.network.topology._draw import lay_out

SMALL = [
    "ring:8",
    "ring:1",
    "ring:2",
    "line:3",
    "star:6",
    "switch:5",
    "torus:4x4",
    "torus:3x3x3",
    "mesh:2x2x2x2",
    "hypercube:3",
    "dgx1",
    "dgx1:2",
    "ndv2:2",
    "dgx2:2",
    "dgx_a100:2",
    "dgx_h100:2",
    "mi250:2",
    "rail_optimized:4,spines=2",
    "fat_tree:4,gpus=2,nics=2",
    "dragonfly:4",
    "leaf_spine:16,leaves=4,spines=2",
]
LARGE = ["fat_tree:8", "fat_tree:8,gpus=8,nics=4", "torus:16x16", "rail_optimized:40,spines=8"]


@pytest.mark.parametrize("text", SMALL + LARGE)
def test_no_two_marks_lie_on_one_another(text):
    layout = lay_out(parse_topology(text))
    marks = sorted(set(layout.marks))
    places = layout.places[marks]
    assert np.isfinite(layout.places).all()
    apart = np.hypot(*(places[:, None] - places[None]).transpose(2, 0, 1))
    np.fill_diagonal(apart, np.inf)
    # A 3-D grid is drawn in perspective, where nodes pass behind one another but do not meet.
    assert apart.min(initial=np.inf) > 0.09


@pytest.mark.parametrize("text", ["line:40", "switch:60"])
def test_a_picture_fits_a_page(text):
    width, height = draw_topology(parse_topology(text)).get_size_inches()
    assert width <= 14.001
    assert height <= 11.401


def test_tiers_stand_above_one_another():
    tree = parse_topology("fat_tree:4,gpus=2,nics=1")
    layout = lay_out(tree)
    heights = {
        kind: [
            y for node, (_, y) in zip(tree.nodes, layout.places, strict=True) if node.kind == kind
        ]
        for kind in ("gpu", "nic", "tor", "agg", "core")
    }
    order = ["gpu", "nic", "tor", "agg", "core"]
    for low, high in itertools.pairwise(order):
        assert max(heights[low]) < min(heights[high])


def test_hosts_hold_their_devices_in_the_picture():
    machine = parse_topology("dgx1:2")
    layout = lay_out(machine)
    boxes = {box.label: box for box in layout.boxes}
    assert set(boxes) == {"box0", "box1"}
    for node, (x, y) in zip(machine.nodes, layout.places, strict=True):
        inside = [
            label
            for label, box in boxes.items()
            if box.x <= x <= box.x + box.width and box.y <= y <= box.y + box.height
        ]
        assert inside == ([node.host] if node.host else [])


def test_many_hosts_become_one_mark_each():
    tree = parse_topology("fat_tree:8,gpus=8,nics=4")
    marks = {tree.nodes[mark].host for mark in lay_out(tree).marks}
    assert len(marks - {None}) == 128
    assert len(set(lay_out(tree).marks)) == 128 + 80


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_files_are_written(tmp_path, ending):
    path = tmp_path / "new" / f"ring.{ending}"
    draw_topology(ring(4), path, title="A ring")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert path.read_bytes().startswith(start)
    again = tmp_path / f"again.{ending}"
    draw_topology(ring(4), again, title="A ring")
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("text", ["ring:1", "torus:4x4", "dgx_a100:2", "dragonfly:2", "fat_tree:6"])
def test_loads_of_any_kind_are_drawn(text, tmp_path):
    topology = parse_topology(text)
    number = topology.num_links
    for loads in (np.zeros(number), np.linspace(0, 1, number), np.arange(number) * 1e9):
        draw_topology(topology, tmp_path / "a.png", link_loads=loads)


def test_the_colour_follows_the_load():
    figure = draw_topology(ring(4), link_loads=[0.25] * 7 + [1.0])
    lines = next(item for item in figure.axes[0].collections if item.get_array() is not None)
    values = lines.get_array()
    assert values.tolist() == [0.25] * 7 + [1.0]  # the busiest last, so on top
    assert figure.axes[1].get_ylabel() == "share of the capacity in use"
    carried = draw_topology(ring(4), link_loads=[2e9] * 8)
    assert carried.axes[1].get_ylabel() == "carried per link"


def test_one_way_links_have_arrows():
    nodes = [Node(name, "gpu") for name in "abc"]
    links = [Link(*ends, bandwidth_bytes_per_s=1.0) for ends in ("ab", "bc", "cb")]
    axes = draw_topology(Topology("one way", nodes, links)).axes[0]
    assert len([text for text in axes.texts if text.get_text() == ""]) == 1


@pytest.mark.parametrize(
    "loads", [[1.0], [[0.5] * 8], [float("nan")] * 8, [-1.0] * 8, [float("inf")] * 8]
)
def test_wrong_loads(loads):
    with pytest.raises(ConfigurationError, match="8 numbers"):
        draw_topology(ring(4), link_loads=loads)


def test_unknown_endings(tmp_path):
    with pytest.raises(ConfigurationError, match=r"ring\.bmp.*\.svg"):
        draw_topology(ring(4), tmp_path / "ring.bmp")
