"""A saved outer state for rounds of another shape: anchors, momenta and sums in flight are kept.

Parts that were cut otherwise have sums in flight that belong to no part of the new cut. They have
landed, so each is merged at once into the saved buffers and the live parameters, in the middle of
a round as it were; the new rounds then begin, and nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fivefold.errors import ConfigurationError
from fivefold.optim._flat import Piece, is_narrow
from fivefold.optim._fragment import Fragment
from fivefold.optim._merge import MERGES, MergeTask, merge_of, outer_coefficients
from fivefold.optim._metadata import MetadataReading
from fivefold.optim._rules.base import OuterRule
from fivefold.optim._shards import local_tensor
from fivefold.optim._state import (
    EngineContext,
    OuterState,
    changed_settings,
    rounded_away,
    settings,
)
from fivefold.optim._update import PieceStatistics
from fivefold.optim.transport import Transport

_LOG = logging.getLogger(__name__)


def agree_to_load(
    state: Mapping[str, Any],
    settings: dict[str, Any],
    *,
    place: object,
    transport: Transport,
    fit: Callable[[set[str], bool], None],
) -> tuple[set[str], bool]:
    """Check a state on all ranks together: what one cannot load is refused by all.

    Args:
        state: What is to be loaded.
        settings: Those of this engine.
        place: This rank's place in its worker.
        transport: Between the ranks.
        fit: Given what has changed, and whether this rank loads what is another's, it refuses
            tensors that are not the model's. Nothing has been written by then.

    Returns:
        The settings that have changed and may, and whether any rank loads what another rank, or
        another world, has saved.
    """
    here, changed, problem = (transport.rank, transport.world_size), set[str](), None
    try:
        changed = changed_settings(state, settings)
        _require_place(state, place)
        fit(changed, (state["rank"], state["world_size"]) != here)
    except ConfigurationError as error:
        problem = error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Raised here alone the other ranks would wait for this one.
        message = f"the outer state is damaged: {type(error).__name__}: {error}"
        problem = ConfigurationError(message, hint="load another checkpoint")
    then = None if problem is not None else (state["rank"], state["world_size"])
    mine = here, then, None if problem is None else (problem.message, problem.hint)
    found = [mine] if getattr(transport, "may_lose", False) else transport.gather_objects(mine)
    if problem is not None:
        raise problem
    for (rank, _), _, theirs in found:
        if theirs is not None:
            raise ConfigurationError(f"rank {rank} cannot load: {theirs[0]}", hint=theirs[1])
    strangers = sum(now != saved for now, saved, _ in found)
    if strangers and state["world_size"] == here[1]:
        _LOG.warning(
            "%d of %d ranks load another rank's outer state: all go on from the anchor, "
            "without the local steps since the last launch. Save and load sync.state_dict() "
            "on every rank to resume bit for bit", strangers, len(found),
        )  # fmt: skip
    return changed, bool(strangers)


def _require_place(state: Mapping[str, Any], place: object) -> None:
    if state["place"] != place:
        message = f"this is the state of another place in its worker, {state['place']}"
        hint = f"load that of place {place}, or use sharded_state_dict()"
        raise ConfigurationError(message, hint=hint)


def restore(
    state: Mapping[str, Any],
    fragments: Iterable[Fragment],
    rule: OuterRule,
    *,
    changed: Iterable[str],
) -> None:
    """Go on with this rank's own state, in rounds that may be longer or shorter."""
    other_rounds = {"rule.tau", "rule.delay_steps"}.intersection(changed)
    for fragment in fragments:
        fragment.load_state_dict(state["fragments"][str(fragment.index)])
        if other_rounds and fragment.index >= 0:
            fragment.schedule.retune(rule.first_tau, delay_steps=rule.delay_steps)


def require_fit(
    state: Mapping[str, Any],
    fragments: Sequence[Fragment],
    *,
    changed: Container[str],
    stranger: bool,
    whole: bool,
) -> None:
    """Refuse a state of other tensors than this model's.

    Args:
        state: What is to be loaded.
        fragments: All of the engine's.
        changed: The settings that it has otherwise.
        stranger: Whether it is another rank's.
        whole: Whether this engine can only go on with the parts that were saved.

    Raises:
        ConfigurationError: Names what differs.
    """
    for part in state["fragments"].values():
        part["schedule"], part["scalars"]
    if "fragments" not in changed:
        for fragment in fragments:
            fragment.matching(state["fragments"][str(fragment.index)], shared=stranger)
        return
    if stranger or whole:
        message = "the saved outer state has another number of fragments"
        hint = "change it on the same ranks, without average_states and shard_group"
        raise ConfigurationError(message, hint=hint)
    saved = {name for part in state["fragments"].values() for name in part["tensors"]}
    if strange := sorted(saved ^ _live_tensors(fragments).keys()):
        message = f"{strange[0]} is in the saved outer state or in this model, and not in both"
        raise ConfigurationError(message, hint="resume with the same parameters trainable")


def _live_tensors(fragments: Iterable[Fragment]) -> dict[str, torch.Tensor]:
    return {n: t for f in fragments for n, t in zip(f.names(), f.tensors(), strict=True)}


def change_rule(
    context: EngineContext,
    fragments: Iterable[Fragment],
    rule: OuterRule,
    *,
    codec: str,
    since: int,
) -> OuterRule:
    """Let an engine go on with a rule of other rounds or another outer learning rate.

    All ranks must, after the same local step ``since``: they compare with the next round.

    Raises:
        ConfigurationError: Names what may not change in the middle of a run.
    """
    before = context.rule
    if isinstance(rule, OuterRule):
        if rule.left_open_momentum and type(rule) is type(before):
            rule = replace(rule, outer_momentum=before.outer_momentum)
        rule = rule.for_model(before.num_fragments)
    if not isinstance(rule, OuterRule) or type(rule) is not type(before):
        message = f"set_rule() takes a {type(before).__name__}; got {rule!r:.60}"
        raise ConfigurationError(message, hint="make a new OuterSync for another rule")
    number = before.num_fragments
    found = {
        "settings": settings(before, fragments=number, codec=codec),
    }
    changed = changed_settings(found, settings(rule, fragments=rule.num_fragments, codec=codec))
    fixed = sorted(changed - {"rule.tau", "rule.delay_steps", "rule.outer_lr"})
    if fixed or rule.carries_rest != before.carries_rest:
        what = fixed[0].removeprefix("rule.") if fixed else "delay_steps"
        message = f"{what} cannot change in the middle of a run"
        hint = "save sync.state_dict(), and load it into a new OuterSync with this rule"
        raise ConfigurationError(message, hint=hint)
    if changed:
        context.begin_rule(rule, since=since)
    if changed & {"rule.tau", "rule.delay_steps"}:
        for fragment in fragments:
            if fragment.index >= 0:
                fragment.schedule.retune(rule.first_tau, delay_steps=rule.delay_steps)
    return rule


def begin_other_rounds(
    state: Mapping[str, Any], fragments: Sequence[Fragment], rule: OuterRule, *, inner_lr: float
) -> None:
    """Go on with parts that are cut otherwise."""
    live = _live_tensors(fragments)
    tensors = _merged_tensors(
        state["fragments"],
        rule=rule,
        live={name: local_tensor(tensor) for name, tensor in live.items()},
        inner_lr=inner_lr,
    )
    weight = state["fragments"]["0"]["scalars"]["weight"]
    for fragment in fragments:
        fragment.begin_with(tensors, total_steps=state["steps"], weight=weight)


@torch.no_grad()
def _merged_tensors(
    fragments: Mapping[str, Mapping[str, Any]],
    *,
    rule: OuterRule,
    live: Mapping[str, torch.Tensor],
    inner_lr: float,
) -> dict[str, dict[str, torch.Tensor]]:
    """Return copies of all buffers by tensor, after what was in flight has moved ``live`` too."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for part in fragments.values():
        tensors = {
            name: {key: value.clone() for key, value in entries.items()}
            for name, entries in part["tensors"].items()
        }
        if rule.carries_rest:  # what the rounds that were saved had no use for
            for name, entries in tensors.items():
                if is_narrow(live[name]) and "rest" not in entries:
                    entries["rest"] = rounded_away(entries["anchor"], live[name].dtype)
        found |= tensors
        reading = MetadataReading(**part["in_flight"]["reading"])
        in_flight = part["schedule"]["in_flight_round"] is not None
        if not (in_flight and part["in_flight"]["arrived"] and reading.total_weight):
            continue
        unit = part["in_flight"]["unit"] if rule.units == "lr" else 1.0
        coefficients = outer_coefficients(
            rule,
            OuterState(**part["scalars"]),
            reading=reading,
            send_unit=unit,
            step_unit=inner_lr if rule.units == "lr" else 1.0,
            elements=sum(entries["anchor"].numel() for entries in tensors.values()),
            shard_sum=list,
        )
        task = MergeTask(
            rule=rule, coefficients=coefficients, send=False, total_weight=reading.total_weight
        )
        for name, entries in tensors.items():
            merge = MERGES["average"] if "value" in entries else merge_of(rule)
            merge(Piece.of(entries, local=live[name], scratch=None), task, PieceStatistics())
            entries["payload"].zero_()
    return found
