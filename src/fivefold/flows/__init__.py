"""Layer 4: which path, priority, rate and time offset each flow gets, over all jobs."""

__all__: list[str] = []
