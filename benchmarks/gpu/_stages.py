"""The stages, in the order of what they are worth for a minute of a GPU."""

from __future__ import annotations

from benchmarks.gpu._experts import EXPERTS
from benchmarks.gpu._graphs import GRAPHS
from benchmarks.gpu._quality import QUALITY
from benchmarks.gpu._tests import TESTS
from benchmarks.gpu._trainer import TRAINER
from benchmarks.gpu._training import TRAINING

__all__ = ["STAGES"]

STAGES = (TRAINING, EXPERTS, TRAINER, TESTS, QUALITY, GRAPHS)
