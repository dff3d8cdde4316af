"""Table ``[sync]``: how the ranks are kept together, and which keys each method takes.

A key that is left out has the method's own default, which is that of its rule in
``fivefold.optim``. A key that the method does not take is an error, so that nobody believes in a
setting that does nothing. This module knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from fivefold.errors import ConfigurationError
from fivefold.runs import Section
from fivefold.runs.config import Count, Momentum, Positive, Share, Text

_ROUNDS: dict[str, Any] = {"tau": 8, "codec": "fp32", "check_every_rounds": 16} | {
    "average_states": None,
    "synchronous_start": 0,
    "synchronous_end": 0,
    "outlier_factor": None,
    "shard": None,
}
_HIDDEN_ROUNDS = _ROUNDS | {"auto_tau": None}
_NESTEROV = {"outer_lr": 0.7, "outer_momentum": None}  # the rule's, by tau

DEFAULT_METHOD: Final = "delay_corrected"  # the rule that guides/which_rule_when.md recommends
# Keys of each method with their defaults; None where there is none. A test compares them with
# the defaults of the rules.
_METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "ddp": {"codec": "fp32"},
    "local_sgd": _ROUNDS,
    "slowmo": _ROUNDS | {"outer_lr": 1.0, "outer_momentum": 0.5, "clip": math.inf, "units": "lr"},
    "diloco": _ROUNDS | _NESTEROV,
    "co2": _HIDDEN_ROUNDS
    | {"outer_lr": 0.7, "outer_momentum": 0.2, "staleness": "gap", "clip": 1.0}
    | {"units": "delta", "bootstrap": "reset", "fragments": 1, "delay_steps": None},
    "delay_corrected": _HIDDEN_ROUNDS | {"fragments": None, "delay_steps": None},
    "overlap_local_sgd": _HIDDEN_ROUNDS | {"outer_momentum": 0.7, "pull": 0.6},
    "eager_diloco": _HIDDEN_ROUNDS | {"outer_lr": 0.5, "outer_momentum": 0.3},
    "streaming_diloco": _HIDDEN_ROUNDS
    | _NESTEROV
    | {"fragments": None, "delay_steps": None, "keep": 0.5},
    "outer_optimizer": _HIDDEN_ROUNDS | {"optimizer": "SGD", "options": None, "hidden": False},
    "delayed_gradients": {"codec": "fp32", "check_every_rounds": 16}
    | {"extrapolation": 0.0, "ramp_steps": 20, "outlier_factor": None},
}
# Of SGD, where neither it nor its options are given: DiLoCo's step; hidden, the best of our tuning.
_SGD_OPTIONS = {False: {"lr": 0.7, "momentum": 0.9, "nesterov": True}, True: {"lr": 0.5}}
_DDP_CODECS = ("fp32", "bf16", "fp16")
_AUTO = ("co2", "delay_corrected", "overlap_local_sgd", "eager_diloco", "streaming_diloco")


# The names of fivefold.optim, which loads torch; a test compares them.
_PENALTIES = ("gap", "gap-rms", "gap-param", "constant", "none")


def _staleness(value: Any) -> Any:
    if not isinstance(value, str):
        return value  # the type check says so
    name, colon, number = value.partition(":")
    if name in _PENALTIES and not colon:
        return value
    if name == "constant":
        with contextlib.suppress(ValueError):
            if float(number) >= 1 and math.isfinite(float(number)):
                return value
    close = difflib.get_close_matches(name.lower(), _PENALTIES, n=1)
    meant = f'did you mean "{close[0]}"? ' if close else ""
    names = ", ".join(f'"{known}"' for known in _PENALTIES)
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


class SyncConfig(Section):
    """Table ``[sync]``: how the ranks are kept together.

    Keys that the method takes and that are left out get its rule's defaults; the others are
    None. Which method takes which keys is in the guide of the trainer.
    """

    method: Literal[
        "none",
        "ddp",
        "local_sgd",
        "slowmo",
        "diloco",
        "co2",
        "delay_corrected",
        "overlap_local_sgd",
        "eager_diloco",
        "streaming_diloco",
        "outer_optimizer",
        "delayed_gradients",
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
        if not isinstance(method, str) or method not in _METHODS:  # the type check says so
            return given
        takes = _METHODS[method]
        values = {key: value for key, value in given.items() if value is not None}
        for key in values:
            if key in cls.model_fields and key not in {"method", *takes}:
                raise _not_a_key_of(method, key)
        return _with_defaults(values, takes)

    @model_validator(mode="after")
    def _fits(self) -> SyncConfig:
        if self.method == "ddp" and self.codec not in _DDP_CODECS:
            message = f'sync.codec "{self.codec}" is not for ddp'
            hint = 'use "fp32", "bf16" or "fp16"; blockwise codecs need a method with rounds'
            raise ConfigurationError(message, hint=hint)
        if self.tau == "auto" and not (self.method in _AUTO or self.hidden):
            message = f'sync.tau "auto" needs a method that hides its rounds; got {self.method}'
            hint = f"use {', '.join(_AUTO)}, or give sync.tau as a number"
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


def keys_of_method(method: str) -> frozenset[str]:
    """Return the keys that a method takes; all keys where there is no such method."""
    takes = _METHODS.get(method, SyncConfig.model_fields)
    return frozenset({"method", *takes})


def _with_defaults(values: dict[str, Any], takes: dict[str, Any]) -> dict[str, Any]:
    defaults = {key: value for key, value in takes.items() if value is not None}
    if "optimizer" in takes and "optimizer" not in values:
        defaults["options"] = dict(_SGD_OPTIONS[values.get("hidden") is True])
    if values.get("tau") == "auto":
        defaults["auto_tau"] = AutoTauConfig()
    return defaults | values


def _not_a_key_of(method: str, key: str) -> ConfigurationError:
    takers = [name for name, keys in _METHODS.items() if key in keys]
    takes = sorted(keys_of_method(method) - {"method"})
    has = f"{method} takes {', '.join(takes)}" if takes else f"{method} takes no other key"
    message = f'sync.{key} is not a setting of sync.method = "{method}"'
    return ConfigurationError(message, hint=f"leave it out; it is for {', '.join(takers)}; {has}")
