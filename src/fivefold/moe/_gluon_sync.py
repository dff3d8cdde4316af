# Device code: Gluon's language in its own spelling, and no types.
# ruff: noqa: ANN001, ANN202, N803
# mypy: ignore-errors
"""Hand-overs inside a program of the Gluon kernel: two rings in shared memory, and their phases.

Between programs the helpers of ``_sync_triton`` are used as they are: ``take_ticket``, ``publish``,
``wait``. This file is about the three roles of one program: *weights* (one warp), *rows* (two
warps), *products* (eight warps).

The stage ring has STAGES places for a step's operands: a tile of rows and a tile of weights. The
ticket ring has SLOTS places for a task's number. Every place of a ring has two mbarriers, "full"
and "empty". The users of a place count how often they have come to it: step (or index) s belongs to
place s % N, and it is the (s // N)-th use of that place.

Phases. An mbarrier has a phase that begins at 0 and advances when all arrivals that it was made for
have come (and all bytes that were announced). ``mbarrier.wait(bar, parity)`` returns when the phase
of that parity has ended: at once if the current phase has the other parity. So:

* A consumer waits for use u of a place with parity u & 1 on "full": phase u ends when the place has
  been filled for the u-th time.
* A producer waits, before it fills a place for use u, with parity (u & 1) ^ 1 on "empty": that is
  the end of phase u - 1, which the consumer's release of use u - 1 brings about. For u = 0 it is
  the parity of the phase "before" the first, which counts as ended: nobody waits.

Parity is enough, because no one can fall behind by two phases: phase u of "full" cannot end before
the place was released u times, that is before the consumer has seen phase u - 1 end, and likewise
the other way round. ``full`` of a stage expects two arrivals: the weights role announces bytes
(which is an arrival, completed by the copy engine), the rows role arrives. ``empty`` of a stage
expects one, of the products. ``full`` of a ticket expects one, ``empty`` two: rows and products.

Proxies. The tensor cores (WGMMA) and the copy engine (TMA) use shared memory through the async
proxy, ``cp.async`` and ordinary stores through the generic one. The rows role's threads wait for
their copies, fence (``fence.proxy.async``), meet at a barrier, and only then one of them arrives.
(The compiler puts a barrier of the role before every arrival that follows work on shared memory or
a product, so none is written here; ``test_gluon_offline`` looks for each of them.)
The other direction needs no fence: the tensor cores' reads have ended (``wgmma.wait_group``) when
the stage is released, and the next writer begins after it has seen that.

``tests/moe/gluon_machine.py`` runs this very source with threads, delayed copies and delayed
products under random interleavings.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fivefold.moe._sync_triton import COUNTED, ERROR, FLAGS, LEFT, PLACED, TICKET


@gluon.jit
def place_of(step, NUMBER: gl.constexpr):
    """Which place of a ring a step uses, and the parity of that use."""
    return step % NUMBER, (step // NUMBER) & 1


@gluon.jit
def await_empty(empty, step, NUMBER: gl.constexpr):
    """Wait until the place of a step may be filled; returns the place."""
    place, parity = place_of(step, NUMBER)
    mbarrier.wait(empty.index(place), parity ^ 1)
    return place


@gluon.jit
def await_full(full, step, NUMBER: gl.constexpr):
    """Wait until the place of a step has been filled; returns the place."""
    place, parity = place_of(step, NUMBER)
    mbarrier.wait(full.index(place), parity)
    return place


@gluon.jit
def hand_on(queue, index, ticket, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Give a ticket to the other two roles of this program."""
    tickets, full, empty = queue
    place = await_empty(empty, index, SLOTS)
    tickets.index(place).store(gl.full([1], ticket, gl.int32, LAYOUT))
    mbarrier.arrive(full.index(place), count=1)


@gluon.jit
def receive(queue, index, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The next ticket, from the weights role."""
    tickets, full, empty = queue
    place = await_full(full, index, SLOTS)
    ticket = gl.max(tickets.index(place).load(LAYOUT), 0)
    mbarrier.arrive(empty.index(place), count=1)
    return ticket


@gluon.jit
def wait_all(flags, mask, wanted, control, SPIN_LIMIT: gl.constexpr):
    """``wait`` for a block of flags at once; as in ``_sync_triton``, with this language's names."""
    seen = gl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="gpu")
    behind = gl.max(gl.where(mask & (seen < wanted), 1, 0), 0)
    polls = 0
    while behind > 0:
        seen = gl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="gpu")
        behind = gl.max(gl.where(mask & (seen < wanted), 1, 0), 0)
        if SPIN_LIMIT > 0:
            polls += 1
            if polls >= SPIN_LIMIT:
                gl.atomic_max(control + ERROR, 1, sem="relaxed", scope="gpu")
                behind = 0
    gl.barrier()  # each thread has acquired its own flags only


@gluon.jit
def leave(control, num_flags, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Count this program out, after its roles have met; the last one clears the control words."""
    gl.barrier()
    before = gl.atomic_add(control + LEFT, 1, sem="acq_rel", scope="gpu")
    if before == gl.num_programs(0) - 1:
        zero = gl.zeros([BLOCK], gl.int32, LAYOUT)
        for first in range(0, num_flags, BLOCK):
            place = first + gl.arange(0, BLOCK, LAYOUT)
            gl.store(control + FLAGS + place, zero, mask=place < num_flags)
        gl.store(control + TICKET, 0)
        gl.store(control + COUNTED, 0)
        gl.store(control + PLACED, 0)
        gl.store(control + LEFT, 0)
