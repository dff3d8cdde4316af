"""The emulated cluster: hosts on slow links, on one machine, for one command at a time.

Hosts are Linux network namespaces joined by a bridge (or by a user-space relay); links have a
rate, a delay, jitter and loss. Knows nothing of training and never imports torch.
"""

from fivefold.lab._capabilities import Capabilities, Capability, probe_capabilities
from fivefold.lab._classes import class_tos
from fivefold.lab._clean import CleanReport, clean_lab
from fivefold.lab._result import LabResult, RankResult
from fivefold.lab._run import run_lab
from fivefold.lab._spec import LabSpec

__all__ = [
    "Capabilities",
    "Capability",
    "CleanReport",
    "LabResult",
    "LabSpec",
    "RankResult",
    "class_tos",
    "clean_lab",
    "probe_capabilities",
    "run_lab",
]
