"""Loss and accuracy over the batches of an epoch, and over those since the last line."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(kw_only=True)
class EpochTally:
    """Sums over the seeds of this rank.

    Examples:
        >>> tally = EpochTally()
        >>> tally.add(loss=4.0, right=1, nodes=2)
        >>> tally.loss, tally.accuracy, tally.take_recent()["nodes"], tally.take_recent()["nodes"]
        (2.0, 0.5, 2, 0)
    """

    loss_sum: float = 0.0
    right: int = 0
    nodes: int = 0
    logged_loss_sum: float = 0.0
    logged_right: int = 0
    logged_nodes: int = 0

    def add(self, *, loss: float, right: int, nodes: int) -> None:
        """Count a batch: summed loss, seeds that were right, seeds with a label."""
        self.loss_sum += loss
        self.right += right
        self.nodes += nodes

    @property
    def loss(self) -> float:
        """Mean loss of the epoch so far."""
        return self.loss_sum / max(1, self.nodes)

    @property
    def accuracy(self) -> float:
        """Accuracy of the epoch so far."""
        return self.right / max(1, self.nodes)

    def take_recent(self) -> dict[str, Any]:
        """Loss, accuracy and seeds since the last call."""
        nodes = self.nodes - self.logged_nodes
        loss = (self.loss_sum - self.logged_loss_sum) / max(1, nodes)
        accuracy = (self.right - self.logged_right) / max(1, nodes)
        self.logged_loss_sum, self.logged_right = self.loss_sum, self.right
        self.logged_nodes = self.nodes
        return {"loss": loss, "accuracy": accuracy, "nodes": nodes}

    def record(self) -> dict[str, Any]:
        """The sums, to be restored from."""
        return dataclasses.asdict(self)
