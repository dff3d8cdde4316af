"""Types of keys that only a configuration for graphs has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fivefold.errors import ConfigurationError


def _fanouts(value: Any) -> Any:
    value = tuple(value) if isinstance(value, list) else value
    if isinstance(value, tuple) and not value:
        message = "fanouts must not be empty"
        raise ConfigurationError(message, hint="write one number per layer, such as [10, 10]")
    for fanout in value if isinstance(value, tuple) else ():
        if isinstance(fanout, int) and fanout < 1 and fanout != -1:
            message = f"a fan-out must be positive, or -1 for all neighbours; got {fanout}"
            raise ConfigurationError(message, hint="write one per layer, such as [10, 10]")
    return value


Backend = Literal["auto", "threads", "io_uring", "python", "mmap"]
Fanouts = Annotated[tuple[int, ...], BeforeValidator(_fanouts)]
Share = Annotated[float, Field(ge=0, lt=1)]
