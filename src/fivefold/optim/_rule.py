"""What every outer rule has: the form that all of them share, and its numbers.

A rule is a frozen, validated record; the engine (``OuterSync``) reads it. With x the anchor (equal
on all replicas), D the mean pseudo-gradient over the replicas, L the staleness gap, beta the outer
momentum, phi the clip and alpha the outer learning rate:

    m <- clamp(beta * m + D / L, -phi, phi)
    x <- x - alpha * m                        (Nesterov: x <- x - alpha * (beta * m + D / L))

Rules differ in *when* a round's D arrives (this boundary, the next one, or some steps after the
launch) and in the *merge*: what a worker's parameters z become when it has arrived.

    replace   z <- x
    pull      z <- (1 - s) * x + s * z         with s the local share
    correct   z <- z + (d - D)                 with d the worker's own part of D
    eager     z <- x, moved on by what the worker's own fresh part would do to it

References:
    ``_rules`` names those of each rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fivefold.errors import ConfigurationError
from fivefold.optim._auto_tau import AutoTau, named_auto_tau
from fivefold.optim._staleness import GapPenalty, NoPenalty, StalenessPenalty, named_penalty

MergeKind = Literal["replace", "pull", "correct", "eager", "hand over"]


@dataclass(frozen=True, kw_only=True)
class OuterRule:
    """What every rule has; use one of its subclasses.

    Attributes:
        tau: Local steps per round; "auto" or ``AutoTau(...)`` for as few as hide the
            communication (delayed rules only).
        outer_lr: alpha, the outer learning rate.
        outer_momentum: beta, the outer momentum, in [0, 1).
        clip: phi, elementwise bound of the momentum in parameter units; None for no bound.
        staleness: Divisor of the pseudo-gradient.
        units: "delta" keeps pseudo-gradients as they are; "lr" divides them by the inner
            learning rate and multiplies it back at the outer step, so that old momentum is
            rescaled when the inner learning rate changes (SlowMo's published form).
        bootstrap: What a delayed rule does at the first boundary (see ``CO2``).

    Examples:
        >>> from fivefold.optim import LocalSGD
        >>> LocalSGD(tau=4).outer_lr
        1.0
    """

    nesterov: ClassVar[bool] = False
    merge: ClassVar[MergeKind] = "replace"
    name: ClassVar[str] = "outer rule"

    tau: int | Literal["auto"] | AutoTau
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    clip: float | None = None
    staleness: StalenessPenalty | str = field(default_factory=NoPenalty)
    units: Literal["delta", "lr"] = "delta"
    bootstrap: Literal["reset", "sync"] = "reset"

    def __post_init__(self) -> None:
        self._check_tau()
        require_positive("outer_lr", self.outer_lr)
        if self.clip is not None:
            require_positive("clip", self.clip)
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

    def _check_tau(self) -> None:
        if isinstance(self.tau, (str, AutoTau)):
            object.__setattr__(self, "tau", named_auto_tau(self.tau))
            if not self.delayed or self.num_fragments > 1:
                message = f'tau="auto" needs a rule that hides whole rounds; got {self.name}'
                raise ConfigurationError(message, hint="use CO2, or give tau as a number")
        elif isinstance(self.tau, bool) or not isinstance(self.tau, int) or self.tau < 1:
            message = f"tau must be a positive integer, the local steps per round; got {self.tau!r}"
            raise ConfigurationError(message, hint="use tau=1 to synchronise at every step")

    @property
    def penalty(self) -> StalenessPenalty:
        """Return the staleness penalty as an object, whatever form it was given in."""
        return named_penalty(self.staleness)

    @property
    def auto_tau(self) -> AutoTau | None:
        """Settings of the automatic tau; None where tau is a number."""
        return self.tau if isinstance(self.tau, AutoTau) else None

    @property
    def first_tau(self) -> int:
        """Local steps of the first round."""
        tau = self.tau
        assert not isinstance(tau, str), "__post_init__ made it an object"
        return tau.initial if isinstance(tau, AutoTau) else tau

    @property
    def delayed(self) -> bool:
        """Return whether a round's result arrives while later local steps are being done."""
        return False

    @property
    def delay_steps(self) -> int | None:
        """Local steps between launch and merge of a delayed rule; None for a whole round."""
        return None

    @property
    def keeps_local(self) -> bool:
        """Return whether replicas differ between boundaries even without local steps."""
        return self.merge in {"pull", "correct"}

    @property
    def local_share(self) -> float:
        """S of the merge "pull"."""
        return 0.0

    @property
    def num_fragments(self) -> int:
        """Parts of the model that are synchronised at moments of their own."""
        return 1


def require_positive(name: str, value: object) -> None:
    """Refuse what is not a positive finite number."""
    if not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name} must be a positive number; got {value!r}")


def require_share(name: str, value: object, *, hint: str) -> None:
    """Refuse what is not strictly between 0 and 1."""
    if not isinstance(value, (int, float)) or not 0 < value < 1:
        message = f"{name} must be between 0 and 1, both excluded; got {value!r}"
        raise ConfigurationError(message, hint=hint)


def require_plain(rule: OuterRule, *names: str, takes: str, hint: str) -> None:
    """Refuse a rule whose settings outside its published form are not at their defaults."""
    defaults = OuterRule(tau=1)
    for name in names:
        if getattr(rule, name) != getattr(defaults, name):
            message = (
                f"{type(rule).__name__} takes {takes} only; got {name}={getattr(rule, name)!r}"
            )
            raise ConfigurationError(message, hint=hint)
