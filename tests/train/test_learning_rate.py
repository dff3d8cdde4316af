"""The schedule against closed forms."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.train._step import cosine_with_warmup


def schedule(steps, warmup_steps, *, lr=2.0, fraction=0.1):
    return [
        cosine_with_warmup(
            t, lr=lr, warmup_steps=warmup_steps, steps=steps, min_lr_fraction=fraction
        )
        for t in range(steps)
    ]


def test_warmup_is_linear_and_starts_above_zero():
    assert schedule(20, 4)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_cosine_at_its_quarters():
    rates = schedule(101, 0, lr=1.0, fraction=0.0)
    half = math.sqrt(0.5)
    wanted = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0]
    assert [rates[t] for t in (0, 25, 50, 75, 100)] == pytest.approx(wanted, abs=1e-12)


def test_last_step_and_beyond_have_the_last_fraction():
    assert schedule(50, 10)[-1] == pytest.approx(0.2)
    beyond = cosine_with_warmup(70, lr=2.0, warmup_steps=10, steps=50, min_lr_fraction=0.1)
    assert beyond == pytest.approx(0.2)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (5, 5), (5, 4)])
def test_edges_reach_the_peak_and_divide_by_nothing(steps, warmup):
    assert max(schedule(steps, warmup)) == pytest.approx(2.0)


@given(
    steps=st.integers(1, 300),
    share=st.floats(0, 1),
    fraction=st.floats(0, 1),
    lr=st.floats(1e-6, 9),
)
def test_rises_then_falls_within_bounds_and_its_mean_is_known(steps, share, fraction, lr):
    warmup = round(share * steps)
    rates = schedule(steps, warmup, lr=lr, fraction=fraction)
    tolerance = 1e-9 * lr
    assert all(0 < rate <= lr + tolerance for rate in rates[:-1])
    assert all(b >= a for a, b in pairwise(rates[:warmup]))
    assert all(b <= a + tolerance for a, b in pairwise(rates[warmup:]))
    # A cosine sampled symmetrically has the mean of its ends.
    if len(rates[warmup:]) > 1:
        mean = sum(rates[warmup:]) / len(rates[warmup:])
        assert mean == pytest.approx(lr * (1 + fraction) / 2, rel=1e-9)


@pytest.mark.parametrize(("step", "warmup"), [(-1, 0), (0, 11), (0, -1)])
def test_impossible_numbers_are_errors(step, warmup):
    with pytest.raises(ConfigurationError):
        cosine_with_warmup(step, lr=1.0, warmup_steps=warmup, steps=10, min_lr_fraction=0.1)
