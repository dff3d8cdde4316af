"""Packed stores: the rows of each mini-batch next to one another on disk."""

from fivefold.gnn.packing._pack import pack
from fivefold.gnn.packing._store import PackedStore

__all__ = ["PackedStore", "pack"]
