"""A model whose experts are shared out over ranks, prepared for what wraps and saves models.

Shapes: E experts of a layer, P ranks that share them out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import CommunicationError, ConfigurationError
from fivefold.moe.operator.layer import MoE

_Share = tuple[str, int, int, int]  # name of the layer, first expert, one after the last, E


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertPlacement:
    """Which parameters of a model are a rank's own, and which ranks have the same ones.

    Attributes:
        model: The model that was prepared.
        names: The parameters that are this rank's alone.
        group: The ranks that share the experts out, one of each share.
        replicas: The ranks of ``process_group`` with the same experts; None for this one alone.
        workers: The ranks of other process groups with the same experts, for
            ``OuterSync(process_group=...)``; None where all ranks step together.
    """

    model: nn.Module
    names: tuple[str, ...]
    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    workers: dist.ProcessGroup | None

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Return this rank's own parameters, for ``fully_shard(ignored_params=...)``."""
        found = dict(self.model.named_parameters())
        return {found[name] for name in self.names}

    def whole_state_dict(self) -> dict[str, Any]:
        """Return the model's state with the experts of all ranks, [E, ...]; a collective call.

        Every rank gets it, and may load it: a layer takes its own share of it, whatever the number
        of ranks. What else the state has is as the model gives it.

        Raises:
            CommunicationError: A peer ended or did not answer in time.
        """
        state = self.model.state_dict()
        for name in self.names:
            mine = state[name].detach().contiguous()
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
            try:
                dist.all_gather(parts, mine, group=self.group)
            except RuntimeError as error:
                raise _lost(f"gathering {name}", error) from error
            state[name] = torch.cat(parts)
            layer = getattr(state, "_metadata", {}).get(name.rpartition(".")[0], {})
            layer.pop("experts", None)
        return state


def prepare_experts(
    model: nn.Module, *, process_group: dist.ProcessGroup | None = None
) -> ExpertPlacement:
    """Prepare a model with expert groups for what would take its experts for replicas.

    Call it once on every rank, before anything is put around the model:

    - ``DistributedDataParallel(model)`` leaves the experts out by itself afterwards;
    - ``fully_shard(model, ignored_params=placement.parameters)`` leaves them as they are;
    - ``OuterSync(model, ..., process_group=placement.workers)`` brings the ranks with the same
      experts together, where ``process_group`` is those that step together as one worker;
    - ``placement.whole_state_dict()`` is a checkpoint for any number of ranks; a rank's own
      ``state_dict()`` is refused by a rank with other experts.

    An expert's gradient becomes that of the mean of the ranks' losses, as the wrappers make the
    others': in the backward pass it is summed over the ranks with the same experts and divided by
    the number of ranks.

    Args:
        model: The bare model; its ``MoE`` layers have groups.
        process_group: Ranks whose gradients are averaged in every step; None for all.

    Returns:
        The rank's own parameters, and who has the same.

    Raises:
        ConfigurationError: No layer has a group, the ranks' models differ, a share of experts is on
            more ranks than another, or the model is prepared already.

    Examples:
        >>> from fivefold.moe import prepare_experts
        >>> placement = prepare_experts(model)  # doctest: +SKIP
        >>> wrapped = DistributedDataParallel(model)  # doctest: +SKIP
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, MoE) and layer.rank_share is not None
    }
    if not layers:
        message = "no layer of the model has its experts shared out over ranks"
        raise ConfigurationError(
            message,
            hint="make them with a group: MoE(config, AllToAllGroup()); other models need nothing",
        )
    together = dist.group.WORLD if process_group is None else process_group
    members = dist.get_process_group_ranks(together)
    shares = [(name, *layer.experts.share) for name, layer in layers.items()]
    told: list[Any] = [None] * dist.get_world_size()
    prepared = any(layer.experts.is_prepared for layer in layers.values())
    dist.all_gather_object(told, (shares, members, prepared))
    if any(entry[2] for entry in told):
        message = "the model is prepared already: its gradients would be divided twice"
        raise ConfigurationError(message, hint="keep what prepare_experts returned")
    group, replicas, workers = _groups(told)
    names = tuple(
        f"{name}.{own}" if name else own
        for name, layer in layers.items()
        for own in layer.expert_parameters
    )
    known = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]  # noqa: SLF001 - untyped in torch
        model, [*known, *names]
    )
    mean = _Mean(len(members), replicas)
    for layer in layers.values():
        layer.experts.prepare(mean)
    return ExpertPlacement(
        model=model, names=names, group=group, replicas=replicas, workers=workers
    )


class _Mean:
    """Makes a gradient of this rank's experts that of the mean of the ranks' losses."""

    def __init__(self, ranks: int, replicas: dist.ProcessGroup | None) -> None:
        self._ranks, self._replicas = ranks, replicas

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient to be accumulated; a collective call where others have the same."""
        mean = gradient / self._ranks
        if self._replicas is not None:
            try:
                dist.all_reduce(mean, group=self._replicas)
            except RuntimeError as error:
                what = "adding up experts' gradients"
                raise _lost(what, error) from error
        return mean

    def __deepcopy__(self, _memo: dict[int, object]) -> None:
        """Return nothing: a layer's copy has parameters of its own, which nobody prepared."""


def _groups(
    told: list[tuple[list[_Share], list[int], bool]],
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Form the groups of this rank; all ranks take part in forming all, in one order."""
    _check_layers([shares for shares, _, _ in told])
    places: dict[int, tuple[int, int, int]] = {}  # of a rank: process group, share, number in it
    for number, members in enumerate(sorted({tuple(sorted(m)) for _, m, _ in told})):
        by_share: dict[tuple[_Share, ...], list[int]] = {}
        for rank in members:
            by_share.setdefault(tuple(told[rank][0]), []).append(rank)
        _check_shares(by_share, members)
        for share, key in enumerate(sorted(by_share)):
            places |= {rank: (number, share, at) for at, rank in enumerate(by_share[key])}
    group = _formed(places, lambda place: (place[0], place[2]))
    replicas = _formed(places, lambda place: (place[0], place[1]))
    workers = _formed(places, lambda place: (place[1], place[2]))
    assert group is not None, "shares are parts of the experts"
    return group, replicas, workers


def _formed(places: dict[int, tuple[int, int, int]], key: Any) -> dist.ProcessGroup | None:
    """Form groups of the ranks with one key; return this rank's, None where it is alone."""
    found, me = None, dist.get_rank()
    for wanted in sorted({key(place) for place in places.values()}):
        ranks = sorted(rank for rank, place in places.items() if key(place) == wanted)
        if len(ranks) > 1:
            group = dist.new_group(ranks)
            found = group if me in ranks else found
    return found


def _check_layers(shares: list[list[_Share]]) -> None:
    for rank, others in enumerate(shares):
        theirs, ours = ([(layer[0], layer[3]) for layer in each] for each in (others, shares[0]))
        if theirs != ours:
            raise ConfigurationError(
                f"rank {rank} has the layers of experts {theirs!r:.90}, rank 0 {ours!r:.90}",
                hint="build the same model on all ranks",
            )


def _check_shares(by_share: dict[tuple[_Share, ...], list[int]], members: Iterable[int]) -> None:
    """Refuse a process group in which experts are missing or on more ranks than others."""
    for layer in zip(*by_share, strict=True):
        name, number = layer[0][0], layer[0][3]
        here = sorted(e for _, first, stop, _ in layer for e in range(first, stop))
        if here != list(range(number)):
            raise ConfigurationError(
                f"ranks {list(members)} have the experts {here} of {name or 'the layer'}, which "
                f"has {number}",
                hint="step together with all ranks that share the experts out: give "
                "process_group their group, or leave it out",
            )
    if len({len(ranks) for ranks in by_share.values()}) > 1:
        raise ConfigurationError(
            f"some experts are on more ranks than others: {sorted(by_share.values())}",
            hint="use a number of ranks that is a multiple of the expert group's",
        )


def _lost(what: str, error: RuntimeError) -> CommunicationError:
    reason = " ".join(str(error).split())[:240]
    return CommunicationError(
        f"rank {dist.get_rank()}: {what} failed: {reason}",
        hint="a peer died, hangs or cannot be reached; read its log",
    )
