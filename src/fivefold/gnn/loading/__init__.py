"""Mini-batches from a packed store: four levels, pipeline, loader."""

__all__: list[str] = []
