"""Random sequences of collectives give what gloo gives, on 2 to 4 ranks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from fivefold.collectives import execution
from fivefold.collectives.execution import configure
from fivefold.testing import run_processes

pytestmark = pytest.mark.distributed

FORCED = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_to_all": "pairwise",
    "broadcast": "binary_tree",
}
OTHERS = FORCED | {"all_reduce": "recursive_halving_doubling", "all_to_all": "bruck"}
SIZES = (0, 1, 1, 2, 3, 7, 64, 1000, 20_000)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16)
SPLITS = (0, 0, 1, 2, 3, 50)


@pytest.fixture(autouse=True)
def _settings():
    before = execution.current_settings()
    yield
    configure(topology=before.topology, algorithms=before.algorithms)


def laid_out(values, layout):
    """The same values elsewhere in memory."""
    if layout == "strided":
        found = torch.zeros(2 * values.numel(), dtype=values.dtype)[::2]
    elif layout == "transposed" and values.numel() % 2 == 0 and values.numel():
        found = torch.zeros(2, values.numel() // 2, dtype=values.dtype).t()
        return found.copy_(values.view(found.shape))
    elif layout == "offset":
        found = torch.zeros(values.numel() + 1, dtype=values.dtype)[1:]
    else:
        found = torch.zeros_like(values)
    return found.copy_(values)


class Step:
    """One collective, drawn alike on all ranks but for what a rank may do as it likes."""

    def __init__(self, common, own, ranks):
        self.name = common.choice(sorted(STEPS))
        self.size, self.dtype = common.choice(SIZES), common.choice(DTYPES)
        kinds = ("SUM", "SUM", "MAX", "MIN", "PRODUCT")
        self.operation = getattr(dist.ReduceOp, common.choice(kinds))
        self.root = common.choice(ranks)
        self.splits = {
            source: {target: common.choice(SPLITS) for target in ranks} for source in ranks
        }
        if common.random() < 0.5:  # some ranks see equal shares, or all do
            for source in common.sample(ranks, common.randint(1, len(ranks))):
                self.splits[source] = dict.fromkeys(ranks, self.size // 7)
        self.seed = common.randrange(1 << 30)
        self.layout = own.choice(("plain", "plain", "strided", "transposed", "offset"))
        self.asynchronous = own.random() < 0.5
        self.says_splits = own.random() < 0.5
        self.ranks = ranks

    def values(self, size, place=0):
        generator = torch.Generator().manual_seed(self.seed + 100 * dist.get_rank() + place)
        return torch.randint(0, 4, (size,), generator=generator).to(self.dtype)


def _all_reduce(step, group, place, own):
    data = place(step.values(step.size))
    return [data], dist.all_reduce(data, step.operation, group=group, async_op=own)


def _broadcast(step, group, place, own):
    data = place(step.values(step.size))
    return [data], dist.broadcast(data, step.root, group=group, async_op=own)


def _reduce(step, group, _, own):
    data = step.values(step.size + 1)
    work = dist.reduce(data, step.root, step.operation, group=group, async_op=own)
    return [data] if dist.get_rank() == step.root else [], work


def _all_gather(step, group, place, own):
    data = place(step.values(step.size))
    found = [place(torch.zeros(step.size, dtype=step.dtype)) for _ in step.ranks]
    found = [part.reshape(data.shape) if part.is_contiguous() else part for part in found]
    return found, dist.all_gather(found, data, group=group, async_op=own)


def _all_gather_single(step, group, place, own):
    data = step.values(step.size)
    found = torch.zeros(step.size * len(step.ranks), dtype=step.dtype)
    if step.layout == "strided" and place is not laid_out_plainly:
        data = place(data)
    return [found], dist.all_gather_single(found, data, group=group, async_op=own)


def _reduce_scatter_single(step, group, _, own):
    data = step.values(step.size * len(step.ranks))
    found = torch.zeros(step.size, dtype=step.dtype)
    work = dist.reduce_scatter_single(found, data, step.operation, group=group, async_op=own)
    return [found], work


def _reduce_scatter(step, group, _, own):
    parts = [step.values(step.size, at) for at in range(len(step.ranks))]
    found = torch.zeros(step.size, dtype=step.dtype)
    return [found], dist.reduce_scatter(found, parts, step.operation, group=group, async_op=own)


def _all_to_all_single(step, group, _, own):
    me = dist.get_rank()
    sent = [step.splits[me][target] for target in step.ranks]
    received = [step.splits[source][me] for source in step.ranks]
    found = torch.zeros(sum(received), dtype=step.dtype)
    options = {"output_split_sizes": received, "input_split_sizes": sent}
    if not step.says_splits:  # equal ones need not be said, whatever the others say
        options = {name: said for name, said in options.items() if len(set(said)) > 1}
    data = step.values(sum(sent))
    return [found], dist.all_to_all_single(found, data, group=group, async_op=own, **options)


def _gather(step, group, _, own):
    data = step.values(step.size + 1)
    found = [torch.zeros_like(data) for _ in step.ranks] if dist.get_rank() == step.root else None
    return found or [], dist.gather(data, found, step.root, group=group, async_op=own)


def _scatter(step, group, _, own):
    found = torch.zeros(step.size + 1, dtype=step.dtype)
    parts = [step.values(step.size + 1, at) for at in range(len(step.ranks))]
    parts = parts if dist.get_rank() == step.root else None
    return [found], dist.scatter(found, parts, step.root, group=group, async_op=own)


def _barrier(_step, group, _, own):
    return [], dist.barrier(group=group, async_op=own)


STEPS = {
    function.__name__: function
    for function in (
        _all_reduce,
        _broadcast,
        _reduce,
        _all_gather,
        _all_gather_single,
        _reduce_scatter_single,
        _reduce_scatter,
        _all_to_all_single,
        _gather,
        _scatter,
        _barrier,
    )
}


def laid_out_plainly(values):
    return values


def run_steps(steps, group, own):
    """All steps on one group; what each has filled, when all are over."""
    found, works = [], []
    for step in steps:

        def place(values, layout=step.layout):
            return laid_out(values, layout)

        function = STEPS[step.name]
        asynchronous = own and step.asynchronous
        filled, work = function(step, group, place if own else laid_out_plainly, asynchronous)
        found.append(filled)
        works.append(work if asynchronous else None)
        if own and step.seed % 3 == 0:  # some are waited for while others are under way
            works = [one for one in works if one is not None and one.wait() is None]
    for work in works:
        if work is not None:
            work.wait()
    return [[part.reshape(-1) for part in filled] for filled in found]


def check_cases(world, cases, seed):
    """So many random sequences; a failure names the case."""

    def work(rank):
        everyone = list(range(world))
        few = everyone[1:] if world > 2 else everyone
        pairs = [
            (ranks, dist.new_group(ranks, backend="fivefold"), dist.new_group(ranks))
            for ranks in (everyone, few)
        ]
        for case in range(cases):
            common = random.Random(f"{seed} {case}")  # noqa: S311 - no secret
            own = random.Random(f"{seed} {case} {rank}")  # noqa: S311 - as above
            ranks, ours, gloos = common.choice(pairs)
            steps = [Step(common, own, ranks) for _ in range(common.randint(1, 6))]
            if rank not in ranks:
                continue
            found, expected = run_steps(steps, ours, own=True), run_steps(steps, gloos, own=False)
            for step, one, other in zip(steps, found, expected, strict=True):
                same = all(torch.equal(*both) for both in zip(one, other, strict=True))
                assert same, (seed, case, step.name, step.size, step.dtype, one, other)
        return True

    assert all(run_processes(world, work, timeout_s=60 + cases))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("algorithms", [FORCED, OTHERS], ids=["rings", "others"])
def test_random_sequences_equal_gloos(world, algorithms):
    configure(algorithms=algorithms)
    profile = settings()
    seed = 0 if profile.derandomize else random.randrange(1 << 30)  # noqa: S311 - no secret
    check_cases(world, profile.max_examples, seed)
