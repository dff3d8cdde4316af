"""Packed stores: the rows of each mini-batch next to one another on disk."""

__all__: list[str] = []
