"""The outer state as flat buffers, and how parameters map into them.

Parameters of one device and one outer data type share a buffer, so that one round needs one
all-reduce per group. The outer data type is at least float32, whatever the parameters have.
Per element the state is the anchor, the momentum (only where the rule needs it) and one payload
buffer: 12 bytes for float32, as counted in CO2's Algorithm 2 with the pseudo-gradient as payload.

Live parameters are read and written through their current storage at each boundary and never
kept: user code may replace it. Pieces are small enough for a core's cache, so that a boundary
reads and writes each buffer once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fivefold.errors import ConfigurationError

__all__ = ["FlatGroup", "Piece", "flat_groups"]

# 64 k float32 elements are 256 KiB: four such pieces fit the 1 MiB second-level cache of common
# server cores. On accelerators a piece is a whole parameter, since each operation is a launch.
_CPU_PIECE_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Piece:
    """Views of the same elements: outer state and live parameter.

    Attributes:
        anchor: x, shape as ``local``.
        momentum: m or None.
        payload: Buffer for the pseudo-gradient and its sum over the ranks.
        sent: This rank's own pseudo-gradient in flight, or None.
        local: The live parameter, in its own data type.
        scratch: Room for one temporary of this size, or None where the allocator is as good.
    """

    anchor: torch.Tensor
    momentum: torch.Tensor | None
    payload: torch.Tensor
    sent: torch.Tensor | None
    local: torch.Tensor
    scratch: torch.Tensor | None


class FlatGroup:
    """Outer state of the parameters of one device and one outer data type.

    Args:
        parameters: Distinct parameters.
        dtype: Outer data type.
        with_momentum: Whether to keep a momentum buffer.
        with_sent: Whether to keep this rank's own pseudo-gradient beside the sum.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        *,
        dtype: torch.dtype,
        with_momentum: bool,
        with_sent: bool,
    ) -> None:
        self.parameters = parameters
        device = parameters[0].device
        size = sum(parameter.numel() for parameter in parameters)
        self.anchor = torch.empty(size, dtype=dtype, device=device)
        self.momentum = torch.zeros_like(self.anchor) if with_momentum else None
        self.payload = torch.zeros_like(self.anchor)
        self.sent = torch.zeros_like(self.anchor) if with_sent else None
        # Fresh memory costs a page fault per 4 KiB, which is more than the arithmetic on it.
        on_cpu = device.type == "cpu"
        self._scratch = torch.empty(_CPU_PIECE_ELEMENTS, dtype=dtype) if on_cpu else None
        self.read_anchor()

    def read_anchor(self) -> None:
        """Set the anchor from the live parameters."""
        for piece in self.pieces():
            piece.anchor.copy_(piece.local)

    def pieces(self) -> Iterator[Piece]:
        """Yield cache-sized views over all elements, in a fixed order."""
        offset = 0
        for parameter in self.parameters:
            local = parameter.detach()
            for start, stop in _ranges(local):
                whole = local.is_contiguous()
                view = local.view(-1)[start:stop] if whole else local
                yield self._piece(view, offset + start, offset + stop)
            offset += local.numel()

    def _piece(self, local: torch.Tensor, start: int, stop: int) -> Piece:
        shape = local.shape
        momentum = None if self.momentum is None else self.momentum[start:stop].view(shape)
        sent = None if self.sent is None else self.sent[start:stop].view(shape)
        scratch = None
        if self._scratch is not None and local.numel() <= self._scratch.numel():
            scratch = self._scratch[: local.numel()].view(shape)
        return Piece(
            anchor=self.anchor[start:stop].view(shape),
            momentum=momentum,
            payload=self.payload[start:stop].view(shape),
            sent=sent,
            local=local,
            scratch=scratch,
        )


def _ranges(local: torch.Tensor) -> Iterator[tuple[int, int]]:
    size = local.numel()
    if local.device.type != "cpu" or not local.is_contiguous():
        yield 0, size
        return
    for start in range(0, size, _CPU_PIECE_ELEMENTS):
        yield start, min(start + _CPU_PIECE_ELEMENTS, size)


def flat_groups(
    parameters: Iterable[torch.nn.Parameter], *, with_momentum: bool, with_sent: bool = False
) -> list[FlatGroup]:
    """Group trainable parameters by device and outer data type.

    Args:
        parameters: Parameters; frozen ones are left out, tied ones counted once.
        with_momentum: Whether the groups keep a momentum buffer.
        with_sent: Whether the groups keep this rank's own pseudo-gradient.

    Returns:
        Groups in the order in which their first parameter comes.

    Raises:
        ConfigurationError: There is nothing to train, or a parameter is sharded, sparse or
            complex.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad:
            _require_plain(parameter)
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            groups.setdefault((parameter.device, dtype), []).append(parameter)
    if not groups:
        message = "the model has no parameter with requires_grad=True"
        raise ConfigurationError(message, hint="nothing would be synchronised; check the model")
    return [
        FlatGroup(members, dtype=dtype, with_momentum=with_momentum, with_sent=with_sent)
        for (_, dtype), members in groups.items()
    ]


def _require_plain(parameter: torch.nn.Parameter) -> None:
    kind = type(parameter.data)
    if kind is not torch.Tensor or parameter.layout != torch.strided or parameter.is_complex():
        message = (
            f"parameters must be dense real torch tensors; got {kind.__name__} of {parameter.dtype}"
        )
        raise ConfigurationError(
            message, hint="sharded (DTensor), sparse and complex parameters are not supported yet"
        )
