"""The reference trainer: a decoder-only language model on real text, with any of our methods.

Everything is set by one :class:`TrainConfig`; :func:`train` runs it as one rank, and
:func:`launch` starts several ranks on this host. Runs are exact: killed at any moment and
resumed, they reach the same parameters bit for bit.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fivefold.train.config import TrainConfig, config_to_toml, load_config

if TYPE_CHECKING:
    from fivefold.train._corpus import load_corpus, load_tokenizer
    from fivefold.train._loop import launch, train
    from fivefold.train._methods import RunResult
    from fivefold.train._model import Transformer
    from fivefold.train.sampler import ShardedSampler

__all__ = [
    "RunResult",
    "ShardedSampler",
    "TrainConfig",
    "Transformer",
    "config_to_toml",
    "launch",
    "load_config",
    "load_corpus",
    "load_tokenizer",
    "train",
]

_LOADING_TORCH = {
    "RunResult": "_methods", "ShardedSampler": "sampler", "Transformer": "_model",
    "launch": "_loop", "load_corpus": "_corpus", "load_tokenizer": "_corpus", "train": "_loop",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what loads torch when it is asked for: a configuration is checked without it."""
    if name in _LOADING_TORCH:
        module = importlib.import_module(f"fivefold.train.{_LOADING_TORCH[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'fivefold.train' has no attribute {name!r}")
