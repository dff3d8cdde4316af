"""The algorithms of the textbooks and of NCCL as schedules."""

__all__: list[str] = []
