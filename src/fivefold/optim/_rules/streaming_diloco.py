"""DiLoCo in parts that take turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fivefold.optim._rules.base import require_share
from fivefold.optim._rules.fragments import InFragments


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(InFragments):
    """Streaming DiLoCo: parts of the model are synchronised in turn, each behind some steps.

    The parameters are cut into ``fragments`` runs of about equal size. Each has DiLoCo's anchor,
    momentum and round of tau local steps, and the rounds are staggered, so that one fragment is
    sent every tau / fragments steps: the peak of the traffic falls by the number of fragments. A
    fragment's mean arrives ``delay_steps`` after its launch; then, with z the local parameters,

        z <- keep * z + (1 - keep) * x

    so that part of the steps taken meanwhile is kept. Choose it where one burst of the whole model
    per round is too much for the link, or for memory in flight.

    Args:
        tau: Local steps between two launches of one fragment.
        outer_lr: alpha.
        outer_momentum: beta; None for 0.5, or from 50 steps per round on 0.9.
        fragments: Number of parts, at most tau; None for 4, or tau where that is less.
        delay_steps: Local steps between launch and merge, 1 to tau; None for tau // fragments.
        keep: Share of the local parameters in the merge, in (0, 1); 0.5 in the paper. 0
            would throw away what was done during the all-reduce.

    Raises:
        ConfigurationError: A value is outside its range.

    References:
        Douillard et al., arXiv 2501.18512, Algorithm 2.
    """

    key: ClassVar[str] = "streaming_diloco"
    name: ClassVar[str] = "Streaming DiLoCo"
    colour: ClassVar[str] = "#9a58c9"
    listed: ClassVar[int] = 80
    nesterov: ClassVar[bool] = True
    momentum_by_rounds: ClassVar[bool] = True
    merge: ClassVar[str] = "pull"
    hides_rounds: ClassVar[bool] = True
    keeps_local: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("outer_lr", "outer_momentum")
    published_fragments: ClassVar[int | None] = 4

    outer_lr: float = 0.7
    outer_momentum: float = None  # type: ignore[assignment]  # chosen in __post_init__
    keep: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("keep", self.keep, hint="0.5 is the paper's; CO2 replaces the local work")

    @property
    def local_share(self) -> float:
        """Return what remains of the local parameters."""
        return self.keep
