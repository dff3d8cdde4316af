"""Layer 1: how model, data and states are split over GPUs, at what cost, and which is best."""

__all__: list[str] = []
