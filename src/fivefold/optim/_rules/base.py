"""The base of all outer rules, and the registry in which each is found.

A rule is a frozen, validated record; the engine (``OuterSync``) reads it. Rules differ in *when* a
round's mean pseudo-gradient arrives (this boundary, the next one, or some steps after the launch)
and in the *merge*: what a worker's parameters become then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, Self, cast

from fivefold.errors import ConfigurationError, require_one_of, require_whole
from fivefold.optim.auto_tau import AutoTau, named_auto_tau
from fivefold.optim.penalties import GapPenalty, StalenessPenalty, is_number, named_penalty

# With x the anchor, z a worker's parameters, s the local share, D the mean pseudo-gradient over the
# workers and d the worker's own part of it:
#
#     replace   z <- x
#     pull      z <- (1 - s) * x + s * z
#     correct   z <- z + (d - D)
#     eager     z <- x, moved on by what the worker's own fresh part would do to it
#     own       what the rule's ``merge_piece`` does

# Rounds of DiLoCo's paper have at least so many steps, and its momentum. In shorter ones that moves
# the anchor too far: of four workers at tau 8 it left 3.31 bits per byte, 0.5 left 2.93.
_LONG_ROUND_STEPS = 50
_GENERAL = ("outer_lr", "outer_momentum", "clip", "staleness", "units", "bootstrap")
_ENDS = ("synchronous_start", "synchronous_end", "total_steps")  # which nearly every rule takes


@dataclass(frozen=True, kw_only=True)
class OuterRule:
    """Base of all outer rules; use one of its subclasses.

    With x the anchor (equal on all replicas), D the mean pseudo-gradient over the replicas, L the
    staleness gap, beta the outer momentum, phi the clip and alpha the outer learning rate:

        m <- clamp(beta * m + D / L, -phi, phi)
        x <- x - alpha * m                        (Nesterov: x <- x - alpha * (beta * m + D / L))

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
        synchronous_start: Local steps at the start after each of which all workers wait for their
            exact mean: replicas are equal and the optimizer's early, large steps cost no quality.
        synchronous_end: The same for the last steps of ``total_steps``; what is in flight is merged
            before.
        total_steps: Local steps of the whole run, where it ends synchronously; later steps are
            synchronous too.
    """

    key: ClassVar[str] = ""  # name in configurations and results; "" for what is only a base
    name: ClassVar[str] = "outer rule"  # for people, and in saved states
    colour: ClassVar[str] = ""  # of its runs on a page; "" for a spare one
    listed: ClassVar[int] = 1000  # place in lists of rules
    merge: ClassVar[str] = "replace"
    nesterov: ClassVar[bool] = False
    hides_rounds: ClassVar[bool] = False
    momentum_by_rounds: ClassVar[bool] = False  # whether None stands for the momentum of its rounds
    left_open_momentum: ClassVar[bool] = False  # of one rule: whether its rounds have chosen it
    # Which of the general settings the published form has; the others must be at their defaults.
    takes: ClassVar[tuple[str, ...]] = _GENERAL
    for_others: ClassVar[str] = "use CO2 for other outer settings"
    keeps_local: ClassVar[bool] = False  # whether replicas differ at boundaries with no local step
    takes_turns: ClassVar[bool] = False  # whether parts of the model may be sent in turn
    bears_losses: ClassVar[bool] = True  # whether an all-reduce of it may get lost
    sends_gradients: ClassVar[bool] = False  # whether it is DDP's all-reduce that it hides
    least_tau: ClassVar[int] = 1  # local steps per round below which it learns worse

    tau: int | Literal["auto"] | AutoTau
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    clip: float | None = None
    staleness: StalenessPenalty | str = "none"
    units: Literal["delta", "lr"] = "delta"
    bootstrap: Literal["reset", "sync"] = "reset"
    synchronous_start: int = 0
    synchronous_end: int = 0
    total_steps: int | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__dict__.get("key"):
            return
        known = _REGISTERED.setdefault(cls.key, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            message = f"an outer rule {cls.key!r} exists already: {known.__module__}"
            raise ConfigurationError(message, hint="give the new one another key")
        _REGISTERED[cls.key] = cls

    def __post_init__(self) -> None:
        self._check_synchronous_steps()
        self._check_tau()
        require_positive("outer_lr", self.outer_lr)
        if self.clip is not None:
            require_positive("clip", self.clip)
        if not (is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1):
            message = f"outer_momentum must be in [0, 1); got {self.outer_momentum!r}"
            raise ConfigurationError(message, hint="0 for none; CO2 uses 0 to 0.6")
        require_one_of(self.units, ("delta", "lr"), f"units is {self.units!r}")
        require_one_of(self.bootstrap, ("reset", "sync"), f"bootstrap is {self.bootstrap!r}")
        object.__setattr__(self, "staleness", named_penalty(self.staleness))
        if not self.delayed and isinstance(self.staleness, GapPenalty):
            message = f"{self.name} is synchronous: nothing is stale, so a gap penalty has no use"
            raise ConfigurationError(message, hint='use staleness="none", or the delayed rule CO2')
        self._check_general_settings()

    def _check_tau(self) -> None:
        if isinstance(self.tau, (str, AutoTau)):
            object.__setattr__(self, "tau", named_auto_tau(self.tau))
            if not self.delayed:
                message = f'tau="auto" needs a rule that hides its rounds; got {self.name}'
                raise ConfigurationError(message, hint="use CO2, or give tau as a number")
        else:
            hint = "it counts the local steps of a round; 1 synchronises at every step"
            object.__setattr__(self, "tau", require_whole("tau", self.tau, hint=hint))
        if self.momentum_by_rounds and cast("float | None", self.outer_momentum) is None:
            steps = self.tau.initial if isinstance(self.tau, AutoTau) else cast("int", self.tau)
            momentum = 0.9 if steps >= _LONG_ROUND_STEPS else 0.5
            object.__setattr__(self, "outer_momentum", momentum)
            object.__setattr__(self, "left_open_momentum", True)

    def _check_synchronous_steps(self) -> None:
        for name in ("synchronous_start", "synchronous_end"):
            hint = "it counts local steps; 0 for none"
            require_whole(name, getattr(self, name), least=0, hint=hint)
        if self.synchronous_end and self.total_steps is None:
            message = f"synchronous_end={self.synchronous_end} needs total_steps"
            raise ConfigurationError(message, hint="give the local steps of the whole run")
        total, ends = self.total_steps, self.synchronous_start + self.synchronous_end
        if total is not None:
            hint = "it is at least the synchronous steps at both ends"
            require_whole("total_steps", total, least=max(ends, 1), hint=hint)
        if ends and self._is_uneven:
            message = "with balance=True ranks are at different steps, which cannot be synchronous"
            raise ConfigurationError(message, hint="leave synchronous_start and _end at 0")

    def _check_general_settings(self) -> None:
        if self.takes == _GENERAL:
            return
        defaults = OuterRule(tau=1)
        for name in set(_GENERAL).difference(self.takes):
            value = getattr(self, name)
            if value != getattr(defaults, name):
                names = [each.name for each in fields(self) if each.name not in _ENDS]
                *most, last = [n for n in names if n not in _GENERAL or n in self.takes]
                taken = f"{', '.join(most)} and {last}" if most else last
                message = f"{type(self).__name__} takes {taken} only"
                raise ConfigurationError(f"{message}; got {name}={value!r}", hint=self.for_others)

    @property
    def penalty(self) -> StalenessPenalty:
        """Return the staleness penalty as an object, whatever form it was given in."""
        return named_penalty(self.staleness)

    @property
    def auto_tau(self) -> AutoTau | None:
        """Settings of the automatic tau; None where tau is a number."""
        return self.tau if isinstance(self.tau, AutoTau) else None

    @property
    def _is_uneven(self) -> bool:
        return isinstance(self.tau, AutoTau) and self.tau.balance

    @property
    def first_tau(self) -> int:
        """Local steps of the first round."""
        assert not isinstance(self.tau, str), "__post_init__ made it an object"
        return self.tau.initial if isinstance(self.tau, AutoTau) else self.tau

    @property
    def delayed(self) -> bool:
        """Return whether a round's result arrives while later local steps are being done."""
        return self.hides_rounds

    @property
    def delay_steps(self) -> int | None:
        """Local steps between launch and merge of a delayed rule; None for a whole round."""
        return None

    def for_model(self, most_fragments: int) -> Self:
        """Return the rule with what it leaves to the model, the number of its fragments."""
        del most_fragments
        return self

    @property
    def carries_rest(self) -> bool:
        """Return whether it writes what is not its anchor, so that 16-bit tensors need a rest.

        What a write of the anchor itself rounds away is known from the anchor.
        """
        if self.merge == "replace":
            return self.delay_steps is not None or (self.delayed and self.auto_tau is not None)
        return self.keeps_local or self.merge == "own"

    @property
    def local_share(self) -> float:
        """Return s of the merge "pull"."""
        return 0.0

    @property
    def num_fragments(self) -> int:
        """Parts of the model that are synchronised at moments of their own."""
        return 1

    @property
    def window(self) -> float:
        """Share of the local steps behind which all-reduces run; 0 where all ranks wait."""
        if not self.delayed:
            return 0.0
        if self.auto_tau is not None:
            return 1.0
        parts, tau = self.num_fragments, self.first_tau
        return min(1.0, parts * (self.delay_steps or tau // parts) / tau)

    def buffers(self, *, may_lose: bool = False) -> tuple[str, ...]:
        """Return the buffers that the rule needs beside anchor and payload.

        The engine knows "momentum", "sent", "start", "own_momentum" and "gradient" (see ``Piece``).
        One of another name is this worker's own, 0 at the start, and in ``piece.own``.
        """
        penalty = self.penalty
        by_element = isinstance(penalty, GapPenalty) and penalty.norm == "element"
        needed = {
            "momentum": self.outer_momentum > 0 or by_element,
            "sent": may_lose and self.merge == "replace",
        }
        return tuple(name for name, wanted in needed.items() if wanted)

    @property
    def numbers_per_parameter(self) -> float:
        """Return the numbers that each parameter costs: anchor, payload and the buffers."""
        return 2.0 + len(self.buffers())

    def merge_piece(self, piece: Any, task: Any, statistics: Any) -> None:
        """Apply what arrived to one piece, set the model, and put what is sent into the payload.

        Called where ``merge`` is "own", with a ``Piece``, a ``MergeTask`` (which has the steps that
        merges are made of) and the ``PieceStatistics`` that it adds to.

        Raises:
            NotImplementedError: The rule has none.
        """
        raise NotImplementedError

    @classmethod
    def settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a configuration may set, with the defaults that go with what is given.

        None stands for a setting that has no default, or whose default another one decides.
        """
        left_out = {*set(_GENERAL).difference(cls.takes), "total_steps"}
        if not cls.hides_rounds:
            left_out |= {"staleness", "bootstrap"}  # nothing is late
        if cls.sends_gradients:
            left_out |= {"tau", "max_norm", *_ENDS}
        del given
        return {
            each.name: None if each.default is MISSING else each.default
            for each in fields(cls)
            if each.name not in left_out
        }

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Return the rule that a configuration describes."""
        return cls(**settings)

    @classmethod
    def label(cls, settings: Mapping[str, Any]) -> str:
        """Return the name for people of a run with these settings."""
        del settings
        return cls.name


_REGISTERED: dict[str, type[OuterRule]] = {}


def outer_rules() -> dict[str, type[OuterRule]]:
    """Return all outer rules by key, in the order in which they are listed.

    A rule is here once its class is defined, wherever that is.

    Examples:
        >>> outer_rules()["co2"].name
        'CO2'
    """
    return dict(sorted(_REGISTERED.items(), key=lambda each: each[1].listed))


def rule_named(name: str) -> type[OuterRule]:
    """Return the rule of a name for people; the base of all where none has it."""
    return next((rule for rule in _REGISTERED.values() if rule.name == name), OuterRule)


def require_positive(name: str, value: object) -> None:
    """Refuse what is no positive number."""
    if not (is_number(value) and value > 0):
        raise ConfigurationError(f"{name} must be a positive number; got {value!r}")


def require_share(name: str, value: object, *, hint: str) -> None:
    """Refuse what is no share."""
    if not (is_number(value) and 0 < value < 1):
        message = f"{name} must be between 0 and 1, both excluded; got {value!r}"
        raise ConfigurationError(message, hint=hint)
