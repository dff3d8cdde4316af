"""What the model goes on from at a boundary: one pass over the pieces of the outer state.

Two merges. *Replace*: the anchor takes the outer step and every worker continues from it.
*Correct*: every worker keeps its own parameters and adds what the arrived mean changes of them.
Pieces are independent, so each is read and written once while it is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fivefold.optim._flat import Piece
from fivefold.optim._update import (
    OuterCoefficients,
    PieceStatistics,
    accumulate_momentum_,
    correct_local_,
    move_anchor_,
)

__all__ = ["merge_pieces"]


def merge_pieces(
    pieces: Iterable[Piece],
    coefficients: OuterCoefficients | None,
    *,
    send: bool,
    keeps_local: bool,
) -> PieceStatistics:
    """Apply what arrived, prepare what is sent, and set what the model goes on from.

    Args:
        pieces: The outer state and the live parameters; a summed pseudo-gradient that arrived is
            in ``payload``, where the next one to send is left.
        coefficients: Scalars of the outer step; None where nothing arrived.
        send: Whether a payload is to be sent.
        keeps_local: Whether workers keep their own parameters.

    Returns:
        Sums over the pieces.
    """
    statistics = PieceStatistics()
    merge = _correct if keeps_local else _replace
    for piece in pieces:
        merge(piece, coefficients, statistics, send=send)
    return statistics


def _replace(
    piece: Piece,
    coefficients: OuterCoefficients | None,
    statistics: PieceStatistics,
    *,
    send: bool,
) -> None:
    # The pseudo-gradient to send is taken against the anchor before the outer step, since the
    # local steps began there; then it takes the place of the sum that arrived.
    anchor, local, payload = piece.anchor, piece.local, piece.payload
    fresh = torch.sub(anchor, local, out=piece.scratch) if send else None
    if coefficients is not None:
        momentum = accumulate_momentum_(
            piece.momentum, payload, coefficients=coefficients, statistics=statistics
        )
        move_anchor_(anchor, momentum, payload, coefficients=coefficients)
    if fresh is not None:
        payload.copy_(fresh)
    local.copy_(anchor)


def _correct(
    piece: Piece,
    coefficients: OuterCoefficients | None,
    statistics: PieceStatistics,
    *,
    send: bool,
) -> None:
    # The pseudo-gradient to send is that of the corrected parameters against the new anchor.
    # Without anything to send this is the end of a drain, after which all replicas are equal.
    anchor, local, payload, sent = piece.anchor, piece.local, piece.payload, piece.sent
    assert sent is not None, "rules that keep local work keep what they sent"
    if coefficients is not None:
        if send:
            correct_local_(local, sent, payload, coefficients=coefficients)
        momentum = accumulate_momentum_(
            piece.momentum, payload, coefficients=coefficients, statistics=statistics
        )
        move_anchor_(anchor, momentum, payload, coefficients=coefficients)
    if send:
        torch.sub(anchor, local, out=sent)
        payload.copy_(sent)
    else:
        local.copy_(anchor)
