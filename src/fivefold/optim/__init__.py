"""Local-update data parallelism with communication hidden behind computation.

Pure: ``_rules``, ``_schedule``, ``auto_tau``, ``codecs``, ``_update``, ``_merge``.
Adapters: ``transport`` (torch.distributed), ``_elastic`` (torchft). Driven by ``OuterSync``.
Paper: CO2, arXiv 2401.16265. It knows nothing of trainers, labs or reports.
"""

from __future__ import annotations

from fivefold.optim._delayed_gradients import DelayedGradients
from fivefold.optim._elastic import ElasticTransport, LeftBehindError, elastic_transport
from fivefold.optim._elastic_lighthouse import Lighthouse, start_lighthouse
from fivefold.optim._layout import outer_state_bytes
from fivefold.optim._muon import MuonAdamW
from fivefold.optim._outer_optimizer import OuterOptimizer
from fivefold.optim._rules import (
    CO2,
    DelayCorrected,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    OuterRule,
    OverlapLocalSGD,
    SlowMo,
    StreamingDiLoCo,
)
from fivefold.optim._sync import OuterSync
from fivefold.optim._update import ConstantPenalty, GapPenalty, NoPenalty
from fivefold.optim.auto_tau import AutoTau
from fivefold.optim.codecs import BlockCodec, Codec, TopKCodec
from fivefold.optim.statistics import StabilityWarning, SyncStatistics
from fivefold.optim.transport import ProcessGroupTransport, Transport

__all__ = [
    "CO2",
    "AutoTau",
    "BlockCodec",
    "Codec",
    "ConstantPenalty",
    "DelayCorrected",
    "DelayedGradients",
    "DiLoCo",
    "EagerDiLoCo",
    "ElasticTransport",
    "GapPenalty",
    "LeftBehindError",
    "Lighthouse",
    "LocalSGD",
    "MuonAdamW",
    "NoPenalty",
    "OuterOptimizer",
    "OuterRule",
    "OuterSync",
    "OverlapLocalSGD",
    "ProcessGroupTransport",
    "SlowMo",
    "StabilityWarning",
    "StreamingDiLoCo",
    "SyncStatistics",
    "TopKCodec",
    "Transport",
    "elastic_transport",
    "outer_state_bytes",
    "start_lighthouse",
]
