"""Nested state (dicts, lists, tensors, plain values) as a flat set of tensors, and back.

``torch.distributed.checkpoint`` stores tensors under names. Everything else of a state becomes a
JSON text, itself stored as a tensor of bytes, in which tensors are replaced by their numbers.
Nothing is pickled; integers keep their type as keys and floats are exact, so that a state comes
back bit for bit. This module knows nothing of files or ranks.
"""

from __future__ import annotations

import json
from typing import Any

import torch

STRUCTURE = "structure"


def flatten_state(state: dict[str, Any], *, prefix: str) -> dict[str, torch.Tensor]:
    """Split a state into named tensors.

    Args:
        state: Nested dicts, lists and tuples of tensors, str, int, float, bool and None.
        prefix: First part of every name, such as ``"rank0"``.

    Returns:
        Tensors by name, among them the structure as bytes. They may share memory with the
        state.

    Raises:
        TypeError: The state holds something else.

    Examples:
        >>> sorted(flatten_state({"step": 3, "w": torch.ones(2)}, prefix="rank0"))
        ['rank0/structure', 'rank0/w']
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = _encode(state, prefix, tensors)
    text = json.dumps(structure).encode()
    tensors[f"{prefix}/{STRUCTURE}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors


def restore_state(tensors: dict[str, torch.Tensor], *, prefix: str) -> dict[str, Any]:
    """Undo :func:`flatten_state`.

    Raises:
        KeyError: A tensor that the structure names is missing.

    Examples:
        >>> flat = flatten_state({"betas": (0.9, 0.95)}, prefix="rank0")
        >>> restore_state(flat, prefix="rank0")
        {'betas': (0.9, 0.95)}
    """
    text = bytes(tensors[f"{prefix}/{STRUCTURE}"].tolist()).decode()
    state: dict[str, Any] = _decode(json.loads(text), tensors)
    return state


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, dict):
        items = [[key, _encode(item, f"{name}/{key}", tensors)] for key, item in value.items()]
        return {"dict": items}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, str | int | float):
        return value
    message = f"{name} is a {type(value).__name__}, which a checkpoint cannot hold"
    raise TypeError(message)


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)
