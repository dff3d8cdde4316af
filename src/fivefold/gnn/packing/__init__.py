"""Packed stores: the rows of each mini-batch next to one another on disk."""

from fivefold.gnn.packing._pack import PackedStore, pack

__all__ = ["PackedStore", "pack"]
