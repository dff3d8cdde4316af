"""Quantities with units: text in files and on the command line, seconds and bytes inside.

The library computes in seconds, bytes and bytes per second only. Decimal prefixes are powers of
1000 (``MB``, ``Gbit/s``), binary ones powers of 1024 (``MiB``). A lower-case ``bit`` means bits.
This module knows nothing of what the quantities measure.
"""

from __future__ import annotations

import math
import re

from fivefold.errors import ConfigurationError

__all__ = [
    "format_bytes",
    "format_bytes_per_s",
    "format_duration_s",
    "parse_bytes",
    "parse_bytes_per_s",
    "parse_duration_s",
]

_PREFIXES = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
# Small units as exponents: "5e-6" is read exactly, 5 * 1e-6 is not.
_EXPONENTS = {"ns": -9, "us": -6, "µs": -6, "ms": -3, "s": 0}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_READINGS = {  # of a text without a unit, the two that are meant most often
    "size": ("B", "MB"),
    "rate": ("Mbit/s", "MB/s"),
    "duration": ("s", "ms"),
}
_BITS_PER_BYTE = 8
_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)"
_SIZE = re.compile(rf"{_NUMBER}\s*(?P<prefix>[kKMGT]i?)?(?P<unit>B|bytes?|bits?|b)")
_RATE = re.compile(rf"{_NUMBER}\s*(?P<prefix>[kKMGT]i?)?(?P<unit>B|bytes?|bits?|b)(?:/s|ps)")
_TIME = re.compile(rf"{_NUMBER}\s*(?P<unit>ns|us|µs|ms|s|min|h)")


def parse_bytes(text: str | float) -> int:
    """Read a size such as ``"10 MB"`` or ``"4MiB"``, or round a number (no text) of bytes.

    Raises:
        ConfigurationError: The text is not a size or has no unit, or it is negative or not
            finite.

    Examples:
        >>> parse_bytes("1.5 MB"), parse_bytes("4KiB"), parse_bytes("8 kbit")
        (1500000, 4096, 1000)
    """
    return round(_parse_scaled(text, pattern=_SIZE, kind="size", example="10 MB"))


def parse_bytes_per_s(text: str | float) -> float:
    """Read a rate such as ``"200Mbit/s"``, or take a number (no text) of bytes per second.

    Raises:
        ConfigurationError: As ``parse_bytes``.

    Examples:
        >>> parse_bytes_per_s("200 Mbit/s"), parse_bytes_per_s("1.5GB/s")
        (25000000.0, 1500000000.0)
    """
    return _parse_scaled(text, pattern=_RATE, kind="rate", example="200 Mbit/s")


def parse_duration_s(text: str | float) -> float:
    """Read a duration such as ``"5 us"`` or ``"2 min"``, or take a number (no text) of seconds.

    Raises:
        ConfigurationError: As ``parse_bytes``.

    Examples:
        >>> parse_duration_s("5 ms"), parse_duration_s(2)
        (0.005, 2.0)
    """
    if isinstance(text, str) and (match := _TIME.fullmatch(text.strip())):
        return _finite(_seconds(match["number"], match["unit"]), text, "duration", "5 ms")
    return _plain_number(text, kind="duration", example="5 ms")


def format_bytes(size_bytes: float) -> str:
    """Write a size with a decimal prefix and three significant digits.

    Examples:
        >>> format_bytes(12_345_678)
        '12.3 MB'
    """
    return _with_prefix(size_bytes, "B")


def format_bytes_per_s(rate_bytes_per_s: float) -> str:
    """Write a rate in bits per second, as links are named.

    Examples:
        >>> format_bytes_per_s(25e6)
        '200 Mbit/s'
    """
    return _with_prefix(rate_bytes_per_s * _BITS_PER_BYTE, "bit/s")


def format_duration_s(duration_s: float) -> str:
    """Write a duration with the unit that reads best.

    Examples:
        >>> format_duration_s(0.00123), format_duration_s(95), format_duration_s(7200)
        ('1.23 ms', '1 min 35 s', '2 h 0 min')
    """
    if math.isnan(duration_s) or duration_s < 0:
        return "nan s" if math.isnan(duration_s) else f"-{format_duration_s(-duration_s)}"
    if duration_s >= 1e6 * _SECONDS["h"]:
        return f"{_three_digits(duration_s / _SECONDS['h'])} h"
    minutes, rest_s = divmod(round(duration_s), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    if minutes:
        return f"{minutes} min {rest_s} s"
    for unit in ("s", "ms", "us"):
        if duration_s >= _SECONDS[unit]:
            return f"{_three_digits(duration_s / _SECONDS[unit])} {unit}"
    return f"{_three_digits(duration_s * 1e9)} ns" if duration_s > 0 else "0 s"


def _parse_scaled(text: str | float, *, pattern: re.Pattern[str], kind: str, example: str) -> float:
    if isinstance(text, str) and (match := pattern.fullmatch(text.strip())):
        scale = _PREFIXES[match["prefix"] or ""]
        # Only an upper-case B (or the word) means bytes; "b" and "bit" mean bits.
        divisor = 1 if match["unit"].startswith(("B", "byte")) else _BITS_PER_BYTE
        return _finite(float(match["number"]) * scale / divisor, text, kind, example)
    return _plain_number(text, kind=kind, example=example)


def _seconds(number: str, unit: str) -> float:
    if unit not in _EXPONENTS:
        return float(number) * _SECONDS[unit]
    digits, _, exponent = number.lower().partition("e")
    if len(exponent) > 9:  # Python refuses to read thousands of digits
        return 0.0 if exponent.startswith("-") else math.inf
    return float(f"{digits}e{int(exponent or 0) + _EXPONENTS[unit]}")


def _plain_number(text: str | float, *, kind: str, example: str) -> float:
    try:
        value = math.nan if isinstance(text, bool) else float(text)
    except (OverflowError, TypeError, ValueError):
        value = math.nan
    if isinstance(text, str) and math.isfinite(value) and value > 0:
        number = text.strip()
        hint = " or ".join(f"'{number} {unit}'" for unit in _READINGS[kind])
        raise ConfigurationError(f"{text!r:.60} has no unit", hint=f"write {hint}")
    return _finite(value, text, kind, example)


def _finite(value: float, text: object, kind: str, example: str) -> float:
    if not math.isfinite(value) or value < 0:
        message = f"{text!r:.60} is not a {kind}"
        raise ConfigurationError(message, hint=f"write a number with its unit, such as {example!r}")
    return value


def _with_prefix(value: float, unit: str) -> str:
    for prefix in ("T", "G", "M", "k"):
        if abs(value) >= _PREFIXES[prefix]:
            return f"{_three_digits(value / _PREFIXES[prefix])} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    text = f"{value:.3g}"  # from 1,000 on with an exponent, which only far numbers keep
    return f"{float(text):.0f}" if "e+" in text and abs(value) < 1e6 else text
