"""Starting ranks on this host through torch's elastic launcher, and ending them cleanly.

The launcher starts ``python -m fivefold.train._worker`` once per rank, restarts all of them
after a failure where that is asked for, and passes SIGTERM and Ctrl-C on, so that the ranks
write a checkpoint. Each worker leaves its outcome in a folder of the launcher; what a user sees
is the root cause among them, not a wall of tracebacks. This module knows nothing of training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.errors import CommunicationError, ConfigurationError
from fivefold.train._before import require_host, require_settings
from fivefold.train._config import load_config
from fivefold.train._outcome import error_from_record
from fivefold.train._rendezvous import STORE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import TCPStore  # type: ignore[attr-defined] # hidden
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

    from fivefold.train._config import TrainConfig

_LOG = logging.getLogger(__name__)
OUTCOME_VARIABLE = "FIVEFOLD_OUTCOME_DIR"
# Beyond the longest wait on a peer: time to write the checkpoint.
_GRACE_S = 30
_SIGNAL_EXIT = 128


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
    with tempfile.TemporaryDirectory(prefix="fivefold-launch-") as folder:
        _set_environment(config, outcomes=Path(folder))
        command = ["-m", "fivefold.train._worker", str(config_file), *overrides]
        store = _local_store()
        os.environ[STORE_VARIABLE] = f"127.0.0.1:{store.port}"
        settings = _launch_config(
            config,
            port=store.port,
            nproc=nproc,
            max_restarts=max_restarts,
            log_folder=Path(folder) / "elastic",
        )
        try:
            return _run_elastic(settings, command, outcomes=Path(folder), nproc=nproc)
        finally:
            del os.environ[STORE_VARIABLE]


def _local_store() -> TCPStore:
    """Where the ranks meet; only this machine reaches it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # noqa: PLC0415 - slow

    listener = socket.create_server(("127.0.0.1", 0))
    return TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _set_environment(config: TrainConfig, *, outcomes: Path) -> None:
    os.environ[OUTCOME_VARIABLE] = str(outcomes)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.run.threads))
    # The ranks meet in the launcher's own store: torch's would listen on all interfaces.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if sys.platform == "linux":
        # All ranks are on this host; resolving its name may fail or lead outside.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _launch_config(
    config: TrainConfig, *, port: int, nproc: int, max_restarts: int, log_folder: Path
) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: PLC0415 - slow
    from torch.distributed.launcher.api import LaunchConfig  # noqa: PLC0415 - slow

    extra: dict[str, Any] = {}
    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:  # newer torch only
        extra["shutdown_timeout"] = math.ceil(config.run.timeout_s) + _GRACE_S
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"is_host": False},
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_folder)),
        **extra,
    )


def _run_elastic(settings: LaunchConfig, command: list[str], *, outcomes: Path, nproc: int) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415 - slow
    from torch.distributed.elastic.multiprocessing.errors import (  # noqa: PLC0415 - slow
        ChildFailedError,
    )
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415 - slow

    if not _LOG.isEnabledFor(logging.DEBUG):
        # It logs a table and tracebacks for what we say in two lines.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        elastic_launch(settings, sys.executable)(*command)
    except ChildFailedError as error:
        raise _root_cause(outcomes, error) from None
    except SignalException as error:
        # The launcher passed the signal on and waited, unless a second one broke that off.
        return _after_signal(outcomes, nproc=nproc, number=error.sigval)
    return 0


def _after_signal(outcomes: Path, *, nproc: int, number: int) -> int:
    records = _records(outcomes)
    if len(records) == nproc and all(record["error"] is None for record in records):
        return 0
    for file in outcomes.glob("rank*.pid"):
        if not file.with_suffix(".json").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text(encoding="utf-8")), signal.SIGKILL)
    failed = [record for record in records if record["error"] is not None]
    if failed:
        raise error_from_record(_first(failed)["error"])
    _LOG.warning("stopped by %s before a checkpoint was written", signal.Signals(number).name)
    return _SIGNAL_EXIT + number


def _records(outcomes: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in outcomes.glob("rank*.json")]


def _first(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The root cause: a lost peer is a consequence wherever another rank knows better."""
    return min(
        records,
        key=lambda record: (record["error"]["kind"] == "CommunicationError", record["time_s"]),
    )


def _root_cause(outcomes: Path, error: ChildFailedError) -> Exception:
    failed = [record for record in _records(outcomes) if record["error"] is not None]
    known = _first(failed) if failed else None
    if known is not None and known["error"]["kind"] != "CommunicationError":
        if known["traceback"]:
            _LOG.debug("%s", known["traceback"])
        return error_from_record(known["error"])
    for rank, failure in sorted(error.failures.items()):
        # SIGTERM is what the launcher itself ends the other ranks with.
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            name = signal.Signals(-failure.exitcode).name
            message = f"rank {rank} was killed by {name}; the other ranks were stopped"
            hint = "run the same command again to resume from the newest checkpoint"
            return CommunicationError(message, hint=hint)
    if known is not None:
        return error_from_record(known["error"])
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    return RuntimeError(f"ranks ended with exit codes {codes}")
