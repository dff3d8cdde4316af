"""Local-update data parallelism with communication hidden behind computation.

Pure: ``_rules``, ``_schedule``, ``auto_tau``, ``codecs``, ``penalties``, ``_update``, ``_merge``.
Adapters: ``transport`` (torch.distributed), ``_elastic`` (torchft). Driven by ``OuterSync``.
Paper: CO2, arXiv 2401.16265. It knows nothing of trainers, labs or reports.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from fivefold.optim._rules.base import OuterRule, outer_rules
from fivefold.optim._rules.co2 import CO2
from fivefold.optim._rules.delay_corrected import DelayCorrected
from fivefold.optim._rules.delayed_gradients import DelayedGradients
from fivefold.optim._rules.diloco import DiLoCo
from fivefold.optim._rules.eager_diloco import EagerDiLoCo
from fivefold.optim._rules.local_sgd import LocalSGD
from fivefold.optim._rules.outer_optimizer import OuterOptimizer
from fivefold.optim._rules.overlap_local_sgd import OverlapLocalSGD
from fivefold.optim._rules.slowmo import SlowMo
from fivefold.optim._rules.streaming_diloco import StreamingDiLoCo
from fivefold.optim.auto_tau import AutoTau
from fivefold.optim.penalties import ConstantPenalty, GapPenalty, NoPenalty

if TYPE_CHECKING:
    from fivefold.optim._elastic import ElasticTransport, LeftBehindError, elastic_transport
    from fivefold.optim._elastic_lighthouse import Lighthouse, start_lighthouse
    from fivefold.optim._layout import outer_state_bytes
    from fivefold.optim._muon import MuonAdamW
    from fivefold.optim._sync import OuterSync
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
    "outer_rules",
    "outer_state_bytes",
    "start_lighthouse",
]

_LOADING_TORCH = {
    "ElasticTransport": "_elastic", "LeftBehindError": "_elastic", "elastic_transport": "_elastic",
    "Lighthouse": "_elastic_lighthouse", "start_lighthouse": "_elastic_lighthouse",
    "outer_state_bytes": "_layout", "MuonAdamW": "_muon", "OuterSync": "_sync",
    "BlockCodec": "codecs", "Codec": "codecs", "TopKCodec": "codecs",
    "StabilityWarning": "statistics", "SyncStatistics": "statistics",
    "ProcessGroupTransport": "transport", "Transport": "transport",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what loads torch when it is asked for: rules and configurations do without it.

    An outer rule is found by the name of its class, and a public module as one of the package.
    """
    if name in _LOADING_TORCH:
        return getattr(importlib.import_module(f"{__name__}.{_LOADING_TORCH[name]}"), name)
    for rule in outer_rules().values():
        if rule.__name__ == name:
            return rule
    if not name.startswith("_"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
