"""One rank as a process: ``python -m fivefold.train._worker CONFIG [KEY=VALUE ...]``.

Used by :func:`fivefold.train.launch`; it loads no command-line library and ends at once.
"""

from __future__ import annotations

import logging
import os
import sys

from fivefold.runs.ending import end_without_waiting
from fivefold.runs.launch import OUTCOME_VARIABLE, run_worker
from fivefold.train._loop import train
from fivefold.train.config import load_config


def main(arguments: list[str]) -> int:
    """Train as one rank; returns the exit code."""
    if OUTCOME_VARIABLE in os.environ:  # the launcher has read the same file and said the same
        logging.getLogger(load_config.__module__).setLevel(logging.WARNING)
    return run_worker(lambda: train(load_config(arguments[0], arguments[1:])))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    end_without_waiting(status)
    sys.exit(status)
