"""Table ``[sync]``: how the ranks are kept together, and which keys each method takes.

A key that is left out has the method's own default, which is that of its rule in
``fivefold.optim``. A key that the method does not take is an error, so that nobody believes in a
setting that does nothing. This module loads no torch.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    LiteralString,
    Self,
    get_type_hints,
)

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model, model_validator
from pydantic_core import PydanticCustomError

from fivefold.errors import ConfigurationError
from fivefold.optim import AutoTau, OuterRule, outer_rules
from fivefold.optim.penalties import PENALTY_NAMES
from fivefold.runs import Section
from fivefold.runs.config import Count, Momentum, Positive, Share, Text

_GRADIENTS: dict[str, Any] = {"codec": "fp32", "check_every_rounds": 16, "outlier_factor": None}
_ROUNDS: dict[str, Any] = _GRADIENTS | {"tau": 8, "average_states": None, "shard": None}
_PLAIN: dict[str, dict[str, Any]] = {"none": {}, "ddp": {"codec": "fp32"}}

DEFAULT_METHOD: Final = "delay_corrected"  # the rule that guides/which_rule_when.md recommends
_DDP_CODECS = ("fp32", "bf16", "fp16")


def _methods() -> list[str]:
    return [*_PLAIN, *outer_rules()]


def _keys(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a method with their defaults; None where there is none."""
    if method in _PLAIN:
        return _PLAIN[method]
    rule = outer_rules()[method]
    own = rule.settings(given)
    takes = (_GRADIENTS if rule.sends_gradients else _ROUNDS) | own
    if takes.get("tau", 0) is None:
        takes["tau"] = _ROUNDS["tau"]
    if "clip" in own and own["clip"] is None:
        takes["clip"] = math.inf
    may_hide = (rule.hides_rounds and not rule.sends_gradients) or "hidden" in own
    return takes | {"auto_tau": None} if may_hide else takes


def _method(value: Any) -> Any:
    names = _methods()
    if value in names:
        return value
    kind: LiteralString = "literal_error"
    raise PydanticCustomError(
        kind,
        "Input should be {expected}",
        {"expected": " or ".join([", ".join(map(repr, names[:-1])), repr(names[-1])])},
    )


def _staleness(value: Any) -> Any:
    if not isinstance(value, str):
        return value  # the type check says so
    name, colon, number = value.partition(":")
    if name in PENALTY_NAMES and not colon:
        return value
    if name == "constant":
        with contextlib.suppress(ValueError):
            if float(number) >= 1 and math.isfinite(float(number)):
                return value
    close = difflib.get_close_matches(name.lower(), PENALTY_NAMES, n=1)
    meant = f'did you mean "{close[0]}"? ' if close else ""
    names = ", ".join(f'"{known}"' for known in PENALTY_NAMES)
    message = f"sync.staleness {value!r} is not known"
    raise ConfigurationError(
        message, hint=f'{meant}Use one of {names}, or "constant:2" with a number of at least 1'
    )


def _tau(value: Any) -> Any:
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if number or value is None or value == "auto":
        return value
    message = f'sync.tau must be an integer of at least 1, or "auto"; got {value!r}'
    raise ConfigurationError(
        message, hint="sync.tau is the local steps per round; its default is 8"
    )


class AutoTauConfig(Section):
    """Table ``[sync.auto_tau]``: the bounds and manners of ``tau = "auto"``."""

    initial: Positive = 8
    """local steps per round until the first measurements"""
    minimum: Positive = 1
    """smallest tau"""
    maximum: Positive = 1024
    """largest tau"""
    margin: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.1
    """share of the communication's time that a round must last"""
    window: Positive = 3
    """rounds whose median counts"""
    patience: Positive = 12
    """rounds that must agree before tau goes down"""

    @model_validator(mode="after")
    def _ordered(self) -> AutoTauConfig:
        if not self.minimum <= self.initial <= self.maximum:
            message = (
                "sync.auto_tau needs minimum <= initial <= maximum; got "
                f"minimum {self.minimum}, initial {self.initial}, maximum {self.maximum}"
            )
            raise ConfigurationError(message, hint="set sync.auto_tau.initial between the two")
        return self


class _SyncTable(Section):
    method: Annotated[
        str, BeforeValidator(_method), WithJsonSchema({"type": "string", "enum": _methods()})
    ] = DEFAULT_METHOD
    """way in which the ranks synchronise"""
    tau: Annotated[int | Literal["auto"] | None, BeforeValidator(_tau)] = None
    """local steps per round, or "auto" for as few as hide the communication"""
    auto_tau: AutoTauConfig | None = None
    """table of the bounds of tau = "auto\""""
    codec: Literal["fp32", "bf16", "fp16", "int8", "int4", "topk", "auto"] | None = None
    """form of the numbers on the wire; "auto" lets tau = "auto" choose fp32, int8 or int4"""
    outer_lr: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    """learning rate of the outer step, at most 10; 1 takes the mean of the ranks"""
    outer_momentum: Momentum | None = None
    """momentum of the outer step, in [0, 1); of the DiLoCo methods by tau where it is left out"""
    staleness: Annotated[Text | None, BeforeValidator(_staleness)] = None
    """name of the staleness penalty"""
    clip: Annotated[float, Field(gt=0)] | None = None
    """elementwise bound of the outer momentum; inf for none"""
    units: Literal["delta", "lr"] | None = None
    """unit of the pseudo-gradients: parameters, or inner learning rates"""
    bootstrap: Literal["reset", "sync"] | None = None
    """way in which CO2 does its first round"""
    pull: Share | None = None
    """share of the way to the anchor, between 0 and 1"""
    fragments: Positive | None = None
    """number of parts of the model that are sent in turn; at most tau"""
    delay_steps: Positive | None = None
    """local steps between launch and merge, at most tau; tau // fragments where left out"""
    keep: Share | None = None
    """share of the local parameters in the merge, between 0 and 1"""
    optimizer: Text | None = None
    """name of the outer optimizer in torch.optim"""
    options: dict[str, Any] | None = None
    """table of the outer optimizer's arguments"""
    hidden: bool | None = None
    """true for an outer optimizer whose all-reduce runs behind the next round"""
    extrapolation: Annotated[float, Field(ge=0, le=1)] | None = None
    """share of an update's last change that is added to it, from 0 to 1"""
    ramp_steps: Positive | None = None
    """steps over which the extrapolation comes in"""
    outlier_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """times the usual norm above which a rank's payload is left out; none is where not given"""
    synchronous_start: Count | None = None
    """local steps at the start after each of which all ranks wait for their mean"""
    synchronous_end: Count | None = None
    """the same at the end of the run"""
    shard: Positive | None = None
    """neighbouring ranks, those of a node, that share the model's states (FSDP2) and take their
    local steps as one worker; left out, every rank has a model of its own"""
    average_states: dict[str, Positive] | None = None
    """table of optimizer states that are averaged too, each with the rounds between two means"""
    check_every_rounds: Count | None = None
    """rounds between two checks that all ranks are equal; 0 for never"""

    @model_validator(mode="before")
    @classmethod
    def _keys_of_the_method(cls, given: Any) -> Any:
        """Refuse keys of other methods, and fill in the defaults of this one's."""
        method = given.get("method", DEFAULT_METHOD) if isinstance(given, dict) else None
        if method not in _methods():  # the type check says so
            return given
        values = {key: value for key, value in given.items() if value is not None}
        takes = _keys(method, values)
        for key in values:
            if key in cls.model_fields and key not in {"method", *takes}:
                raise _not_a_key_of(method, key)
        # A rule that was defined after this class keeps its own settings to itself.
        known = takes.keys() & cls.model_fields.keys()
        defaults = {key: takes[key] for key in takes if key in known and takes[key] is not None}
        if values.get("tau") == "auto":
            defaults["auto_tau"] = AutoTauConfig()
        return defaults | values

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.method == "ddp" and self.codec not in _DDP_CODECS:
            message = f'sync.codec "{self.codec}" is not for ddp'
            hint = 'use "fp32", "bf16" or "fp16"; blockwise codecs need a method with rounds'
            raise ConfigurationError(message, hint=hint)
        rules = outer_rules()
        hiding = [n for n, r in rules.items() if r.hides_rounds and not r.sends_gradients]
        if self.tau == "auto" and not (self.method in hiding or self.hidden):
            message = f'sync.tau "auto" needs a method that hides its rounds; got {self.method}'
            hint = f"use {', '.join(hiding)}, or give sync.tau as a number"
            raise ConfigurationError(message, hint=hint)
        if self.codec == "auto" and self.tau != "auto":
            message = f'sync.codec "auto" is chosen with the round; got sync.tau {self.tau}'
            raise ConfigurationError(message, hint='set sync.tau = "auto", or name a codec')
        if self.average_states and self.tau == "auto":
            message = 'sync.average_states needs rounds of a known length; got sync.tau "auto"'
            raise ConfigurationError(message, hint="give sync.tau as a number")
        if self.auto_tau is not None and self.tau != "auto":
            message = f'[sync.auto_tau] is for sync.tau = "auto"; got tau = {self.tau}'
            raise ConfigurationError(message, hint='set sync.tau = "auto", or drop the table')
        if self.tau == "auto" and self.delay_steps is not None:
            message = f'sync.tau "auto" chooses the delay too; got delay_steps={self.delay_steps}'
            raise ConfigurationError(message, hint="leave them out, or give sync.tau as a number")
        for key in ("fragments", "delay_steps"):
            value = getattr(self, key)
            if value is not None and isinstance(self.tau, int) and value > self.tau:
                message = f"sync.{key} must be at most sync.tau={self.tau}; got {value}"
                raise ConfigurationError(message, hint=f"lower sync.{key}, or raise sync.tau")
        return self

    @property
    def rule_class(self) -> type[OuterRule] | None:
        """Outer rule of the method; None for a method without one."""
        return outer_rules().get(self.method)

    @property
    def has_rounds(self) -> bool:
        """Whether the method synchronises in rounds of local steps."""
        return self.rule_class is not None and not self.rule_class.sends_gradients

    def rule(self, *, total_steps: int | None = None) -> OuterRule:
        """Return the outer rule of a run of so many steps.

        Raises:
            ConfigurationError: The method has none, or the rule refuses its settings.
        """
        kind = self.rule_class
        if kind is None:
            message = f'sync.method = "{self.method}" has no outer rule'
            raise ConfigurationError(message, hint=f"use one of {', '.join(outer_rules())}")
        given = {key: getattr(self, key, None) for key in kind.settings({})}
        settings: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if self.synchronous_end:
            settings["total_steps"] = total_steps
        if self.clip is not None and math.isinf(self.clip):
            settings["clip"] = None
        if self.auto_tau is not None:
            settings["tau"] = AutoTau(**self.auto_tau.model_dump())
        return kind.from_settings(settings)


def _own_keys() -> dict[str, Any]:
    """Return the settings of rules that are no keys above, each as its rule declares it."""
    found: dict[str, Any] = {}
    for rule in outer_rules().values():
        own = rule.settings({}).keys() - _SyncTable.model_fields.keys()
        types = get_type_hints(rule, include_extras=True) if own else {}
        for each in fields(rule):
            if each.name in own:
                about = Field(default=None, description=each.metadata.get("help"))
                found[each.name] = (types[each.name] | None, about)
    return found


if TYPE_CHECKING:

    class SyncConfig(_SyncTable):
        """Table ``[sync]``: how the ranks are kept together."""

else:
    SyncConfig = create_model(
        "SyncConfig",
        __base__=_SyncTable,
        __module__=__name__,
        __doc__="""Table ``[sync]``: how the ranks are kept together.

Keys that the method takes and that are left out get its rule's defaults; the others are
None. Which method takes which keys is in the guide of the trainer.""",
        **_own_keys(),
    )


def keys_of_method(method: str) -> frozenset[str]:
    """Return the keys that a method takes; all keys where there is no such method."""
    takes = _keys(method, {}) if method in _methods() else SyncConfig.model_fields
    return frozenset({"method", *takes})


def _not_a_key_of(method: str, key: str) -> ConfigurationError:
    takers = [name for name in _methods() if key in _keys(name, {})]
    takes = sorted(keys_of_method(method) - {"method"})
    has = f"{method} takes {', '.join(takes)}" if takes else f"{method} takes no other key"
    message = f'sync.{key} is not a setting of sync.method = "{method}"'
    return ConfigurationError(message, hint=f"leave it out; it is for {', '.join(takers)}; {has}")
