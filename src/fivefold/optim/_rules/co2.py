"""The published method of hidden rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fivefold.optim._rules.fragments import InFragments
from fivefold.optim.penalties import StalenessPenalty


@dataclass(frozen=True, kw_only=True)
class CO2(InFragments):
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

    key: ClassVar[str] = "co2"
    name: ClassVar[str] = "CO2"
    colour: ClassVar[str] = "#1f83c8"
    listed: ClassVar[int] = 40
    hides_rounds: ClassVar[bool] = True
    least_tau: ClassVar[int] = 4  # below it learns worse, which the guide has figures for

    outer_lr: float = 0.7
    outer_momentum: float = 0.2
    clip: float | None = 1.0
    staleness: StalenessPenalty | str = "gap"
    fragments: int | None = 1
