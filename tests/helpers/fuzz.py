# ruff: noqa: S311, E501
"""Mutations of whole documents: what people mistype, what disks damage, what other programs write.

A document is changed as its grammar has it (a value of another type, a key gone or twice, a list
cut or repeated, a number of another size) or as bytes (cut, flipped, something in between).
"""

import copy
import json
import math
import random
import re
import tomllib

ODD = [
    None, True, False, 0, 1, -1, 2, 7, 10**9, 10**12, 2**31, 2**63 - 1, -(2**63), 2**64, 10**400, 0.0, -0.5, 0.1,
    1e-300, 1e300, math.inf, -math.inf, math.nan, "", "x", "nan", "1e999 GB", "0 B", "25 GB/s", "5 us", "-1 s", "../..",
    "/dev/zero", "/", "ring:1000000000", "ring:4", "torus:4x4", "1" * 5000, "\0", "\ud800", "é" * 50, "[red]", "[/]",
    "a\nb", [], [0], [[]], [[0, 0]], [1, "x"], [None], {}, {"x": 1}, {"": 0}, [{}], {"0": [1]}, list(range(200)),
]  # fmt: skip
PIECES = [
    b"\0", b"\xff", b"\xef\xbb\xbf", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b'"', b"\n", b"=", b"a." * 500, b"]", b"}",
    b"<", b">", b"&", b",", b"1e999", b"-", b"\\", b"\r", b"\x1b[2J", b"<a>" * 3000, "\u2028".encode(),
]  # fmt: skip


class NotTomlError(Exception):
    """The mutated value has no form in TOML."""


def mutated(text, kind, seed):
    """The bytes of a changed document: ``kind`` is "toml", "json", "jsonl" or "xml"."""
    rng = random.Random(seed)
    if kind == "jsonl":
        lines = text.splitlines()
        place = rng.randrange(len(lines))
        lines[place] = mutated(lines[place], "json", seed + 1).decode(errors="surrogateescape")
        return "\n".join(lines).encode(errors="surrogateescape") + b"\n" * rng.randrange(2)
    if rng.random() < 0.15:
        return _bytes(text.encode(), rng)
    for _ in range(20):
        try:
            return _KINDS[kind](text, rng).encode(errors="surrogatepass")
        except (NotTomlError, RecursionError):
            continue
    return _bytes(text.encode(), rng)


def _bytes(data, rng):
    place = rng.randrange(len(data) + 1)
    way = rng.randrange(5)
    if way == 0:
        return data[:place]
    if way == 1:
        return data[:place] + rng.choice(PIECES) + data[place:]
    if way == 2:
        return data[:place] + data[place + rng.randrange(1, 40) :]
    if way == 3:
        flipped = bytearray(data or b"x")
        flipped[place % len(flipped)] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    return rng.choice(
        [b"", b"\0" * 100, b"[" * 100000, bytes(rng.randrange(256) for _ in range(200)), data * 2]
    )


def _tree(value, rng):
    """A copy of the value with one to three changes."""
    top = [copy.deepcopy(value)]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(top))
        holder, key = rng.choice(places)
        _change(holder, key, rng, places)
    return top[0]


def _places(found):
    pairs = found.items() if isinstance(found, dict) else enumerate(found)
    for key, value in list(pairs):
        yield found, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _change(holder, key, rng, places):
    way = rng.randrange(9)
    value = holder[key]
    if way == 0 and isinstance(holder, dict):
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[rng.choice([str(key) + "x", "", "name", "é"])] = holder.pop(key)
    elif way == 2 and isinstance(value, list) and value:
        holder[key] = rng.choice(
            [value * 2, value[:-1], value[1:], [*value, value[0]], value[::-1]]
        )
    elif way == 3 and isinstance(value, int | float) and abs(value) < 1e300:
        holder[key] = rng.choice(
            [-value, value + 1, value * 1000, value * 10**9, value / 3, str(value), [value]]
        )
    elif way == 4:
        other, place = rng.choice(places)
        try:
            holder[key] = copy.deepcopy(other[place])
        except (KeyError, IndexError):  # an earlier change took it away
            holder[key] = None
    elif way == 5:
        for _ in range(rng.choice([2, 300])):
            value = [value] if rng.random() < 0.5 else {"x": value}
        holder[key] = value
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD))


def _json(text, rng):
    return json.dumps(_tree(json.loads(text), rng))


def _toml(text, rng):
    value = _tree(tomllib.loads(text), rng)
    if not isinstance(value, dict):
        raise NotTomlError
    return "\n".join(f"{_quoted(key)} = {_toml_value(one)}" for key, one in value.items()) + "\n"


def _toml_value(value):
    if value is None:
        raise NotTomlError
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return str(value)


def _quoted(text):
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


_ATTRIBUTE = re.compile(r'([\w]+)="([^"]*)"')
_TAG = re.compile(r"<[^>]*>\n?\s*")


def _xml(text, rng):
    for _ in range(rng.choice([1, 1, 2])):
        pattern = _ATTRIBUTE if rng.random() < 0.8 else _TAG
        found = rng.choice(list(pattern.finditer(text)))
        if pattern is _TAG:
            new = rng.choice(["", found[0] * 2, "<step/>", "<!DOCTYPE a>", "<x>", "</tb>"])
        else:
            odd = rng.choice(
                [
                    "",
                    "-1",
                    "0",
                    "1",
                    "7",
                    "99999",
                    str(10**12),
                    "9" * 5000,
                    "x",
                    "nan",
                    "i",
                    "o",
                    "s",
                    "r",
                    "cpy",
                ]
            )
            new = rng.choice([f'{found[1]}="{odd}"', f'{found[1]}x="{found[2]}"', "", found[0] * 2])
        text = text[: found.start()] + new + text[found.end() :]
    return text


_KINDS = {"toml": _toml, "json": _json, "xml": _xml}


def mutated_line(text, seed):
    """One line that a person might type instead: a spec such as ``fat_tree:8,gpus=8``."""
    rng = random.Random(seed)
    words = re.findall(r"[A-Za-z_]+|[0-9.]+|[^A-Za-z_0-9.]+", text)
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.randrange(len(words))
        way = rng.randrange(5)
        if way == 0:
            words[place] = ""
        elif way == 1:
            words[place] *= 2
        elif way == 2:
            words[place] = rng.choice(
                [
                    "0",
                    "1",
                    "3",
                    "-1",
                    "7",
                    "1000000000",
                    "10" * 12,
                    "9" * 5000,
                    "1e9",
                    "0.5",
                    "nan",
                    "x",
                    "é",
                    "²",
                    "",
                ]
            )
        elif way == 3:
            words[place] += rng.choice(
                [",", ":", "=", "x", "=1", ",gpus=3", ":2", "\0", " ", "[/]", "25GB/s", "1e999s"]
            )
        else:
            other = rng.randrange(len(words))
            words[place], words[other] = words[other], words[place]
    return "".join(words)
