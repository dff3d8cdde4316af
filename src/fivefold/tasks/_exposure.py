"""What of a communication is left exposed beside compute, in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def exposed_s(
    sent_s: npt.ArrayLike,
    beside_s: npt.ArrayLike,
    *,
    pieces: float | npt.NDArray[Any] | None = None,
    slowdown: float = 0.0,
) -> Floats:
    """Return the seconds that communication adds to compute that runs beside it.

    All but one of its pieces can hide; while they do, compute is slower:
    ``sent - (1 - slowdown) * min(sent - sent / pieces, beside)``.

    Args:
        sent_s: Seconds of the communication: a number, or an array with one entry per case.
        beside_s: Seconds of compute that it may run beside.
        pieces: Into how many equal pieces it is cut, the last of which waits for the compute's
            end; None hides all of it.
        slowdown: Share by which compute slows down while communication runs.

    Returns:
        Seconds, of the shape of the arguments.

    Examples:
        >>> float(exposed_s(3.0, 2.0)), float(exposed_s(4.0, 9.0, pieces=4))
        (1.0, 1.0)
    """
    sent = np.asarray(sent_s, dtype=np.float64)
    hidden = np.minimum(sent if pieces is None else sent - sent / pieces, beside_s)
    exposed: Floats = sent - (1.0 - slowdown) * hidden
    return exposed
