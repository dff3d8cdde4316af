"""Experts on several ranks: by all-to-all, or one-sided through a symmetric heap."""

from fivefold.moe.parallel._all_to_all import ExchangeFlight, ExpertGroup
from fivefold.moe.parallel._config import ExchangeConfig
from fivefold.moe.parallel._exchange import ExpertExchange
from fivefold.moe.parallel._heaps import (
    SharedMemoryHeap,
    SymmetricHeap,
    TorchSymmetricHeap,
    VirtualHeap,
)

__all__ = [
    "ExchangeConfig",
    "ExchangeFlight",
    "ExpertExchange",
    "ExpertGroup",
    "SharedMemoryHeap",
    "SymmetricHeap",
    "TorchSymmetricHeap",
    "VirtualHeap",
]
