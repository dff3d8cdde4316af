"""The words by which ranks keep in step, as a model: a thousand launches in any order of steps.

The interpreter runs a kernel's programs one after another and processes share two cores, so few
orders of events ever happen there. Here each rank is a generator that gives way after every single
read or write of a heap, and a seeded scheduler lets ranks run ahead of each other as far as the
protocol allows. Every value read is compared with what was meant. Each rule that a rank keeps can
be left out, and the model then finds the fault: so it would find one in the rules themselves.
"""

import random

import pytest

PEERS, LOCAL, TILE = 3, 2, 2
EXPERTS = PEERS * LOCAL
WAITING, ENDED = "waiting", "ended"


class Heap:
    """What one rank's peers can write to."""

    def __init__(self):
        self.signal = [0] * PEERS
        self.counts = [[None] * PEERS for _ in range(2)]
        self.arrived = [[(0, 0)] * LOCAL for _ in range(PEERS)]
        self.received = {}
        self.returned = {}
        self.back = {}


def routing(epoch, rank):
    """Rows of a rank for each expert: often none, sometimes all for one."""
    draw = random.Random(epoch * PEERS + rank)  # noqa: S311 - a test
    kind = draw.randrange(4)
    if kind == 0:
        return [0] * EXPERTS
    if kind == 1:
        return [5 * (e == epoch % EXPERTS) for e in range(EXPERTS)]
    return [draw.choice([0, 0, 1, 3]) for _ in range(EXPERTS)]


def announce(heaps, rank, epoch, counts, left_out):
    parity = 0 if "parity" in left_out else epoch % 2
    for peer in range(PEERS):
        heaps[peer].counts[parity][rank] = counts
        yield
        heaps[peer].signal[rank] = epoch
        yield


def gather(heaps, rank, epoch, left_out):
    """All ranks' counts, read one by one."""
    parity = 0 if "parity" in left_out else epoch % 2
    while "counts" not in left_out and min(heaps[rank].signal) < epoch:
        yield WAITING
    matrix = []
    for peer in range(PEERS):
        matrix.append(heaps[rank].counts[parity][peer])
        yield
    if "counts" in left_out:  # as if they were known by magic
        matrix = [routing(epoch, peer) for peer in range(PEERS)]
    assert matrix == [routing(epoch, peer) for peer in range(PEERS)], "counts of another launch"
    return matrix


def place_of(matrix, source, expert, row):
    """Where a row lies: in its source's cell, or in the compact layout behind all earlier rows."""
    if matrix is None:
        return source, expert, row
    first = expert - expert % LOCAL
    before = sum(matrix[s][e] for e in range(first, expert) for s in range(PEERS))
    return before + sum(matrix[s][expert] for s in range(source)) + row


def send(heaps, rank, epoch, counts, matrix):
    for expert in random.Random(epoch).sample(range(EXPERTS), EXPERTS):  # noqa: S311 - a test
        heap = heaps[expert // LOCAL]
        for row in range(counts[expert]):
            heap.received[place_of(matrix, rank, expert, row)] = (epoch, rank, expert, row)
            yield
        if counts[expert] or matrix is None:
            heap.arrived[rank][expert % LOCAL] = (epoch, counts[expert])
            yield


def serve(heaps, rank, epoch, matrix):
    for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
        for source in random.Random(epoch + expert).sample(range(PEERS), PEERS):  # noqa: S311
            if matrix is not None and matrix[source][expert] == 0:
                continue
            while heaps[rank].arrived[source][expert % LOCAL][0] < epoch:
                yield WAITING
            of, count = heaps[rank].arrived[source][expert % LOCAL]
            count = count if of == epoch else 0  # the source is ahead: it had nothing here
            assert count == routing(epoch, source)[expert], "a signal of another launch"
            for row in range(count):
                found = heaps[rank].received.get(place_of(matrix, source, expert, row))
                assert found == (epoch, source, expert, row), "a row was overwritten too early"
                yield
                heaps[source].returned[expert, row] = (epoch, rank)
                yield
                key = (expert, row // TILE)
                heaps[source].back[key] = heaps[source].back.get(key, 0) + 1
                yield


def collect(heaps, rank, epoch, counts, left_out):
    heap = heaps[rank]
    for expert, count in enumerate(counts):
        for row in range(count):
            wanted = min(TILE, count - row // TILE * TILE)
            while "returns" not in left_out and heap.back.get((expert, row // TILE), 0) < wanted:
                yield WAITING
            if "returns" not in left_out:
                assert heap.returned.get((expert, row)) == (epoch, expert // LOCAL), "not come back"
            yield
    if "clearing" not in left_out:
        heap.back.clear()
    yield


def launches(heaps, rank, number, *, compact, left_out):
    for epoch in range(1, number + 1):
        counts = routing(epoch, rank)
        matrix = None
        if compact:
            yield from announce(heaps, rank, epoch, counts, left_out)
            matrix = yield from gather(heaps, rank, epoch, left_out)
        yield from send(heaps, rank, epoch, counts, matrix)
        yield from serve(heaps, rank, epoch, matrix)
        yield from collect(heaps, rank, epoch, counts, left_out)


def run(number, *, compact, left_out=(), seed=0):
    """Let ranks take turns of random length."""
    draw = random.Random(seed)  # noqa: S311 - a test
    heaps = [Heap() for _ in range(PEERS)]
    ranks = {
        r: launches(heaps, r, number, compact=compact, left_out=left_out) for r in range(PEERS)
    }
    idle = 0
    while ranks:
        rank = draw.choice(list(ranks))
        for _ in range(draw.choice([1, 2, 5, 200])):
            step = next(ranks[rank], ENDED)
            idle = idle + 1 if step == WAITING else 0
            assert idle < 10_000, "no rank can go on"
            if step == ENDED:
                del ranks[rank]
            if step in {ENDED, WAITING}:
                break


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "capacity"])
def test_a_thousand_launches_in_any_order_of_steps(compact):
    run(1000, compact=compact)


@pytest.mark.parametrize(
    ("compact", "rule", "fault"),
    [
        (True, "parity", "counts of another launch"),
        (True, "counts", "overwritten too early|signal of another launch"),
        (False, "returns", "overwritten too early|signal of another launch"),
        (True, "clearing", "not come back"),
        (False, "clearing", "not come back"),
    ],
)
def test_every_rule_is_needed(compact, rule, fault):
    def play():
        for seed in range(20):
            run(100, compact=compact, left_out=(rule,), seed=seed)

    with pytest.raises(AssertionError, match=fault):
        play()
