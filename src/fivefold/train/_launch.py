"""The start of several ranks of the trainer on this host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fivefold.errors import ConfigurationError
from fivefold.runs.launch import launch_ranks
from fivefold.train._config import load_config
from fivefold.train._setup import require_host, require_settings


def launch(
    config_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    nproc: int,
    max_restarts: int = 0,
) -> int:
    """Train with several ranks on this host; returns when all have ended.

    Args:
        config_file: The TOML configuration.
        overrides: Assignments such as ``"run.steps=50"`` on top of it.
        nproc: Number of ranks.
        max_restarts: How often all ranks are started again after a failure; each time they
            resume from the newest whole checkpoint.

    Returns:
        Exit code: 0 when training finished, or stopped with a checkpoint after a signal; 128
        plus the signal's number when a signal ended the ranks before they could write one.

    Raises:
        ConfigurationError: The configuration is not allowed, or nproc is below 1.
        FivefoldError: What the first rank to fail met.
        CommunicationError: A rank was killed.
        RuntimeError: A rank met an internal error.

    Examples:
        >>> launch("no such file.toml", nproc=2)
        Traceback (most recent call last):
            ...
        fivefold.errors.ConfigurationError: ...
    """
    if nproc < 1 or max_restarts < 0:
        message = (
            f"nproc must be at least 1 and max_restarts at least 0; got {nproc}, {max_restarts}"
        )
        raise ConfigurationError(message, hint="use --nproc 2")
    config = load_config(config_file, overrides)
    require_settings(config, world_size=nproc)
    require_host(config, nproc=nproc)
    return launch_ranks(
        ["-m", "fivefold.train._worker", str(config_file), *overrides],
        nproc=nproc,
        max_restarts=max_restarts,
        timeout_s=config.run.timeout_s,
        threads=config.run.threads,
    )
