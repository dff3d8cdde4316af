"""Algorithms under torch.distributed: a backend that DDP, FSDP2 and the rest use unchanged."""

__all__: list[str] = []
