"""Quantities with units: hand-computed values, round trips, refusals."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import CheckpointError, CommunicationError, ConfigurationError, FivefoldError
from fivefold.units import (
    format_bytes,
    format_bytes_per_s,
    format_duration_s,
    parse_bytes,
    parse_bytes_per_s,
    parse_duration_s,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0 B", 0),
        ("10 MB", 10**7),
        ("4KiB", 4096),
        ("1.5GB", 15 * 10**8),
        ("8 Mbit", 10**6),
        ("8Mb", 10**6),
        ("0", 0),
        (7, 7),
        ("1e3 kB", 10**6),
        (" 2 TiB ", 2 * 2**40),
    ],
)
def test_sizes(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200 Mbit/s", 25e6),
        ("200Mbps", 25e6),
        ("25 GB/s", 25e9),
        ("1Gbit/s", 125e6),
        ("64 KiB/s", 65536.0),
        (100, 100.0),
    ],
)
def test_rates(text, rate):
    assert parse_bytes_per_s(text) == rate


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("5 us", 5e-6), ("5µs", 5e-6), ("1.5ms", 1.5e-3), ("2 min", 120.0), ("1h", 3600.0), (3, 3.0)],
)
def test_durations(text, duration_s):
    assert parse_duration_s(text) == pytest.approx(duration_s, rel=1e-15)


@pytest.mark.parametrize("parse", [parse_bytes, parse_bytes_per_s, parse_duration_s])
@pytest.mark.parametrize(
    "text", ["", "fast", "-1", "5 parsecs", "nan", "inf", "10 MB/h", None, True, "1 2 s"]
)
def test_refusals_show_the_value_and_an_example(parse, text):
    with pytest.raises(ConfigurationError, match=r"is not a .*write a number with its unit"):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "hint"),
    [
        (parse_bytes, "write '16 B' or '16 MB'"),
        (parse_bytes_per_s, "write '16 Mbit/s' or '16 MB/s'"),
        (parse_duration_s, "write '16 s' or '16 ms'"),
    ],
)
def test_a_text_without_a_unit_is_refused_with_its_likely_readings(parse, hint):
    with pytest.raises(ConfigurationError, match="'16' has no unit") as caught:
        parse("16")
    assert caught.value.hint == hint
    assert parse(16) == 16
    assert parse("0") == 0


def test_a_size_is_no_rate_and_a_rate_no_size():
    with pytest.raises(ConfigurationError):
        parse_bytes("10 MB/s")
    with pytest.raises(ConfigurationError):
        parse_bytes_per_s("10 MB")


@given(st.floats(1, 1e15))
def test_formatted_values_read_back_within_rounding(value):
    assert parse_bytes(format_bytes(value)) == pytest.approx(value, rel=6e-3, abs=0.5)
    assert parse_bytes_per_s(format_bytes_per_s(value)) == pytest.approx(value, rel=6e-3)


@given(st.floats(1e-9, 59))
def test_short_durations_read_back(duration_s):
    assert parse_duration_s(format_duration_s(duration_s)) == pytest.approx(duration_s, rel=6e-3)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 s"), (59.7, "1 min 0 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h 0 min"),
        (7260, "2 h 1 min"), (0.5, "500 ms"), (-0.5, "-500 ms"), (-90, "-1 min 30 s"),
        (math.nan, "nan s"), (math.inf, "inf h"),
    ],
)  # fmt: skip
def test_duration_texts(duration_s, text):
    assert format_duration_s(duration_s) == text


def test_errors_carry_hint_and_nearest_builtin():
    error = ConfigurationError("tau is 0", hint="use 1")
    assert isinstance(error, ValueError)
    assert (error.message, error.hint, str(error)) == ("tau is 0", "use 1", "tau is 0; use 1")
    assert str(FivefoldError("plain")) == "plain"
    assert str(CheckpointError("no space", hint="free some")) == "no space; free some"
    assert str(CommunicationError("rank 1 left", hint="look there")) == "rank 1 left; look there"
    assert math.isclose(FivefoldError("x").exit_code, 1)


@pytest.mark.parametrize("kind", [ConfigurationError, CheckpointError, CommunicationError])
def test_errors_travel_between_processes(kind):
    copy = pickle.loads(pickle.dumps(kind("what", hint="do")))  # noqa: S301 - our own bytes
    assert type(copy) is kind
    assert (copy.message, copy.hint) == ("what", "do")
