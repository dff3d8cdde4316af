"""What the tables of a configuration are made of: their base class and the types of their keys.

This module knows nothing of what the keys mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fivefold.errors import ConfigurationError
from fivefold.units import parse_bytes, parse_duration_s


def _duration(value: Any) -> Any:
    # Strings only: a bool or a list must reach the type check of the field itself.
    return parse_duration_s(value) if isinstance(value, str) else value


def _bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _path(value: Any) -> Any:
    if value == "":
        message = "a path must not be empty"
        raise ConfigurationError(message, hint='name a folder, such as "runs/first"')
    return Path(value) if isinstance(value, str) else value


# The largest that all who take them can hold: JSON's readers, NumPy and torch.
_MOST = 2**53
Count = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(_duration), Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A table: frozen, strict, without unknown keys; its docstrings describe the keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )
