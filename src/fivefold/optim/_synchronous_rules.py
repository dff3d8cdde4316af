"""Rules that wait at each boundary for the round that has just ended.

One exposed all-reduce per round: few messages, and simple to reason about. Their delayed
counterparts are in ``_delayed_rules``.

References:
    SlowMo: arXiv 1910.00643. Local SGD: arXiv 1805.09767. DiLoCo: arXiv 2311.08105.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fivefold.optim._rule import OuterRule, require_plain

_OUTER = ("outer_lr", "outer_momentum", "clip", "staleness", "units")


@dataclass(frozen=True, kw_only=True)
class LocalSGD(OuterRule):
    """Local SGD: average the parameters after every tau local steps, and wait for the average.

    x_{t+1,0} = mean over workers of x_{t,tau}. The baseline for all others: fewer messages than
    DDP, every one of them exposed. Choose it when the network is fast enough that the wait does
    not matter.

    Args:
        tau: Local steps per round.

    Raises:
        ConfigurationError: tau is not a positive integer, or another setting is given.

    References:
        Stich, arXiv 1805.09767.

    Examples:
        >>> LocalSGD(tau=8).delayed
        False
    """

    name: ClassVar[str] = "Local SGD"

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "use SlowMo for an outer learning rate"
        require_plain(self, *_OUTER, takes="tau", hint=hint)


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

    Examples:
        >>> SlowMo(tau=8, outer_momentum=0.5).units
        'lr'
    """

    name: ClassVar[str] = "SlowMo"

    outer_momentum: float = 0.5
    units: Literal["delta", "lr"] = "lr"


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
        outer_momentum: beta; 0.9 in the paper.

    Raises:
        ConfigurationError: A value is outside its range.

    References:
        Douillard et al., arXiv 2311.08105, Algorithm 1.

    Examples:
        >>> DiLoCo(tau=100).outer_momentum
        0.9
    """

    nesterov: ClassVar[bool] = True
    name: ClassVar[str] = "DiLoCo"

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "use SlowMo for a clip or units of lr"
        takes = "tau, outer_lr and outer_momentum"
        require_plain(self, "clip", "staleness", "units", takes=takes, hint=hint)
