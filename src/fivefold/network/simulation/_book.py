"""What each link carried, and the record of rates: compiled bookkeeping beside the events."""

from __future__ import annotations

from typing import Any

from fivefold._compiler import njit
from fivefold.network.simulation._records import LOGGED, World

# Columns of World.book.
FLOWS, BUSY_SINCE_S, BUSY_S, DEMAND, OVER_SINCE_S, OVER_S, CARRIED_BYTES = range(7)
BOOK_COLUMNS = 7
_OVER = 1e-9  # demand above capacity by less is rounding


@njit
def carry(world: World, task: int, size_bytes: float) -> None:
    """Count bytes on every link of a flow's route."""
    for at in range(world.tasks[task].first_use, world.tasks[task + 1].first_use):
        use = world.uses[at]
        world.book[use.link, CARRIED_BYTES] += size_bytes * use.amount


@njit
def enter_links(world: World, task: int, now_s: float) -> None:
    """A flow gets under way."""
    alone = world.tasks[task].alone
    for at in range(world.tasks[task].first_use, world.tasks[task + 1].first_use):
        use = world.uses[at]
        row = world.book[use.link]
        row[FLOWS] += 1
        if row[FLOWS] == 1:
            row[BUSY_SINCE_S] = now_s
        row[DEMAND] += alone * use.amount
        over = row[DEMAND] > world.loads.links[use.link].capacity * (1.0 + _OVER)
        if over and row[OVER_SINCE_S] < 0.0:
            row[OVER_SINCE_S] = now_s


@njit
def exit_links(world: World, task: int, now_s: float) -> None:
    """A flow has sent its last byte."""
    alone = world.tasks[task].alone
    for at in range(world.tasks[task].first_use, world.tasks[task + 1].first_use):
        use = world.uses[at]
        row = world.book[use.link]
        row[FLOWS] -= 1
        row[DEMAND] -= alone * use.amount
        if row[FLOWS] == 0:
            row[BUSY_S] += now_s - row[BUSY_SINCE_S]
            row[DEMAND] = 0.0
        over = row[DEMAND] > world.loads.links[use.link].capacity * (1.0 + _OVER)
        if not over and row[OVER_SINCE_S] >= 0.0:
            row[OVER_S] += now_s - row[OVER_SINCE_S]
            row[OVER_SINCE_S] = -1.0


@njit
def log_level(world: World, bundle: int, now_s: float) -> None:
    """Record a change of level, where there is a log."""
    if world.log.size > 0:
        entry = world.log[world.loads.counts[LOGGED]]
        entry.time_s = now_s
        entry.bundle = bundle
        entry.level = world.loads.bundles[bundle].level
        world.loads.counts[LOGGED] += 1


@njit
def close_books(world: World, now_s: float, moved_bytes: Any) -> None:
    """Count what is still under way when a simulation stops early, up to ``now_s``.

    Args:
        world: The state.
        now_s: When it stopped.
        moved_bytes: Bytes that each flow under way has sent so far; float64 [tasks], filled here.
    """
    for number in range(world.loads.bundles.size - 1):
        bundle = world.loads.bundles[number]
        virtual = bundle.virtual + bundle.level * (now_s - bundle.updated_s)
        for place in range(bundle.first_member, bundle.first_member + bundle.members):
            task = world.loads.heaps[place].id
            left = max(0.0, world.loads.heaps[place].key - virtual) * world.tasks[task].weight
            moved_bytes[task] = world.tasks[task].size - left
            carry(world, task, moved_bytes[task])
    for link in range(world.book.shape[0]):
        row = world.book[link]
        if row[FLOWS] > 0:
            row[BUSY_S] += now_s - row[BUSY_SINCE_S]
        if row[OVER_SINCE_S] >= 0.0:
            row[OVER_S] += now_s - row[OVER_SINCE_S]
