"""Pipeline schedules: closed forms against published ratios and against a simulated pipeline."""

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.strategy.pipeline import pipeline_shape, stage_layers, stored_at

THIRD = {"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0}


def order_1f1b(stage, stages, micro_batches):
    """What a stage runs, in order: (kind, micro-batch)."""
    ahead = min(stages - 1 - stage, micro_batches)
    todo = [("f", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        todo += [("f", ahead + i), ("b", i)]
    return todo + [("b", i) for i in range(micro_batches - ahead, micro_batches)]


def simulate(orders, forward_s, backward_s):
    """Time of a pipeline whose stages run the given orders, and the most forwards in flight."""
    stages = len(orders)
    done, clock, position = {}, [0.0] * stages, [0] * stages
    flying, most = [0] * stages, [0] * stages
    waiting = [(0.0, stage) for stage in range(stages)]
    heapq.heapify(waiting)
    left = sum(len(order) for order in orders)
    while left:
        progressed = False
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                kind, i = orders[stage][position[stage]]
                need = ("f", i, stage - 1) if kind == "f" else ("b", i, stage + 1)
                inside = 0 <= need[2] < stages
                if inside and need not in done:
                    break
                start = max(clock[stage], done.get(need, 0.0))
                clock[stage] = start + (forward_s if kind == "f" else backward_s)
                done[kind, i, stage] = clock[stage]
                flying[stage] += 1 if kind == "f" else -1
                most[stage] = max(most[stage], flying[stage])
                position[stage] += 1
                left -= 1
                progressed = True
        assert progressed, "the order deadlocks"
    return max(clock), most


@given(
    stages=st.integers(2, 7),
    micro_batches=st.integers(1, 20),
    forward_s=st.floats(0.1, 3.0),
    backward_s=st.floats(0.1, 3.0),
)
def test_1f1b_and_gpipe_equal_a_simulated_pipeline(stages, micro_batches, forward_s, backward_s):
    ideal = micro_batches * (forward_s + backward_s)
    times = {"forward_s": forward_s, "input_s": backward_s / 2, "weight_s": backward_s / 2}
    gpipe = [
        [("f", i) for i in range(micro_batches)] + [("b", i) for i in range(micro_batches)]
    ] * stages
    one = [order_1f1b(stage, stages, micro_batches) for stage in range(stages)]
    for name, orders in (("gpipe", gpipe), ("1f1b", one)):
        shape = pipeline_shape(name, stages=stages, micro_batches=micro_batches, **times)
        if micro_batches >= stages or name == "gpipe":
            seconds, most = simulate(orders, forward_s, backward_s)
            assert ideal + shape.bubble_s == pytest.approx(seconds, rel=1e-9)
            for stage in range(stages):
                kept = stored_at(
                    name,
                    after=stages - 1 - stage,
                    stages=stages,
                    micro_batches=micro_batches,
                    virtual=1,
                )
                assert kept == most[stage]


# sail-sg/zero-bubble-pipeline-parallelism: idle time in units of 1F1B's, memory, messages.
ZERO_BUBBLE = {
    "zb_1p": (1 / 3, 1, 1), "zb_2p": (0, 2, 1), "zb_v": (0, 1, 2), "v_half": (1 / 2, 1 / 2, 2),
    "v_min": (2 / 3, 1 / 3, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ZERO_BUBBLE)
@pytest.mark.parametrize("stages", [2, 4, 8, 30])
def test_zero_bubble_ratios(name, stages):
    sizes = {"stages": stages, "micro_batches": 100, **THIRD}
    plain, shape = pipeline_shape("1f1b", **sizes), pipeline_shape(name, **sizes)
    idle, memory, messages = ZERO_BUBBLE[name]
    assert shape.bubble_s == pytest.approx(idle * plain.bubble_s, abs=1e-9)
    exact = memory * stages - (1 if name == "zb_2p" else 0)  # ZB-H2 keeps 2 p - 1
    stored = stored_at(name, after=stages - 1, stages=stages, micro_batches=100, virtual=1)
    assert stored == pytest.approx(exact)
    assert shape.p2p_messages == messages * plain.p2p_messages


@given(
    p=st.integers(1, 40).map(lambda n: 2 * n),
    f=st.floats(0.5, 2),
    i=st.floats(0.5, 2),
    w=st.floats(0.1, 0.5),
)
def test_dualpipe_and_interleaving_forms(p, f, i, w):
    times = {"forward_s": f, "input_s": i, "weight_s": w}
    sizes = {"stages": p, "micro_batches": 1000, **times}
    dual = pipeline_shape("dualpipe", **sizes)
    whole = i + w
    assert dual.bubble_s == pytest.approx(max(p / 2 - 1, 0) * (f + whole + whole - 3 * w))
    sizes_of = {"after": p - 1, "stages": p, "micro_batches": 1000, "virtual": 1}
    assert stored_at("dualpipe", **sizes_of) == p + 1
    one, four = (
        pipeline_shape("interleaved" if v > 1 else "1f1b", virtual=v, **sizes) for v in (1, 4)
    )
    assert four.bubble_s == pytest.approx(one.bubble_s / 4, rel=1e-9)
    assert one.bubble_s == pytest.approx((p - 1) * (f + i + w), rel=1e-9)


@given(st.integers(1, 200), st.integers(1, 64), st.booleans())
def test_layers_are_dealt_out_whole(layers, stages, outer):
    if stages > layers:
        return
    first, middle, last = map(int, stage_layers(layers, stages, embedding_layers=outer))
    if stages == 1:
        assert first == middle == last == layers
    elif not outer:
        least = layers // stages
        assert {first, middle, last} <= {least, least + 1}
        assert middle * stages >= layers
        assert last == least
        assert middle >= first >= last


def test_uneven_layers_with_embedding_and_head():
    assert stage_layers(126, 8, embedding_layers=True) == (15, 16, 15)
    assert sum(itertools.repeat(16, 6)) + 30 == 126


@given(st.integers(2, 200), st.integers(2, 64), st.booleans(), st.integers(1, 3))
def test_every_layer_has_a_stage(layers, stages, outer, losses):
    if stages > layers:
        return
    first, middle, last = map(
        int, stage_layers(layers, stages, embedding_layers=outer, losses=losses)
    )
    inner = stages - 2
    assert layers <= first + middle * inner + last <= layers + max(inner - 1, 0) + (last == 0)


def test_a_head_that_predicts_further_tokens_counts_twice():
    assert stage_layers(62, 16, embedding_layers=True, losses=2) == (4, 4, 2)


def test_an_unknown_schedule_is_explained():
    with pytest.raises(ConfigurationError, match="choose one of gpipe"):
        pipeline_shape("2f2b", stages=2, micro_batches=2, **THIRD)
