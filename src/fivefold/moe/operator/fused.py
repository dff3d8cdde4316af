"""The operator: who computes it, and how torch knows it, as a custom op with shapes and gradients.

``fused_moe`` is what users call. Below it ``fivefold::fused_moe`` and its backward are registered
with ``torch.library``, so that ``torch.compile`` sees one opaque call whatever the backend, and the
number of tokens may change without compiling again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from fivefold.errors import ConfigurationError, UnsupportedError, require_one_of
from fivefold.moe.kernels.arguments import Workspace
from fivefold.moe.kernels.launch import (
    DTYPES,
    backward_fused,
    forward_fused,
    forward_split,
    missing_fused,
)
from fivefold.moe.operator._grouped import backward_grouped, forward_grouped, recorded_grouped
from fivefold.moe.operator.activations import ACTIVATIONS, Activation, activation_named
from fivefold.moe.operator.operands import (
    Precision,
    as_autocast,
    check_forward_mode,
    check_operands,
    check_precision,
    check_transforms,
    check_values,
    check_weight_on_input,
    is_eager,
)
from fivefold.moe.routing.router import DropPolicy, check_capacity, drop_beyond_capacity, is_plain


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute the operator; the same bits every time."""

    name: str
    forward: Callable[..., torch.Tensor]  # what the backward needs goes to ``hidden``
    backward: Callable[..., tuple[torch.Tensor | None, ...]]
    missing: Callable[[torch.device], str | None]  # why it cannot work on a device
    recorded: Callable[..., torch.Tensor] | None = None
    """``forward`` with its own record for autograd, outside of graphs; None: the custom op's."""
    dtypes: frozenset[torch.dtype] | None = None  # None: every floating-point type

    def refuses(self, x: torch.Tensor) -> str | None:
        """Return why it cannot take these tokens, or None where it can."""
        if self.dtypes is not None and x.dtype not in self.dtypes:
            names = ", ".join(sorted(str(dtype) for dtype in self.dtypes))
            return f"it takes {names}; got {x.dtype}"
        return self.missing(x.device)


_TIMED = frozenset({torch.bfloat16, torch.float16})
_KERNELS: dict[str, Any] = {"backward": backward_fused, "missing": missing_fused, "dtypes": DTYPES}
_BACKENDS = {
    "fused": Backend(name="fused", forward=forward_fused, **_KERNELS),
    "split": Backend(name="split", forward=forward_split, **_KERNELS),
    "reference": Backend(
        name="reference",
        forward=forward_grouped,
        backward=backward_grouped,
        recorded=recorded_grouped,
        missing=lambda _device: None,
    ),
}


def backends(device: str | torch.device = "cpu") -> dict[str, str | None]:
    """Return all backends, with what is missing for each on a device, or None.

    "fused" is the single kernel, "split" the same work in five launches, both with the same kernels
    for the backward; "reference" is plain torch.

    Examples:
        >>> backends("cpu")["reference"] is None
        True
    """
    return {name: found.missing(torch.device(device)) for name, found in _BACKENDS.items()}


def backend_for(name: str, x: torch.Tensor) -> Backend:
    """Return the backend of a name, or the best one for these tokens where it is "auto"."""
    require_one_of(name, ("auto", *_BACKENDS), f"there is no backend {name!r}")
    found = _BACKENDS[_best_for(x) if name == "auto" else name]
    if (reason := found.refuses(x)) is not None:
        raise UnsupportedError(f"backend {name!r} cannot work here: {reason}", hint="use auto")
    return found


def _best_for(x: torch.Tensor) -> str:
    """Return the fastest that was timed: kernels for 16 bits on an H200, or H100 of its kind."""
    if x.is_cuda and x.dtype in _TIMED and torch.cuda.get_device_capability(x.device) == (9, 0):
        return "split" if missing_fused(x.device) is None else "reference"
    return "reference"


_Optional = torch.Tensor | None


@runtime_checkable
class OperatorGroup(Protocol):
    """Ranks between which ``fused_moe`` itself dispatches and combines."""

    @property
    def precision(self) -> Precision:
        """Return the arithmetic for float32 that the group computes in."""

    @property
    def fused_moe(self) -> Callable[..., torch.Tensor]:
        """Return ``fused_moe`` between the ranks, by operands and options of the same names."""


# As ``fused_moe`` has them, the first five by place; torch passes what is optional as None.
_OPERANDS = (
    "Tensor x, Tensor w13, Tensor w2, Tensor ids, Tensor weights, Tensor? b13, Tensor? b2, "
    "str activation, bool weight_on_input, str backend, str precision"
)


def _chosen(given: tuple[Any, ...]) -> tuple[Backend, tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return who computes, from what, and how, for what ``_OPERANDS`` says."""
    b13, b2, activation, weight_on_input, backend, precision = given[5:11]
    options = {
        "activation": activation_named(activation),
        "b13": b13,
        "b2": b2,
        "weight_on_input": weight_on_input,
        "precision": precision,
    }
    return backend_for(backend, given[0]), given[:5], options


def _forward_shape(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, w13, _, ids, *_, keep_hidden = given
    hidden = x.new_empty((ids.numel() if keep_hidden else 0, w13.shape[1]))
    return torch.empty_like(x, memory_format=torch.contiguous_format), hidden


def _compute_forward(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # The workspace is written to, and the schema does not say so: control is left as it was found,
    # what lies in scratch means nothing, and an op that says so could have no gradients.
    backend, operands, options = _chosen(given)
    control, scratch, keep_hidden = given[11:]
    workspace = None if control is None else Workspace(control=control, scratch=scratch)
    x, w13, _, ids, _ = operands
    hidden = x.new_empty((ids.numel() if keep_hidden else 0, w13.shape[1]))
    kept = hidden if keep_hidden else None
    return backend.forward(*operands, **options, workspace=workspace, hidden=kept), hidden


_forward = torch.library.custom_op(
    "fivefold::fused_moe",
    _compute_forward,
    mutates_args=(),
    schema=f"({_OPERANDS}, Tensor? control, Tensor? scratch, bool keep_hidden) -> (Tensor, Tensor)",
)
_forward.register_fake(_forward_shape)


def _compute_backward(gradient: torch.Tensor, *given: Any) -> list[torch.Tensor]:
    backend, operands, options = _chosen(given)
    found = backend.backward(gradient.contiguous(), *operands, **options, hidden=given[11])
    return [g.contiguous() for g in found if g is not None]


def _backward_shapes(_gradient: torch.Tensor, *given: Any) -> list[torch.Tensor]:
    like = [tensor for tensor in (*given[:3], *given[4:7]) if tensor is not None]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]


_backward = torch.library.custom_op(
    "fivefold::fused_moe_backward",
    _compute_backward,
    mutates_args=(),
    schema=f"(Tensor gradient, {_OPERANDS}, Tensor? hidden) -> Tensor[]",
)
_backward.register_fake(_backward_shapes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    hidden = output[1]
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)  # or the kept values would get a gradient of zeros
    ctx.save_for_backward(*inputs[:7], hidden if inputs[-1] else None)
    ctx.options = inputs[7:11]  # activation, weight_on_input, backend, precision


def _gradients(ctx: Any, gradient: _Optional, _of_hidden: None) -> tuple[_Optional, ...]:
    if gradient is None:  # nothing downstream depends on the output
        return (None,) * 14
    *saved, hidden = ctx.saved_tensors
    found = iter(_backward(gradient, *saved, *ctx.options, hidden))
    d_x, d_w13, d_w2, d_weights = (next(found) for _ in range(4))
    d_b13, d_b2 = (None if bias is None else next(found) for bias in saved[5:7])
    return d_x, d_w13, d_w2, None, d_weights, d_b13, d_b2, *(None,) * 7


_forward.register_autograd(_gradients, setup_context=_keep)


def fused_moe(  # noqa: PLR0913 - an operator's operands and options, all but five by name
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str | Activation = "swiglu",
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    weight_on_input: bool = False,
    capacity: int | None = None,
    drop_policy: DropPolicy = "position",
    backend: str = "auto",
    precision: Precision = "ieee",
    workspace: Workspace | None = None,
    group: OperatorGroup | None = None,
    recompute: bool = True,
    check: bool | None = None,
) -> torch.Tensor:
    """Send every token through its experts and add up the weighted results.

    y[t] = sum_k weight[t, k] * (W2[e] f(W13[e] x[t] + b13[e]) + b2[e]) with e = topk_ids[t, k], the
    sum over k in order and in float32 at least. Differentiable in all but the ids; the same bits
    every time, forward and backward.
    Under torch.autocast the operands are cast to its type first, as those of torch's products.

    Args:
        x: Tokens, [T, H]; T may be 0.
        w13: First weights, [E, 2I, H] (gate rows, then up rows) for gated activations, else
            [E, I, H].
        w2: Second weights, [E, H, I].
        topk_ids: Experts of each token, int32 or int64 [T, K]; -1 drops an assignment.
        topk_weights: [T, K].
        activation: A key of ``ACTIVATIONS``; or one of your own, for "reference", outside of graphs
            and groups.
        b13: [E, 2I] or [E, I]; None for none.
        b2: [E, H]; None for none.
        weight_on_input: Give the experts weight * x instead of weighing their outputs. The weight
            multiplies W13 x, in float32 at least and before the bias: no backend rounds
            weight * x to 16 bits.
        capacity: Most tokens per expert; None drops nothing.
        drop_policy: Who is dropped beyond the capacity, see ``drop_beyond_capacity``.
        backend: ``"auto"``, or a name of ``backends()``.
        precision: The least that float32 products may be on a GPU: ``"ieee"``; ``"tf32x3"``, three
            TF32 products for nearly the same; ``"tf32"``, 10 bits of mantissa. ``"reference"``
            leaves this to torch's own switch. Without effect on other data types.
        workspace: Memory for the kernels, of this call's ``Workspace.size`` or more, which is
            checked for every backend; None takes some for this call.
        group: Ranks that share the experts out and reach each other's memory; None: all experts are
            here. The ids are then among all ranks' experts, w13, w2 and biases those of this rank
            (a virtual heap: of all), and the call and its backward are collective. A capacity is
            that of a rank's own tokens. See ``OneSidedGroup``.
        recompute: Compute the first product again in the backward. False keeps it, T K rows of
            ``w13``'s height, where a gradient may be asked for: more memory, less work.
        check: Look at the values of ids and weights; None: on the CPU only, since it waits for the
            device.

    Returns:
        [T, H], in x's data type.

    Raises:
        CommunicationError: A rank of the group did not answer in time.
        ConfigurationError: Shapes, data types, devices, ids or options do not fit.
        DataError: A weight is NaN; or a rank of the group would get more rows than it has room for.
        UnsupportedError: The backend is not available here, says why; or a derivative is wanted in
            forward mode, or inside of torch.func's transformations.

    References:
        FlashMoE, arXiv 2506.04667; the layouts are those of transformers' fused experts.

    Examples:
        >>> x, w13, w2 = torch.ones(1, 2), torch.ones(3, 4, 2), torch.ones(3, 2, 2)
        >>> ids, weights = torch.tensor([[0, 2]]), torch.tensor([[0.25, 0.75]])
        >>> fused_moe(x, w13, w2, ids, weights, activation="reglu").tolist()  # 2 * (2 * 2)
        [[8.0, 8.0]]
    """
    kind = activation_named(activation)
    check_precision(precision)
    capacity = check_capacity(capacity, drop_policy)
    if isinstance(x, torch.Tensor):
        floats = as_autocast(x, w13, w2, b13, b2)
        x, w13, w2, b13, b2 = floats
        check_forward_mode((*floats, topk_weights))
        check_transforms((*floats, topk_ids, topk_weights))
    options = {
        "activation": kind.name,
        "b13": b13,
        "b2": b2,
        "weight_on_input": weight_on_input,
        "precision": precision,
    }
    if group is not None:
        _check_own(kind, "between the ranks of a group", refused=True)
        _check_group(group, workspace, recompute=recompute)
        how = {"backend": backend, "capacity": capacity, "drop_policy": drop_policy, "check": check}
        return group.fused_moe(x, w13, w2, topk_ids, topk_weights, **options, **how)
    check_operands(x, w13, w2, topk_ids, topk_weights, activation=kind, b13=b13, b2=b2)
    check_weight_on_input(topk_ids.shape[1], weight_on_input=weight_on_input)
    if is_plain(x) and (check or (check is None and x.device.type == "cpu")):
        check_values(topk_ids, topk_weights, len(w2))
    if workspace is not None:
        _check_workspace(workspace, x, w2, topk_ids.shape[1])
    chosen = backend_for(backend, x)
    _check_own(kind, f"on backend {chosen.name!r}", refused=chosen.recorded is None)
    if capacity is not None and x.device.type != "meta":
        room = {"num_experts": len(w2), "capacity": capacity}
        kept = drop_beyond_capacity(topk_ids, topk_weights, **room, policy=drop_policy)
        topk_ids = topk_ids.masked_fill(~kept, -1)
    operands = (x, w13, w2, topk_ids, topk_weights)
    return _computed(chosen, operands, kind, options, workspace, recompute=recompute)


def _computed(
    chosen: Backend,
    operands: tuple[torch.Tensor, ...],
    kind: Activation,
    options: dict[str, Any],
    workspace: Workspace | None,
    *,
    recompute: bool,
) -> torch.Tensor:
    b13, b2 = options["b13"], options["b2"]
    floats = (*operands[:3], operands[4], b13, b2)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floats)
    if is_eager((*operands, b13, b2)):
        # Nobody looks at the graph: without the price of torch's dispatch.
        more = options | {"activation": kind, "workspace": workspace}
        if not wanted:
            return chosen.forward(*operands, **more)
        if chosen.recorded is not None:
            return chosen.recorded(*operands, **more, recompute=recompute)
    _check_own(kind, "in graphs and transformations", refused=True)
    named = (options["activation"], options["weight_on_input"], chosen.name, options["precision"])
    memory = (None, None) if workspace is None else (workspace.control, workspace.scratch)
    keep_hidden = wanted and not recompute
    result: torch.Tensor = _forward(*operands, b13, b2, *named, *memory, keep_hidden)[0]
    return result


def _check_own(kind: Activation, where: str, *, refused: bool) -> None:
    """Refuse an activation that only Python knows where others have to know it by name."""
    if refused and ACTIVATIONS.get(kind.name) is not kind:
        raise UnsupportedError(
            f"the activation {kind.name!r} is not one of ACTIVATIONS and cannot be used {where}",
            hint='use backend="reference", outside of torch.compile and without a group',
        )


def _check_workspace(workspace: Any, x: torch.Tensor, w2: torch.Tensor, top_k: int) -> None:
    if not isinstance(workspace, Workspace):
        raise ConfigurationError(
            f"workspace is a {type(workspace).__name__}", hint="Workspace.allocate makes one"
        )
    if not torch.compiler.is_compiling():  # sizes in a graph may be unknown; backends look again
        workspace.check_call(x, w2, top_k)


def _check_group(group: Any, workspace: Workspace | None, *, recompute: bool) -> None:
    if not isinstance(group, OperatorGroup):
        raise ConfigurationError(
            f"group is a {type(group).__name__}; it must be a OneSidedGroup",
            hint="OneSidedGroup(config, heap) reaches its ranks one-sided; a layer also takes an "
            "AllToAllGroup: MoE(config, AllToAllGroup(process_group))",
        )
    if workspace is not None:
        message = "a group brings memory of its own"
        raise ConfigurationError(message, hint="leave workspace None")
    if not recompute:
        message = "between the ranks of a group nothing is kept for the backward"
        raise UnsupportedError(message, hint="use recompute=True")
