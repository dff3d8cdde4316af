# Device code: Triton's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913, PLR0917
# mypy: ignore-errors
"""All synchronisation of the kernels: queues, hand-over within and between ranks, and leaving.

The programs of a launch (thread blocks, CTAs) share data through global memory. Every hand-over is
one release by the writer and one acquire by the reader, and stands in this file.

Order. Work is cut into tasks with numbers. ``take`` gives every number of a queue to one program,
in order. The counter is relaxed: it orders progress, it guards no data. The kernel of one rank has
one queue. A task waits only on tasks with lower numbers; the lowest unfinished task is held by a
program that runs nothing older, and all that it waits for is finished, so it finishes, and the
kernel with it. Nothing is assumed about how many programs are resident. Between ranks there are
five queues, one for each phase. A program takes all it can get of one phase before it looks at the
next, so that when anyone works at a phase, all tasks of the phases before it are held by running
programs. A task waits for tasks of earlier phases, on any rank, or for tasks before it in its own
queue. So the first unfinished task (by phase, then by place) can always finish, if all ranks
launch.

Hand-over within a rank, in the words of the PTX memory model. Writer: all threads store their parts
of a tile; ``bar.sync`` puts these stores before the release of one thread (causality order is
transitive through a barrier); that thread does ``atom.add.release.gpu`` on the flag. Reader: one
thread reads the flag with acquire at GPU scope until the count is full; every release on the flag
heads or continues a release sequence of read-modify-writes, so reading the full count synchronises
with *all* writers that added to it, not only with the last one; ``bar.sync`` then puts the loads of
the other threads behind. The acquire also drops stale lines of the reader's L1 cache. All data so
handed over is written by ordinary stores and read by ordinary or ``cp.async`` loads, which are of
one proxy; the tensor memory accelerator reads weights only, which nobody writes during the launch,
so no proxy fence is needed.

Hand-over between ranks goes through a symmetric heap, at system scope. Writer: all threads store
rows into the peer's heap; ``bar.sync`` puts the stores before one thread's ``atom.acq_rel.gpu`` on
a counter of this rank; the one that completes it has so synchronised with the others, and does
``atom.exch.release.sys`` on the peer's signal word. All rows precede the release. Reader: an
acquire at system scope sees the word, ``bar.sync`` puts the other threads' loads behind it. Words
that one rank writes and another waits for:

*Signal words*, 64 bits, ``epoch << 32 | count``: written whole, by an exchange with release, by one
rank only. A reader waits until the epoch is its own or a later one. Later: the writer has finished
this epoch, and could do so only because it sent nothing here (what it sends must come back first).
So a later epoch means a count of zero.

*Counts of returned rows*, 32 bits: added to with release by the ranks that return rows; the owner
waits for the sum, and sets it to zero when it leaves. No one adds for a later epoch before the
owner has sent rows in it, which is after it left.

Reuse of memory without a barrier. In the capacity layout a cell has one writer, which writes again
only after all that it sent before has come back, so after it was read. In the compact layout cells
are shared, but no rank sends rows before it has all ranks' counts of the epoch; a rank that has
announced its counts has left the launches before. The counts themselves are kept twice, by the
parity of the epoch: a rank that announces epoch n + 2 has seen everyone's counts of n + 1.

Between launches. The last program to leave sets all words that count back to zero. Its read-modify-
write on the exit counter acquires what the others released, so no one looks at a word any more;
the next launch on the stream begins after this one has ended. An aborted launch leaves the words
dirty: call ``Workspace.reset``, or set up another group.

A wait gives up after ``limit_ns`` where this is not None: the error word is set to what was waited
for, which the host turns into an exception. Triton's CPU interpreter runs programs one after
another, so a wait on a task with a higher number would never end there: the limit makes it an
error, and the tests a proof that tickets are in order. (The interpreter is sequentially consistent:
it says nothing about the memory order. The offline-compile test looks for the instructions.)
"""

import os
import time

import triton
import triton.language as tl

# Control words of a rank, one 128-byte line apart, and where the flags begin.
LINE = tl.constexpr(32)
QUEUES = tl.constexpr(0)  # one line for each phase
LEFT = tl.constexpr(6 * 32)
GATED_BLOCKS = tl.constexpr(7 * 32)
COUNTED = tl.constexpr(8 * 32)
ANNOUNCED = tl.constexpr(9 * 32)
PLACED = tl.constexpr(10 * 32)
PLANNED = tl.constexpr(11 * 32)
ERROR = tl.constexpr(12 * 32)
EPOCH = tl.constexpr(13 * 32)
FLAGS = tl.constexpr(14 * 32)  # ``CONTROL_WORDS`` of the host

# What an error word says: kind << 28 | peer << 14 | detail.
OWN_TASK = tl.constexpr(1)
COUNTS = tl.constexpr(2)
ROWS = tl.constexpr(3)
RETURNS = tl.constexpr(4)
OVERFLOW = tl.constexpr(5)
CONFLICT = tl.constexpr(6)

if os.environ.get("TRITON_INTERPRET", "0") == "1":

    def _clock_ns():
        return time.monotonic_ns()

    def _pause():
        time.sleep(2e-4)  # the ranks share cores
else:

    @triton.jit
    def _clock_ns():
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def _pause():
        tl.inline_asm_elementwise(
            "nanosleep.u32 64; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def take(control, phase):
    """Take the next number of a queue, for all threads of this program."""
    return tl.atomic_add(control + QUEUES + phase * LINE, 1, sem="relaxed", scope="gpu")


@triton.jit
def publish(flag):
    """Add one to a flag of this rank, after all stores of this program's threads."""
    tl.debug_barrier()
    return tl.atomic_add(flag, 1, sem="release", scope="gpu")


@triton.jit
def complete(counter):
    """Add one to a counter of this rank and return the old value.

    Who gets the last number sees what the others wrote before, and may release it to a peer.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def signal(words, epoch, count, mask):
    """Write signal words in peers' heaps, after all stores that this program knows of."""
    tl.debug_barrier()
    word = (epoch.to(tl.int64) << 32) | count.to(tl.int64)
    tl.atomic_xchg(words, word, mask=mask, sem="release", scope="sys")


@triton.jit
def give_back(counts, rows, mask):
    """Add to counts of returned rows in peers' heaps, after all stores of this program."""
    tl.debug_barrier()
    tl.atomic_add(counts, rows, mask=mask, sem="release", scope="sys")


@triton.jit
def fail(control, kind, peer, detail):
    """Note what went wrong, unless something is noted already."""
    word = (peer << 14) + detail + (kind << 28)
    tl.atomic_cas(control + ERROR, 0, word, sem="relaxed")


@triton.jit
def _give_up(behind, control, began, limit_ns, kind, peer, detail):
    """Return whether to stop waiting: for too long, or because another of this rank stopped."""
    if behind & (_clock_ns() - began >= limit_ns):
        fail(control, kind, peer, detail)
    return tl.atomic_add(control + ERROR, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def wait(flag, wanted, control, limit_ns):
    """Wait until a flag of this rank has reached a count; whether it did."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    if limit_ns is None:
        while seen < wanted:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    else:
        began = _clock_ns()
        stopped = False
        while (seen < wanted) & (not stopped):
            _pause()
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
            stopped = _give_up(seen < wanted, control, began, limit_ns, OWN_TASK, 0, 0)
    return seen >= wanted


@triton.jit
def _late(seen, wanted, peers, mask):
    return tl.max(tl.where(mask & (seen < wanted), peers, -1), 0)


@triton.jit
def wait_counts(
    words, wanted, peers, mask, control, limit_ns, KIND: tl.constexpr, SCOPE: tl.constexpr
):
    """Wait for a block of counts at once; the highest peer that is missing, or -1.

    Words outside the mask are not looked at.
    """
    seen = tl.atomic_add(words, 0, mask=mask, sem="acquire", scope=SCOPE)
    late = _late(seen, wanted, peers, mask)
    if limit_ns is None:
        while late >= 0:
            seen = tl.atomic_add(words, 0, mask=mask, sem="acquire", scope=SCOPE)
            late = _late(seen, wanted, peers, mask)
    else:
        began = _clock_ns()
        stopped = False
        while (late >= 0) & (not stopped):
            _pause()
            seen = tl.atomic_add(words, 0, mask=mask, sem="acquire", scope=SCOPE)
            late = _late(seen, wanted, peers, mask)
            stopped = _give_up(late >= 0, control, began, limit_ns, KIND, late, 0)
    tl.debug_barrier()  # each thread has acquired its own words only
    return late


@triton.jit
def wait_signals(words, peers, mask, epoch, control, kind, detail, limit_ns):
    """Wait until signal words have reached an epoch; whether they did, and their counts in it."""
    seen = tl.atomic_add(words, 0, mask=mask, sem="acquire", scope="sys")
    late = _late(seen >> 32, epoch, peers, mask)
    began = _clock_ns()
    stopped = False
    while (late >= 0) & (not stopped):
        _pause()
        seen = tl.atomic_add(words, 0, mask=mask, sem="acquire", scope="sys")
        late = _late(seen >> 32, epoch, peers, mask)
        stopped = _give_up(late >= 0, control, began, limit_ns, kind, late, detail)
    tl.debug_barrier()  # as above
    count = tl.where(mask & ((seen >> 32) == epoch), seen & 0xFFFFFFFF, 0).to(tl.int32)
    return late < 0, count


@triton.jit
def last_to_leave(control):
    """Count this program out; whether all others are out."""
    tl.debug_barrier()
    before = tl.atomic_add(control + LEFT, 1, sem="acq_rel", scope="gpu")
    return before == tl.num_programs(0) - 1


@triton.jit
def clear(words, num_words):
    """Set words to zero."""
    zero = tl.full([1024], 0, tl.int32)
    for first in range(0, num_words, 1024):
        place = first + tl.arange(0, 1024)
        tl.store(words + place, zero, mask=place < num_words)


@triton.jit
def clear_control(control, num_flags):
    """Set a rank's queues, counters and flags to zero; not the exit counter, error and epoch."""
    line = tl.arange(0, 16)
    counts = (line * LINE < ERROR) & (line * LINE != LEFT)
    tl.store(control + line * LINE, tl.full([16], 0, tl.int32), mask=counts)
    clear(control + FLAGS, num_flags)
