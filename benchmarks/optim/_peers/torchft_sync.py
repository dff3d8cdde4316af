"""torchft's LocalSGD and DiLoCo, with its manager and lighthouse, over gloo.

Each host is a replica group of one rank with a store and a manager of its own; host 0 runs the
lighthouse. Defaults are torchft's own, so tensors are reduced one by one (its buckets are off by
default). Settings: ``algorithm`` "local_sgd" or "diloco", ``tau``; DiLoCo: ``lr``, ``momentum``,
``delay`` (``fragment_sync_delay``), ``alpha`` (``fragment_update_alpha``), ``fragments``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torchft
import torchft.local_sgd
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.coordination import LighthouseServer

from benchmarks.optim._peers._case import Attached, Place

__all__ = ["attach"]

_TIMEOUT = timedelta(seconds=60)
_LIGHTHOUSE_PORT, _STORE_PORT = 1, 2  # offsets into the case's ports


def attach(
    settings: Mapping[str, Any],
    model: Any,
    optimizer: torch.optim.Optimizer,
    place: Place,
) -> Attached:
    """Start lighthouse and manager, and enter the algorithm's context."""
    logging.getLogger("torchft").setLevel(logging.ERROR)
    cleanup = contextlib.ExitStack()
    manager = _manager(model, optimizer, place, cleanup)
    if settings["algorithm"] == "local_sgd":
        algorithm = torchft.local_sgd.LocalSGD(manager, model, optimizer, settings["tau"])
    else:
        algorithm = _diloco(manager, model, optimizer, settings)
    cleanup.enter_context(algorithm)

    def committed() -> dict[str, float]:
        return {"commits": float(manager.current_step())}

    return Attached(loss=model.loss, optimizer=optimizer, figures=committed, close=cleanup.close)


def _manager(
    model: Any, optimizer: torch.optim.Optimizer, place: Place, cleanup: contextlib.ExitStack
) -> torchft.Manager:
    lighthouse = f"http://{place.main_address}:{place.port + _LIGHTHOUSE_PORT}"
    if place.rank == 0:
        bind = f"[::]:{place.port + _LIGHTHOUSE_PORT}"
        server = LighthouseServer(bind=bind, min_replicas=place.world_size)
        cleanup.callback(server.shutdown)
    torch.distributed.barrier()  # the lighthouse listens
    port = place.port + _STORE_PORT
    store = TCPStore(place.address, port, is_master=True, wait_for_workers=False)
    cleanup.callback(lambda: store)  # lives as long as the manager

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=place.world_size,
        use_async_quorum=False,  # DiLoCo demands it
        init_sync=False,  # all replicas start from one seed
        timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=place.address,
        store_port=port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{place.rank}",
        hostname=place.address,
    )
    cleanup.callback(lambda: manager.shutdown(wait=False))
    return manager


def _diloco(
    manager: torchft.Manager,
    model: Any,
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
) -> torchft.local_sgd.DiLoCo:
    fragments = _fragments(model, settings.get("fragments", 1))
    outer = [
        torch.optim.SGD(
            fragment.parameters(),
            lr=settings["lr"],
            momentum=settings["momentum"],
            nesterov=settings["momentum"] > 0,
        )
        for fragment in fragments
    ]
    return torchft.local_sgd.DiLoCo(
        manager,
        fragments,
        optimizer,
        outer,
        sync_every=settings["tau"],
        fragment_sync_delay=settings.get("delay", 0),
        fragment_update_alpha=settings.get("alpha", 0.0),
    )


def _fragments(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """The model, or runs of neighbouring parameters of about equal size."""
    if count == 1:
        return [model]
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    found: list[list[torch.nn.Parameter]] = [[] for _ in range(count)]
    seen = 0
    for parameter in parameters:
        found[min(count - 1, seen * count // total)].append(parameter)
        seen += parameter.numel()
    return [torch.nn.ParameterList(part) for part in found]
