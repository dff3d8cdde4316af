"""What is for the night, where less of the same kind remains by day."""

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


def by_day(examples):
    """Let a property whose examples take long have fewer of them by day."""
    return settings(max_examples=number_of(examples, settings().max_examples))
