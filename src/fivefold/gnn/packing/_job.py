"""What an unfinished packing run has settled, so that the next one goes on in the same way."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from fivefold.errors import DataError, InfeasibleError
from fivefold.files import read_checked_json, write_checked_json
from fivefold.gnn.packing._geometry import PAGE_BYTES, Geometry, choose_geometry
from fivefold.gnn.packing._movement import Mover
from fivefold.gnn.packing._store import StoreFiles
from fivefold.gnn.planning import DiskCost
from fivefold.units import format_bytes, format_duration_s

ANEW_HINT = "give another folder, or begin anew with resume=False (--fresh)"
Profile = DiskCost | Callable[[], DiskCost]

_logger = logging.getLogger(__name__)
_BYTES_PER_S = 1e9  # of a disk that was not measured
_LEDGER_BYTES_PER_PAGE = 10  # checksum and state of a page, for the rows and for the spill
_DEARER = 1.1  # bytes that rows may cost more, so that records are made in the same time


class Job:
    """What an unfinished run has settled: its inputs, its geometry, and whether both at once.

    Args:
        files: Of the store.
        inputs: Fingerprints.
        memory_bytes: Of this run.

    Raises:
        DataError: The unfinished run had other inputs.
    """

    def __init__(self, files: StoreFiles, inputs: dict[str, str], *, memory_bytes: int) -> None:
        self._files = files
        self._path = files.scratch / "job.json"
        self._memory_bytes = memory_bytes
        self._settled: dict[str, Any] = {
            "inputs": inputs,
            "geometry": None,
            "at_once": False,
            "memory_bytes": 0,
        }
        if not self._path.exists():
            write_checked_json(self._path, self._settled)
            return
        try:
            self._settled = read_checked_json(self._path)
        except DataError as error:
            raise DataError(error.message, hint=ANEW_HINT) from None
        known = self._settled["inputs"]
        other = [name for name in inputs if inputs[name] != known.get(name)]
        if other:
            message = f"{files.folder} holds an unfinished store of other {', '.join(other)}"
            raise DataError(message, hint=ANEW_HINT)

    @property
    def at_once(self) -> bool:
        """Whether records are made while rows are moved."""
        return bool(self._settled.get("at_once"))

    def with_geometry(
        self,
        mover: Mover,
        sections: dict[str, int],
        *,
        beside_bytes: int,
        free_bytes: int,
        profile: Profile | None,
        strategy: str | None,
    ) -> Mover:
        """The mover with the sizes of the earlier run, where they fit, else with new ones.

        Args:
            mover: What is to be moved.
            sections: Rows of each output section.
            beside_bytes: Memory that making the records takes.
            free_bytes: Disk space for rows and spill.
            profile: Speeds of the disk.
            strategy: Take this one; None: the cheapest.

        Raises:
            InfeasibleError: Memory or disk space are short.
        """
        known = self._settled["geometry"]
        fits = known is not None and self._settled["memory_bytes"] <= self._memory_bytes
        if fits and strategy in {None, known["strategy"]}:
            return dataclasses.replace(mover, geometry=Geometry(**known))
        for leftover in (*self._files.scratch.glob("spill*"), *self._files.scratch.glob("routes*")):
            leftover.unlink()
        disk = profile() if callable(profile) else profile
        output_bytes = sum(sections.values()) * mover.row_bytes
        ledger_bytes = _LEDGER_BYTES_PER_PAGE * output_bytes // PAGE_BYTES
        choose = partial(
            choose_geometry,
            num_nodes=mover.num_nodes,
            row_bytes=mover.row_bytes,
            sections=sections,
            read_bytes_per_s=getattr(disk, "sequential_read_bytes_per_s", _BYTES_PER_S),
            write_bytes_per_s=getattr(disk, "sequential_write_bytes_per_s", _BYTES_PER_S),
            free_bytes=free_bytes,
            strategy=strategy,
        )
        memory_bytes = self._memory_bytes - ledger_bytes
        geometry, at_once = _with_records(choose, memory_bytes, beside_bytes)
        _logger.info(
            "packing (%s%s): reads %s, writes %s, about %s",
            geometry.strategy,
            "" if at_once else ", records first",
            format_bytes(geometry.read_bytes),
            format_bytes(geometry.written_bytes),
            format_duration_s(geometry.seconds),
        )
        self._settled |= {
            "geometry": geometry.to_json(),
            "at_once": at_once,
            "memory_bytes": self._memory_bytes,
        }
        write_checked_json(self._path, self._settled)
        return dataclasses.replace(mover, geometry=geometry)


def _with_records(
    choose: Callable[..., Geometry], memory_bytes: int, beside_bytes: int
) -> tuple[Geometry, bool]:
    """Sizes that leave memory for the records where that costs little, else sizes without."""
    alone = choose(memory_bytes=memory_bytes)
    try:
        beside = choose(memory_bytes=memory_bytes - beside_bytes)
    except InfeasibleError:
        return alone, False
    moved = [way.read_bytes + way.written_bytes for way in (alone, beside)]
    return (beside, True) if moved[1] <= _DEARER * moved[0] else (alone, False)
