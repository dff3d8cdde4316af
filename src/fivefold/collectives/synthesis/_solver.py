"""Time limits of the searches: loops that may take long ask here whether there is time left.

A limit holds for everything that runs inside it, however deep, and an inner one never extends an
outer one. What runs in compiled code or in a solver gets the time that is left as its own limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from fivefold._compiler import compiled_s
from fivefold.errors import InfeasibleError, optional_module

SLACK_S = 2.0
"""Seconds past its limit in which a method may complete a first schedule, where it has none."""

_LIMIT: ContextVar[tuple[float, float]] = ContextVar("limit", default=(math.inf, math.inf))
"""When the time is over, by ``clock_s``, and how long it was."""


class OutOfTime(InfeasibleError):  # noqa: N818 - what happened, not whose fault it is
    """The time was over before there was a schedule."""


@contextmanager
def time_limit(limit_s: float | None, *, slack_s: float = 0.0) -> Iterator[None]:
    """Let ``check_time`` raise, within this context, once the time and the slack are over."""
    outer = _LIMIT.get()
    own = math.inf if limit_s is None else limit_s
    token = _LIMIT.set(min(outer, (clock_s() + own + slack_s, own)))
    try:
        yield
    finally:
        _LIMIT.reset(token)


def clock_s() -> float:
    """Return the time by the clock of all limits, which stands still while loops are compiled."""
    return time.perf_counter() - compiled_s()


def time_left_s() -> float:
    """Return the seconds until the time is over, negative afterwards, infinite without a limit."""
    return _LIMIT.get()[0] - clock_s()


def check_time() -> None:
    """Do nothing while there is time."""
    ends_s, limit_s = _LIMIT.get()
    if clock_s() > ends_s:
        within = f"within {limit_s:.3g} s" if limit_s >= 0 else "before the time limit"
        raise OutOfTime(
            f"no schedule was found {within}",
            hint="allow more time, fewer chunks, or ask for method='library' or 'matching'",
        )


_WORKERS = 2
Status = Literal["optimal", "found", "infeasible", "unknown"]


@dataclass(frozen=True)
class CpOutcome:
    """Result of the solver."""

    status: Status
    solver: Any
    bound: float
    solver_s: float

    @property
    def found(self) -> bool:
        """Return whether there is a solution to read."""
        return self.status in {"optimal", "found"}

    def value(self, variable: Any) -> int:
        """Return the value of a variable in the solution."""
        return int(self.solver.value(variable))


def _cp_model() -> Any:
    name = "ortools.sat.python.cp_model"
    return optional_module(name, extra="collectives", use="the solver of exact searches")


def new_model() -> Any:
    """Return an empty CP-SAT model."""
    return _cp_model().CpModel()


def solve(model: Any, *, time_limit_s: float, seed: int = 0, gap: float = 0.0) -> CpOutcome:
    """Run CP-SAT on a model."""
    cp_model = _cp_model()
    solver = cp_model.CpSolver()
    time_limit_s = min(time_limit_s, time_left_s())
    if time_limit_s <= 0:
        return CpOutcome("unknown", solver, 0.0, 0.0)
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = _WORKERS
    # Its own handler of Ctrl-C would not give Python its own back: the next one would kill us.
    solver.parameters.catch_sigint_signal = False
    solver.parameters.random_seed = seed
    solver.parameters.relative_gap_limit = gap
    started_s = time.perf_counter()
    code = solver.solve(model)
    names: dict[int, Status] = {
        cp_model.OPTIMAL: "optimal",
        cp_model.FEASIBLE: "found",
        cp_model.INFEASIBLE: "infeasible",
    }
    status = names.get(code, "unknown")
    bound = float(solver.best_objective_bound) if status in {"optimal", "found"} else 0.0
    return CpOutcome(status, solver, bound, time.perf_counter() - started_s)
