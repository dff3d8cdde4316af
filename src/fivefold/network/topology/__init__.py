"""The graph of GPUs, switches, NICs and links: model, files, named machines, pictures."""

__all__: list[str] = []
