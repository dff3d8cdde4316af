"""The emulated cluster: hosts on slow links, on one machine, for one command at a time.

Hosts are Linux network namespaces joined by a bridge (or by a user-space relay); links have a
rate, a delay, jitter and loss. Knows nothing of training and never imports torch.
"""

from fivefold.lab._run import LabResult, run_lab
from fivefold.lab._spec import LabSpec, class_tos
from fivefold.lab._state import clean_lab
from fivefold.lab.capabilities import probe_capabilities

__all__ = ["LabResult", "LabSpec", "class_tos", "clean_lab", "probe_capabilities", "run_lab"]
