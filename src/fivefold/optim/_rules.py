"""Outer rules: what happens to the parameters at the end of a round of local steps.

A rule is a frozen, validated record of numbers; the engine (``OuterSync``) reads it. All rules
share one form. With x the anchor (equal on all replicas), D the mean pseudo-gradient over the
replicas, L the staleness gap, beta the outer momentum, phi the clip and alpha the outer learning
rate:

    m <- clamp(beta * m + D / L, -phi, phi)
    x <- x - alpha * m                        (Nesterov: x <- x - alpha * (beta * m + D / L))

They differ in *which* round's D arrives at a boundary: this round's (synchronous) or the one
before (delayed, so that the all-reduce runs behind a whole round of compute); and in the *merge*:
workers go on from the anchor, or keep their own parameters and correct them.

References:
    CO2: arXiv 2401.16265. SlowMo: arXiv 1910.00643. Local SGD: arXiv 1805.09767. DiLoCo: arXiv
    2311.08105. Delay-corrected merge: CoCoD-SGD, arXiv 1906.12043; LOSCAR-SGD, arXiv 2605.20866.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fivefold.errors import ConfigurationError
from fivefold.optim._staleness import GapPenalty, NoPenalty, StalenessPenalty, named_penalty

__all__ = ["CO2", "DelayCorrected", "DiLoCo", "LocalSGD", "OuterRule", "SlowMo"]


@dataclass(frozen=True, kw_only=True)
class OuterRule:
    """What every rule has; use one of its subclasses.

    Attributes:
        tau: Local steps per round.
        outer_lr: alpha, the outer learning rate.
        outer_momentum: beta, the outer momentum, in [0, 1).
        clip: phi, elementwise bound of the momentum in parameter units; None for no bound.
        staleness: Divisor of the pseudo-gradient.
        units: "delta" keeps pseudo-gradients as they are; "lr" divides them by the inner
            learning rate and multiplies it back at the outer step, so that old momentum is
            rescaled when the inner learning rate changes (SlowMo's published form).
        bootstrap: What a delayed rule does at the first boundary (see ``CO2``).

    Class attributes say what kind of rule it is: ``delayed``; ``nesterov``; ``keeps_local``,
    whether workers go on from their own corrected parameters and not from the anchor.

    Example:
        >>> LocalSGD(tau=4).outer_lr
        1.0
    """

    delayed: ClassVar[bool] = False
    nesterov: ClassVar[bool] = False
    keeps_local: ClassVar[bool] = False
    name: ClassVar[str] = "outer rule"

    tau: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    clip: float | None = None
    staleness: StalenessPenalty | str = field(default_factory=NoPenalty)
    units: Literal["delta", "lr"] = "delta"
    bootstrap: Literal["reset", "sync"] = "reset"

    def __post_init__(self) -> None:
        _require_steps(self.tau)
        _require_positive("outer_lr", self.outer_lr)
        if self.clip is not None:
            _require_positive("clip", self.clip)
        if not 0 <= self.outer_momentum < 1:
            message = f"outer_momentum must be in [0, 1); got {self.outer_momentum!r}"
            raise ConfigurationError(message, hint="0 for none; CO2 uses 0 to 0.6")
        if self.units not in {"delta", "lr"}:
            raise ConfigurationError(f"units must be 'delta' or 'lr'; got {self.units!r}")
        if self.bootstrap not in {"reset", "sync"}:
            raise ConfigurationError(f"bootstrap must be 'reset' or 'sync'; got {self.bootstrap!r}")
        object.__setattr__(self, "staleness", named_penalty(self.staleness))
        if not self.delayed and isinstance(self.staleness, GapPenalty):
            message = f"{self.name} is synchronous: nothing is stale, so a gap penalty has no use"
            raise ConfigurationError(message, hint='use staleness="none", or the delayed rule CO2')

    @property
    def penalty(self) -> StalenessPenalty:
        """The staleness penalty as an object, whatever form it was given in."""
        return named_penalty(self.staleness)


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

    Example:
        >>> LocalSGD(tau=8).delayed
        False
    """

    name: ClassVar[str] = "Local SGD"

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = (self.outer_lr, self.outer_momentum, self.clip) == (1.0, 0.0, None)
        if not plain or self.penalty != NoPenalty():
            message = "LocalSGD takes tau only: it is the plain average of the parameters"
            raise ConfigurationError(message, hint="use SlowMo for an outer learning rate")


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

    Example:
        >>> SlowMo(tau=8, outer_momentum=0.5).units
        'lr'
    """

    name: ClassVar[str] = "SlowMo"

    outer_momentum: float = 0.5
    units: Literal["delta", "lr"] = "lr"


@dataclass(frozen=True, kw_only=True)
class CO2(OuterRule):
    """CO2: the all-reduce of a round runs behind the whole next round of local steps.

    At the end of round t the mean pseudo-gradient D_{t-1} = x_{t-1,0} - xbar_{t-1,tau}, launched
    one round ago, is consumed, and this round's is launched:

        m_t = clamp(beta * m_{t-1} + D_{t-1} / L_t, -phi, phi)
        x_{t+1,0} = x_{t,0} - alpha * m_t

    and every worker continues from x_{t+1,0}. Nothing is waited for while
    T_allreduce <= tau * T_step. No sample is lost: round t's work is applied exactly once, one
    round late. On a noise-free quadratic mode that tau local steps contract by a in (0, 1], the
    method is stable if and only if alpha * a / L < 1 - beta; a warning is given when
    alpha >= (1 - beta) * L for the running L.

    Bootstrap, since nothing has arrived at the first boundary: "reset" (default) returns to
    x_{0,0}, so that rounds 0 and 1 start from one point; "sync" waits for the first all-reduce,
    applies it at once, and moves that gap to the second boundary. Drain: see
    ``OuterSync.finalize``.

    Args:
        tau: Local steps per round.
        outer_lr: alpha; keep it below (1 - beta) * L.
        outer_momentum: beta.
        staleness: Name or object of the penalty L_t; "gap" by default. The expression of the
            paper's Eq. 3 is unconfirmed, see ``GapPenalty``.
        clip: phi, elementwise bound of the momentum, in parameter units: pseudo-gradients have
            a size of about the inner learning rate times tau, so 1.0 almost never binds. None
            for no clipping.
        units: "delta" (default, as in the released code) or "lr".
        bootstrap: "reset" or "sync".

    Raises:
        ConfigurationError: A value is outside its range.

    References:
        Sun et al., ICLR 2024, arXiv 2401.16265.

    Example:
        >>> CO2(tau=8).delayed
        True
    """

    delayed: ClassVar[bool] = True
    name: ClassVar[str] = "CO2"

    outer_lr: float = 0.7
    outer_momentum: float = 0.2
    clip: float | None = 1.0
    staleness: StalenessPenalty | str = "gap"


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

    Example:
        >>> DiLoCo(tau=100).outer_momentum
        0.9
    """

    nesterov: ClassVar[bool] = True
    name: ClassVar[str] = "DiLoCo"

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None or self.penalty != NoPenalty() or self.units != "delta":
            message = "DiLoCo takes tau, outer_lr and outer_momentum only"
            raise ConfigurationError(message, hint="use SlowMo for a clip or units of lr")


@dataclass(frozen=True, kw_only=True)
class DelayCorrected(OuterRule):
    """Hidden averaging that keeps local work: when a mean arrives, add what it changes.

    The all-reduce runs behind the next round, as with CO2. At the end of round t the mean over
    the workers of y_{t-1}, their parameters one round ago, arrives, and every worker adds the
    difference to its own: z <- z + (mean(y_{t-1}) - y_{t-1}). Work done during the flight is
    kept at once instead of being replaced; the mean of the workers moves exactly as in Local SGD
    whose workers see each other one round late. Replicas differ at all times until
    ``finalize``; the anchor is the last mean that arrived.

    Args:
        tau: Local steps per round.

    Raises:
        ConfigurationError: tau is not a positive integer, or another setting is given.

    References:
        CoCoD-SGD, arXiv 1906.12043; LOSCAR-SGD, arXiv 2605.20866.

    Example:
        >>> DelayCorrected(tau=8).keeps_local
        True
    """

    delayed: ClassVar[bool] = True
    keeps_local: ClassVar[bool] = True
    name: ClassVar[str] = "delay-corrected"

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = (self.outer_lr, self.outer_momentum, self.clip) == (1.0, 0.0, None)
        if not plain or self.penalty != NoPenalty() or self.bootstrap != "reset":
            message = "DelayCorrected takes tau only: it adds the plain mean of the parameters"
            raise ConfigurationError(message, hint="use CO2 for outer settings")


def _require_steps(tau: object) -> None:
    if isinstance(tau, bool) or not isinstance(tau, int) or tau < 1:
        message = f"tau must be a positive integer, the local steps per round; got {tau!r}"
        raise ConfigurationError(message, hint="use tau=1 to synchronise at every step")


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name} must be a positive number; got {value!r}")
