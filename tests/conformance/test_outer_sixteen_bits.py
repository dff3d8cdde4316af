"""Parameters of 16 bits: what a write of the outer state rounds away is carried, not lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.optim import CO2, DelayCorrected, LocalSGD, OuterSync
from fivefold.testing import run_world
from helpers.outer_world import OF_GRADIENTS, RULES

pytestmark = pytest.mark.filterwarnings("ignore::fivefold.optim.StabilityWarning")
WORKERS = 4


def moved(transport, rule, dtype, moves, *, buffer=False):
    """The end of parameters (or a buffer) whose every local step is a whole step of 16 bits."""
    model = torch.nn.Module()
    model.weights = torch.nn.ParameterList(torch.ones(2, dtype=dtype) for _ in range(4))
    model.register_buffer("seen", torch.ones(2, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = OuterSync(model, optimizer, rule=rule, transport=transport, check_every_rounds=1)
    unit = 2 * float(torch.finfo(torch.bfloat16).eps)  # a whole step of both, from 1 up to 4
    for move in moves[transport.rank]:
        for tensor in [model.seen] if buffer else model.weights:
            tensor.detach().add_(unit * move)
        sync.step()
    sync.finalize()
    ends = [model.seen] if buffer else list(model.weights)
    return (torch.cat([end.detach().reshape(-1) for end in ends]).double() - 1.0) / unit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "rule",
    [
        LocalSGD(tau=1),
        DelayCorrected(tau=1, fragments=1),
        DelayCorrected(tau=4, fragments=4),
        CO2(tau=1, outer_lr=1.0, outer_momentum=0.0, staleness="none"),
        CO2(tau=4, fragments=2, outer_lr=1.0, outer_momentum=0.0, staleness="none"),
    ],
    ids=lambda rule: f"{rule.name}-{rule.tau}",
)
def test_a_step_of_one_worker_in_four_counts_a_quarter(rule, dtype):
    moves = [[1.0] * 40, *[[0.0] * 40] * 3]
    for ends in run_world(WORKERS, lambda t: moved(t, rule, dtype, moves)):
        assert ends.tolist() == [10.0] * len(ends)
    for ends in run_world(WORKERS, lambda t: moved(t, rule, dtype, moves, buffer=True)):
        assert ends.tolist() == [10.0] * len(ends)


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(RULES.keys() - OF_GRADIENTS)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    steps=st.integers(1, 25),
    data=st.data(),
)
def test_sixteen_bits_end_within_a_step_of_float32(name, dtype, steps, data):
    whole = st.lists(st.sampled_from([-1.0, 0.0, 1.0, 2.0]), min_size=steps, max_size=steps)
    moves = [data.draw(whole) for _ in range(2)]

    def ends(dtype):
        first, second = run_world(2, lambda t: moved(t, RULES[name], dtype, moves))
        assert torch.equal(first, second)
        return first

    exact, found = ends(torch.float32), ends(dtype)
    # The unit is two of the spacings at 1, one from 2 on; a step that a rounded position takes from
    # 1.99 instead of 2 may be of half the size, so a whole unit is what is promised.
    assert float((exact - found).abs().max()) <= 1.0
