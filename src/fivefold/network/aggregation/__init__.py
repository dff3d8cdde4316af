"""In-network aggregation: its models, and a software switch that really sums."""

__all__: list[str] = []
