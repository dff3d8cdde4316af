"""Experts on several ranks: by all-to-all, or one-sided through a symmetric heap."""

__all__: list[str] = []
