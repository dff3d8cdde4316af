"""The peers in one harness: memory map, online cache, Ginex, MariusGNN, DiskGNN."""

__all__: list[str] = []
