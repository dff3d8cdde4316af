"""A plan as a table that a person reads before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.gnn.planning._plan import Plan

__all__ = ["explain"]


def explain(plan: Plan) -> str:
    """The plan as text."""
    return plan.to_json()
