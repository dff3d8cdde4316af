"""The graph of GPUs, switches, NICs and links: model, files, named machines, pictures."""

from fivefold.network.topology._elements import Aggregation, Link, Node, NodeKind, SwitchAbility
from fivefold.network.topology._graph import Adjacency
from fivefold.network.topology._machines import machine_names, machine_source, named_topology
from fivefold.network.topology._rank_graph import RankGraph
from fivefold.network.topology._regular import (
    fully_connected,
    hypercube,
    line,
    mesh,
    ring,
    star,
    switch,
    torus,
)
from fivefold.network.topology._routes import Router, Routes
from fivefold.network.topology._topology import Topology

__all__ = [
    "Adjacency",
    "Aggregation",
    "Link",
    "Node",
    "NodeKind",
    "RankGraph",
    "Router",
    "Routes",
    "SwitchAbility",
    "Topology",
    "fully_connected",
    "hypercube",
    "line",
    "machine_names",
    "machine_source",
    "mesh",
    "named_topology",
    "ring",
    "star",
    "switch",
    "torus",
]
