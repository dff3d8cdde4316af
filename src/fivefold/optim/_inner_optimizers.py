"""What the engine must know of the optimizers that a user brings."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fivefold.errors import ConfigurationError
from fivefold.optim._kept_apart import plain_name
from fivefold.optim._shards import local_tensor, memory_of

# States that are 0 (or this number) before the first step, and what they are of: moments of
# gradients, and counters.
_BEFORE_THE_FIRST_STEP = dict.fromkeys(
    (
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf"),
        *("square_avg", "grad_avg", "acc_delta", "sum", "row_var", "col_var", "variance"),
    ),
    0.0,
) | {"mu_product": 1.0}


def as_optimizers(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the inner optimizers as a tuple; refuse what is none."""
    several = tuple(map(_unwrapped, given if isinstance(given, Sequence) else (given,)))
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            message = f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}"
            raise ConfigurationError(message, hint="pass one, or a list of them")
    if not several:
        message = "optimizer is an empty list"
        raise ConfigurationError(message, hint="pass the optimizers that train the model")
    return several


def group_of(optimizers: Iterable[torch.optim.Optimizer], parameter: torch.Tensor) -> int:
    """Return the number of the group that has a parameter, over all optimizers; 0 for none."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    has = (any(parameter is p for p in group["params"]) for group in groups)
    return next((number for number, found in enumerate(has) if found), 0)


_WAYS = {"params", "foreach", "fused", "capturable", "differentiable"}  # to the same numbers


# What torch's schedules move, and where they keep what they move it between.
_SCHEDULED = {
    *("lr", "initial_lr", "max_lr", "min_lr", "swa_lr"),
    *("momentum", "base_momentum", "max_momentum", "betas"),
}


def optimizer_settings(
    optimizers: Iterable[torch.optim.Optimizer], *, at_any_time: bool = False
) -> list[tuple[object, ...]]:
    """Return what the ranks must have alike: kinds, numbers of parameters and settings.

    Args:
        optimizers: The inner optimizers.
        at_any_time: Whether some ranks are in the middle of a run where others begin, so that what
            schedules move may differ.
    """
    left_out = _WAYS | (_SCHEDULED if at_any_time else set())
    found: list[tuple[object, ...]] = []
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            kind = type(optimizer).__name__
            found.append((kind, f"group {number}", "parameters", len(group["params"])))
            found += [
                (kind, f"group {number}", key, float(value) if _is_number(value) else value)
                for key, value in sorted(group.items())
                if key not in left_out and _is_plain(value)
            ]
    return found


def _is_number(value: object) -> bool:
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return one or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, str)) or _is_number(value)


def _unwrapped(optimizer: Any) -> Any:
    """Return what a trainer's wrapper (Accelerate's, Lightning's) steps.

    A wrapper with a state of its own is an optimizer of its own.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        _require_no_weights(optimizer)
        groups, state = (getattr(optimizer, name, None) for name in ("param_groups", "state"))
        mere = groups is inner.param_groups and (state is inner.state or not state)
        return _unwrapped(inner) if mere else optimizer
    return optimizer


# Beside the parameters they hold weights, from which they step or which they give back at the end;
# brought together, the parameters would be one thing and those another.
_HOLDS_WEIGHTS = {
    "ASGD": "an average of the weights",
    "Lookahead": "slow weights",
    "Prodigy": "the weights of the start, and a learning rate of this rank alone",
    "ProdigyPlusScheduleFree": "a second sequence of weights",
    "AdamWScheduleFree": "a second sequence of weights",
    "AdamWScheduleFreePaper": "a second sequence of weights",
    "SGDScheduleFree": "a second sequence of weights",
    "RAdamScheduleFree": "a second sequence of weights",
    "ScheduleFreeWrapper": "a second sequence of weights",
    "DAdaptAdam": "a learning rate of this rank alone",
    "DAdaptSGD": "a learning rate of this rank alone",
}
_INSTEAD = (
    "train with an optimizer that keeps moments of gradients only (AdamW, Muon, SGD); average "
    "weights outside of it (torch.optim.swa_utils.AveragedModel)"
)


def _require_no_weights(optimizer: object) -> None:
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _HOLDS_WEIGHTS:
            what = f"{type(optimizer).__name__} holds {_HOLDS_WEIGHTS[kind.__name__]}"
            message = f"{what}, which outer synchronisation does not move"
            raise ConfigurationError(message, hint=_INSTEAD)


def require_moved(
    optimizers: Iterable[torch.optim.Optimizer],
    model: torch.nn.Module,
    *,
    apart: Container[str] = (),
) -> None:
    """Refuse optimizers that train something else than the model's parameters, or not all of them.

    Args:
        optimizers: The inner optimizers.
        model: What they are to train.
        apart: Plain names of those that each rank keeps for itself.

    Raises:
        ConfigurationError: Names what would stay different on every rank.
    """
    optimizers, parameters = list(optimizers), dict(model.named_parameters())
    for optimizer in optimizers:
        _require_no_weights(optimizer)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(p): p for group in groups for p in group["params"]}
    # Of two parameters over one memory one is enough.
    trained = {_identity(p) for p in held.values()}
    wanted = {n: p for n, p in parameters.items() if p.requires_grad and plain_name(n) not in apart}
    if not wanted:
        return  # which is refused in words of its own
    idle = [name for name, p in wanted.items() if _identity(p) not in trained]
    if idle:
        message = f"{_few(idle)} of the model's trainable parameters are in no optimizer"
        hint = (
            "give the optimizers the model's own parameters (not float32 copies of them, and made "
            "after fully_shard), or set requires_grad=False"
        )
        raise ConfigurationError(message, hint=hint)
    known = {_identity(p) for p in parameters.values()}
    foreign = [p for p in held.values() if p.requires_grad and _identity(p) not in known]
    if foreign:
        shapes = _few([str(tuple(p.shape)) for p in foreign])
        message = f"the optimizers have {len(foreign)} parameters that the model has not: {shapes}"
        hint = "pass one module that holds all that is trained: ModuleList([model, loss])"
        raise ConfigurationError(message, hint=hint)


def _identity(tensor: torch.Tensor) -> object:
    return memory_of(tensor) or id(tensor)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# Copies of weights that are written before each use: sharpness-aware minimisation's way back.
_OVERWRITTEN = {"old_p"}


def _by_parameter(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[Any, Any]]:
    """Return the states that are parameters' own; others may stand beside them."""
    return {
        parameter: entries
        for parameter, entries in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and isinstance(entries, dict)
    }


# A moment is a mean of gradients or of their squares; a copy of the weights begins as they do, and
# is near them as long as few steps have been taken.
_NEAR = 0.25  # square of the distance over the square of the weights


class WeightWatch:
    """Looks for weights in the optimizers, whatever the optimizers are called."""

    _WALKS = 2  # at the start and after the first step, where they are made

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._known: list[set[Any]] = [set(_BEFORE_THE_FIRST_STEP) for _ in optimizers]
        self._seen: list[Any] = [None] * len(optimizers)
        self._walks = [0] * len(optimizers)

    def look(self) -> None:
        """Refuse an optimizer in which weights have appeared since the last look.

        Raises:
            ConfigurationError: Names the optimizer and where it has them.
        """
        for index, optimizer in enumerate(self._optimizers):
            entries = _by_parameter(optimizer)
            last: Mapping[Any, Any] = next(reversed(entries.values()), {}) if entries else {}
            seen = len(entries), tuple(last)
            if seen != self._seen[index]:
                self._seen[index] = seen
                keys = {key for each in entries.values() for key in each} - self._known[index]
                self._known[index] |= keys
                for key in sorted(keys - _OVERWRITTEN, key=str):
                    _refuse_weights(optimizer, f"the state {key!r}", _pairs(entries, key))
            if self._walks[index] < self._WALKS:
                self._walks[index] += 1
                for where, tensors in _elsewhere(optimizer):
                    _refuse_weights(optimizer, where, _matched(optimizer, tensors))


def _pairs(
    entries: Mapping[torch.Tensor, Mapping[Any, Any]], key: object
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parameters with the state of a key where it is of the same shape."""
    for parameter, own in entries.items():
        found = own.get(key)
        if isinstance(found, torch.Tensor) and found.shape == parameter.shape:
            yield local_tensor(parameter.detach()), local_tensor(found)


def _elsewhere(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the tensors in attributes, groups and containers of the state, by where they are."""
    for name, value in vars(optimizer).items():
        if name not in {"state", "param_groups", "defaults"} and name not in _OVERWRITTEN:
            yield f"the attribute {name!r}", list(_tensors_in(value))
    entries = [*optimizer.param_groups]
    entries += [each for each in optimizer.state.values() if isinstance(each, dict)]
    found: dict[Any, list[torch.Tensor]] = {}
    parameters = _by_parameter(optimizer)
    for each in entries:
        own = any(each is known for known in parameters.values())
        for key, value in each.items():
            if key not in {"params", *_OVERWRITTEN} and not (own and torch.is_tensor(value)):
                found.setdefault(key, []).extend(_tensors_in(value))
    yield from ((f"the entry {key!r}", tensors) for key, tensors in found.items())


def _tensors_in(value: object, *, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(each, depth=depth - 1)
    elif depth and isinstance(value, torch.optim.Optimizer):
        for _, tensors in _elsewhere(value):
            yield from tensors


def _matched(
    optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return parameters with tensors of their shapes, in order, or with parts of a flat one.

    Nothing where those are less than half of the elements: a table of sizes of steps may be all
    ones, as a scale is.
    """
    parameters = [local_tensor(p.detach()) for g in optimizer.param_groups for p in g["params"]]
    places = {memory_of(p) for p in parameters}
    plain = [t for t in tensors if _is_plain_tensor(t) and t.is_floating_point()]
    found = [local_tensor(t.detach()) for t in plain]
    found = [t for t in found if t.numel() > 1 and memory_of(t) not in places]
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for tensor in found:
        by_shape.setdefault(tensor.shape, []).append(tensor)
    pairs = [(p, by_shape[p.shape].pop(0)) for p in parameters if by_shape.get(p.shape)]
    total = sum(p.numel() for p in parameters)
    for flat in found:
        if flat.dim() == 1 and flat.numel() >= total > 0 and len(parameters) > 1:
            parts = torch.split(flat[:total], [p.numel() for p in parameters])
            pairs += [(p, part.view(p.shape)) for p, part in zip(parameters, parts, strict=True)]
            break
    return pairs if 2 * sum(p.numel() for p, _ in pairs) >= total else []


@torch.no_grad()
def _refuse_weights(
    optimizer: torch.optim.Optimizer,
    where: str,
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    distance = size = 0.0
    for parameter, found in pairs:
        if found.is_floating_point():
            mine, theirs = parameter.double(), found.to(parameter.device).double()
            distance += float((mine - theirs).square().sum())
            size += float(mine.square().sum())
    if distance < _NEAR * size:
        message = (
            f"{where} of {type(optimizer).__name__} is a copy of the weights, which outer "
            "synchronisation does not move"
        )
        raise ConfigurationError(message, hint=_INSTEAD)


@torch.no_grad()
def forget_steps(
    optimizer: torch.optim.Optimizer, *, makes_state_late: bool, keeps_count: bool
) -> None:
    """Set an optimizer's state to what it is before the first step, where that is known.

    Of states that are not known only what is not finite is set to 0.

    Args:
        optimizer: The optimizer.
        makes_state_late: Whether its first step makes the state, so that it can be thrown away.
        keeps_count: Whether the numbers of steps stay: where averages take the moments' place.
    """
    for parameter, entries in _by_parameter(optimizer).items():
        if makes_state_late and not _BEFORE_THE_FIRST_STEP.keys() >= entries.keys():
            del optimizer.state[parameter]
            continue
        group = _group(optimizer, parameter)
        for key, value in entries.items():
            if key == "step" and keeps_count:
                continue
            if key not in _BEFORE_THE_FIRST_STEP:
                _mend(value)  # where it began is not known: tables of values, sizes of steps
                continue
            start = _BEFORE_THE_FIRST_STEP[key]
            if key == "sum":  # Adagrad's
                start = float(group.get("initial_accumulator_value", start))
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                local = local_tensor(value)
                local.copy_(torch.full_like(local, start))
            elif isinstance(value, (int, float)):
                entries[key] = type(value)(start)


def _group(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    of = (g for g in optimizer.param_groups if any(parameter is p for p in g["params"]))
    return next(of, {})


def _is_plain_tensor(value: object) -> bool:
    plain: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, DTensor)
    return any(type(value) is kind for kind in plain)  # quantised ones lack operations


def _mend(value: object) -> None:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return
    if _is_plain_tensor(value):
        local_tensor(value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


@torch.no_grad()
def forget_nonsense(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Set to 0 what is not finite in the optimizers' states."""
    for entries in (e for each in optimizers for e in _by_parameter(each).values()):
        for value in entries.values():
            _mend(value)


def begin_optimizers_again(
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    makes_state_late: Sequence[bool],
    took_no_steps: bool,
    keeps_count: bool,
) -> None:
    """Undo what steps that are left out did to the optimizers' states.

    Args:
        optimizers: The inner optimizers.
        makes_state_late: For each, whether its first step makes its state.
        took_no_steps: Whether they step with the mean gradient, so that they took none of those.
        keeps_count: Whether the numbers of steps stay.
    """
    if took_no_steps:
        forget_nonsense(optimizers)
        return
    for optimizer, late in zip(optimizers, makes_state_late, strict=True):
        forget_steps(optimizer, makes_state_late=late, keeps_count=keeps_count)
