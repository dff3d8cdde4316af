"""DDP one step late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fivefold.errors import ConfigurationError, require_whole
from fivefold.optim._rules.base import OuterRule, require_positive
from fivefold.optim.penalties import is_number


@dataclass(frozen=True, kw_only=True)
class DelayedGradients(OuterRule):
    """DDP one step late: every rank takes the mean gradient of the step before.

    With g_i the gradient of worker i at the common parameters x:

        optimizer steps with  G_{t-1} = mean_i g_{i,t-1};   u_t = what that step adds to x
        x_{t+1} = x_t + u_t + e_t (u_t - u_{t-1});          e_t = extrapolation * min(1, t / ramp)

    and g_{i,t} is sent, to arrive behind step t + 1. Nothing is waited for while T_allreduce <=
    T_step. Replicas and the optimizer's state are equal at all times, so evaluation and checkpoints
    are those of DDP. It sends as much as DDP, at every step: choose it where one step is long
    enough to hide an all-reduce (with a codec if need be), and no local steps are wanted. The delay
    of one step costs AdamW more than Muon; see "Which rule when".

    The swap happens when ``optimizer.step()`` is called, so clip with ``max_norm`` here: what a
    loop clips before is each worker's own gradient. The first step has no gradient yet and changes
    nothing. A parameter without a gradient counts as one whose gradient is 0. Every rank takes the
    optimizer's step for itself, as with DDP: ranks of unequal processors drift apart.

    Args:
        max_norm: Bound of the norm of the mean gradient, over all parameters; None for no bound.
        extrapolation: How far an update is carried on by its own last change, from 0 (not at all)
            to 1, which cancels the delay of an update that changes evenly.
        ramp_steps: Steps over which the extrapolation comes in.
        tau: Always 1; accumulate gradients for fewer messages.

    Raises:
        ConfigurationError: A value is outside its range.

    References:
        Pipe-SGD, arXiv 1811.03619; arXiv 2606.30634.
    """

    key: ClassVar[str] = "delayed_gradients"
    name: ClassVar[str] = "delayed gradients"
    colour: ClassVar[str] = "#7a9a3c"
    listed: ClassVar[int] = 100
    merge: ClassVar[str] = "gradients"
    sends_gradients: ClassVar[bool] = True
    bears_losses: ClassVar[bool] = False
    hides_rounds: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ()
    for_others: ClassVar[str] = "the inner optimizer has the learning rate and the momentum"

    tau: int = 1
    max_norm: float | None = None
    extrapolation: float = 0.0
    ramp_steps: int = 20

    def __post_init__(self) -> None:
        if self.tau != 1:
            message = f"DelayedGradients sends the gradient of every step; got tau={self.tau!r}"
            hint = "accumulate gradients over several batches, or use DelayCorrected"
            raise ConfigurationError(message, hint=hint)
        super().__post_init__()
        if self.synchronous_start or self.synchronous_end:
            message = "DelayedGradients has no local steps that could be synchronous"
            raise ConfigurationError(message, hint="use DDP for the first or last steps")
        if self.max_norm is not None:
            require_positive("max_norm", self.max_norm)
        if not (is_number(self.extrapolation) and 0 <= self.extrapolation <= 1):
            message = f"extrapolation must be from 0 to 1; got {self.extrapolation!r}"
            raise ConfigurationError(message, hint="0 for none, 1 for the whole last change")
        require_whole("ramp_steps", self.ramp_steps, hint="1 for no ramp")

    @property
    def carries_rest(self) -> bool:
        """Return whether it writes what is not its anchor: where it extrapolates."""
        return self.extrapolation > 0

    def buffers(self, *, may_lose: bool = False) -> tuple[str, ...]:
        """Return the last update, where it extrapolates."""
        del may_lose
        return ("momentum",) if self.extrapolation > 0 else ()
