"""How a model is cut into fragments, when each is sent, and what a merge makes of a weight."""

import pytest
import torch

from fivefold.errors import ConfigurationError
from fivefold.optim import (
    CO2,
    AutoTau,
    DelayCorrected,
    DiLoCo,
    LocalSGD,
    OuterSync,
    OverlapLocalSGD,
    StreamingDiLoCo,
)
from fivefold.testing import run_world


class Vectors(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.vectors = torch.nn.ParameterList(torch.zeros(size) for size in sizes)


def engine(transport, rule, sizes):
    model = Vectors(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, OuterSync(model, optimizer, rule=rule, transport=transport)


# Sizes of the parameters and of the fragments that they make, cut by hand: a parameter begins a
# new fragment where more than half of it would lie beyond an even share, and none is left empty.
CUTS = [
    ([4, 4, 4, 4], [8, 8]),
    ([10, 1, 1], [10, 2]),
    ([1, 1, 10], [2, 10]),
    ([1, 1, 1, 1, 12], [4, 12]),
    ([3, 3, 3], [6, 3]),
    ([5, 1, 5, 1], [6, 6]),
    ([100, 1], [100, 1]),
    ([1, 100], [1, 100]),
    ([2, 2, 2, 2, 2, 2], [4, 4, 4]),
    ([9, 1, 1, 1], [9, 1, 2]),
    ([1, 1, 1, 9], [2, 1, 9]),
]


@pytest.mark.parametrize(("sizes", "expected"), CUTS)
def test_fragments_are_runs_of_parameters_of_about_equal_size(sizes, expected):
    number = len(expected)

    def work(transport):
        _, sync = engine(transport, StreamingDiLoCo(tau=number, fragments=number), sizes)
        for _ in range(3 * number):
            sync.step()
        sync.finalize()
        return {record.fragment: record.payload_bytes // 4 for record in sync.all_reduces()}

    found = run_world(2, work)
    assert found[0] == found[1] == dict(enumerate(expected))


@pytest.mark.parametrize(("tau", "parts"), [(1, 1), (2, 2), (4, 4), (9, 4)])
def test_four_parts_are_usual_and_no_more_than_steps(tau, parts):
    assert StreamingDiLoCo(tau=tau).num_fragments == parts


@pytest.mark.parametrize(
    ("tau", "fragments", "first"), [(4, 2, [2, 4]), (8, 4, [2, 4, 6, 8]), (5, 3, [1, 3, 5])]
)
def test_fragments_are_sent_in_turn_evenly_over_a_round(tau, fragments, first):
    def work(transport):
        _, sync = engine(transport, StreamingDiLoCo(tau=tau, fragments=fragments), [4] * fragments)
        rounds = []
        for _ in range(2 * tau):
            before = sync.statistics().rounds
            sync.step()
            rounds.append(sync.statistics().rounds - before)
        return [step for step, ended in enumerate(rounds, start=1) for _ in range(ended)]

    assert run_world(2, work)[0] == [*first, *(step + tau for step in first)]


def test_more_fragments_than_parameters_are_refused():
    def work(transport):
        engine(transport, StreamingDiLoCo(tau=4, fragments=3), [4, 4])

    with pytest.raises(ConfigurationError, match="fragments=3 is more than the model's 2 param"):
        run_world(2, work)


@pytest.mark.parametrize(
    ("sizes", "tau", "expected"),
    [
        ([100, 100], 8, 2),  # small messages: no link was measured
        ([1 << 17] * 16, 8, 8),  # 8 MiB in all
        ([1 << 17] * 32, 8, 8),
        ([1 << 17] * 16, 4, 4),  # a round has only so many steps
        ([1 << 20] * 2, 8, 2),  # a parameter is not cut
        ([1 << 18] * 3, 9, 3),
        ([1 << 18] * 3, 8, 2),  # three of two steps each hide nothing behind the other two
        ([1 << 18] * 6, 8, 4),
        ([1 << 17] * 16, 12, 6),
        ([1 << 17] * 16, 13, 6),  # 12 of 13 steps
        ([1 << 17] * 16, 9, 8),  # 8 of 9
    ],
)
def test_the_number_of_fragments_follows_the_model(sizes, tau, expected):
    def work(transport):
        rule = DelayCorrected(tau=tau)
        return engine(transport, rule, sizes)[1].statistics()

    for record in run_world(2, work):
        assert (record.fragments, record.delay_steps) == (expected, tau // expected)


def test_a_delay_or_uneven_steps_keep_the_model_whole():
    def work(transport, rule):
        return engine(transport, rule, [1 << 19] * 4)[1].statistics().fragments

    for rule in (
        DelayCorrected(tau=8, delay_steps=3),
        DelayCorrected(tau=AutoTau(balance=True)),
        DelayCorrected(tau=8, fragments=1),
    ):
        assert run_world(2, lambda t, rule=rule: work(t, rule)) == [1, 1]
    assert run_world(2, lambda t: work(t, DelayCorrected(tau="auto"))) == [4, 4]


RULES = [
    LocalSGD(tau=1),
    DiLoCo(tau=1, outer_lr=1.0, outer_momentum=0.0),
    CO2(tau=1, outer_lr=1.0, outer_momentum=0.0, staleness="none", clip=None),
    DelayCorrected(tau=1),
    OverlapLocalSGD(tau=1, outer_momentum=0.0, pull=0.5),
    StreamingDiLoCo(tau=1, fragments=1, outer_lr=1.0, outer_momentum=0.0),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("weights", [(1.0, 3.0), (2.0, 2.0), (0.0, 5.0)])
def test_the_first_round_moves_the_anchor_by_the_weighted_mean(rule, weights):
    """With alpha 1 and no momentum: after one local step and a drain all are at that mean."""
    moves = (2.0, -6.0)

    def work(transport):
        model, sync = engine(transport, rule, [3])
        with torch.no_grad():
            model.vectors[0].add_(moves[transport.rank])
        sync.step(weight=weights[transport.rank])
        if sync.statistics().merged_rounds == 0:  # on its way
            sync.finalize()
        return model.vectors[0].detach().clone()

    mean = sum(w * move for w, move in zip(weights, moves, strict=True)) / sum(weights)
    for found in run_world(2, work):
        torch.testing.assert_close(found, torch.full((3,), mean))
