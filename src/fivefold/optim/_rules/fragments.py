"""What rules have in common whose parts of the model take turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from fivefold.errors import ConfigurationError, require_whole
from fivefold.optim._round_choice import filling_fragments
from fivefold.optim._rules.base import OuterRule
from fivefold.optim.auto_tau import AutoTau


@dataclass(frozen=True, kw_only=True)
class InFragments(OuterRule):
    """A rule whose fragments take turns: each is sent and merged at moments of its own."""

    takes_turns: ClassVar[bool] = True
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
