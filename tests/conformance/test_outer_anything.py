"""Whatever a loop brings arrives: rules, data types, codecs, and tensors of every kind together.

Every local step moves all that is trained by whole steps of 16 bits, of other numbers on each rank,
so that float32 holds it all exactly: its run is the answer.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.optim import OuterSync
from fivefold.testing import run_world
from helpers.outer_world import OF_GRADIENTS, RULES, Rounded

pytestmark = pytest.mark.filterwarnings("ignore::fivefold.optim.StabilityWarning")
START, UNIT = 1.25, float(torch.finfo(torch.bfloat16).eps)  # a step from 1 to 2, where all stay
WEIGHTS = 1.0, 3.0  # so that a mean is no whole number of 16 bits' steps
# Largest error of a message, of the largest number in it.
LOST = {None: 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 1 / 127, "int4": 1 / 7, "topk": 1.0}


class Odd(torch.nn.Module):
    """Tensors of every kind that public models have."""

    def __init__(self, dtype):
        super().__init__()
        self.plain = torch.nn.ParameterList(torch.full((3,), START, dtype=dtype) for _ in range(3))
        self.tied = torch.nn.Parameter(torch.full((2, 2), START, dtype=dtype))
        self.same = torch.nn.Parameter(self.tied.data)  # by memory: another object
        self.freezes = torch.nn.Parameter(torch.full((4,), START, dtype=dtype))
        self.late = torch.nn.Parameter(torch.full((2,), START, dtype=dtype), requires_grad=False)
        self.fixed = torch.nn.Parameter(torch.full((2,), 7.0, dtype=dtype), requires_grad=False)
        self.register_buffer("seen", torch.full((2,), START, dtype=dtype))
        self.register_buffer("flag", torch.zeros(1, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def trained(self):
        return [p for p in self.parameters() if p.requires_grad and p is not self.same]


def train(transport, name, dtype, codec, moves, changes_at):
    """Return what the rank ends with, in units, and the largest number its codec has kept."""
    model = Odd(dtype)
    wire = transport if codec is None else Rounded(transport, codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = OuterSync(model, optimizer, rule=RULES[name], transport=wire, check_every_rounds=1)
    for step, move in enumerate(moves[transport.rank]):
        if step == changes_at:
            model.freezes.requires_grad_(False)
            model.late.requires_grad_(True)
        optimizer.zero_grad()
        for p in model.trained():
            p.grad = torch.full_like(p, -UNIT * move)
        optimizer.step()
        model.seen += UNIT * move
        model.flag.fill_(1.0)
        model.count += 1
        sync.step(weight=WEIGHTS[transport.rank])
    sync.finalize()
    assert model.flag.item() == 1.0
    assert int(model.count) == len(moves[transport.rank])
    assert model.fixed.tolist() == [7.0, 7.0]
    assert torch.equal(model.tied, model.same)
    kept = [float(r.abs().max()) for r in getattr(wire, "residuals", {}).values() if r.numel()]
    ends = {
        n: t.detach() for n, t in itertools.chain(model.named_parameters(), [("seen", model.seen)])
    }
    return {n: (t.double() - START) / UNIT for n, t in ends.items()}, max(kept, default=0.0) / UNIT


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    codec=st.none() | st.sampled_from(list(LOST)),
    steps=st.integers(1, 14),
    data=st.data(),
)
def test_what_training_moves_ends_within_a_step_of_float32(name, dtype, codec, steps, data):
    # A mean gradient of two ranks is a whole number of units where both are even.
    amounts = [0.0, 2.0] if name in OF_GRADIENTS else [-1.0, 0.0, 1.0, 2.0]
    whole = st.lists(st.sampled_from(amounts), min_size=steps, max_size=steps)
    moves = [data.draw(whole) for _ in range(2)]
    changes_at = data.draw(st.integers(0, steps))

    def ends(dtype, codec):
        (first, mine), (second, theirs) = run_world(
            2, lambda t: train(t, name, dtype, codec, moves, changes_at)
        )
        assert all(torch.equal(first[key], second[key]) for key in first)
        return first, max(mine, theirs)

    exact, _ = ends(torch.float32, None)
    if RULES[name].num_fragments == 1:  # else their rounds end at other moments
        for twice in ("tied", "same"):
            torch.testing.assert_close(exact[twice].flatten()[:3], exact["plain.0"])
    found, kept = ends(dtype, codec)
    # What a codec still keeps at the end, or an outer momentum has made of its delay.
    late = 4.0 * kept + 8.0 * LOST[codec] * steps
    # The optimizer's own step with a part of a unit is rounded by the optimizer.
    rounded = steps / 2 if name in OF_GRADIENTS and dtype != torch.float32 else 0.0
    for key, value in exact.items():
        apart = float((value - found[key]).abs().max())
        assert apart <= 1.0 + rounded + (0.0 if key == "seen" else late), key
