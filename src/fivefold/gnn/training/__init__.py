"""Training and inference out of core."""

__all__: list[str] = []
