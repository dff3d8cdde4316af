"""Packed stores: the rows of each mini-batch next to one another on disk.

Pure parts: ``_coding`` and ``_record`` (what a batch is), ``_levels`` (where its rows are),
``_geometry`` (how rows move). Adapters to the disk: ``_records``, ``_movement``, ``_rows``.
Public objects: ``pack``, ``PackedStore``, ``BatchRecord``, and plans as files.
"""

from fivefold.gnn.packing._pack import pack
from fivefold.gnn.packing._record import BatchRecord
from fivefold.gnn.packing._store import PackedStore, read_plan, write_plan

__all__ = ["BatchRecord", "PackedStore", "pack", "read_plan", "write_plan"]
