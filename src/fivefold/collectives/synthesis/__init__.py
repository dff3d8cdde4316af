"""Algorithms made for a topology: sketches, trees, exact search, matching, flows."""

__all__: list[str] = []
