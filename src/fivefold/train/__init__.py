"""The reference trainer: a decoder-only language model on real text, with any of our methods.

Everything is set by one :class:`TrainConfig`; :func:`train` runs it as one rank, and
:func:`launch` starts several ranks on this host. Runs are exact: killed at any moment and
resumed, they reach the same parameters bit for bit.
"""

from __future__ import annotations

from fivefold.train._config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SyncConfig,
    TrainConfig,
    config_to_toml,
    load_config,
)
from fivefold.train._launch import launch
from fivefold.train._loop import train
from fivefold.train._result import RunResult

__all__ = [
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "RunResult",
    "SyncConfig",
    "TrainConfig",
    "config_to_toml",
    "launch",
    "load_config",
    "train",
]
