"""The one door to OR-Tools' CP-SAT: parameters, deadlines, statuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fivefold.collectives.synthesis._deadline import time_left_s
from fivefold.errors import UnsupportedError

_WORKERS = 2
Status = Literal["optimal", "found", "infeasible", "unknown"]


@dataclass(frozen=True)
class CpOutcome:
    """What the solver said."""

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
    try:
        from ortools.sat.python import cp_model  # noqa: PLC0415 - heavy, and optional
    except ImportError as error:  # pragma: no cover - the development environment has it
        message = "ortools is not installed, and the exact searches use its CP-SAT solver"
        raise UnsupportedError(message, hint="pip install 'fivefold[collectives]'") from error
    return cp_model


def new_model() -> Any:
    """Return an empty CP-SAT model."""
    return _cp_model().CpModel()


def solve(
    model: Any,
    *,
    time_limit_s: float,
    seed: int = 0,
    gap: float = 0.0,
    progress: Callable[[float, float, float], None] | None = None,
) -> CpOutcome:
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
    callback = _callback(cp_model, progress) if progress is not None else None
    code = solver.solve(model, callback) if callback is not None else solver.solve(model)
    names: dict[int, Status] = {
        cp_model.OPTIMAL: "optimal",
        cp_model.FEASIBLE: "found",
        cp_model.INFEASIBLE: "infeasible",
    }
    status = names.get(code, "unknown")
    bound = float(solver.best_objective_bound) if status in {"optimal", "found"} else 0.0
    return CpOutcome(status, solver, bound, time.perf_counter() - started_s)


def _callback(cp_model: Any, progress: Callable[[float, float, float], None]) -> Any:
    class Report(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            progress(self.wall_time, self.objective_value, self.best_objective_bound)

    return Report()
