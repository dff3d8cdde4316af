"""Nesterov momentum on the rounds, waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fivefold.optim._rules.base import OuterRule


@dataclass(frozen=True, kw_only=True)
class DiLoCo(OuterRule):
    """DiLoCo: Nesterov momentum on the rounds, and a wait at each of them.

    m_t = beta * m_{t-1} + D_t;  x_{t+1,0} = x_{t,0} - alpha * (beta * m_t + D_t). With an inner
    AdamW and hundreds of local steps this is the published method; the same outer step is
    ``torch.optim.SGD(lr=alpha, momentum=beta, nesterov=True)`` on the pseudo-gradient. Choose it
    for long rounds, where one exposed all-reduce per round does not matter.

    Args:
        tau: Local steps per round; the paper uses about 500.
        outer_lr: alpha; 0.7 in the paper.
        outer_momentum: beta; None for 0.9, the paper's, from 50 steps per round on, and 0.5 below.

    Raises:
        ConfigurationError: A value is outside its range.

    References:
        Douillard et al., arXiv 2311.08105, Algorithm 1.
    """

    key: ClassVar[str] = "diloco"
    name: ClassVar[str] = "DiLoCo"
    colour: ClassVar[str] = "#6f78dd"
    listed: ClassVar[int] = 30
    nesterov: ClassVar[bool] = True
    momentum_by_rounds: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("outer_lr", "outer_momentum")
    for_others: ClassVar[str] = "use SlowMo for a clip or units of lr"

    outer_lr: float = 0.7
    outer_momentum: float = None  # type: ignore[assignment]  # chosen in __post_init__
