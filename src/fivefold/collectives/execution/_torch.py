"""torch.distributed without its annotations, which are wrong or missing where a backend looks."""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

__all__ = ["c10d", "dist"]

dist: Any = torch.distributed
c10d: Any = distributed_c10d
