"""Any optimizer of torch on the pseudo-gradients."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fivefold.errors import ConfigurationError, require_one_of
from fivefold.optim._rules.base import OuterRule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer(OuterRule):
    """Any ``torch.optim`` optimizer on the pseudo-gradients, exposed or hidden.

    At a boundary the optimizer takes one step on the anchor with the mean pseudo-gradient as the
    gradient, and every worker goes on from the anchor. ``SGD(lr=1)`` is Local SGD,
    ``SGD(lr=0.7, momentum=0.9, nesterov=True)`` is DiLoCo; with ``hidden=True`` the pseudo-gradient
    is that of the round before and the all-reduce runs behind compute, as in CO2. The optimizer's
    state is part of the checkpoint. Choose it for adaptive outer steps (FedAdam and its family).

    Every rank takes the step for itself. With an elementwise optimizer on a CPU (each product and
    sum is then rounded by itself) all reach the same bits whatever their processors; one that sums
    over elements or multiplies matrices (Adafactor, Muon) needs ranks with equal processors, and
    the replica check ends the run where they are not.

    Args:
        tau: Local steps per round.
        optimizer: A class of ``torch.optim``, or one with the same constructor.
        options: Its keyword arguments.
        hidden: Whether the all-reduce runs behind the next round.

    Raises:
        ConfigurationError: A value is outside its range, or the optimizer refuses its options.

    References:
        Reddi et al., FedOpt, arXiv 2003.00295, which calls it the server optimizer.

    Examples:
        >>> import torch
        >>> OuterOptimizer(tau=8, optimizer=torch.optim.AdamW, options={"lr": 1e-3}).delayed
        False
    """

    key: ClassVar[str] = "outer_optimizer"
    name: ClassVar[str] = "outer optimizer"
    listed: ClassVar[int] = 90
    merge: ClassVar[str] = "hand over"
    takes: ClassVar[tuple[str, ...]] = ()
    for_others: ClassVar[str] = "put the learning rate and momentum into options"

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    hidden: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._probe(2)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            message = f"optimizer={self.optimizer!r} refuses options={self.options!r}: {error}"
            hint = "give a class of torch.optim and its keyword arguments"
            raise ConfigurationError(message, hint=hint) from error

    @property
    def delayed(self) -> bool:
        """Return whether the all-reduce runs behind the next round."""
        return self.hidden

    def _probe(self, size: int) -> dict[str, Any]:
        """Return the state of a square parameter after one step."""
        import torch  # noqa: PLC0415 - a configuration is checked without it

        probe = torch.nn.Parameter(torch.zeros(size, size))
        probe.grad = torch.zeros(size, size)
        optimizer = self.optimizer([probe], **self.options)
        optimizer.step()
        return dict(optimizer.state[probe])

    def buffers(self, *, may_lose: bool = False) -> tuple[str, ...]:
        """Return the gradient, and where it may be lost, what was sent."""
        return ("sent", "gradient") if may_lose else ("gradient",)

    @property
    def numbers_per_parameter(self) -> float:
        """Return the numbers that each parameter costs, those of the optimizer's state too."""
        size = 64  # what is kept by row and column, or once, does not count
        states = self._probe(size).values()
        numbers: int = sum(state.numel() for state in states if hasattr(state, "numel"))
        return super().numbers_per_parameter + numbers // size**2

    @classmethod
    def settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings with their defaults: of SGD the steps that learn best."""
        options = None
        if "optimizer" not in given:  # DiLoCo's step; hidden, the best of our tuning
            hidden = given.get("hidden") is True
            options = {"lr": 0.5} if hidden else {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        return super().settings(given) | {"optimizer": "SGD", "options": options}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Return the rule with the optimizer of torch.optim that a configuration names."""
        kind = _torch_optimizer(settings["optimizer"])
        taken = [name for name in inspect.signature(kind).parameters if name != "params"]
        for name in settings.get("options", {}):
            message = f"sync.options.{name} is not an argument of torch.optim.{kind.__name__}"
            require_one_of(name, taken, message)
        return super().from_settings({**settings, "optimizer": kind})

    @classmethod
    def label(cls, settings: Mapping[str, Any]) -> str:
        """Return the name for people."""
        hidden = "hidden " if settings.get("hidden") else ""
        return f"{hidden}outer {settings['optimizer']}"


def _torch_optimizer(name: str) -> type[torch.optim.Optimizer]:
    import torch  # noqa: PLC0415 - a configuration is checked without it

    optimizers = {
        key: kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    del optimizers["Optimizer"]  # the base class
    if name not in optimizers:
        same = [key for key in optimizers if key.lower() == name.lower()]
        close = same or difflib.get_close_matches(name, optimizers, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        hint = f"{meant}torch.optim has {', '.join(sorted(optimizers))}"
        message = f"sync.optimizer {name!r} is not an optimizer of torch.optim"
        raise ConfigurationError(message, hint=hint)
    return optimizers[name]
