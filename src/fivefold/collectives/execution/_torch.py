"""torch.distributed without its annotations, which are wrong or missing where a backend looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

dist: Any = torch.distributed
c10d: Any = distributed_c10d


def inner_method(group: Any, *names: str) -> Callable[..., Any]:
    """Return the method that a group has under one of the names that torch gave it over time."""
    found: Callable[..., Any] = next(getattr(group, name) for name in names if hasattr(group, name))
    return found
