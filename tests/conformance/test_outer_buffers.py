"""What is no pseudo-gradient arrives exact, whatever the codec: statistics, flags, counters.

References:
    A BatchNorm's running variance is a mean of squares, so it is never below zero.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.optim import OuterSync
from fivefold.testing import run_world
from helpers.outer_world import RULES, Rounded

pytestmark = pytest.mark.filterwarnings("ignore::fivefold.optim.StabilityWarning")


class Statistics(torch.nn.Module):
    """A parameter, and buffers as models have them."""

    def __init__(self, dtype):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(3) for _ in range(4))
        self.register_buffer("var", torch.ones(5, dtype=dtype))
        self.register_buffer("ready", torch.zeros(2, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=dtype))
        self.register_buffer("table", torch.linspace(-3, 3, 7).to(dtype))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def see(self, variance):
        """Do what a forward pass in training mode does."""
        self.var.mul_(0.5).add_(0.5 * variance)
        self.ready.fill_(1.0)
        self.count += 1
        self.seen += 1


def train(transport, rule, codec, dtype, variances, *, weighted):
    model = Statistics(dtype)
    table = model.table.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    transport = transport if codec is None else Rounded(transport, codec)
    sync = OuterSync(model, optimizer, rule=rule, transport=transport, check_every_rounds=1)
    least, steps = [], len(variances)
    for step in range(steps):
        for p in model.weights:
            p.grad = torch.full_like(p, 1.0 + transport.rank)
        optimizer.step()
        model.see(variances[step] if transport.rank == 0 else 1e-4)
        sync.step(weight=100.0 + 7 * transport.rank if weighted else None)
        with sync.global_parameters():
            least.append(float(model.var.min()))
        least.append(float(model.var.min()))
        assert model.ready.tolist() == [1.0, 1.0], "a flag that all have set was no longer 1"
        assert int(model.count) == model.count == step + 1
        assert torch.equal(model.table, table)
    sync.finalize()
    assert int(model.seen) == steps
    assert min(*least, float(model.var.min())) > 0
    return model.var


@given(
    name=st.sampled_from(sorted(RULES)),
    codec=st.sampled_from([None, "bf16", "int8", "int4", "topk"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    weighted=st.booleans(),
    variances=st.lists(st.sampled_from([0.0, 1e-6, 1.0, 300.0]), min_size=1, max_size=9),
)
def test_buffers_arrive_exact_with_any_rule_and_codec(name, codec, dtype, weighted, variances):
    def work(transport):
        return train(transport, RULES[name], codec, dtype, variances, weighted=weighted)

    first, second = run_world(2, work)
    assert torch.equal(first, second)


def test_a_buffer_ends_at_the_mean_over_the_ranks():
    def work(transport):
        return train(transport, RULES["local-sgd"], "int4", torch.float64, [4.0] * 2, weighted=True)

    # At tau 2 rank 0 goes from 1 to 2.5 and 3.25, rank 1 from 1 to 0.25 and a bit.
    rank_0, rank_1 = 3.25, 0.25 + 0.75e-4
    expected = torch.full((5,), (100 * rank_0 + 107 * rank_1) / 207, dtype=torch.float64)
    for found in run_world(2, work):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
