"""Activations between the two matrix products of an expert, and their derivatives.

A gated activation takes a gate half and an up half and returns ``f(gate) * up``; a plain one
returns ``f(h)``. Derivatives are written out, because the operator's backward runs below autograd.

References: Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202; So et al. 2021
(squared ReLU), arXiv 2109.08668.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from fivefold.errors import ConfigurationError

Pointwise = Callable[[torch.Tensor], torch.Tensor]

_APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}
_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_TANH_CUBIC = 0.044715


@dataclass(frozen=True, kw_only=True)
class Activation:
    """One activation.

    Attributes:
        name: As in ``ACTIVATIONS``.
        gated: Whether the first product has a gate half and an up half, in this order.
        function: f, elementwise.
        derivative: f', elementwise.

    Examples:
        >>> swiglu = ACTIVATIONS["swiglu"]
        >>> swiglu(torch.tensor([[0.0, 1.0, 2.0, 3.0]])).shape  # two gates, two ups
        torch.Size([1, 2])
    """

    name: str
    gated: bool
    function: Pointwise
    derivative: Pointwise

    @property
    def plain(self) -> str:
        """Return the name of f: "silu" of "swiglu"."""
        return _GATED.get(self.name, self.name)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply it to the first product's output.

        Args:
            hidden: Shape [..., 2I] where gated, else [..., I].

        Returns:
            Shape [..., I].
        """
        if not self.gated:
            return self.function(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        opened = self.function(gate)
        return opened * up if opened.requires_grad else opened.mul_(up)

    def backward(self, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``hidden`` from that of the output.

        Args:
            hidden: What ``__call__`` got.
            gradient: Shape of what it returned.

        Returns:
            Shape of ``hidden``.
        """
        if not self.gated:
            return gradient * self.derivative(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        return torch.cat(
            [gradient * up * self.derivative(gate), gradient * self.function(gate)], -1
        )

    def with_gradient(
        self, hidden: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and gradient of ``hidden`` at once, with as few passes over memory as there are.

        Args:
            hidden: Shape [..., 2I] where gated, else [..., I].
            gradient: Of the output, [..., I]; overwritten.

        Returns:
            What ``__call__`` and ``backward`` return.
        """
        d_hidden = torch.empty_like(hidden)
        if not self.gated:
            self._pull(gradient, hidden, d_hidden)
            return self.function(hidden), d_hidden
        gate, up = hidden.chunk(2, dim=-1)
        d_gate, d_up = d_hidden.chunk(2, dim=-1)
        opened = self.function(gate)
        torch.mul(gradient, opened, out=d_up)
        self._pull(gradient.mul_(up), gate, d_gate)
        return opened.mul_(up), d_hidden

    def _pull(self, gradient: torch.Tensor, at: torch.Tensor, out: torch.Tensor) -> None:
        """Put gradient * f'(at) in ``out``, by torch's own single pass where it has one."""
        aten = torch.ops.aten
        name = self.plain
        if name == "silu":
            aten.silu_backward.grad_input(gradient, at, grad_input=out)
        elif name == "relu":
            aten.threshold_backward.grad_input(gradient, at, 0, grad_input=out)
        elif name in _APPROXIMATIONS:
            kind = _APPROXIMATIONS[name]
            aten.gelu_backward.grad_input(gradient, at, approximate=kind, grad_input=out)
        else:
            torch.mul(gradient, self.derivative(at), out=out)

    def width(self, intermediate: int) -> int:
        """Rows of the first weight for an intermediate size: 2I where gated, else I."""
        return 2 * intermediate if self.gated else intermediate


def _silu_derivative(x: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1.0 + x * (1.0 - sigmoid))


def _gelu_derivative(x: torch.Tensor) -> torch.Tensor:
    cumulative = 0.5 * (1.0 + torch.erf(x * _SQRT_HALF))
    density = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return cumulative + x * density


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_derivative(x: torch.Tensor) -> torch.Tensor:
    inner = torch.tanh(_SQRT_2_OVER_PI * (x + _TANH_CUBIC * x**3))
    slope = _SQRT_2_OVER_PI * (1.0 + 3.0 * _TANH_CUBIC * x * x)
    return 0.5 * (1.0 + inner) + 0.5 * x * (1.0 - inner * inner) * slope


def _relu_derivative(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).to(x.dtype)


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) ** 2


def _relu_squared_derivative(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * torch.relu(x)


_FUNCTIONS: dict[str, tuple[Pointwise, Pointwise]] = {
    "silu": (F.silu, _silu_derivative),
    "gelu": (F.gelu, _gelu_derivative),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_derivative),
    "relu": (torch.relu, _relu_derivative),
    "relu2": (_relu_squared, _relu_squared_derivative),
}
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}

ACTIVATIONS: dict[str, Activation] = {
    name: Activation(name=name, gated=gated, function=function, derivative=derivative)
    for name, gated, (function, derivative) in [
        *((name, False, pair) for name, pair in _FUNCTIONS.items()),
        *((name, True, _FUNCTIONS[plain]) for name, plain in _GATED.items()),
    ]
}
"""All activations by name: silu, gelu, gelu_tanh, relu, relu2 and the gated swiglu, geglu,
geglu_tanh, reglu."""


def activation_named(name: str | Activation) -> Activation:
    """Look an activation up.

    Args:
        name: A key of ``ACTIVATIONS``; an activation is returned as it is.

    Returns:
        The activation.

    Raises:
        ConfigurationError: There is none of this name.
    """
    if isinstance(name, Activation):
        return name
    try:
        return ACTIVATIONS[name]
    except KeyError:
        raise ConfigurationError(
            f"there is no activation {name!r}", hint=f"use one of {', '.join(sorted(ACTIVATIONS))}"
        ) from None
