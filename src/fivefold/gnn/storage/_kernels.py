"""The compiled inner loops of the readers: whole reads by ``pread``, and reads from a map.

Several workers run one of these at a time over one list of requests. They take the next request
by an atomic counter, so that none waits for a slow one, and look at a stop word in between.
A worker ends with a status: a code, the error number and the place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fivefold.gnn.storage._machine import atomic_add, compiled, pread, read_errno
from fivefold.gnn.storage._plan_runs import deliver
from fivefold.gnn.storage._xxhash import PAGE_BYTES

#: Codes: all well; a system call failed; the file ended; a page is damaged; told to stop.
DONE, FAILED, ENDED, DAMAGED, STOPPED = 0, 1, 2, 3, 4
_EINTR = 4


@compiled
def read_whole(direct: Any, plain: Any, address: Any, count: Any, offset: Any, status: Any) -> Any:
    """Read ``count`` bytes, however many calls it takes; False with the status set on failure.

    Direct reads need aligned places. Where a short one ended elsewhere, the rest is read through
    the other descriptor, which goes through the page cache.
    """
    done = np.int64(0)
    while done < count:
        descriptor = direct if done % PAGE_BYTES == 0 else plain
        got = pread(descriptor, address + done, np.uint64(count - done), offset + done)
        if got > 0:
            done += got
            continue
        number = read_errno() if got < 0 else 0
        if got < 0 and number == _EINTR:
            continue
        status[0] = FAILED if got < 0 else ENDED
        status[1], status[2] = number, offset + done
        return False
    return True


@compiled
def stopped(shared: Any) -> Any:
    """Whether another worker has failed, or the reader is being closed."""
    return atomic_add(shared + 8, np.int64(0)) != 0


@compiled
def halt(shared: Any) -> None:
    """Tell all workers to stop."""
    atomic_add(shared + 8, np.int64(1))


@compiled
def deliver_checked(buffer: Any, request: Any, work: Any, status: Any) -> Any:
    """Check and copy one request; False with the status set if a page is damaged."""
    page = deliver(buffer, request, work)
    if page < 0:
        return True
    status[0], status[2] = DAMAGED, page
    return False


@compiled
def take(work: Any, status: Any) -> Any:
    """Number of the next request, or -1: none is left, or all shall stop (see the status)."""
    request = atomic_add(work.shared, np.int64(1))
    if request >= len(work.requests.first_pages):
        return -1
    if stopped(work.shared):
        if status[0] == DONE:
            status[0] = STOPPED
        return -1
    return request


@compiled
def read_share(direct: Any, plain: Any, buffer: Any, work: Any, status: Any) -> None:
    """One worker of the threads back end: read, check, copy, until nothing is left."""
    status[0] = DONE
    request = take(work, status)
    while request >= 0:
        count = work.requests.num_pages[request] * PAGE_BYTES
        offset = work.requests.first_pages[request] * PAGE_BYTES
        if not read_whole(direct, plain, buffer, count, offset, status) or not deliver_checked(
            buffer, request, work, status
        ):
            halt(work.shared)
            return
        request = take(work, status)


@compiled
def serve_share(base: Any, work: Any, status: Any) -> None:
    """One worker of the map back end: check and copy straight from the mapped file."""
    status[0] = DONE
    request = take(work, status)
    while request >= 0:
        buffer = base + work.requests.first_pages[request] * PAGE_BYTES
        if not deliver_checked(buffer, request, work, status):
            halt(work.shared)
            return
        request = take(work, status)
