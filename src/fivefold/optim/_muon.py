"""Muon on the matrices of a model and AdamW on the rest, as one optimizer.

Trainers, schedulers, gradient scalers and checkpoints know one optimizer with one state dict, so
the two are one here; the arithmetic is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fivefold.errors import ConfigurationError, require_number

_KINDS: dict[str, Any] = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}


class MuonAdamW(torch.optim.Optimizer):
    r"""``torch.optim.Muon`` on matrices and ``torch.optim.AdamW`` on the rest.

    With ``B`` the momentum of a matrix of shape [A, C], ``NS`` five Newton-Schulz steps towards
    the nearest orthogonal matrix, and lambda the weight decay::

        B <- momentum B + (1 - momentum) g
        w <- (1 - lr lambda) w - lr 0.2 sqrt(max(A, C)) NS((1 - momentum) g + momentum B)

    The factor 0.2 sqrt(max(A, C)) gives an update the size that AdamW's has, so one learning rate
    serves both. Parameters that are DTensors (``fully_shard``) are gathered for the products by
    torch: every rank of the worker computes the whole matrix.

    Args:
        params: Parameters, or groups of them. A group may say ``"algorithm": "muon"`` or
            ``"adamw"`` and settings of that algorithm; otherwise its two-dimensional parameters
            are Muon's and the others AdamW's. ``for_model`` also sorts out embeddings.
        lr: Learning rate of both.
        weight_decay: Decoupled weight decay of both.
        momentum: Muon's momentum.
        nesterov: Whether Muon looks one momentum step ahead.
        betas: AdamW's two decay rates.

    Raises:
        ConfigurationError: A number is out of range, a group's algorithm is unknown, or Muon's
            group has a parameter that is not two-dimensional.

    References:
        Muon is scalable for LLM training, arXiv 2502.16982; AdamW, arXiv 1711.05101.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
        >>> optimizer = MuonAdamW.for_model(model, lr=1e-2)
        >>> [(g["algorithm"], len(g["params"])) for g in optimizer.param_groups]
        [('muon', 1), ('adamw', 2)]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        if not isinstance(lr, torch.Tensor):  # as torch's optimizers allow
            require_number("lr", lr)
        require_number("weight_decay", weight_decay)
        if require_number("momentum", momentum) >= 1:
            raise ConfigurationError(f"momentum is {momentum}", hint="give a number below 1")
        both = {"lr": lr, "weight_decay": weight_decay}
        muon = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
        self._settings: dict[str, dict[str, Any]] = {
            "muon": both | muon,
            "adamw": both | {"betas": betas},
        }
        self._parts: dict[str, torch.optim.Optimizer] = {}
        super().__init__(params, {})

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        adamw: Iterable[nn.Parameter] = (),
        **settings: Any,
    ) -> MuonAdamW:
        """Make one for the trainable parameters of a model.

        Muon gets the two-dimensional parameters but embeddings, matrices tied with them, and
        linear layers with as many outputs as an embedding has rows (the logits).

        Args:
            model: The bare module.
            lr: Learning rate of both.
            adamw: Matrices that are AdamW's beside those.
            **settings: Further arguments of ``MuonAdamW``.

        Raises:
            ConfigurationError: No parameter is trainable.
        """
        embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        rows = {module.num_embeddings for module in embeddings}
        heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in rows]
        excluded = {id(m.weight) for m in [*embeddings, *heads]} | {id(p) for p in adamw}
        trainable = [p for p in dict.fromkeys(model.parameters()) if p.requires_grad]
        matrices = [p for p in trainable if p.dim() == 2 and id(p) not in excluded]
        taken = {id(p) for p in matrices}
        rest = [p for p in trainable if id(p) not in taken]
        groups = [
            {"params": found, "algorithm": name}
            for name, found in (("muon", matrices), ("adamw", rest))
            if found
        ]
        if not groups:
            message = "the model has no parameter with requires_grad=True"
            raise ConfigurationError(message, hint="make some trainable before the optimizer")
        return cls(groups, lr, **settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; a group without an ``"algorithm"`` becomes up to two groups.

        Args:
            param_group: ``"params"`` and any settings, as for ``torch.optim``.

        Raises:
            ConfigurationError: The algorithm is unknown, or does not take these parameters.
        """
        params = param_group["params"]
        members = [params] if isinstance(params, torch.Tensor) else list(params)
        algorithm = param_group.get("algorithm")
        if algorithm is None:
            matrices = [m for m in members if _tensor(m).dim() == 2]
            rest = [m for m in members if _tensor(m).dim() != 2]
            for name, found in (("muon", matrices), ("adamw", rest)):
                if found:
                    self.add_param_group({**param_group, "params": found, "algorithm": name})
            return
        if algorithm not in _KINDS:
            message = (
                f'the algorithm of a parameter group must be "muon" or "adamw"; got {algorithm!r}'
            )
            raise ConfigurationError(message, hint='leave out "algorithm" to sort by dimensions')
        odd = [tuple(_tensor(m).shape) for m in members if _tensor(m).dim() != 2]
        if algorithm == "muon" and odd:
            message = f"Muon takes two-dimensional parameters; got one of shape {odd[0]}"
            raise ConfigurationError(message, hint='put it into a group of "algorithm": "adamw"')
        # Torch's own checks the settings, and fills in those that are not given here.
        filled = _KINDS[algorithm](
            [{**self._settings[algorithm], **param_group, "params": members}]
        )
        super().add_param_group({**filled.param_groups[0], "params": members})

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied."""
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continue from what was pickled, copied or loaded."""
        super().__setstate__(state)
        self._parts = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one step of both.

        Args:
            closure: Computes the loss again; None where gradients are there.

        Returns:
            The closure's loss; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for algorithm, kind in _KINDS.items():
            groups = [g for g in self.param_groups if g["algorithm"] == algorithm]
            if groups and algorithm not in self._parts:
                self._parts[algorithm] = kind(groups)
            if groups:
                part = self._parts[algorithm]
                # The same objects: loading a state and some wrappers put new ones here.
                part.state, part.param_groups = self.state, groups
                part.step()
        return loss


def _tensor(member: Any) -> torch.Tensor:
    """Return the parameter of a member, which may be a pair of a name and a parameter."""
    tensor: torch.Tensor = member[1] if isinstance(member, tuple) else member
    return tensor
