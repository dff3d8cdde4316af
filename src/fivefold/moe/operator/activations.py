"""Activations between the two matrix products of an expert, and their derivatives.

A gated activation takes a gate half and an up half and returns ``f(gate) * up``; a plain one
returns ``f(h)``. Derivatives are written out, because the operator's backward runs below autograd.

References: Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202; So et al. 2021
(squared ReLU), arXiv 2109.08668.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from fivefold.errors import require_one_of

Pull = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
_ATEN = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Activation:
    """One activation; hidden values are [..., 2I], gate half first, where gated, else [..., I]."""

    name: str
    gated: bool
    function: Callable[[torch.Tensor], torch.Tensor]  # f, elementwise
    pull: Pull  # puts gradient * f'(at) in ``out``, from (gradient, at, out)

    @property
    def plain(self) -> str:
        """Return the name of f: "silu" of "swiglu"."""
        return next((plain for plain, name in GATED_NAMES.items() if name == self.name), self.name)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [..., I]."""
        if not self.gated:
            return self.function(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        opened = self._of(gate)
        return opened * up if opened.requires_grad else opened.mul_(up)

    def with_gradient(
        self, hidden: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the gradient of ``hidden``, in few passes over memory.

        ``gradient`` is that of the output, and is overwritten.
        """
        d_hidden = torch.empty_like(hidden)
        if not self.gated:
            self.pull(gradient, hidden, d_hidden)
            return self._of(hidden), d_hidden
        gate, up = hidden.chunk(2, dim=-1)
        d_gate, d_up = d_hidden.chunk(2, dim=-1)
        opened = self._of(gate)
        torch.mul(gradient, opened, out=d_up)
        self.pull(gradient.mul_(up), gate, d_gate)
        return opened.mul_(up), d_hidden

    def _of(self, at: torch.Tensor) -> torch.Tensor:
        """Return f(at), to be written to: a copy where f returns what it was given."""
        found = self.function(at)
        return found.clone() if found is at else found

    def width(self, intermediate: int) -> int:
        """Return the rows of the first weight for an inner size: 2I where gated, else I."""
        return 2 * intermediate if self.gated else intermediate


def _pull_gelu(approximate: str) -> Pull:
    pull = _ATEN.gelu_backward.grad_input
    return lambda gradient, at, out: pull(gradient, at, approximate=approximate, grad_input=out)


_FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Pull]] = {
    "silu": (F.silu, lambda g, at, out: _ATEN.silu_backward.grad_input(g, at, grad_input=out)),
    "gelu": (F.gelu, _pull_gelu("none")),
    "gelu_tanh": (functools.partial(F.gelu, approximate="tanh"), _pull_gelu("tanh")),
    "relu": (
        torch.relu,
        lambda g, at, out: _ATEN.threshold_backward.grad_input(g, at, 0, grad_input=out),
    ),
    "relu2": (
        lambda x: torch.relu(x) ** 2,
        lambda g, at, out: torch.mul(g, 2.0 * torch.relu(at), out=out),
    ),
}
GATED_NAMES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}

ACTIVATIONS: dict[str, Activation] = {
    name: Activation(name=name, gated=name != plain, function=function, pull=pull)
    for plain, name in [*zip(_FUNCTIONS, _FUNCTIONS, strict=True), *GATED_NAMES.items()]
    for function, pull in [_FUNCTIONS[plain]]
}
"""All activations by name: silu, gelu, gelu_tanh, relu, relu2 and the gated swiglu, geglu,
geglu_tanh, reglu."""


def activation_named(name: str | Activation) -> Activation:
    """Return the activation of a name; an activation is returned as it is."""
    if isinstance(name, Activation):
        return name
    require_one_of(name, ACTIVATIONS, f"there is no activation {name!r}")
    return ACTIVATIONS[name]
