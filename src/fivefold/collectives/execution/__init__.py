"""Algorithms under torch.distributed: a backend that DDP, FSDP2 and the rest use unchanged.

Importing this package registers the backend: ``init_process_group(backend="fivefold")``.
"""

from fivefold.collectives.execution._aggregation import GlooHosts
from fivefold.collectives.execution._backend import BACKEND, FivefoldGroup, register_backend
from fivefold.collectives.execution._calls import CollectiveError
from fivefold.collectives.execution._choose import Choice, LinkClock, choose, predict_s
from fivefold.collectives.execution._settings import (
    Settings,
    configure,
    current_settings,
    lab_topology,
    register_algorithm,
)

__all__ = [
    "BACKEND",
    "Choice",
    "CollectiveError",
    "FivefoldGroup",
    "GlooHosts",
    "LinkClock",
    "Settings",
    "choose",
    "configure",
    "current_settings",
    "lab_topology",
    "predict_s",
    "register_algorithm",
    "register_backend",
]

register_backend()
