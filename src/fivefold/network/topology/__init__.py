"""The graph of GPUs, switches, NICs and links: model, files, named machines, pictures."""

from fivefold.network.topology._build import HostSpec
from fivefold.network.topology._direct import (
    dragonfly,
    fully_connected,
    hypercube,
    line,
    mesh,
    ring,
    star,
    switch,
    torus,
)
from fivefold.network.topology._draw import draw_topology
from fivefold.network.topology._fabrics import (
    Port,
    clos,
    dual_plane,
    fat_tree,
    leaf_spine,
    rail_only,
    rail_optimized,
)
from fivefold.network.topology._graph import Aggregation, Link, Node, SwitchAbility
from fivefold.network.topology._machines import load_lingjun, named_topology
from fivefold.network.topology._taccl import TacclProfile
from fivefold.network.topology._topology import Topology
from fivefold.network.topology.text import parse_topology, read_topology

__all__ = [
    "Aggregation",
    "HostSpec",
    "Link",
    "Node",
    "Port",
    "SwitchAbility",
    "TacclProfile",
    "Topology",
    "clos",
    "dragonfly",
    "draw_topology",
    "dual_plane",
    "fat_tree",
    "fully_connected",
    "hypercube",
    "leaf_spine",
    "line",
    "load_lingjun",
    "mesh",
    "named_topology",
    "parse_topology",
    "rail_only",
    "rail_optimized",
    "read_topology",
    "ring",
    "star",
    "switch",
    "torus",
]
