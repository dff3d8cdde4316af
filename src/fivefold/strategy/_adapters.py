"""Operators of a layer whose weights are frozen, and of the adapters beside them.

A frozen product has a backward for its inputs only and keeps none of them, unless its adapter does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from fivefold.strategy._operators import (
    LayerShape,
    Operator,
    head_operators,
    layer_operators,
    tensor_message,
)
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.parts import BASE_BYTES, WeightMatrix

_UPS = ("gate_proj", "up_proj")
# Which matrices one product computes with: the part of a block, and its modules.
_PRODUCTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "query, key, value": ("attention", ("q_proj", "k_proj", "v_proj")),
    "compression": ("attention", ("q_a_proj", "kv_a_proj_with_mqa")),
    "queries": ("attention", ("q_b_proj", "q_proj")),
    "keys, values": ("attention", ("kv_b_proj",)),
    "attention projection": ("attention", ("o_proj",)),
    "mamba in": ("mamba", ("in_proj",)),
    "mamba step, B, C": ("mamba", ("x_proj",)),
    "mamba step": ("mamba", ("dt_proj",)),
    "mamba out": ("mamba", ("out_proj",)),
    "feed-forward up": ("dense", _UPS),
    "feed-forward down": ("dense", ("down_proj",)),
    "shared expert up": ("shared", _UPS),
    "shared expert down": ("shared", ("down_proj",)),
    "experts up": ("experts", _UPS),
    "experts down": ("experts", ("down_proj",)),
}


def trained_operators(model: ModelSpec, shape: LayerShape, kind: str) -> tuple[Operator, ...]:
    """Return the forward operators of one layer on one GPU, as its training needs them."""
    operators = layer_operators(model, shape, kind)
    if model.adapters is None:
        return operators
    shared = any(model.is_adapted(m) for m in model.matrices("shared") if m.module in _UPS)
    found: list[Operator] = []
    for op in operators:
        if op.kind != "gemm":
            found.append(op)
        elif op.name.startswith("latent "):
            found.append(dataclasses.replace(op, frozen=True, stored_bytes=0.0))
        elif op.name == "router":  # whose input the shared experts share
            stored = op.stored_bytes if shared else 0.0
            found.append(dataclasses.replace(op, frozen=True, stored_bytes=stored))
        else:
            found += _adapted(model, shape, op)
    return tuple(found)


def trained_head(model: ModelSpec, shape: LayerShape) -> tuple[Operator, ...]:
    """Return last norm, head and loss; a frozen head keeps nothing of its input."""
    operators = head_operators(model, shape)
    if model.adapters is None:
        return operators
    return tuple(
        dataclasses.replace(op, frozen=True, stored_bytes=0.0) if op.kind == "gemm" else op
        for op in operators
    )


def widened_bytes(model: ModelSpec, shape: LayerShape, operators: tuple[Operator, ...]) -> float:
    """Return the bytes of the largest matrix while it is widened from the type it is kept in."""
    if model.adapters is None or model.adapters.base == "bf16":
        return 0.0
    sizes = [op.batch * op.n * op.k for op in operators if op.frozen and op.name != "router"]
    return shape.element_bytes * max(sizes, default=0.0)


def _adapted(model: ModelSpec, shape: LayerShape, op: Operator) -> Iterator[Operator]:
    """Yield a frozen product, what widens its weights, and the adapters of its matrices."""
    adapters = model.adapters
    assert adapters is not None, "only called with adapters"
    part, modules = (op.part, (op.module,)) if op.part else _PRODUCTS[op.name]
    adapted = [m for m in model.matrices(part) if m.module in modules and model.is_adapted(m)]
    yield dataclasses.replace(op, frozen=True, stored_bytes=op.stored_bytes if adapted else 0.0)
    if adapters.base != "bf16":
        moved = (BASE_BYTES[adapters.base] + shape.element_bytes) * op.batch * op.n * op.k
        yield Operator(
            name=f"{op.name} widened", kind="memory", moved_bytes=moved, backward_moved_bytes=moved
        )
    if op.name == "attention projection" and shape.device.fused_attention and not adapted:
        # The backward of fused attention reads its own result.
        yield Operator(
            name="attention result", kind="memory", kernels=0, stored_bytes=op.stored_bytes
        )
    split = shape.tensor
    if part == "experts" and shape.expert_tensor is not None:
        split = shape.expert_tensor
    for matrix in adapted:
        yield from _adapter(model, op, matrix, split=split, width=shape.element_bytes)


def _adapter(
    model: ModelSpec, op: Operator, matrix: WeightMatrix, *, split: int, width: float
) -> Iterator[Operator]:
    """Yield an adapter's two products, their sum with the frozen one's result, and the message.

    A tensor group splits both: ranks of A and columns of B, or A by the rows of a row-wise matrix.
    """
    assert model.adapters is not None, "only called with adapters"
    rank, rows = model.adapters.rank, op.m * op.batch
    split = 1 if matrix.split == "none" else split
    inputs = matrix.inputs / (split if matrix.split == "rows" else 1)
    outputs = matrix.outputs / split
    if matrix.module in {"k_proj", "v_proj"}:
        outputs = max(outputs, model.head_width)
    by_columns = split if matrix.split == "columns" else 1
    grouped = op.grouped
    yield Operator(
        name=f"{matrix.module} A", kind="gemm", m=op.m, n=rank / by_columns, k=inputs,
        batch=op.batch, plain=True, grouped=grouped,
    )  # fmt: skip
    if split > 1:
        yield tensor_message(f"{matrix.module} adapter", width * rows * rank)
    yield Operator(
        name=f"{matrix.module} B", kind="gemm", m=op.m, n=outputs, k=rank, batch=op.batch,
        plain=True, grouped=grouped, stored_bytes=width * rows * rank,
    )  # fmt: skip
    yield Operator(
        name=f"{matrix.module} sum", kind="memory", moved_bytes=3 * width * rows * outputs,
        backward_moved_bytes=3 * width * rows * inputs,
    )  # fmt: skip
