"""The reference trainer: a decoder-only language model on real text, with any of our methods.

Everything is set by one :class:`TrainConfig`; :func:`train` runs it as one rank, and
:func:`launch` starts several ranks on this host. Runs are exact: killed at any moment and
resumed, they reach the same parameters bit for bit.
"""

from __future__ import annotations

from fivefold.train._corpus import load_corpus
from fivefold.train._loop import launch, train
from fivefold.train._methods import RunResult
from fivefold.train._model import Transformer
from fivefold.train._profile import (
    DeviceRates,
    StepTimes,
    measure_all_reduce,
    measure_device,
    measure_steps,
)
from fivefold.train._tokenizer import load_tokenizer
from fivefold.train.config import TrainConfig, config_to_toml, load_config
from fivefold.train.sampler import ShardedSampler

__all__ = [
    "DeviceRates",
    "RunResult",
    "ShardedSampler",
    "StepTimes",
    "TrainConfig",
    "Transformer",
    "config_to_toml",
    "launch",
    "load_config",
    "load_corpus",
    "load_tokenizer",
    "measure_all_reduce",
    "measure_device",
    "measure_steps",
    "train",
]
