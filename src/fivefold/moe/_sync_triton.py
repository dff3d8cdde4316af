# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, N803
# mypy: ignore-errors
"""All synchronisation of the mixture-of-experts kernel: take a ticket, publish, wait; and leave.

The kernel's programs (thread blocks, CTAs) share data through global memory. Every hand-over is
one release by the writer and one acquire by the reader, at GPU scope, and stands in this file.

Order. Work is cut into tasks with numbers. ``take_ticket`` gives every number to one program, in
order. A task waits only on tasks with lower numbers. The lowest unfinished task is held by a
program that runs nothing older, and all that it waits for is finished; so it finishes, and the
kernel with it. Nothing is assumed about how many programs are resident: tickets are only taken by
programs that run. The counter itself is relaxed: it orders progress, it guards no data.

Hand-over, in the words of the PTX memory model. Writer: all threads store their parts of a tile;
``bar.sync`` puts these stores before the release of one thread (causality order is transitive
through a barrier); that thread does ``atom.add.release.gpu`` on the flag. Reader: one thread reads
the flag with acquire at GPU scope until the count is full; every release on the flag heads or
continues a release sequence of read-modify-writes, so reading the full count synchronises with
*all* writers that added to it, not only with the last one; ``bar.sync`` then puts the loads of the
other threads behind. The acquire also drops stale lines of the reader's L1 cache. All data so
handed over is written by ordinary stores and read by ordinary or ``cp.async`` loads, which are of
one proxy; the tensor memory accelerator reads weights only, which nobody writes during the launch,
so no proxy fence is needed.

Between launches. The last program to leave sets all control words back to zero. Its read-modify-
write on the exit counter acquires what the others released, so no one looks at a word any more;
the next launch on the stream begins after this one has ended. An aborted launch leaves the words
dirty: call ``Workspace.reset``.

A wait gives up after ``SPIN_LIMIT`` polls where this is not 0, and sets the error word, which the
host turns into an exception. Triton's CPU interpreter runs programs one after another, so a wait
on a task with a higher number would never end there: the limit makes it an error, and the tests a
proof that tickets are in order. (The interpreter is sequentially consistent: it says nothing about
the memory order. The offline-compile test looks for the instructions named above.)
"""

import triton
import triton.language as tl

# Places of the control words, one 128-byte line apart, and where the flags begin.
TICKET = tl.constexpr(0)
LEFT = tl.constexpr(32)
COUNTED = tl.constexpr(64)
PLACED = tl.constexpr(96)
ERROR = tl.constexpr(128)
FLAGS = tl.constexpr(160)


@triton.jit
def take_ticket(control):
    """The next number, for all threads of this program."""
    return tl.atomic_add(control + TICKET, 1, sem="relaxed", scope="gpu")


@triton.jit
def publish(flag):
    """Add one to a flag, after all stores of this program's threads; returns the old value."""
    tl.debug_barrier()
    return tl.atomic_add(flag, 1, sem="release", scope="gpu")


@triton.jit
def wait(flag, wanted, control, SPIN_LIMIT: tl.constexpr):
    """Wait until a flag has reached a count; all threads then see what was published by it."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    polls = 0
    while seen < wanted:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
        if SPIN_LIMIT > 0:
            polls += 1
            if polls >= SPIN_LIMIT:
                tl.atomic_max(control + ERROR, 1, sem="relaxed", scope="gpu")
                seen = tl.maximum(seen, wanted)


@triton.jit
def wait_all(flags, mask, wanted, control, SPIN_LIMIT: tl.constexpr):
    """``wait`` for a block of flags at once; flags outside the mask are not looked at."""
    seen = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="gpu")
    behind = tl.max(tl.where(mask & (seen < wanted), 1, 0), 0)
    polls = 0
    while behind > 0:
        seen = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="gpu")
        behind = tl.max(tl.where(mask & (seen < wanted), 1, 0), 0)
        if SPIN_LIMIT > 0:
            polls += 1
            if polls >= SPIN_LIMIT:
                tl.atomic_max(control + ERROR, 1, sem="relaxed", scope="gpu")
                behind = 0
    tl.debug_barrier()  # each thread has acquired its own flags only


@triton.jit
def leave(control, num_flags, BLOCK: tl.constexpr):
    """Count this program out; the last one sets all control words but the error to zero."""
    tl.debug_barrier()
    before = tl.atomic_add(control + LEFT, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        zero = tl.zeros([BLOCK], tl.int32)
        for first in range(0, num_flags, BLOCK):
            place = first + tl.arange(0, BLOCK)
            tl.store(control + FLAGS + place, zero, mask=place < num_flags)
        tl.store(control + TICKET, 0)
        tl.store(control + COUNTED, 0)
        tl.store(control + PLACED, 0)
        tl.store(control + LEFT, 0)
