"""The reference trainer: a decoder-only language model on real text, with any of our methods.

Everything is set by one :class:`TrainConfig`; :func:`train` runs it as one rank, and
:func:`launch` starts several ranks on this host. Runs are exact: killed at any moment and
resumed, they reach the same parameters bit for bit.
"""

from __future__ import annotations

from fivefold.train._config import (
    AutoTauConfig,
    DataConfig,
    MixtureConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SyncConfig,
    TasksConfig,
    TrainConfig,
    config_to_toml,
    load_config,
)
from fivefold.train._corpus import Corpus, load_corpus
from fivefold.train._launch import launch
from fivefold.train._loop import train
from fivefold.train._model import Transformer
from fivefold.train._result import RunResult
from fivefold.train._sampler import ShardedSampler, gather_batch
from fivefold.train._tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer

__all__ = [
    "AutoTauConfig",
    "ByteTokenizer",
    "Corpus",
    "DataConfig",
    "HuggingFaceTokenizer",
    "MixtureConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "RunResult",
    "ShardedSampler",
    "SyncConfig",
    "TasksConfig",
    "TrainConfig",
    "Transformer",
    "config_to_toml",
    "gather_batch",
    "launch",
    "load_config",
    "load_corpus",
    "load_tokenizer",
    "train",
]
