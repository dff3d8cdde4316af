"""Workers pulled towards an anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fivefold.optim._rules.base import OuterRule, require_share


@dataclass(frozen=True, kw_only=True)
class OverlapLocalSGD(OuterRule):
    """Overlap-Local-SGD: workers are pulled towards an anchor that is averaged behind compute.

    At the end of round t the mean over the workers of y_{t-1}, the parameters that they sent one
    round ago, arrives and moves the anchor x, with momentum; then every worker z is pulled
    towards it and sends the result:

        m_t = beta * m_{t-1} + (x_{t-1} - mean(y_{t-1}));  x_t = x_{t-1} - m_t
        z <- (1 - pull) * z + pull * x_t;  y_t = z

    Workers never stop at a common point, so a slow mean disturbs little; the pull alone bounds how
    far they drift apart. Choose it for rounds of few steps and noisy gradients.

    Args:
        tau: Local steps per round.
        pull: Share of the way to the anchor, in (0, 1); 0.6 in the paper.
        outer_momentum: beta of the anchor; 0.7 in the paper.

    Raises:
        ConfigurationError: A value is outside its range.

    References:
        Wang, Liang and Joshi, arXiv 2002.09539, equations 3 to 5 and section on momentum.
    """

    key: ClassVar[str] = "overlap_local_sgd"
    name: ClassVar[str] = "Overlap-Local-SGD"
    colour: ClassVar[str] = "#8c6a56"
    listed: ClassVar[int] = 60
    merge: ClassVar[str] = "pull"
    hides_rounds: ClassVar[bool] = True
    keeps_local: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("outer_momentum",)

    outer_momentum: float = 0.7
    pull: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "0.6 is the paper's; use CO2 to replace the local work, DelayCorrected to keep it"
        require_share("pull", self.pull, hint=hint)

    @property
    def local_share(self) -> float:
        """Return what remains of the local parameters."""
        return 1.0 - self.pull
