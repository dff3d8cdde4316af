"""Our operator as an experts backend of Hugging Face transformers.

transformers (version 5) lets a model's expert modules be computed by a function registered under a
name. Models that keep gate and up projections as halves of one tensor, or have no gate, fit this
operator as they are. A gate or an activation of a module's own is called as it is, between our
products, where "reference" computes them; what does more than that is refused by name.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe.operator.activations import GATED_NAMES, Activation, activation_named
from fivefold.moe.operator.fused import backend_for, fused_moe

# Classes of transformers' activation functions, by what they compute.
_NAMES = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
_FUNCTIONS = {
    torch.nn.functional.silu: "silu",
    torch.nn.functional.gelu: "gelu",
    torch.nn.functional.relu: "relu",
    torch.relu: "relu",
}
_PARAMETERS = frozenset(
    f"{name}{kind}" for name in ("gate_up_proj", "up_proj", "down_proj") for kind in ("", "_bias")
)


def register_transformers_backend(
    name: str = "fivefold", *, backend: str = "auto", recompute: bool = False
) -> str:
    """Make the operator available to transformers' models.

    Afterwards ``Model.from_pretrained(..., experts_implementation=name)`` or
    ``model.set_experts_implementation(name)`` computes its experts with ``fused_moe``. Registering
    a name again replaces it.

    Args:
        name: What models call it.
        backend: As in ``fused_moe``.
        recompute: Compute the hidden values again in the backward pass instead of keeping them:
            less memory, more time.

    Raises:
        UnsupportedError: transformers is not installed, or has no such registry; or the backend
            cannot work on the CPU and there is no other device.
        ConfigurationError: The name is one of transformers' own, or there is no such backend.

    Examples:
        >>> register_transformers_backend()  # doctest: +SKIP
        'fivefold'
        >>> register_transformers_backend("eager")
        Traceback (most recent call last):
        ...
        fivefold.errors.ConfigurationError: 'eager' is a backend of transformers itself; choose ...
    """
    if backend != "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        backend_for(backend, torch.empty(0, device=device))
    taken = ConfigurationError(
        f"{name!r} is a backend of transformers itself", hint='choose another name: "fivefold"'
    )
    if name == "eager":
        raise taken
    registry = _registry()
    if name in registry and getattr(registry[name], "func", None) is not _forward:
        raise taken
    # A function of the module's own is Python, which a graph has to leave. Made here: it loads
    # torch._dynamo, which takes seconds.
    untraced = torch.compiler.disable(fused_moe)  # type: ignore[no-untyped-call]
    forward = functools.partial(_forward, untraced=untraced, backend=backend, recompute=recompute)
    registry.register(name, forward)
    return name


def _registry() -> Any:
    try:
        module = importlib.import_module("transformers.integrations.moe")
    except ImportError as error:
        raise UnsupportedError(
            f"the experts backend needs transformers 5, which is not there: {error}",
            hint="pip install 'fivefold[hf]'",
        ) from error
    registry = getattr(module, "ALL_EXPERTS_FUNCTIONS", None)
    if registry is None:
        message = "this transformers has no registry of experts backends"
        raise UnsupportedError(message, hint="install transformers 5.0 or newer")
    return registry


def _forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    untraced: Any,
    backend: str,
    recompute: bool,
) -> torch.Tensor:
    kind = _activation_of(experts)
    first = experts.gate_up_proj if kind.gated else experts.up_proj
    second = experts.down_proj
    b13 = b2 = None
    if experts.has_bias:
        b13 = experts.gate_up_proj_bias if kind.gated else experts.up_proj_bias
        b2 = experts.down_proj_bias
    if experts.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    if experts._is_expert_parallel:  # noqa: SLF001 - its own mark for expert numbers beyond the last
        top_k_index = top_k_index.masked_fill(top_k_index >= len(second), -1)
    call: Any = untraced if isinstance(kind, _Own) else fused_moe
    output: torch.Tensor = call(
        hidden_states.to(second.dtype),
        first,
        second,
        top_k_index,
        top_k_weights,
        activation=kind,
        b13=b13,
        b2=b2,
        backend=backend,
        recompute=recompute,
        check=False,  # transformers' routers choose distinct experts in range
    )
    return output.to(hidden_states.dtype)


def _activation_of(experts: Any) -> Activation:
    """Return what the module computes between its two products: one of ours, or its own."""
    module = type(experts).__name__
    if experts.has_post_expert_norm:
        raise _unfit(module, "normalises each expert's output")
    more = sorted({name for name, _ in experts.named_parameters()} - _PARAMETERS)
    if more:
        raise _unfit(module, f"has parameters of its own ({', '.join(more)})")
    gate = getattr(type(experts), "_apply_gate", None)
    is_usual = not experts.has_gate or getattr(gate, "__name__", "") == "_default_apply_gate"
    plain = _name_of(experts.act_fn) if is_usual else None
    name = GATED_NAMES.get(plain or "") if experts.has_gate else plain
    if name is not None:
        return activation_named(name)
    function = experts._apply_gate if experts.has_gate else experts.act_fn  # noqa: SLF001 - what its own backends call
    return _Own(
        name=f"that of {module}",
        gated=experts.has_gate,
        function=function,
        pull=lambda *_: None,  # not asked for: autograd has it
    )


@dataclass(frozen=True, kw_only=True)
class _Own(Activation):
    """A module's own function of the whole first product, which autograd differentiates."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.function(hidden)

    def with_gradient(
        self, hidden: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the gradient of ``hidden``, both by the module's own function."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            output = self._of(leaf)
            (d_hidden,) = torch.autograd.grad(output, leaf, gradient)
        return output.detach(), d_hidden


def _name_of(function: Any) -> str | None:
    """Return our name of an activation function or module; None where we have none."""
    if function in _FUNCTIONS:
        return _FUNCTIONS[function]
    name = _NAMES.get(type(function).__name__)
    exact = getattr(function, "act", None) in {None, torch.nn.functional.gelu}
    return None if name == "gelu" and not exact else name


def _unfit(module: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{module} {reason}, which the operator does not compute",
        hint='use experts_implementation="eager" for this model',
    )
