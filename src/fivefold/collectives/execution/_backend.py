"""Makes torch know the backend "fivefold".

Until torch 2.13 a creator may return a Python subclass of ``ProcessGroup``, which torch then uses
as the group itself. From 2.14 on ``_Backend`` can be subclassed in Python, and the group stays an
ordinary one. Which of the two works is found by trying, not by the version's number.
"""

from __future__ import annotations

from typing import Any

import torch

from fivefold.collectives.execution._collectives import Collectives
from fivefold.collectives.execution._engine import Engine
from fivefold.collectives.execution._settings import current_settings
from fivefold.collectives.execution._torch import c10d, dist
from fivefold.collectives.execution._work import FivefoldWork

BACKEND = "fivefold"
_ProcessGroup: Any = dist.ProcessGroup


class FivefoldGroup(Collectives, _ProcessGroup):
    """A process group whose collectives are run by an engine.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        _ProcessGroup.__init__(self, engine.rank, engine.size)
        self.engine = engine
        self._name = ""

    # Names with which C++ asks; they are torch's.
    def getRank(self) -> int:  # noqa: N802 - torch's name
        """Return the rank of this process in the group."""
        return self.engine.rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """Return the number of ranks."""
        return self.engine.size

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Name of the backend."""
        return BACKEND

    def name(self) -> str:
        """Name of the backend."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Name of the group."""
        return self.group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Name the group."""
        self._name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name of the group, under which functional collectives find it."""
        return self._name or str(c10d._world.pg_names[self])  # noqa: SLF001 - torch keeps it there

    def _get_backend(self, device: torch.device) -> Any:
        return self.engine.inner(device.type)

    def _get_backend_name(self) -> str:
        return BACKEND

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls between start and end are run as they come."""

    def _end_coalescing(self, device: torch.device) -> FivefoldWork:
        del device
        work = FivefoldWork([], what="coalesced calls")
        work.finish(None)
        return work

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers are for torch's debug wrapper, which is not put around this group."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def set_timeout(self, timeout: Any) -> None:
        """Set the longest wait for a message from now on."""
        self.engine.timeout = timeout

    def shutdown(self) -> None:
        """Let go of the inner groups."""
        self.engine.close()

    def abort(self) -> None:
        """Let go of the inner groups at once."""
        self.engine.close()


def _subclassable_backend() -> Any:
    """Return torch's backend class, where it can be subclassed in Python; else None."""
    base = getattr(dist, "_Backend", None)
    if base is None:
        return None
    try:
        base(0, 1)
    except TypeError:  # no constructor is defined: torch up to 2.13
        return None
    return base


def _backend_class(base: Any) -> type:
    class FivefoldBackend(Collectives, base):
        """A backend of an ordinary process group, run by an engine."""

        def __init__(self, engine: Engine) -> None:
            base.__init__(self, engine.rank, engine.size)
            self.engine = engine

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            return BACKEND

        def name(self) -> str:
            return BACKEND

        def shutdown(self) -> None:
            self.engine.close()

        def abort(self) -> None:
            self.engine.close()

    return FivefoldBackend


def _create(options: Any, backend_options: Any = None) -> Any:
    """Make a group for torch; ``options`` are its ``_DistributedBackendOptions``."""
    del backend_options
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    world = c10d._world.default_pg  # noqa: SLF001 - None while the default group is being made
    engine = Engine(
        options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout,
        ranks=ranks,
        world_size=options.group_size if world is None else world.size(),
        settings=current_settings(),
    )
    base = _subclassable_backend()
    return FivefoldGroup(engine) if base is None else _backend_class(base)(engine)


def register_backend() -> None:
    """Make ``init_process_group(backend="fivefold")`` work; done by importing the package."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
