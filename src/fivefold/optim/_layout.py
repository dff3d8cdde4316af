"""How a model is cut up for the engine: what is synchronised, what is averaged, what stays fixed.

Trainable parameters are synchronised by the rule. Floating-point buffers of the state dict (running
statistics) are averaged. Frozen parameters and other buffers are made equal once, at the start.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Container, Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fivefold.errors import ConfigurationError, require_whole
from fivefold.optim._delayed_gradients import GradientFragment
from fivefold.optim._flat import FlatGroup, flat_groups
from fivefold.optim._fragment import Fragment
from fivefold.optim._kept_apart import own_shares, plain_name
from fivefold.optim._round_choice import most_fragments
from fivefold.optim._rules.base import OuterRule
from fivefold.optim._schedule import RoundSchedule
from fivefold.optim._shards import (
    RowShare,
    WorkerGroup,
    local_tensor,
    memory_of,
    reshard,
    worker_group_of,
)
from fivefold.optim._state import EngineContext
from fivefold.optim.codecs import Codec, is_exact, resolve_codec
from fivefold.optim.penalties import GapPenalty, is_number
from fivefold.optim.transport import Transport


def state_extras(rule: OuterRule, *, may_lose: bool) -> tuple[str, ...]:
    """Return the buffers that a rule needs beside anchor and payload."""
    if may_lose and not rule.bears_losses:
        message = f"{rule.name} cannot be used with a transport that may lose a round"
        raise ConfigurationError(message, hint="use CO2, DelayCorrected or DiLoCo")
    return rule.buffers(may_lose=may_lose)


def trainable(model: torch.nn.Module, *, apart: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Return the trainable parameters by name, each piece of memory once.

    Here and below ``apart`` has the plain names of what each rank keeps for itself.
    """
    found: dict[object, tuple[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and plain_name(name) not in apart:
            found.setdefault(memory_of(parameter) or id(parameter), (name, parameter))
    return dict(found.values())


def make_fragments(model: torch.nn.Module, context: EngineContext) -> list[Fragment]:
    """Cut the trainable parameters into the rule's fragments, in the model's order."""
    rule = context.rule
    parameters = list(trainable(model, apart=context.apart).values())
    if not parameters:
        message = "the model has no parameter with requires_grad=True"
        raise ConfigurationError(message, hint="nothing would be synchronised; check the model")
    buffers, tau = averaged_buffers(model, apart=context.apart).values(), rule.first_tau
    return [
        _fragment(
            part,
            context,
            index=index,
            buffers=buffers if index == 0 else [],
            # Staggered evenly: the last fragment's first round is a whole one.
            schedule=_schedule(
                rule, tau=tau, first_round_steps=max(tau * (index + 1) // rule.num_fragments, 1)
            ),
        )
        for index, part in enumerate(_cut(parameters, rule.num_fragments))
    ]


def late_fragment(
    tensors: Iterable[torch.Tensor],
    context: EngineContext,
    *,
    index: int,
    first: RoundSchedule,
) -> Fragment:
    """Make a fragment of tensors that joined late, whose rounds end with the first one's.

    What is not trainable is a buffer, which is averaged.
    """
    schedule = _schedule(context.rule, tau=first.tau, first_round_steps=first.steps_left)
    schedule.merge_after = first.merge_after
    schedule.total_steps = first.total_steps
    parts: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for tensor in tensors:
        parts[tensor.requires_grad].append(tensor)
    return _fragment(parts[True], context, index=index, buffers=parts[False], schedule=schedule)


def _fragment(
    parameters: Iterable[torch.Tensor],
    context: EngineContext,
    *,
    index: int,
    schedule: RoundSchedule,
    buffers: Iterable[torch.Tensor] = (),
) -> Fragment:
    worker = context.worker
    share = RowShare() if worker is None else worker.share
    copies = {} if worker is None else {"copies_of": worker.copies_of}
    rest = ("rest",) if context.rule.carries_rest else ()
    groups, averaged = (
        flat_groups(
            tensors,
            extras=kept,
            share=share,
            device=context.outer_device,
            least=least,
            **copies,
        )
        for tensors, kept, least in (
            (parameters, (*context.extras, *rest), torch.float32),
            (buffers, ("value", "rest"), torch.float64),
        )
    )
    kind = GradientFragment if context.rule.sends_gradients else Fragment
    return kind(index, groups, averaged=averaged, schedule=schedule, context=context)


def _schedule(rule: OuterRule, *, tau: int, first_round_steps: int) -> RoundSchedule:
    # With uneven step counts one rank may have open steps at a drain where another has none, and
    # both must do the same.
    uneven = rule.auto_tau is not None and rule.auto_tau.balance
    ends = rule.total_steps is not None and rule.synchronous_end > 0
    return RoundSchedule(
        tau=tau,
        delayed=rule.delayed,
        delay_steps=rule.delay_steps,
        first_round_steps=first_round_steps,
        first_round_synchronous=rule.bootstrap == "sync",
        always_sends=rule.keeps_local or uneven,
        synchronous_until=rule.synchronous_start,
        synchronous_from=(rule.total_steps or 0) - rule.synchronous_end if ends else math.inf,
    )


def require_codec_for(rule: OuterRule, codec: str | Codec, transport: Transport | None) -> None:
    """Refuse a codec that nobody would choose."""
    if transport is not None and codec not in ("fp32", "auto"):
        message = f"codec={codec!r} has no use: the transport that was given sends what it gets"
        raise ConfigurationError(message, hint="leave codec out, or use the default transport")
    if codec != "auto":
        return
    if rule.auto_tau is None or transport is not None:
        message = 'codec="auto" is chosen with the round'
        message += "" if rule.auto_tau is None else ", which needs the engine's own transport"
        hint = 'use tau="auto"; AutoTau(initial=8, minimum=8, maximum=8) keeps tau'
        raise ConfigurationError(f"{message}; got {rule.name} with tau={rule.tau}", hint=hint)


def _cut(parameters: list[torch.Tensor], number: int) -> list[list[torch.Tensor]]:
    """Cut a list into runs of about equal numbers of elements, none of them empty."""
    if len(parameters) < number:
        message = f"fragments={number} is more than the model's {len(parameters)} parameters"
        raise ConfigurationError(message, hint=f"use at most fragments={len(parameters)}")
    total = sum(p.numel() for p in parameters)
    parts: list[list[torch.Tensor]] = [[]]
    seen = 0
    for position, parameter in enumerate(parameters):
        left = len(parameters) - position
        missing = number - len(parts)
        full = seen + parameter.numel() / 2 > total * len(parts) / number
        if parts[-1] and missing and (full or left <= missing):
            parts.append([])
        parts[-1].append(parameter)
        seen += parameter.numel()
    return parts


def averaged_buffers(
    model: torch.nn.Module, *, apart: Container[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the floating-point buffers of the state dict by name, each piece of memory once.

    Those of 8 bits are tables of values that no mean can be written into.
    """
    kept = {n for n in model.state_dict(keep_vars=True) if plain_name(n) not in apart}
    found: dict[object, tuple[str, torch.Tensor]] = {}
    for name, buffer in model.named_buffers():
        if name in kept and buffer.is_floating_point() and buffer.element_size() > 1:
            found.setdefault(memory_of(buffer) or id(buffer), (name, buffer))
    of_parameters = {memory_of(p) for p in model.parameters()}
    return dict(each for place, each in found.items() if place not in of_parameters)


def fixed_tensors(model: torch.nn.Module, *, apart: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Return the frozen parameters and the buffers that are not averaged, by name."""
    averaged = set(map(id, averaged_buffers(model, apart=apart).values()))
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    others = {n: b for n, b in model.named_buffers() if id(b) not in averaged}
    return {name: t for name, t in (frozen | others).items() if plain_name(name) not in apart}


_ELEMENT_BYTES = 4  # the outer state is float32 for parameters of at most 32 bits


def outer_state_bytes(
    rule: OuterRule,
    num_parameters: int,
    *,
    num_workers: int = 2,
    num_shards: int = 1,
    codec: str | Codec = "fp32",
) -> int:
    """Return the bytes of outer state that each rank keeps for float32 parameters.

    Per parameter: 4 for the anchor, 4 for the payload, 4 for the momentum where the rule has one,
    4 for what delay-corrected merges sent, 12 more for the eager merge with momentum, 4 for the
    gradient of an outer optimizer (whose own state is not counted), and 4 + 4 / num_workers for
    the residuals of a lossy codec; all of it divided by ``num_shards``. 16-bit parameters need 4
    more with rules that correct or pull, with fragments, and with extrapolated gradients: what a
    write rounds away is carried.

    Args:
        rule: The outer rule.
        num_parameters: Trainable parameters of the model.
        num_workers: Number of workers.
        num_shards: Ranks that act as one worker.
        codec: How payloads travel.

    Raises:
        ConfigurationError: A number is not positive.

    References:
        CO2, arXiv 2401.16265, Algorithm 2.

    Examples:
        >>> from fivefold.optim import CO2
        >>> outer_state_bytes(CO2(tau=8), 1_000_000, num_shards=4)
        3000000
    """
    require_whole("num_parameters", num_parameters)
    require_whole("num_workers", num_workers)
    require_whole("num_shards", num_shards)
    buffers = 2.0 + len(state_extras(rule, may_lose=False))
    if codec == "auto" or not is_exact(resolve_codec(codec)):
        buffers += 1 + 1 / num_workers
    return round(_ELEMENT_BYTES * buffers * num_parameters / num_shards)


def may_lose(transport: Transport) -> bool:
    """Return whether all-reduces of a transport may be lost, so that their work must be kept."""
    return bool(getattr(transport, "may_lose", False))


def most_parts(fragments: Iterable[Fragment], transport: Transport) -> int:
    """Return the parts in which a model could be sent."""
    if may_lose(transport):
        return 1
    tensors = [t for fragment in fragments for group in fragment.groups for t in group.tensors]
    return most_fragments(tensors=len(tensors), num_bytes=sum(t.nbytes for t in tensors))


@contextlib.contextmanager
def at_the_anchor(model: torch.nn.Module, fragments: Iterable[Fragment]) -> Iterator[None]:
    """Have the anchor in the model for the duration."""
    reshard(model)
    fragments = list(fragments)
    live = [tensor for fragment in fragments for tensor in fragment.tensors()]
    saved = [tensor.detach().clone() for tensor in live]
    with torch.no_grad():
        for fragment in fragments:
            fragment.write_anchor()
    try:
        yield
    finally:
        reshard(model)
        with torch.no_grad():
            for tensor, value in zip(live, saved, strict=True):
                tensor.copy_(value)


def rule_for(
    rule: OuterRule, model: torch.nn.Module, transport: Transport, *, apart: Container[str]
) -> OuterRule:
    """Return the rule with what it leaves to the model and the transport: its fragments."""
    parameters = trainable(model, apart=apart).values()
    num_bytes = None if rule.auto_tau is None else sum(p.nbytes for p in parameters)
    if may_lose(transport):
        num_bytes = 0  # workers that come and go take part in launches of the whole
    return rule.for_model(most_fragments(tensors=len(parameters), num_bytes=num_bytes))


def find_worker(
    model: torch.nn.Module,
    shard_group: dist.ProcessGroup | DeviceMesh | None,
    *,
    rule: OuterRule,
    transport: Transport,
    timeout_s: float,
    apart: Container[str],
) -> WorkerGroup | None:
    """Find the ranks of this worker and give them the same plain tensors; None for one rank."""
    peers = getattr(transport, "global_ranks", None)
    worker = worker_group_of(model, shard_group, peers=peers, timeout_s=timeout_s)
    if worker is None:
        return None
    try:
        _require_fit(worker, model, rule=rule, transport=transport, apart=apart)
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        worker.broadcast([tensor for name, tensor in named if plain_name(name) not in apart])
    except BaseException:
        worker.close()
        raise
    return worker


def _require_fit(
    worker: WorkerGroup,
    model: torch.nn.Module,
    *,
    rule: OuterRule,
    transport: Transport,
    apart: Container[str],
) -> None:
    """Refuse what a worker of several ranks cannot have."""
    if may_lose(transport):
        message = "a worker of several ranks cannot use a transport that may lose a round"
        raise ConfigurationError(message, hint="use one rank for each worker, or no elastic")
    if shares := own_shares(model):
        message = f"the ranks of a worker have experts of their own ({shares[0]})"
        how = "leave shard_group out" if worker.splits else "do not shard the model over them"
        hint = f"{how}; process_group is the ranks with the same experts"
        raise ConfigurationError(message, hint=hint)
    parameters = trainable(model, apart=apart)
    plain = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
    if isinstance(rule.penalty, GapPenalty) and plain and len(plain) < len(parameters):
        message = f"the gap penalty needs norms, but {plain[0]} is not sharded as the others are"
        raise ConfigurationError(message, hint='shard all, or use staleness="none"')


_LONGEST_S = 10**6  # gloo counts milliseconds in 32 bits


def require_usable(
    model: torch.nn.Module,
    rule: object,
    *,
    apart: Container[str],
    timeout_s: float,
    every: int,
    outer_device: str,
    outlier_factor: float | None,
) -> None:
    """Refuse arguments of ``OuterSync`` that cannot work."""
    bare = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if isinstance(bare, torch.nn.parallel.DistributedDataParallel):
        message = "the model is wrapped in DistributedDataParallel, which communicates every step"
        raise ConfigurationError(message, hint="pass the bare module: OuterSync(model.module, ...)")
    _require_readable(model, apart)
    if not isinstance(rule, OuterRule):
        message = f"rule must be an outer rule; got {rule!r}"
        raise ConfigurationError(message, hint="give one, such as CO2(tau=8)")
    if not (is_number(timeout_s) and 0 < timeout_s <= _LONGEST_S):
        message = f"timeout_s must be a positive number of seconds; got {timeout_s!r}"
        raise ConfigurationError(message, hint=f"use at most {_LONGEST_S:,}")
    require_whole("check_every_rounds", every, least=0, hint="0 switches the replica check off")
    if outer_device not in ("same", "cpu"):
        message = f"outer_device must be 'same' or 'cpu'; got {outer_device!r}"
        raise ConfigurationError(message, hint="'cpu' saves device memory, 'same' is faster")
    if outlier_factor is not None and not (is_number(outlier_factor) and outlier_factor > 1):
        message = f"outlier_factor must be a number above 1, or None; got {outlier_factor!r}"
        raise ConfigurationError(message, hint="10 leaves out what is ten times the usual size")


def _require_readable(model: torch.nn.Module, apart: Container[str]) -> None:
    """Refuse tensors that have no elements to send, or whose elements are others' too."""
    together: dict[object, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if plain_name(name) in apart:
            continue
        kind = type(tensor).__name__
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            hint = "run one forward pass before OuterSync is made"
            raise ConfigurationError(f"{name} has no shape yet ({kind})", hint=hint)
        local = local_tensor(tensor)
        if local.is_meta or local.layout != torch.strided or local.is_quantized:
            what = "on the meta device" if local.is_meta else f"{local.layout} {local.dtype}"
            hint = "materialise it, keep it dense, or leave it out (see ignore)"
            raise ConfigurationError(f"{name} is {what} and cannot be sent", hint=hint)
        if tensor.requires_grad and local.numel():
            place = local.untyped_storage().data_ptr(), local.device
            together.setdefault(place, []).append((name, local))
    for parts in together.values():
        _require_disjoint(sorted(parts, key=lambda part: part[1].data_ptr()))


def _require_disjoint(parts: list[tuple[str, torch.Tensor]]) -> None:
    """Refuse tensors of one storage, in order, that are not the same view and share elements."""
    before: list[tuple[str, torch.Tensor]] = []
    for name, tensor in parts:
        before = [each for each in before if _end(each[1]) > tensor.data_ptr()]
        for other, earlier in before:
            if memory_of(earlier) != memory_of(tensor) and _have_common(earlier, tensor):
                message = f"{other} and {name} have some elements in common"
                raise ConfigurationError(message, hint="make one parameter, and views in forward()")
        before.append((name, tensor))


def _end(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _have_common(first: torch.Tensor, second: torch.Tensor) -> bool:
    start, size = first.data_ptr(), first.element_size()
    if second.element_size() != size or (first.is_contiguous() and second.is_contiguous()):
        return True  # views that end after the other's start
    found = []
    for tensor in (first, second):
        taken = torch.zeros((max(_end(first), _end(second)) - start) // size, dtype=torch.bool)
        offset = (tensor.data_ptr() - start) // size
        taken.as_strided(tensor.shape, tensor.stride(), offset).fill_(True)
        found.append(taken)
    return bool((found[0] & found[1]).any())


_PATIENCE_ROUNDS = 2  # ranks whose rounds have other numbers of steps may announce one round apart


class LateParameters:
    """Parameters and buffers that come after the engine was made, and tensors that are replaced.

    A known name with a new object (``load_state_dict`` with ``assign=True``) is followed. New ones
    are announced in the metadata, so that all ranks adopt them at the same boundary.
    """

    def __init__(
        self, model: torch.nn.Module, *, apart: Container[str] = (), never: bool = False
    ) -> None:
        self._model, self._apart, self._never = model, apart, never
        self._known = trainable(model, apart=apart)
        self._buffers = averaged_buffers(model, apart=apart)
        self._other_buffers: set[str] = set()  # which the state dict has not
        # Parameters over the memory of another, with that one; by identity, and so kept.
        self._same: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._different_rounds = 0
        self.announced = 0.0

    def look(self, groups: Iterable[FlatGroup]) -> dict[str, torch.Tensor]:
        """Return what is not known yet, by name, after following replaced objects."""
        reshard(self._model)  # FSDP's gathered parameters would look like replaced ones
        groups = list(groups)
        for name, buffer in self._model.named_buffers():
            old = self._buffers.get(name, buffer)
            if old is not buffer:
                _follow(groups, name, old=old, new=buffer)
                self._buffers[name] = buffer
        unknown = self._unknown()
        still_there = {id(p) for p in self._model.parameters()} if unknown else set()
        for name in list(unknown):
            before = self._known.get(name)
            if before is not None and id(before) not in still_there:
                _follow(groups, name, old=before, new=unknown[name])
                self._known[name] = unknown.pop(name)
        unknown |= self._unknown_buffers()
        if unknown and self._never:
            message = f"{next(iter(unknown))} is new, but membership may change meanwhile"
            hint = "have all parameters and buffers before the start, or no elastic workers"
            raise ConfigurationError(message, hint=hint)
        text = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in unknown.items())
        self.announced = float(zlib.crc32(text.encode()) + 1) if unknown else 0.0
        return unknown

    def _unknown(self) -> dict[str, torch.Tensor]:
        """Return trainable parameters that are neither known nor over the memory of known ones."""
        known = {id(p) for p in self._known.values()}
        new = {
            name: p
            for name, p in self._model.named_parameters()
            if p.requires_grad and id(p) not in known and not self._is_same(p)
        }
        if not any(plain_name(name) not in self._apart for name in new):
            return {}
        # Which memory all parameters have is looked at only where some was not seen before.
        now = trainable(self._model, apart=self._apart)
        places = {memory_of(p): p for p in now.values()}
        for p in new.values():
            place = memory_of(p)
            first = None if place is None else places.get(place)
            if first is not None and first is not p:
                self._same[id(p)] = p, first
        return {n: p for n, p in now.items() if id(p) not in known}

    def _unknown_buffers(self) -> dict[str, torch.Tensor]:
        """Return buffers to be averaged that were registered late, such as masks of pruning."""
        known = {id(buffer) for buffer in self._buffers.values()}
        new = {}
        for name, buffer in self._model.named_buffers():
            if name not in self._buffers and name not in self._other_buffers:
                if id(buffer) in known:  # a module has another name now
                    self._buffers[name] = buffer
                else:
                    new[name] = buffer
        if not new:  # to ask for the state dict takes longer
            return new
        found = averaged_buffers(self._model, apart=self._apart)
        self._other_buffers |= new.keys() - found.keys()
        return {name: buffer for name, buffer in new.items() if name in found}

    def _is_same(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter has the memory of another, as it had when it was found."""
        _, first = self._same.get(id(parameter), (None, None))
        return first is not None and memory_of(parameter) == memory_of(first)

    def know(self, found: dict[str, torch.Tensor]) -> None:
        """Count parameters and buffers as known from now on."""
        self._known.update({name: t for name, t in found.items() if t.requires_grad})
        self._buffers.update({name: t for name, t in found.items() if not t.requires_grad})
        self.announced = 0.0

    def all_announced(self, values: list[float]) -> bool:
        """Return whether all ranks announced the same parameters."""
        if len(set(values)) == 1:
            self._different_rounds = 0
            return values[0] != 0.0
        self._different_rounds += 1
        if self._different_rounds < _PATIENCE_ROUNDS:
            return False
        ranks = [rank for rank, value in enumerate(values) if value != values[0]]
        message = f"rank(s) {ranks} have other new parameters or buffers than rank 0"
        raise ConfigurationError(message, hint=_SAME_ON_ALL)


_SAME_ON_ALL = "make the same parameters trainable, and add the same buffers, after the same step"


def require_same_names(names: list[list[str]]) -> None:
    """Check what all ranks are about to adopt."""
    for rank, found in enumerate(names):
        if found != names[0]:
            apart = sorted(set(found) ^ set(names[0]))
            message = f"rank {rank} has other new parameters or buffers than rank 0: {apart}"
            raise ConfigurationError(message, hint=_SAME_ON_ALL)


def _follow(
    groups: Iterable[FlatGroup], name: str, *, old: torch.Tensor, new: torch.Tensor
) -> None:
    was, now = local_tensor(old), local_tensor(new)
    if (was.shape, was.dtype, was.device) != (now.shape, now.dtype, now.device):
        message = (
            f"{name} was {tuple(was.shape)} {was.dtype} on {was.device}, and is now "
            f"{tuple(now.shape)} {now.dtype} on {now.device}"
        )
        raise ConfigurationError(message, hint="make a new OuterSync for a changed model")
    for group in groups:
        group.tensors = [new if tensor is old else tensor for tensor in group.tensors]
