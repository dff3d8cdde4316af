"""The plain mean of the parameters, waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fivefold.optim._rules.base import OuterRule


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

    key: ClassVar[str] = "local_sgd"
    name: ClassVar[str] = "Local SGD"
    colour: ClassVar[str] = "#b45fa0"
    listed: ClassVar[int] = 10
    takes: ClassVar[tuple[str, ...]] = ()
    for_others: ClassVar[str] = "use SlowMo for an outer learning rate"
