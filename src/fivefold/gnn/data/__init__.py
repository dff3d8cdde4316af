"""Data sets on disk: ingestion, real graphs and a generator."""

__all__: list[str] = []
