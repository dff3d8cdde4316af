"""Table ``[tasks]``: when plain data parallelism's gradients are sent against compute.

This module knows nothing of torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from fivefold.errors import ConfigurationError
from fivefold.runs import Bytes, Positive, Section


class TasksConfig(Section):
    """Table ``[tasks]``: the order in which gradients are sent, for ``sync.method = "ddp"``.

    Raises:
        ConfigurationError: Through ``load_config``; the order could not change anything.

    Examples:
        >>> TasksConfig(chunk="1 MB").chunk
        1000000
    """

    ordering: Literal["fifo", "priority"] = "priority"
    """"fifo" as gradients become ready, or "priority" for what the next forward pass needs first"""
    chunk: Bytes = 1_000_000
    """bytes of the pieces in which buckets are sent; 0 for whole buckets"""
    bucket: Bytes = 0
    """bytes of a bucket of gradients; 0 for DDP's own choice"""
    credit: Positive = 2
    """pieces in flight at once"""
    overlap_forward: bool = True
    """true where each layer's next forward pass waits for its own gradients only"""
    plan_after_steps: Positive = 3
    """measured steps after which the order is planned"""

    @model_validator(mode="after")
    def _order_can_matter(self) -> TasksConfig:
        if self.ordering == "priority" and not self.overlap_forward:
            message = 'tasks.ordering "priority" does nothing where forward waits for all gradients'
            raise ConfigurationError(
                message, hint='set tasks.ordering = "fifo", or tasks.overlap_forward = true'
            )
        return self
