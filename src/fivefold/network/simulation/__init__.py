"""The fluid simulator: max-min fair rates of flows over paths, event by event."""

__all__: list[str] = []
