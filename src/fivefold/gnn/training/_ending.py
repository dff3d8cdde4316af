"""How the process of one rank ends: with the right exit code, and without waiting for peers."""

from __future__ import annotations

import os
from collections.abc import Callable

from fivefold.gnn.training._config import GnnConfig
from fivefold.gnn.training._loop import train_graph
from fivefold.gnn.training._result import GnnResult
from fivefold.runs import end_without_waiting, exit_code


def run_rank(config: GnnConfig, *, show: Callable[[str], None] | None = None) -> GnnResult:
    """Train as one rank whose process ends afterwards, as a command does.

    After an error among several ranks the process is set to end at once when it gets to its end,
    with the error's exit code: the interpreter's own shutdown could wait for a dead peer.

    Args:
        config: The whole configuration.
        show: Called with the plan's explanation before anything is packed; None logs it.

    Returns:
        What was reached.

    Raises:
        FivefoldError: Whatever training met, as ``train_graph`` raises it.

    Examples:
        >>> run_rank.__name__
        'run_rank'
    """
    try:
        return train_graph(config, show=show)
    except BaseException as error:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            end_without_waiting(exit_code(error))
        raise
