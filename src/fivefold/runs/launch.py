"""Several ranks on this host: started by torch's elastic launcher, and ended cleanly.

The launcher starts the same Python module once per rank, restarts all of them after a failure where
that is asked for, and passes SIGTERM and Ctrl-C on, so that the ranks write a checkpoint. Each rank
leaves its outcome in a folder of the launcher; what a user sees is the root cause among them, not a
wall of tracebacks.
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
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined] # hidden
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fivefold import errors
from fivefold.errors import CommunicationError, FivefoldError
from fivefold.runs.ending import exit_code
from fivefold.runs.ranks import STORE_VARIABLE

_LOG = logging.getLogger(__name__)
OUTCOME_VARIABLE = "FIVEFOLD_OUTCOME_DIR"
"""Folder in which each rank leaves its outcome; set by :func:`launch_ranks`."""
# Beyond the longest wait on a peer: time to write the checkpoint.
_GRACE_S = 30
_SIGNAL_EXIT = 128


def launch_ranks(
    command: Sequence[str], *, nproc: int, max_restarts: int, timeout_s: float, threads: int
) -> int:
    """Start ranks that call :func:`run_worker`, and return when all have ended."""
    with tempfile.TemporaryDirectory(prefix="fivefold-launch-") as folder:
        _set_environment(threads=threads, outcomes=Path(folder))
        store = _local_store()
        os.environ[STORE_VARIABLE] = f"127.0.0.1:{store.port}"
        extra: dict[str, Any] = {}
        if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:  # newer torch only
            extra["shutdown_timeout"] = math.ceil(timeout_s) + _GRACE_S
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{store.port}",
            rdzv_configs={"is_host": False},
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "elastic")),
            **extra,
        )
        try:
            return _run_elastic(settings, list(command), outcomes=Path(folder), nproc=nproc)
        finally:
            del os.environ[STORE_VARIABLE]


def _local_store() -> TCPStore:
    """Make the store where the ranks meet; only this machine reaches it."""
    listener = socket.create_server(("127.0.0.1", 0))
    return TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _set_environment(*, threads: int, outcomes: Path) -> None:
    os.environ[OUTCOME_VARIABLE] = str(outcomes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # The ranks meet in the launcher's own store: torch's would listen on all interfaces.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if sys.platform == "linux":
        # All ranks are on this host; resolving its name may fail or lead outside.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _run_elastic(settings: LaunchConfig, command: list[str], *, outcomes: Path, nproc: int) -> int:
    if not _LOG.isEnabledFor(logging.DEBUG):
        # It logs a table and tracebacks for what we say in two lines. Its modules have levels of
        # their own.
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        elastic_launch(settings, sys.executable)(*command)
    except ChildFailedError as error:
        raise _cause_of_failure(outcomes, error) from None
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
        raise error_from_record(root_cause(failed)["error"])
    _LOG.warning("stopped by %s before a checkpoint was written", signal.Signals(number).name)
    return _SIGNAL_EXIT + number


def _records(outcomes: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in outcomes.glob("rank*.json")]


def root_cause(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of the root cause: a lost peer follows from what another rank met."""
    return min(
        records,
        key=lambda record: (record["error"]["kind"] == "CommunicationError", record["time_s"]),
    )


def _cause_of_failure(outcomes: Path, error: ChildFailedError) -> Exception:
    failed = [record for record in _records(outcomes) if record["error"] is not None]
    known = root_cause(failed) if failed else None
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


# -- in the process of a rank ---------------------------------------------------------------------


def run_worker(work: Callable[[], object]) -> int:
    """Do the work of one rank, leave its outcome for the launcher, and return the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    folder = os.environ.get(OUTCOME_VARIABLE)
    note = None if folder is None else Path(folder) / f"rank{rank}.json"
    if note is not None:
        note.unlink(missing_ok=True)  # of the attempt before a restart
        note.with_suffix(".pid").write_text(str(os.getpid()), encoding="utf-8")
    failed: BaseException | None = None
    try:
        work()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - handed to the launcher
        failed = error
    if note is not None:
        partial = note.with_suffix(".tmp")
        partial.write_text(json.dumps(outcome_record(failed)), encoding="utf-8")
        partial.rename(note)
    elif failed is not None:
        sys.stderr.write(f"error: {failed}\n")
    return exit_code(failed)


def outcome_record(error: BaseException | None) -> dict[str, Any]:
    """Return how a rank ended, as its launcher reads it."""
    if error is None:
        return {"time_s": time.time(), "error": None, "traceback": None}
    if isinstance(error, FivefoldError):
        record = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
        return {"time_s": time.time(), "error": record, "traceback": None}
    record = {"kind": None, "message": f"{type(error).__name__}: {error}", "hint": None}
    trace = "".join(traceback.format_exception(error))
    return {"time_s": time.time(), "error": record, "traceback": trace}


def error_from_record(record: dict[str, Any]) -> Exception:
    """Return the error that a rank met; a RuntimeError where it was none of ours."""
    if record["kind"] in errors.__all__:
        kind: type[FivefoldError] = getattr(errors, record["kind"])
        return kind(record["message"], hint=record["hint"])
    return RuntimeError(record["message"])
