"""DiLoCo with one's own work at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fivefold.optim._rules.base import OuterRule


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

    key: ClassVar[str] = "eager_diloco"
    name: ClassVar[str] = "eager DiLoCo"
    colour: ClassVar[str] = "#4a9fb5"
    listed: ClassVar[int] = 70
    merge: ClassVar[str] = "eager"
    hides_rounds: ClassVar[bool] = True
    bears_losses: ClassVar[bool] = False
    nesterov: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("outer_lr", "outer_momentum")  # the rest is not linear

    outer_lr: float = 0.5
    outer_momentum: float = 0.3

    def buffers(self, *, may_lose: bool = False) -> tuple[str, ...]:
        """Return what was sent, where the round began, and the worker's own momentum."""
        own = ("own_momentum",) if self.outer_momentum > 0 else ()
        return (*super().buffers(may_lose=may_lose), "sent", "start", *own)
