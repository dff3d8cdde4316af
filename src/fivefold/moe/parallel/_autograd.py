"""The operator between ranks, with gradients: one launch, or two around any backend.

The exchange kernel does everything in one launch. Cut in two at its products, what a rank received
lies in its heap, a table says for which expert each row is, and a row has to be made for each. So
another backend can compute the experts, and so does the backward, which sends tokens and gradients
out side by side, and brings gradients of tokens and of routing weights back.

Calls are collective, and so are their backward passes: all ranks run them, in one order.

Shapes: T tokens of this process, K experts per token, H width, R rows that a rank has room for, V
ranks of this process, L experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import Function

from fivefold.errors import ConfigurationError
from fivefold.moe.kernels.arguments import Operands, Sizes
from fivefold.moe.operator.activations import activation_named
from fivefold.moe.operator.backend import Backend, backend_for
from fivefold.moe.operator.operands import PRECISIONS, check_ids, check_weight_on_input
from fivefold.moe.parallel._config import heap_layout, sizes_of
from fivefold.moe.parallel._launch import ExchangeLaunches, check_call, dropped_by_rank
from fivefold.moe.routing.capacity import DropPolicy

_Tensor = torch.Tensor
_Optional = torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call's operands, checked, and who computes them.

    Weights and biases are of this process's experts, ids among all experts, ``counts`` the tokens
    of each rank of this process.
    """

    launches: ExchangeLaunches
    x: _Tensor
    w13: _Tensor
    w2: _Tensor
    ids: _Tensor
    weights: _Tensor
    b13: _Optional
    b2: _Optional
    counts: tuple[int, ...]
    weight_on_input: bool
    backend: Backend

    def options(self) -> dict[str, Any]:
        """Return what the backend is told besides operands."""
        return {
            "activation": activation_named(self.launches.config.activation),
            "weight_on_input": self.weight_on_input,
            "precision": self.launches.config.precision,
        }

    def share(self, place: int) -> tuple[_Tensor, _Tensor, dict[str, _Optional]]:
        """Return the weights and biases of one rank of this process."""
        local = self.launches.config.local_experts
        here = slice(place * local, (place + 1) * local)
        biases = {"b13": self.b13, "b2": self.b2}
        found = {name: None if bias is None else bias[here] for name, bias in biases.items()}
        return self.w13[here], self.w2[here], found

    def forward(self) -> _Tensor:
        """Three steps: dispatch, this process's experts, combination."""
        rows, experts = _scatter(self, self.x, weights=self.weight_on_input)

        def compute(place: int, here: _Tensor | slice, ids: _Tensor) -> None:
            w13, w2, biases = self.share(place)
            entering = rows[place][here].contiguous()
            weight = entering.new_ones(len(entering), 1, dtype=torch.float32)
            if self.weight_on_input:
                weight = _sent_weights(self, place)[here].unsqueeze(1)
            results[place][here] = self.backend.forward(
                entering, w13, w2, ids, weight, **biases, **self.options(), workspace=None
            )

        results = rows.new_empty(rows.shape)
        _by_rank(experts, compute)
        return _gather(self, results, None)[0]

    def backward(self, gradient: _Tensor) -> tuple[_Optional, ...]:
        """Gradients of x, w13, w2, weights, b13 and b2, by the same way out and back.

        A token's row goes out with the row of its gradient; the experts' ranks compute the first
        product again.
        """
        width = self.launches.config.hidden
        both = torch.cat([self.x, gradient.to(self.x.dtype)], dim=1)
        rows, experts = _scatter(self, both, weights=True)
        out = rows.new_empty(*rows.shape[:2], width)
        of_weights = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
        parts: list[tuple[_Optional, ...]] = []

        def compute(place: int, here: _Tensor | slice, ids: _Tensor) -> None:
            w13, w2, biases = self.share(place)
            received = rows[place][here]
            entering, incoming = received[:, :width], received[:, width:]
            weight = _sent_weights(self, place)[here].unsqueeze(1)
            d_x, d_w13, d_w2, d_weight, d_b13, d_b2 = self.backend.backward(
                incoming.contiguous(),
                entering.contiguous(),
                w13,
                w2,
                ids,
                weight,
                **biases,
                **self.options(),
                hidden=None,
            )
            assert d_x is not None, "a backend gives all gradients"
            assert d_weight is not None, "a backend gives all gradients"
            out[place][here] = d_x
            of_weights[place][here] = d_weight.squeeze(1)
            parts.append((d_w13, d_w2, d_b13, d_b2))

        _by_rank(experts, compute)
        d_x, d_weights = _gather(self, out, of_weights)
        d_w13, d_w2, d_b13, d_b2 = (_stacked(found) for found in zip(*parts, strict=True))
        return d_x, d_w13, d_w2, d_weights, d_b13, d_b2


def _stacked(parts: tuple[_Optional, ...]) -> _Optional:
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return found[0] if len(found) == 1 else torch.cat(found)


def _by_rank(experts: _Tensor, compute: Callable[[int, _Tensor | slice, _Tensor], None]) -> None:
    """Call ``compute(place, rows, ids)`` for each rank of this process.

    On the CPU with the rows that came only. Elsewhere with all that there is room for, -1 marking
    those that did not come: to know their number would be to wait for the device.
    """
    for place, of_rank in enumerate(experts):
        if experts.device.type == "cpu":
            here = (of_rank >= 0).nonzero().squeeze(1)
            compute(place, here, of_rank[here].unsqueeze(1))
        else:
            compute(place, slice(None), of_rank.unsqueeze(1))


def _sent_weights(call: _Call, place: int) -> _Tensor:
    first, count, kind = heap_layout(call.launches.config).sections["weights"]
    return call.launches.heap.own[place, first : first + count * kind.itemsize].view(kind)


def _scatter(call: _Call, rows: _Tensor, *, weights: bool) -> tuple[_Tensor, _Tensor]:
    """Send rows [T, W]; what came [V, R, W], and its local experts [V, R], -1 for no row."""
    from fivefold.moe.kernels import exchange as kernels  # noqa: PLC0415 - optional

    heap, config = call.launches.heap, call.launches.config
    width = rows.shape[1]
    experts = torch.full(
        (heap.num_local, config.room_rows), -1, dtype=torch.int32, device=rows.device
    )
    changes = {
        "given": Operands(rows.contiguous(), call.ids.contiguous(), call.weights.contiguous()),
        "row_expert": experts,
        "S": _sizes(call, H=width, WEIGHT_ON_INPUT=weights),
    }
    call.launches.launch(kernels.scatter_kernel, changes, call.counts)
    first, _, kind = heap_layout(config).sections["receive"]
    stop = first + config.room_rows * width * kind.itemsize
    return heap.own[:, first:stop].view(kind).view(heap.num_local, -1, width), experts


def _gather(call: _Call, rows: _Tensor, scalars: _Optional) -> tuple[_Tensor, _Optional]:
    """Return a row [V, R, H], and a number, for each that came; their sums [T, H], and [T, K].

    Sums are weighted unless there are numbers, or the weights are on the input.
    """
    from fivefold.moe.kernels import exchange as kernels  # noqa: PLC0415 - optional

    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    numbers = torch.empty(call.ids.shape, dtype=torch.float32, device=out.device)
    weights = call.weights.contiguous()
    plain = call.weight_on_input or scalars is not None
    changes = {
        "given": Operands(call.x, call.ids, weights, out=out),
        "rows": rows,
        "scalars": numbers if scalars is None else scalars,
        "scalars_out": numbers,
        # A row comes back whole: one tile of columns.
        "S": _sizes(
            call,
            WEIGHT_ON_INPUT=plain,
            SCALARS=scalars is not None,
            SHADOW=False,
            BN2=call.launches.config.hidden,
        ),
    }
    call.launches.launch(kernels.gather_kernel, changes, call.counts)
    call.launches.check_if_cheap()
    return out, None if scalars is None else numbers.to(weights.dtype)


def _sizes(call: _Call, **changes: Any) -> Sizes:
    launches = call.launches
    made = sizes_of(launches.config, num_local=launches.heap.num_local, weight_on_input=False)
    return replace(made, **changes)


@torch.compiler.disable  # a call reaches other processes: it must be neither left out nor repeated
def fused_moe_between(  # noqa: PLR0913 - the operator's own operands and options
    launches: ExchangeLaunches,
    x: _Tensor,
    w13: _Tensor,
    w2: _Tensor,
    ids: _Tensor,
    weights: _Tensor,
    *,
    activation: str,
    b13: _Optional,
    b2: _Optional,
    weight_on_input: bool,
    capacity: int | None,
    drop_policy: DropPolicy,
    backend: str,
    precision: str,
    check: bool | None,
) -> _Tensor:
    """``fused_moe`` between the ranks of a group; differentiable.

    The backend "fused" is one launch; "split" and "reference" compute the experts between two.
    "auto" is "fused" on a GPU and "reference" on the CPU.
    """
    config = launches.config
    launches.check_whole()
    _check_options(launches, activation=activation, precision=precision, dtype=x.dtype)
    counts = launches.token_counts(len(x)) if x.ndim == 2 else None
    counts = check_call(
        config, launches.heap, (x, w13, w2, ids, weights), biases=(b13, b2), num_tokens=counts
    )
    check_weight_on_input(ids, weight_on_input=weight_on_input)
    if check or (check is None and x.device.type == "cpu"):
        check_ids(ids, config.experts)
    for most in (capacity, config.capacity):
        if most is not None:
            room = {"experts": config.experts, "capacity": most}
            ids = dropped_by_rank(ids, weights, counts=counts, policy=drop_policy, **room)
    if backend == "auto":
        backend = "fused" if x.device.type == "cuda" else "reference"
    floats = (x, w13, w2, weights, b13, b2)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floats)
    if wanted and not config.training:
        message = "this exchange has no room for a backward"
        raise ConfigurationError(
            message, hint="make it with ExchangeConfig(training=True), or use torch.no_grad()"
        )
    rest = {"counts": counts, "weight_on_input": weight_on_input, "launches": launches}
    options = rest | {"backend": backend_for(backend, x)}
    result: _Tensor = _Recorded.apply(*floats, ids, options)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


def _check_options(
    launches: ExchangeLaunches, *, activation: str, precision: str, dtype: torch.dtype
) -> None:
    config = launches.config
    if activation != config.activation:
        raise ConfigurationError(
            f"activation is {activation!r}, the exchange was made for {config.activation!r}",
            hint="make ExchangeConfig and the call with the same activation",
        )
    lower = PRECISIONS.index(config.precision) > PRECISIONS.index(precision)
    if dtype == torch.float32 and lower:
        raise ConfigurationError(
            f"precision is {precision!r}, the exchange computes in {config.precision!r}",
            hint=f"ask for precision={config.precision!r}, or make the exchange with {precision!r}",
        )


class _Recorded(Function):
    """One call and its gradients."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> _Tensor:
        x, w13, w2, weights, b13, b2, ids, options = given
        # The tensors come back from ctx, so that torch sees when one was changed in between.
        ctx.save_for_backward(x, w13, w2, weights, b13, b2, ids)
        ctx.options = options
        if options["backend"].name != "fused":
            return _made(given[:7], options).forward()
        launches: ExchangeLaunches = options["launches"]
        return launches.forward(
            (x, w13, w2, ids, weights),
            (b13, b2),
            options["counts"],
            weight_on_input=options["weight_on_input"],
        )

    @staticmethod
    def backward(ctx: Any, *gradients: _Tensor) -> tuple[Any, ...]:
        call = _made(ctx.saved_tensors, ctx.options)
        call.launches.check_whole()
        return *call.backward(gradients[0].contiguous()), None, None


def _made(tensors: tuple[Any, ...], options: dict[str, Any]) -> _Call:
    names = ("x", "w13", "w2", "weights", "b13", "b2", "ids")
    return _Call(**dict(zip(names, tensors, strict=True)), **options)
