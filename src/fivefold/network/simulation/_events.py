"""The event loop: releases, rates, ends, slots, processors and repeated iterations, compiled.

A bundle advances by virtual time, the integral of its level: a member of weight w that joins at
virtual time V with n bytes is through at V + n / w, whatever the level does meanwhile. So a change
of level touches one number a bundle, and each has one pending event. All events of one time come
before rates are solved again; ends only put tasks into the queue, so nothing recurses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold._compiler import njit
from fivefold.network.simulation._state import (
    ASKED,
    EVENTS,
    IN_LINE,
    JOINS,
    LINE,
    LOGGED,
    PENDING,
    REFUSALS,
    REGION,
    SCANS,
    TICKETS,
    WAITS,
    World,
    pop_pair,
    push_pair,
    remove_event,
    schedule_event,
)
from fivefold.network.simulation.rates import change_bundle, join_entry, leave_entry, resolve

# Columns of World.book.
FLOWS, BUSY_SINCE_S, BUSY_S, DEMAND, OVER_SINCE_S, OVER_S, CARRIED_BYTES = range(7)
BOOK_COLUMNS = 7
_OVER = 1e-9  # demand above capacity by less is rounding
# States of a task.
WAITING, SCHEDULED, QUEUED, RUNNING, ENDING, ENDED, SKIPPED = 0, 1, 2, 3, 4, 5, 6
# What ended the loop.
FINISHED, STOPPED, LOG_FULL = 0, 1, 2
# Events this close, relative to the time, are one: rounding must not split what is simultaneous.
_SAME = 1e-12
_LOOSE = 0.5  # of the tolerance: how late, relative to the time, an end may change rates
_QUEUE_CLASS = 2.0**40  # tickets of one priority stay below those of the next
_JOINED = 1  # bundles change before the solver's rounds begin


@njit
def carry(world: World, task: int, size_bytes: float) -> None:
    """Count bytes on every link of a flow's route."""
    for at in range(world.tasks[task].first_use, world.tasks[task + 1].first_use):
        use = world.uses[at]
        world.book[use.link, CARRIED_BYTES] += size_bytes * use.amount


@njit
def count_on_links(world: World, task: int, change: int, now_s: float) -> None:
    """Count a flow that gets under way on its links, or (-1) has sent its last byte."""
    alone = world.tasks[task].alone
    for at in range(world.tasks[task].first_use, world.tasks[task + 1].first_use):
        use = world.uses[at]
        row = world.book[use.link]
        row[FLOWS] += change
        row[DEMAND] += change * alone * use.amount
        if row[FLOWS] == 0:
            row[BUSY_S] += now_s - row[BUSY_SINCE_S]
            row[DEMAND] = 0.0
        elif row[FLOWS] == 1 and change == 1:
            row[BUSY_SINCE_S] = now_s
        over = row[DEMAND] > world.loads.links[use.link].capacity * (1.0 + _OVER)
        if over and row[OVER_SINCE_S] < 0.0:
            row[OVER_SINCE_S] = now_s
        elif not over and row[OVER_SINCE_S] >= 0.0:
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
    """Count what is still under way when a simulation stops early, up to ``now_s``."""
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


@njit
def release_roots(world: World) -> None:
    """Put every task that waits for none into the queue."""
    for task in range(world.tasks.size - 1):
        if world.tasks[task].needs == 0:
            _release(world, task, 0.0)


@njit
def run(world: World, until_s: float) -> int:
    """Process events up to a time; may be called again after the log was emptied."""
    events, counts = world.events, world.loads.counts
    num_tasks = world.tasks.size - 1
    room = world.log.size - 2 * world.loads.bundles.size
    while counts[PENDING] > 0:
        first_s = events[events[0].order].time_s
        if first_s > until_s:
            return STOPPED
        if world.log.size > 0 and counts[LOGGED] > room:
            return LOG_FULL
        limit_s = min(until_s, first_s * (1.0 + _SAME))
        # Ends may wait a little for their effect on rates, where that is allowed; starts may not.
        loose_s = min(until_s, first_s * (1.0 + max(_SAME, _LOOSE * world.loads.tolerance)))
        joins, now_s = counts[JOINS], first_s
        while counts[PENDING] > 0:
            due_s = events[events[0].order].time_s
            if due_s > limit_s and (due_s > loose_s or counts[JOINS] != joins):
                break
            slot = events[0].order
            now_s = due_s
            remove_event(events, counts, slot)
            counts[EVENTS] += 1
            if slot >= num_tasks:
                _end_members(world, slot - num_tasks, now_s)
            elif world.tasks[slot].state == SCHEDULED:
                _begin(world, slot, now_s)
            else:
                _finish(world, slot, now_s)
        _serve_processors(world, now_s)
        _settle(world, now_s)
    return FINISHED


@njit
def _settle(world: World, now_s: float) -> None:
    """Solve rates, and move the events of the bundles whose rate or members changed."""
    loads, num_tasks = world.loads, world.tasks.size - 1
    resolve(loads)
    for at in range(loads.counts[REGION]):
        number = loads.lists[REGION, at]
        bundle = loads.bundles[number]
        bundle.inside = 0
        if bundle.level != bundle.before:
            bring_up_to_date(world, number, now_s, bundle.before)
            log_level(world, number, now_s)
        if bundle.level > 0.0 and bundle.members > 0:
            left = loads.heaps[bundle.first_member].key - bundle.virtual
            due_s = max(now_s, bundle.updated_s + left / bundle.level)
            schedule_event(world.events, loads.counts, num_tasks + number, due_s)
        else:
            remove_event(world.events, loads.counts, num_tasks + number)
    loads.counts[REGION] = 0


@njit
def bring_up_to_date(world: World, number: int, now_s: float, level: float) -> None:
    """Advance a bundle's virtual time, at the level that it had."""
    bundle = world.loads.bundles[number]
    bundle.virtual += level * (now_s - bundle.updated_s)
    bundle.updated_s = now_s


@njit
def _release(world: World, task: int, now_s: float) -> None:
    world.tasks[task].state = SCHEDULED
    due_s = max(now_s, world.tasks[task].release_s)
    schedule_event(world.events, world.loads.counts, task, due_s)


@njit
def _satisfy(world: World, task: int, now_s: float) -> None:
    world.tasks[task].pending -= 1
    if world.tasks[task].pending == 0:
        _release(world, task, now_s)


@njit
def _end_at(world: World, task: int, due_s: float) -> None:
    world.tasks[task].state = ENDING
    schedule_event(world.events, world.loads.counts, task, due_s)


@njit
def _begin(world: World, number: int, now_s: float) -> None:
    task, counts = world.tasks[number], world.loads.counts
    if task.first_slot == world.tasks[number + 1].first_slot:
        _start(world, number, now_s)
        return
    task.state = QUEUED
    world.loads.lists[LINE, counts[IN_LINE]] = number
    counts[IN_LINE] += 1
    _serve_line(world, now_s)
    if task.state != QUEUED:
        return
    end = world.tasks[number + 1].first_fallback
    if task.first_fallback == end:
        counts[WAITS] += 1
        if task.job >= 0:
            world.jobs[task.job].waits += 1
        return
    counts[IN_LINE] -= 1  # it was the last in line
    counts[REFUSALS] += 1
    if task.job >= 0:
        world.jobs[task.job].refusals += 1
    task.state = RUNNING
    task.start_s = now_s
    task.fallback_left = end - task.first_fallback
    for at in range(task.first_fallback, end):
        _satisfy(world, world.others[at], now_s)


@njit
def _serve_line(world: World, now_s: float) -> None:
    """Start requests whose slots are free; none overtakes one that waits for the same switch."""
    counts, line = world.loads.counts, world.loads.lists[LINE]
    counts[SCANS] += 1
    kept = 0
    for place in range(counts[IN_LINE]):
        number = line[place]
        first, end = world.tasks[number].first_slot, world.tasks[number + 1].first_slot
        fits = True
        for at in range(first, end):
            switch = world.switches[world.slots[at].switch]
            if switch.blocked == counts[SCANS] or switch.free < world.slots[at].slots:
                fits = False
        if not fits:
            for at in range(first, end):
                world.switches[world.slots[at].switch].blocked = counts[SCANS]
            line[kept] = number
            kept += 1
            continue
        for at in range(first, end):
            world.switches[world.slots[at].switch].free -= world.slots[at].slots
        world.tasks[number].held = 1
        _skip_fallbacks(world, number)
        _start(world, number, now_s)
    counts[IN_LINE] = kept


@njit
def _skip_fallbacks(world: World, number: int) -> None:
    first, end = world.tasks[number].first_fallback, world.tasks[number + 1].first_fallback
    for at in range(first, end):
        task = world.tasks[world.others[at]]
        task.state = SKIPPED
        if task.job >= 0:
            world.jobs[task.job].left -= 1


@njit
def _start(world: World, number: int, now_s: float) -> None:
    task = world.tasks[number]
    task.start_s = now_s
    if task.is_compute and task.processor >= 0:
        _queue(world, number)
    elif task.is_compute:
        task.sent_s = now_s + task.size
        _end_at(world, number, task.sent_s)
    elif task.size == 0.0 or task.bundle < 0:
        task.sent_s = now_s
        carry(world, number, task.size)
        _end_at(world, number, now_s + task.latency_s)
    else:
        task.state = RUNNING
        _join(world, number, now_s)


@njit
def _queue(world: World, number: int) -> None:
    task, counts = world.tasks[number], world.loads.counts
    processor = world.processors[task.processor]
    task.state = QUEUED
    key = task.priority * _QUEUE_CLASS + counts[TICKETS]
    counts[TICKETS] += 1
    push_pair(world.loads.heaps, processor.first_place, processor.waiting, (key, number))
    processor.waiting += 1
    _ask(world, task.processor)


@njit
def _ask(world: World, processor: int) -> None:
    """Have a processor look at its queue once all events of this time are known."""
    if not world.processors[processor].is_asked:
        world.processors[processor].is_asked = 1
        world.loads.lists[ASKED, world.loads.counts[ASKED]] = processor
        world.loads.counts[ASKED] += 1


@njit
def _serve_processors(world: World, now_s: float) -> None:
    for at in range(world.loads.counts[ASKED]):
        processor = world.processors[world.loads.lists[ASKED, at]]
        processor.is_asked = 0
        if processor.is_busy or processor.waiting == 0:
            continue
        number = world.loads.heaps[processor.first_place].id
        pop_pair(world.loads.heaps, processor.first_place, processor.waiting)
        processor.waiting -= 1
        processor.is_busy = 1
        task = world.tasks[number]
        task.start_s = now_s
        task.sent_s = now_s + task.size
        _end_at(world, number, task.sent_s)
    world.loads.counts[ASKED] = 0


@njit
def _join(world: World, number: int, now_s: float) -> None:
    task, loads = world.tasks[number], world.loads
    bundle = loads.bundles[task.bundle]
    loads.counts[JOINS] += 1
    change_bundle(loads, task.bundle, _JOINED)
    if bundle.members == 0:
        bundle.virtual = 0.0
        bundle.updated_s = now_s
        bundle.level = 0.0
        bundle.before = 0.0
        bundle.cap = np.inf
    bring_up_to_date(world, task.bundle, now_s, bundle.level)
    key = bundle.virtual + task.size / task.weight
    push_pair(loads.heaps, bundle.first_member, bundle.members, (key, number))
    bundle.members += 1
    bundle.cap = min(bundle.cap, task.cap_level)
    for at in range(task.first_row, world.tasks[number + 1].first_row):
        join_entry(loads, world.rows[at].entry, world.rows[at].usage)
    count_on_links(world, number, 1, now_s)


@njit
def _end_members(world: World, number: int, now_s: float) -> None:
    bundle, heaps = world.loads.bundles[number], world.loads.heaps
    first = bundle.first_member
    change_bundle(world.loads, number, _JOINED)
    # The event is the end of this member: its key is more exact than the sum of steps.
    bundle.virtual = heaps[first].key
    bundle.updated_s = now_s
    limit = bundle.virtual * (1.0 + _SAME)
    while bundle.members > 0 and heaps[first].key <= limit:
        ended = heaps[first].id
        pop_pair(heaps, first, bundle.members)
        bundle.members -= 1
        _leave(world, ended, now_s)
        task = world.tasks[ended]
        task.sent_s = now_s
        carry(world, ended, task.size)
        if task.latency_s > 0.0:
            _end_at(world, ended, now_s + task.latency_s)
        else:
            _finish(world, ended, now_s)


@njit
def _leave(world: World, number: int, now_s: float) -> None:
    task, loads = world.tasks[number], world.loads
    bundle = loads.bundles[task.bundle]
    for at in range(task.first_row, world.tasks[number + 1].first_row):
        leave_entry(loads, world.rows[at].entry, world.rows[at].usage)
    if bundle.members == 0:
        bundle.level = 0.0
        bundle.before = 0.0
        log_level(world, task.bundle, now_s)
    elif bundle.caps_differ:
        first = bundle.first_member
        bundle.cap = np.inf
        for place in range(first, first + bundle.members):
            bundle.cap = min(bundle.cap, world.tasks[loads.heaps[place].id].cap_level)
    count_on_links(world, number, -1, now_s)


@njit
def _finish(world: World, number: int, now_s: float) -> None:
    task = world.tasks[number]
    task.state = ENDED
    task.finish_s = now_s
    if task.held:
        task.held = 0
        for at in range(task.first_slot, world.tasks[number + 1].first_slot):
            world.switches[world.slots[at].switch].free += world.slots[at].slots
        _serve_line(world, now_s)
    if task.is_compute and task.processor >= 0:
        world.processors[task.processor].is_busy = 0
        _ask(world, task.processor)
    for at in range(task.first_dependent, world.tasks[number + 1].first_dependent):
        _satisfy(world, world.others[at], now_s)
    if task.fallback_of >= 0:
        request = world.tasks[task.fallback_of]
        request.fallback_left -= 1
        if request.fallback_left == 0:
            request.sent_s = now_s
            _end_at(world, task.fallback_of, now_s)
    if task.job >= 0:
        _count_job(world, task.job, now_s)


@njit
def _count_job(world: World, number: int, now_s: float) -> None:
    job = world.jobs[number]
    job.left -= 1
    if job.left > 0:
        return
    world.iteration_finish_s[job.first_iteration + job.done] = now_s
    job.done += 1
    if job.done < job.iterations and job.isolated_since_s >= 0.0:
        now_s = _skip_iterations(world, number, now_s)
    if job.done == job.iterations:
        for at in range(job.first_use, world.jobs[number + 1].first_use):
            world.sharers[world.shares[at].resource] -= 1
        return
    job.waits, job.refusals = 0, 0
    job.isolated_since_s = now_s if _keep_books(world, number) else -1.0
    end = world.jobs[number + 1].first_task
    job.left = end - job.first_task
    for at in range(job.first_task, end):
        task = world.tasks[world.others[at]]
        task.state = WAITING
        task.pending = task.needs
    for at in range(job.first_task, end):
        if world.tasks[world.others[at]].needs == 0:
            _release(world, world.others[at], now_s)


@njit
def _keep_books(world: World, number: int) -> bool:
    """Note what the books say of a job's links; false where another job uses one of its things."""
    num_links = world.book.shape[0]
    for at in range(world.jobs[number].first_use, world.jobs[number + 1].first_use):
        share = world.shares[at]
        if world.sharers[share.resource] > 1:
            return False
        if share.resource < num_links:
            row = world.book[share.resource]
            share.busy_s, share.over_s, share.carried = row[BUSY_S], row[OVER_S], row[CARRIED_BYTES]
    return True


@njit
def _skip_iterations(world: World, number: int, now_s: float) -> float:
    """Count the iterations that are like the one that has just ended; gives their end."""
    # The job shares no link, processor or switch with an unfinished one, so no other task can delay
    # it: all its iterations begin in the same state, and are alike.
    job, counts = world.jobs[number], world.loads.counts
    period_s = now_s - job.isolated_since_s
    skipped = job.iterations - job.done
    if now_s + skipped * period_s > world.horizon_s[0]:
        # The one that the horizon cuts is run.
        skipped = max(0, int((world.horizon_s[0] - now_s) / period_s) - 1)
    if skipped == 0:
        return now_s
    for further in range(skipped):
        end_s = now_s + (further + 1) * period_s
        world.iteration_finish_s[job.first_iteration + job.done + further] = end_s
    job.done += skipped
    counts[WAITS] += skipped * job.waits
    counts[REFUSALS] += skipped * job.refusals
    for at in range(job.first_task, world.jobs[number + 1].first_task):
        task = world.tasks[world.others[at]]
        task.start_s += skipped * period_s
        task.sent_s += skipped * period_s
        task.finish_s += skipped * period_s
    for at in range(job.first_use, world.jobs[number + 1].first_use):
        share = world.shares[at]
        if share.resource < world.book.shape[0]:
            row = world.book[share.resource]
            row[BUSY_S] += skipped * (row[BUSY_S] - share.busy_s)
            row[OVER_S] += skipped * (row[OVER_S] - share.over_s)
            row[CARRIED_BYTES] += skipped * (row[CARRIED_BYTES] - share.carried)
    return float(now_s + skipped * period_s)
