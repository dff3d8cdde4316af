"""Schedules as JSON: the collective by name where it has one, arrays as lists, topology as TOML."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fivefold.collectives.schedules._arrays import Array
from fivefold.collectives.schedules._collective import Collective
from fivefold.collectives.schedules._constructors import COLLECTIVES, named_collective
from fivefold.collectives.schedules._schedule import Schedule
from fivefold.errors import DataError
from fivefold.files import parse_json

SCHEMA = "fivefold.schedule.1"
_ARRAYS = ("chunks", "sources", "targets")
_OPTIONAL = ("starts_s", "ends_s", "route_offsets", "route_links")
_KEYS = {"schema", "name", "solver", "collective", "topology", "attributes", "reduces", "steps"}


def to_json(schedule: Schedule) -> str:
    """The schedule as text; see `Schedule.to_json`."""
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "name": schedule.name,
        "solver": schedule.solver,
        "collective": _collective_to_data(schedule.collective),
        "topology": None if schedule.topology is None else schedule.topology.to_toml(),
        "attributes": dict(schedule.attributes),
    }
    found |= {key: getattr(schedule, key).tolist() for key in _ARRAYS}
    found["reduces"] = _short(schedule.reduces.astype(np.int8))
    found["steps"] = _short(schedule.steps)
    for key in _OPTIONAL:
        if (array := getattr(schedule, key)) is not None:
            found[key] = array.tolist()
    return json.dumps(found)


def _short(array: Array) -> int | list[int]:
    """One number where all are equal."""
    if array.size and (array == array[0]).all():
        return int(array[0])
    return [int(value) for value in array]


def _collective_to_data(collective: Collective) -> dict[str, Any]:
    data: dict[str, Any] = {"name": collective.name, "num_ranks": collective.num_ranks}
    if collective.name in COLLECTIVES:
        per = {"all_to_all": collective.num_ranks**2}.get(collective.name, collective.num_ranks)
        if collective.name in ("all_reduce", "broadcast", "reduce"):
            per = 1
        root = 0 if collective.root is None else collective.root
        chunks = collective.num_chunks // per
        made = named_collective(collective.name, collective.num_ranks, chunks=chunks, root=root)
        if made == collective:
            return {**data, "chunks": chunks, "root": root}
    return data | {
        "num_chunks": collective.num_chunks,
        "reducing": collective.reducing,
        "root": collective.root,
        "pre": np.stack([collective.pre_chunks, collective.pre_ranks], axis=1).tolist(),
        "post": np.stack([collective.post_chunks, collective.post_ranks], axis=1).tolist(),
        "weights": _short_weights(collective),
    }


def _short_weights(collective: Collective) -> float | list[float] | None:
    """One number where all are that number."""
    weights = collective.chunk_weights
    if weights.size and collective.has_equal_chunks:
        return float(weights[0])
    return [float(weight) for weight in weights] or None


def _collective_from_data(data: dict[str, Any]) -> Collective:
    if "pre" not in data:
        return named_collective(
            data["name"], data["num_ranks"], chunks=data["chunks"], root=data["root"]
        )
    pre = np.array(data["pre"], dtype=np.int32).reshape(-1, 2)
    post = np.array(data["post"], dtype=np.int32).reshape(-1, 2)
    return Collective(
        name=data["name"],
        num_ranks=data["num_ranks"],
        num_chunks=data["num_chunks"],
        reducing=data["reducing"],
        pre_chunks=pre[:, 0],
        pre_ranks=pre[:, 1],
        post_chunks=post[:, 0],
        post_ranks=post[:, 1],
        chunk_weights=data["weights"],
        root=data["root"],
    )


def read_schedule(text: str) -> Schedule:
    """A schedule from JSON text, as `Schedule.to_json` writes it.

    Args:
        text: The JSON text.

    Returns:
        The schedule; `verify` has not seen it.

    Raises:
        DataError: The text is no JSON, of another schema, or lacks or has wrong entries.

    Examples:
        >>> read_schedule("{}")
        Traceback (most recent call last):
        fivefold.errors.DataError: the text is no schedule: its schema is None; ...
    """
    data = parse_json(text, where="the schedule")
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise DataError(
            f"the text is no schedule: its schema is {schema!r}", hint=f"expected {SCHEMA!r}"
        )
    unknown = sorted(set(data) - _KEYS - {*_ARRAYS, *_OPTIONAL})
    if unknown:
        raise DataError(f"the schedule has an unknown entry {unknown[0]!r}", hint="remove it")
    try:
        return _schedule_from_data(data)
    except KeyError as error:
        raise DataError(f"the schedule has no entry {error}", hint="write it again") from None
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        message = f"the schedule has a wrong entry: {error}"
        raise DataError(message, hint="write it again with Schedule.to_json") from None


def _schedule_from_data(data: dict[str, Any]) -> Schedule:
    from fivefold.network.topology import Topology  # noqa: PLC0415 - only where a file names one

    arrays = {key: _numbers(data, key) for key in (*_ARRAYS, *_OPTIONAL) if key in data}
    toml = data["topology"]
    for key in ("name", "solver"):
        if not isinstance(data[key], str):
            raise TypeError(f"{key} is {data[key]!r:.60}, not text")
    return Schedule(
        collective=_collective_from_data(data["collective"]),
        **{**{key: data[key] for key in _ARRAYS}, **arrays},
        reduces=np.asarray(data["reduces"]).astype(np.bool_),
        steps=np.asarray(data["steps"], dtype=np.int32),
        topology=None if toml is None else Topology.from_toml(toml),
        name=data["name"],
        solver=data["solver"],
        attributes=data["attributes"],
    )


def _numbers(data: dict[str, Any], key: str) -> Array:
    array = np.asarray(data[key], dtype=np.float64 if key.endswith("_s") else np.int64)
    if array.ndim != 1:
        message = f"{key} is no list of numbers"
        raise DataError(message, hint="write the schedule with Schedule.to_json")
    return array
