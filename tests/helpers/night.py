"""Cases of a parametrized test that are for the night, where quicker ones of the same remain."""

import pytest
from hypothesis import settings


def by_night(values, chosen):
    """Return all values, those that are chosen marked ``nightly``."""
    assert all(value in values for value in chosen), "a case that is none would be left out unseen"
    night = pytest.mark.nightly
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=night)
        if value in chosen
        else value
        for value in values
    ]


def number_of(usual, nightly):
    """Return how often something is repeated: less by day than in ``make test-nightly``."""
    return nightly if settings().max_examples > 50 else usual
