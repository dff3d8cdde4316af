"""Nested state (dicts, lists, tensors, plain values) as one array of bytes and a JSON record.

Nothing is pickled; integers keep their type as keys and floats are exact, so that a state comes
back bit for bit. This module knows nothing of files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
_ALIGNMENT = 64


def flatten_state(state: dict[str, Any]) -> tuple[Bytes, dict[str, Any]]:
    """Split a state into the bytes of its tensors and a record of everything else.

    Args:
        state: Nested dicts, lists and tuples of tensors, str, int, float, bool and None.

    Returns:
        The bytes, and a record that JSON can hold.

    Raises:
        TypeError: The state holds something else.

    Examples:
        >>> data, record = flatten_state({"step": 3, "w": torch.ones(2)})
        >>> restore_state(data, record)
        {'step': 3, 'w': tensor([1., 1.])}
    """
    tensors: list[Tensor] = []
    structure = _encode(state, "state", tensors)
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    data = np.zeros(sum(sizes), np.uint8)
    table: list[list[Any]] = []
    offset = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        table.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        data[offset : offset + tensor.nbytes] = values.numpy()
        offset += size
    return data, {"structure": structure, "tensors": table}


def restore_state(data: Bytes, record: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`flatten_state`.

    Raises:
        KeyError: The record is not one of a state.
    """
    tensors = [_tensor(data, *entry) for entry in record["tensors"]]
    state: dict[str, Any] = _decode(record["structure"], tensors)
    return state


def _tensor(data: Bytes, dtype: str, shape: list[int], offset: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    out = torch.empty(shape, dtype=kind)
    values = torch.from_numpy(data[offset : offset + out.nbytes].copy())
    return values.view(kind).reshape(shape) if out.numel() else out


def _encode(value: Any, name: str, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[k, _encode(v, f"{name}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(v, f"{name}[{i}]", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, str | int | float):
        return value
    message = f"{name} is a {type(value).__name__}, which a checkpoint cannot hold"
    raise TypeError(message)


def _decode(value: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)
