"""Measures latency and bandwidth of the links between running ranks, and fits the model."""

__all__: list[str] = []
