"""What the engine must know of the optimizers that a user brings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim._shards import local_tensor

# States that are 0 (or this number) before the first step, and what they are of: moments of
# gradients, and counters.
_BEFORE_THE_FIRST_STEP = dict.fromkeys(
    (
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf"),
        *("square_avg", "grad_avg", "acc_delta", "sum", "row_var", "col_var", "variance"),
    ),
    0.0,
) | {"mu_product": 1.0}


def as_optimizers(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the inner optimizers as a tuple; refuse what is none."""
    several = tuple(given) if isinstance(given, Sequence) else (given,)
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            message = f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}"
            raise ConfigurationError(message, hint="pass one, or a list of them")
    if not several:
        message = "optimizer is an empty list"
        raise ConfigurationError(message, hint="pass the optimizers that train the model")
    return several


@torch.no_grad()
def forget_steps(
    optimizer: torch.optim.Optimizer, *, makes_state_late: bool, keeps_count: bool
) -> None:
    """Set an optimizer's state to what it is before the first step.

    Args:
        optimizer: The optimizer.
        makes_state_late: Whether its first step makes the state, so that it can be thrown away.
        keeps_count: Whether the numbers of steps stay: where averages take the moments' place.
    """
    for parameter, entries in list(optimizer.state.items()):
        if makes_state_late and not _BEFORE_THE_FIRST_STEP.keys() >= entries.keys():
            del optimizer.state[parameter]
            continue
        for key, value in entries.items():
            if key == "step" and keeps_count:
                continue
            start = _BEFORE_THE_FIRST_STEP.get(key, 0.0)
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                local_tensor(value).fill_(start)
            elif isinstance(value, (int, float)) and key in _BEFORE_THE_FIRST_STEP:
                entries[key] = type(value)(start)


@torch.no_grad()
def forget_nonsense(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Set to 0 what is not finite in the optimizers' states."""
    states = (entries for optimizer in optimizers for entries in optimizer.state.values())
    for value in (value for entries in states for value in entries.values()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            local_tensor(value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
