"""The outer rules: synchronous ones, and those whose all-reduce runs behind local steps.

A rule is a frozen, validated record; the engine (``OuterSync``) reads it. Rules differ in *when* a
round's mean pseudo-gradient arrives (this boundary, the next one, or some steps after the launch)
and in the *merge*: what a worker's parameters become then.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal, Self, cast

from fivefold.errors import ConfigurationError, require_one_of, require_whole
from fivefold.optim._round_choice import filling_fragments
from fivefold.optim._update import (
    GapPenalty,
    NoPenalty,
    StalenessPenalty,
    is_number,
    named_penalty,
)
from fivefold.optim.auto_tau import AutoTau, named_auto_tau

# With x the anchor, z a worker's parameters, s the local share, D the mean pseudo-gradient over the
# workers and d the worker's own part of it:
#
#     replace   z <- x
#     pull      z <- (1 - s) * x + s * z
#     correct   z <- z + (d - D)
#     eager     z <- x, moved on by what the worker's own fresh part would do to it
MergeKind = Literal["replace", "pull", "correct", "eager", "hand over", "gradients"]


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

    name: ClassVar[str] = "outer rule"
    merge: ClassVar[MergeKind] = "replace"
    nesterov: ClassVar[bool] = False
    hides_rounds: ClassVar[bool] = False
    momentum_by_rounds: ClassVar[bool] = False  # whether None stands for the momentum of its rounds
    # Which of the general settings the published form has; the others must be at their defaults.
    takes: ClassVar[tuple[str, ...]] = _GENERAL
    for_others: ClassVar[str] = "use CO2 for other outer settings"

    tau: int | Literal["auto"] | AutoTau
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    clip: float | None = None
    staleness: StalenessPenalty | str = field(default_factory=NoPenalty)
    units: Literal["delta", "lr"] = "delta"
    bootstrap: Literal["reset", "sync"] = "reset"
    synchronous_start: int = 0
    synchronous_end: int = 0
    total_steps: int | None = None

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

    @property
    def keeps_local(self) -> bool:
        """Return whether replicas differ between boundaries even without local steps."""
        return self.merge in {"pull", "correct"}

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
        return self.keeps_local

    @property
    def local_share(self) -> float:
        """Return s of the merge "pull"."""
        return 0.0

    @property
    def num_fragments(self) -> int:
        """Parts of the model that are synchronised at moments of their own."""
        return 1


def require_positive(name: str, value: object) -> None:
    """Refuse what is no positive number."""
    if not (is_number(value) and value > 0):
        raise ConfigurationError(f"{name} must be a positive number; got {value!r}")


def _require_share(name: str, value: object, *, hint: str) -> None:
    if not (is_number(value) and 0 < value < 1):
        message = f"{name} must be between 0 and 1, both excluded; got {value!r}"
        raise ConfigurationError(message, hint=hint)


@dataclass(frozen=True, kw_only=True)
class _InFragments(OuterRule):
    """A rule whose fragments take turns: each is sent and merged at moments of its own."""

    published_fragments: ClassVar[int | None] = None  # the usual number; None: the model decides

    fragments: int | None = None
    delay_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fragments is None and self.published_fragments is not None:
            usual = 1 if self._is_uneven else min(self.published_fragments, self.first_tau)
            object.__setattr__(self, "fragments", usual)
        if self.fragments is None and self.delay_steps is not None:
            object.__setattr__(self, "fragments", 1)
        if self.fragments is None:
            return
        tau = self.first_tau
        hint = f"use at most tau={tau}, or a larger tau"
        require_whole("fragments", self.fragments, most=tau, hint=hint)
        if self._is_uneven and self.fragments > 1:
            message = "with balance=True ranks are at different steps, and fragments cannot be sent"
            raise ConfigurationError(message, hint="use fragments=1, or balance=False")
        if self.delay_steps is not None:
            if self.auto_tau is not None:
                message = f'tau="auto" chooses the delay too; got delay_steps={self.delay_steps}'
                raise ConfigurationError(message, hint="leave it out, or give tau as a number")
            require_whole("delay_steps", self.delay_steps, most=tau, hint=hint)
        elif self.fragments > 1:
            object.__setattr__(self, "delay_steps", tau // self.fragments)
        if self.delay_steps == tau:  # a whole round, which the boundary at its end merges
            object.__setattr__(self, "delay_steps", None)

    @property
    def first_tau(self) -> int:
        """Local steps of the first round: with tau="auto" the same for each fragment's delay."""
        if isinstance(self.tau, AutoTau) and self.fragments:
            return self.fragments * max(1, self.tau.initial // self.fragments)
        return super().first_tau

    @property
    def num_fragments(self) -> int:
        """Parts of the model that are synchronised at moments of their own."""
        return self.fragments or 1

    def for_model(self, most_fragments: int) -> Self:
        """Return the rule with up to so many fragments, which fill a given tau."""
        if self.fragments is not None:
            return self
        if self.auto_tau is None:
            number = filling_fragments(super().first_tau, most=most_fragments)
            return replace(self, fragments=number)
        most = 1 if self._is_uneven else min(most_fragments, super().first_tau)
        return replace(self, fragments=most)  # of which tau="auto" sends some together


@dataclass(frozen=True, kw_only=True)
class CO2(_InFragments):
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

    With ``fragments`` F or ``delay_steps`` d < tau the mean arrives d local steps after its launch.
    A fragment f has an anchor, momentum, clip and gap of its own; each worker goes on from x^f at
    the launch, and at the merge, with w the sum of its local steps since, from the new x^f and w:

        x^f <- x^f - alpha * m^f;    z^f <- x^f + w

    so that w is in the next pseudo-gradient, and each step is applied exactly once. d of the tau
    steps of a round were done before the anchor moved, so the gap counts d / tau of the movement;
    with d = tau all of this is the published rule. With r = d / tau the stability limit becomes

        alpha / L < min((1 - beta) / (r (1 - r)^((1 - r) / r)), 2 (1 + beta))

    which is wide: at r = 1/8 an alpha of 1 is stable up to beta = 0.95.

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
    """

    name: ClassVar[str] = "CO2"
    hides_rounds: ClassVar[bool] = True

    outer_lr: float = 0.7
    outer_momentum: float = 0.2
    clip: float | None = 1.0
    staleness: StalenessPenalty | str = "gap"
    fragments: int | None = 1


@dataclass(frozen=True, kw_only=True)
class DelayCorrected(_InFragments):
    """Hidden averaging that keeps local work: when a mean arrives, add what it changes.

    Every tau steps each worker i sends its parameters y_i; when their mean arrives, ``delay_steps``
    later, the worker adds the difference to what it has by then:

        z_i <- z_i + (mean_j(y_j) - y_i)

    Work done during the all-reduce is kept at once instead of being replaced; the mean of the
    workers moves as in Local SGD whose workers see each other a little late. Replicas differ at
    all times until ``finalize``; the anchor is the last mean that arrived.

    The delay is what costs quality. With ``fragments`` F the model is cut into F parts of about
    equal bytes, part f is sent at step (f + 1) tau / F of each round and merged tau // F steps
    later: the same bytes over the same time, and parameters that are F times fresher. The price is
    F times the number of messages, and an all-reduce must fit behind tau // F steps, each time.

    Args:
        tau: Local steps per round: between two launches of one fragment.
        fragments: Number of parts, at most tau; 1 sends the whole model at once. None for up to 8,
            as many as leave little of a round in which nothing is on its way (tau=12: 6 parts,
            2 steps late each), and 1 where workers come and go; with tau="auto", which measures
            the link, each at least 1 MiB.
        delay_steps: Local steps between launch and merge, 1 to tau; None for tau // fragments.

    Raises:
        ConfigurationError: A value is outside its range, or another setting is given.

    References:
        CoCoD-SGD, arXiv 1906.12043; LOSCAR-SGD, arXiv 2605.20866. Fragments in turn: Streaming
        DiLoCo, arXiv 2501.18512.

    Examples:
        >>> DelayCorrected(tau=8, fragments=4).delay_steps
        2
    """

    merge: ClassVar[MergeKind] = "correct"
    name: ClassVar[str] = "delay-corrected"
    hides_rounds: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ()


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

    merge: ClassVar[MergeKind] = "pull"
    name: ClassVar[str] = "Overlap-Local-SGD"
    hides_rounds: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("outer_momentum",)

    outer_momentum: float = 0.7
    pull: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "0.6 is the paper's; use CO2 to replace the local work, DelayCorrected to keep it"
        _require_share("pull", self.pull, hint=hint)

    @property
    def local_share(self) -> float:
        """Return what remains of the local parameters."""
        return 1.0 - self.pull


@dataclass(frozen=True, kw_only=True)
class EagerDiLoCo(OuterRule):
    """Eager updates: the others' work arrives one round late, one's own counts at once.

    DiLoCo whose all-reduce runs behind the next round. At the end of round t every worker i takes
    the outer step not with the stale mean D_{t-1} but with its own stale part replaced by its
    fresh one:

        D'_{i,t} = D_{t-1} + (d_{i,t} - d_{i,t-1}) / G

    The engine keeps two parts of the same sum, since the outer step is linear: the anchor x and its
    momentum m, driven by D_{t-1} and equal on all workers, and the worker's own offset u and
    momentum v, driven by the correction, which never piles up because it telescopes:

        m_t = beta * m_{t-1} + D_{t-1};              x_t = x_{t-1} - alpha * (beta * m_t + D_{t-1})
        c_t = (d_{i,t} - d_{i,t-1}) / G
        v_t = beta * v_{t-1} + c_t;                  u_t = u_{t-1} - alpha * (beta * v_t + c_t)
        z <- x_t + u_t

    ``finalize`` drops u and v, and all workers end at x. Costs 12 bytes more per parameter than CO2
    (v, the start of the round and the sent part). Choose it for DiLoCo's settings where the wait
    must be hidden.

    Args:
        tau: Local steps per round.
        outer_lr: alpha; delay asks for less than DiLoCo's 0.7, since a high momentum on late
            pseudo-gradients is unstable (see ``CO2``).
        outer_momentum: beta.

    Raises:
        ConfigurationError: A value is outside its range.

    References:
        Kale, Douillard and Donchev, arXiv 2502.12996, section on eager updates.
    """

    merge: ClassVar[MergeKind] = "eager"
    name: ClassVar[str] = "eager DiLoCo"
    hides_rounds: ClassVar[bool] = True
    nesterov: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("outer_lr", "outer_momentum")  # the rest is not linear

    outer_lr: float = 0.5
    outer_momentum: float = 0.3


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(_InFragments):
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

    nesterov: ClassVar[bool] = True
    momentum_by_rounds: ClassVar[bool] = True
    merge: ClassVar[MergeKind] = "pull"
    name: ClassVar[str] = "Streaming DiLoCo"
    hides_rounds: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("outer_lr", "outer_momentum")
    published_fragments: ClassVar[int | None] = 4

    outer_lr: float = 0.7
    outer_momentum: float = None  # type: ignore[assignment]  # chosen in __post_init__
    keep: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_share("keep", self.keep, hint="0.5 is the paper's; CO2 replaces the local work")

    @property
    def local_share(self) -> float:
        """Return what remains of the local parameters."""
        return self.keep


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
    """

    name: ClassVar[str] = "Local SGD"
    takes: ClassVar[tuple[str, ...]] = ()
    for_others: ClassVar[str] = "use SlowMo for an outer learning rate"


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
        outer_momentum: beta; None for 0.9, the paper's, from 50 steps per round on, and 0.5 below.

    Raises:
        ConfigurationError: A value is outside its range.

    References:
        Douillard et al., arXiv 2311.08105, Algorithm 1.
    """

    nesterov: ClassVar[bool] = True
    momentum_by_rounds: ClassVar[bool] = True
    name: ClassVar[str] = "DiLoCo"
    takes: ClassVar[tuple[str, ...]] = ("outer_lr", "outer_momentum")
    for_others: ClassVar[str] = "use SlowMo for a clip or units of lr"

    outer_lr: float = 0.7
    outer_momentum: float = None  # type: ignore[assignment]  # chosen in __post_init__
