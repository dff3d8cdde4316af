"""The operator and the layer: the CPU's path, autograd, backends, transformers."""

__all__: list[str] = []
