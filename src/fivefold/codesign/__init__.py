"""The coordinator over the five layers: plan down, cost up, until nothing is gained."""

__all__: list[str] = []
