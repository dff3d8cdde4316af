"""Plans as columns, one array entry each, and their conversion to and from single plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from fivefold.errors import ConfigurationError
from fivefold.strategy._plan import (
    DTYPES,
    Order,
    Overlap,
    ParallelPlan,
    PipelineSchedule,
    Recompute,
)

Column = npt.NDArray[np.int64]
_WORDS: Mapping[str, tuple[Any, ...]] = {
    "schedule": get_args(PipelineSchedule),
    "recompute": get_args(Recompute),
    "tensor_overlap": get_args(Overlap),
    "order": get_args(Order),
    "dtype": DTYPES,
}
_FLAGS = {
    "sequence_parallel", "regather", "data_overlap", "pipeline_overlap", "offload_weights",
    "offload_activations", "offload_optimizer", "embedding_layers",
}  # fmt: skip
_NAMES = tuple(field.name for field in dataclasses.fields(ParallelPlan))


@dataclass(frozen=True)
class PlanTable:
    """Many plans, as one integer column per setting.

    Words are stored as their number; a shard of None as 0.

    Args:
        columns: An array of equal length for every field of ``ParallelPlan``.

    Raises:
        ConfigurationError: A column is missing or of another length.

    Examples:
        >>> table = PlanTable.of([ParallelPlan(global_batch=8, tensor=2)])
        >>> len(table), table.plan(0).tensor
        (1, 2)
    """

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        lengths = {len(column) for column in self.columns.values()}
        if set(self.columns) != set(_NAMES) or len(lengths) > 1:
            message = f"a plan table has {sorted(self.columns)} of lengths {sorted(lengths)}"
            raise ConfigurationError(message, hint="give one column per field, of equal length")

    def __len__(self) -> int:
        return len(self.columns["global_batch"])

    def __getattr__(self, name: str) -> Column:
        if name.startswith("_") or name not in _NAMES:
            raise AttributeError(name)
        return self.columns[name]

    @classmethod
    def of(cls, plans: Iterable[ParallelPlan]) -> PlanTable:
        """Return a table of the given plans."""
        listed = list(plans)
        return cls(
            {
                name: np.array([encode(name, getattr(plan, name)) for plan in listed], np.int64)
                for name in _NAMES
            }
        )

    def take(self, chosen: npt.NDArray[Any]) -> PlanTable:
        """Return the plans of a mask or of row numbers."""
        return PlanTable({name: column[chosen] for name, column in self.columns.items()})

    def plan(self, row: int) -> ParallelPlan:
        """One plan.

        Raises:
            ConfigurationError: The row contradicts itself.
        """
        return ParallelPlan(**{name: decode(name, int(self.columns[name][row])) for name in _NAMES})

    def is_word(self, name: str, *words: str) -> npt.NDArray[np.bool_]:
        """Return which rows have one of the words in a column."""
        numbers = [encode(name, word) for word in words]
        return np.isin(self.columns[name], numbers)

    def words(self, name: str) -> list[str]:
        """Return which words occur in a column."""
        return [_WORDS[name][number] for number in np.unique(self.columns[name])]


def encode(name: str, value: Any) -> int:
    """Return the number that stands for a setting."""
    if name in _WORDS:
        if value not in _WORDS[name]:
            message = f"{name}={value!r} is unknown"
            raise ConfigurationError(message, hint=f"use one of {', '.join(_WORDS[name])}")
        return int(_WORDS[name].index(value))
    return 0 if value is None else int(value)


def decode(name: str, number: int) -> Any:
    """Return the setting that a number stands for."""
    if name in _WORDS:
        return _WORDS[name][number]
    if name in _FLAGS:
        return bool(number)
    if name == "shard":
        return number or None
    return number
