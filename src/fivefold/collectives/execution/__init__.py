"""Algorithms under torch.distributed: a backend that DDP, FSDP2 and the rest use unchanged.

Importing this package registers the backend: ``init_process_group(backend="fivefold")``.
"""

from fivefold.collectives.execution._backend import register_backend
from fivefold.collectives.execution._calls import CollectiveError
from fivefold.collectives.execution._engine import GlooHosts
from fivefold.collectives.execution._settings import (
    Settings,
    configure,
    current_settings,
    register_algorithm,
)

__all__ = [
    "CollectiveError",
    "GlooHosts",
    "Settings",
    "configure",
    "current_settings",
    "register_algorithm",
]

register_backend()
