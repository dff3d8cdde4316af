"""What of the engine a checkpoint holds, and how it is put back.

The structure of a state depends on the rule, the model and the number of ranks only, never on the
moment, so that loaders which fill a prepared structure (``torch.distributed.checkpoint``) can be
used.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim._fixed import FixedWatch
from fivefold.optim._metadata import MetadataReading
from fivefold.optim._rules.base import OuterRule
from fivefold.optim._shards import WorkerGroup
from fivefold.optim._update import Number
from fivefold.optim.penalties import is_number
from fivefold.optim.statistics import StatisticsMeter
from fivefold.optim.transport import PendingAllReduce, Transport

_NORM_MEMORY = 16  # rounds over which norms are averaged
_ROUNDS_BEFORE_JUDGING = 8


_FORMAT = 13


@dataclass(kw_only=True)
class InAllReduce:
    """A launched round."""

    round: int  # its number
    unit: float = 0.0  # inner learning rate when it was launched
    weight: float = 0.0  # weight of this rank's payload
    # The transport's all-reduce; None once it has landed (the sum is in the payload).
    handle: PendingAllReduce | None = None
    arrived: bool = True  # whether it landed whole; False where it was lost
    reading: MetadataReading | None = None  # what its metadata brought, once it has landed
    non_finite: int = 0  # what its metadata says of this rank's payload; see ``MetadataReading``


@dataclass(kw_only=True)
class OuterState:
    """Scalars that outlive a boundary; equal on all ranks up to the last bits of the norms."""

    gap_reference: float | None = None  # C of the gap penalty; None before the first applied round
    gap: float = 1.0  # L of the last outer step
    # Factor from the momentum to the anchor's movement at the last boundary; 0 where it did not
    # move.
    last_step: float = 0.0
    last_move: Number = 0.0  # norm of that movement
    steps_before_move: int = 0  # local steps of the round at that moment
    # Norm of the mean pseudo-gradient applied last, until it has been sent.
    last_delta: Number = 0.0
    last_all_reduce_s: float = 0.0  # seconds of the last all-reduce
    own_share: float = 0.0  # this rank's share of the weights of the last all-reduce
    # Weight of the local steps since the last launch; None where none was given.
    weight: float | None = None
    usual_norm: float = 0.0  # moving average of the norms of all ranks' payloads
    norm_rounds: int = 0  # rounds that are in it
    link_s: float = 0.0  # shortest of the ranks' seconds for the last all-reduce that is known

    def follow_norms(self, norms: Sequence[float], *, most_times: float) -> None:
        """Take in what all ranks sent; an outlying norm counts as the largest that is not."""
        # So an honest change of scale is followed after some rounds, and a wild payload is not.
        found = [norm for norm in norms if norm > 0]
        if not found:
            return
        if self.norm_rounds:
            bound = most_times * self.usual_norm
            found = [min(norm, bound) for norm in found]
        mean = math.fsum(found) / len(found)
        kept = min(self.norm_rounds, _NORM_MEMORY) / (min(self.norm_rounds, _NORM_MEMORY) + 1)
        self.usual_norm = kept * self.usual_norm + (1 - kept) * mean
        self.norm_rounds += 1

    def times_the_usual(self, norm: float) -> float:
        """Return norm over the usual one; 0 while too few rounds are known."""
        known = self.norm_rounds >= _ROUNDS_BEFORE_JUDGING and self.usual_norm > 0
        return norm / self.usual_norm if known else 0.0

    def numbers(self) -> dict[str, Any]:
        """Return plain numbers, for a checkpoint."""
        plain = dict(vars(self))
        return plain | {name: float(plain[name]) for name in ("last_move", "last_delta")}


def plain_settings(rule: OuterRule) -> list[tuple[str, Any]]:
    """Return a rule's settings by name, equal and written alike where they mean the same."""
    return [("rule", rule.name), *sorted(_plain(asdict(rule)).items())]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return float(value) if is_number(value) else value  # 1, 1.0 and NumPy's 1.0


def settings(rule: OuterRule, *, fragments: int, codec: str) -> dict[str, Any]:
    """Return what a state and the engine that loads it must agree on, or may change."""
    return {
        "format": _FORMAT,
        "rule": rule.name,
        **{f"rule.{name}": repr(value) for name, value in plain_settings(rule)[1:]},
        "fragments": fragments,
        "codec": codec,
    }


_OF_ROUNDS = {"rule.tau", "rule.fragments", "rule.delay_steps", "fragments"}
_MAY_CHANGE = {
    *_OF_ROUNDS,
    *("rule.outer_lr", "rule.synchronous_start", "rule.synchronous_end", "rule.total_steps"),
    "codec",
}


def changed_settings(state: object, current: dict[str, Any], *, sharded: bool = False) -> set[str]:
    """Return which settings a saved state has otherwise, where a run may go on with others.

    Raises:
        ConfigurationError: The state is of another rule, or a setting differs that may not.
    """
    saved = state.get("settings", {}) if isinstance(state, Mapping) else {}
    # With the same rule another number is that of parameters which joined late.
    same = sharded or saved.get("rule.fragments") == current.get("rule.fragments")
    return require_same(state, current, may_change=_MAY_CHANGE - ({"fragments"} if same else set()))


def require_same(
    state: object, current: dict[str, Any], *, may_change: Container[str] = ()
) -> set[str]:
    """Check that a saved state belongs to this engine; return what differs and may."""
    saved = state.get("settings") if isinstance(state, Mapping) else None
    if saved is None:
        message = "this is no state of an OuterSync"
        raise ConfigurationError(message, hint="load what its state_dict() returned")
    changed = {key for key in current | saved if saved.get(key) != current.get(key)}
    for key in (key for key in current | saved if key in changed):
        both = saved.get(key), current.get(key)
        # An automatic round has measurements that a given one has not.
        automatic = any(value == "auto" or str(value).startswith("{") for value in both)
        if automatic or key not in may_change:
            message = f"the saved outer state has {key}={both[0]!r}, this run has {both[1]!r}"
            hint = "resume with the same rule, or load the model alone into a new OuterSync"
            raise ConfigurationError(message, hint=hint)
    return changed


_THE_SAME = "resume with the model that was saved, the same parameters trainable; freeze them then"


def matching_buffers(
    mine: Mapping[str, Mapping[str, torch.Tensor]],
    saved: Mapping[str, Mapping[str, Any]],
    *,
    written_as: Mapping[str, torch.dtype],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return every buffer with what it was saved as; nothing is written.

    Args:
        mine: Buffers by tensor and then by what they are.
        saved: The same, as they were saved. Rounds that had no use for a rest have written the
            anchor, so theirs is what that write rounded away.
        written_as: Data types of the live tensors.

    Raises:
        ConfigurationError: Names the first tensor that is on one side only, or of another shape.
    """
    pairs = []
    for name, entries in mine.items():
        found = dict(saved.get(name, {}))
        if "rest" in entries and "anchor" in found and "rest" not in found:
            found["rest"] = rounded_away(found["anchor"], written_as[name])
        for key, buffer in entries.items():
            value = found.get(key)
            if value is None or value.shape != buffer.shape:
                there = "nothing" if value is None else tuple(value.shape)
                message = (
                    f"the saved outer state has {there} for the {key} of {name}, the model "
                    f"has {tuple(buffer.shape)}"
                )
                raise ConfigurationError(message, hint=_THE_SAME)
            pairs.append((buffer, value))
    if gone := sorted(saved.keys() - mine.keys()):
        message = f"the saved outer state has {gone[0]}, which this model does not train"
        raise ConfigurationError(message, hint=_THE_SAME)
    return pairs


def rounded_away(values: torch.Tensor, written_as: torch.dtype) -> torch.Tensor:
    """Return what is lost of values of the outer state where they are written."""
    return values - values.to(written_as).to(values.dtype)


OF_OPTIMIZER = "outer_optimizer."
"""What the names of an outer optimizer's own tensors begin with."""


def is_shared(key: str) -> bool:
    """Return whether a buffer is equal on all workers once an all-reduce has landed."""
    return key in ("anchor", "momentum", "payload") or key.startswith(OF_OPTIMIZER)


def is_handed_over(key: str, state: Mapping[str, Any]) -> bool:
    """Return whether a peer hands a buffer over: no sum that is only launched."""
    return is_shared(key) and (key != "payload" or "in_flight" in state)


@dataclass(kw_only=True)
class EngineContext:
    """Rule, transport and settings that all fragments of one engine share."""

    rule: OuterRule  # the outer rule
    transport: Transport  # what moves the sums
    meter: StatisticsMeter  # where all-reduces and merges are counted
    inner_lr: Callable[[], float]  # reads the inner learning rate
    extras: tuple[str, ...]  # buffers that the rule needs beside anchor and payload
    check_every_rounds: int  # replica checks; 0 for none
    timeout_s: float  # longest wait for an all-reduce on CUDA, where the backend reports no failure
    worker: WorkerGroup | None  # the ranks that act as one worker; None where that is one rank
    # What this rank would adopt, for the metadata; see ``LateParameters``.
    pending: Callable[[], float]
    apart: frozenset[str]  # plain names of what each rank keeps for itself
    names: Callable[[], dict[int, str]]  # of the model's tensors, by their identity
    group_of: Callable[[torch.Tensor], int]  # number of the optimizers' group that has a parameter
    fixed: FixedWatch  # compares what no round moves
    communicates: Callable[[], float]  # number of an optimizer that communicates by itself
    on_non_finite: Callable[[], None]  # told that this worker's own numbers are not finite
    # Told each metadata of the first fragment that arrived, with its round.
    on_reading: Callable[[MetadataReading, int], None]
    # Where the outer state lives; None for beside the parameters.
    outer_device: torch.device | None = None
    rule_since: int = 0  # local steps when the rule was last changed
    told_same_work: bool = False  # whether a fragment has warned of equal pseudo-gradients
    # Payloads of more than so many times the usual norm are left out; None for no such check.
    outlier_factor: float | None = None

    @functools.cached_property
    def rule_digest(self) -> float:
        """A number that is the same on ranks with the same rule, changed after the same step."""
        text = repr((plain_settings(self.rule), self.rule_since))
        return float(zlib.crc32(text.encode()) + 1)

    def begin_rule(self, rule: OuterRule, *, since: int) -> None:
        """Go on with another rule from this local step on."""
        self.rule, self.rule_since = rule, since
        vars(self).pop("rule_digest", None)
