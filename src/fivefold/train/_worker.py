"""One rank as a process: ``python -m fivefold.train._worker CONFIG [KEY=VALUE ...]``.

Used by the launcher. It loads no command-line library, trains, leaves its outcome for the
launcher, and ends at once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path

from fivefold.errors import FivefoldError
from fivefold.runs import end_without_waiting, exit_code
from fivefold.train._config import load_config
from fivefold.train._launch import OUTCOME_VARIABLE
from fivefold.train._loop import train
from fivefold.train._outcome import error_to_record


def main(arguments: list[str]) -> int:
    """Train as one rank; returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    if OUTCOME_VARIABLE in os.environ:  # the launcher has read the same file and said the same
        logging.getLogger(load_config.__module__).setLevel(logging.WARNING)
    outcome = _Outcome(rank)
    error: BaseException | None = None
    try:
        train(load_config(arguments[0], arguments[1:]))
    except (Exception, KeyboardInterrupt) as caught:  # noqa: BLE001 - handed to the launcher
        error = caught
    outcome.write(error)
    return exit_code(error)


class _Outcome:
    """This rank's note to the launcher: its process, and how it ended."""

    def __init__(self, rank: int) -> None:
        folder = os.environ.get(OUTCOME_VARIABLE)
        self._path = Path(folder) / f"rank{rank}.json" if folder else None
        if self._path is not None:
            self._path.unlink(missing_ok=True)  # of the attempt before a restart
            self._path.with_suffix(".pid").write_text(str(os.getpid()), encoding="utf-8")

    def write(self, error: BaseException | None) -> None:
        internal = error is not None and not isinstance(error, FivefoldError)
        record = {
            "time_s": time.time(),
            "error": None if error is None else error_to_record(error),
            "traceback": "".join(traceback.format_exception(error)) if internal else None,
        }
        if self._path is None:
            if error is not None:
                sys.stderr.write(f"error: {error}\n")
            return
        partial = self._path.with_suffix(".tmp")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.rename(self._path)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    end_without_waiting(status)
    sys.exit(status)
