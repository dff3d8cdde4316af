"""The operator in Triton: device code, its memory and its launches; triton is loaded when used."""

from fivefold.moe.kernels.workspace import Workspace

__all__ = ["Workspace"]
