"""Local-update data parallelism with communication hidden behind computation.

Specification: ``_reference`` (all ranks in one process, float64, line by line). Core:
``_rules``, ``_staleness``, ``_schedule``, ``_update`` (pure). Adapter: ``_transport``
(torch.distributed). Public object: ``OuterSync``. Paper: CO2, arXiv 2401.16265.
This package knows nothing of trainers, labs or reports.
"""

from __future__ import annotations

from fivefold.optim._elastic import ElasticTransport, LeftBehindError, elastic_transport
from fivefold.optim._elastic_lighthouse import Lighthouse, start_lighthouse
from fivefold.optim._rules import CO2, DelayCorrected, DiLoCo, LocalSGD, OuterRule, SlowMo
from fivefold.optim._stability import StabilityWarning
from fivefold.optim._staleness import ConstantPenalty, GapPenalty, NoPenalty
from fivefold.optim._statistics import FlightRecord, SyncStatistics
from fivefold.optim._sync import OuterSync
from fivefold.optim._transport import Flight, ProcessGroupTransport, Transport

__all__ = [
    "CO2",
    "ConstantPenalty",
    "DelayCorrected",
    "DiLoCo",
    "ElasticTransport",
    "Flight",
    "FlightRecord",
    "GapPenalty",
    "LeftBehindError",
    "Lighthouse",
    "LocalSGD",
    "NoPenalty",
    "OuterRule",
    "OuterSync",
    "ProcessGroupTransport",
    "SlowMo",
    "StabilityWarning",
    "SyncStatistics",
    "Transport",
    "elastic_transport",
    "start_lighthouse",
]
