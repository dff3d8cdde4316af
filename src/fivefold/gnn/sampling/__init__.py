"""Neighbour sampling and files of mini-batches sampled offline."""

__all__: list[str] = []
