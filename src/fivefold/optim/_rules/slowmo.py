"""Momentum on the rounds, waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fivefold.optim._rules.base import OuterRule


@dataclass(frozen=True, kw_only=True)
class SlowMo(OuterRule):
    """SlowMo: Local SGD with momentum on the rounds, and a wait at each of them.

    m_t = beta * m_{t-1} + (x_{t,0} - xbar_{t,tau}) / gamma_t;
    x_{t+1,0} = x_{t,0} - alpha * gamma_t * m_t, with gamma_t the inner learning rate.
    ``units="delta"`` drops both gamma. Choose it when the wait is affordable and Local SGD
    loses accuracy.

    Args:
        tau: Local steps per round.
        outer_lr: alpha.
        outer_momentum: beta; the paper's auto table is 0.2 to 0.6, growing with the workers.
        units: "lr" as published (default) or "delta".

    Raises:
        ConfigurationError: A value is outside its range.

    References:
        Wang et al., arXiv 1910.00643, Algorithm 1.
    """

    key: ClassVar[str] = "slowmo"
    name: ClassVar[str] = "SlowMo"
    colour: ClassVar[str] = "#109668"
    listed: ClassVar[int] = 20

    outer_momentum: float = 0.5
    units: Literal["delta", "lr"] = "lr"
