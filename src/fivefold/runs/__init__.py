"""What every run has in common: configuration, folder, metrics, progress, ranks, checkpoints, end.

A configuration is a checked TOML file whose errors name the key and the remedy; files are written
whole or not at all, into a folder that one run at a time holds; a signal is a request to write a
checkpoint and end. Three modules load torch and are imported by their own names: ``ranks`` (the
processes of a run), ``checkpoints`` and ``launch``. This package knows nothing of what is run.
"""

from fivefold.runs._config import (
    Bytes,
    Count,
    FilePath,
    Fraction,
    Momentum,
    Positive,
    Rate,
    Seconds,
    Section,
    Seed,
    Share,
    Text,
    apply_overrides,
    check_tables,
    format_toml,
)
from fivefold.runs._ending import StopRequest, end_without_waiting, exit_code, rank_process
from fivefold.runs._files import MetricsWriter, cannot_write, write_json, write_text
from fivefold.runs._lock import FolderLock
from fivefold.runs._machine import LinkMeter, run_facts
from fivefold.runs._progress import ProgressBar

__all__ = [
    "Bytes",
    "Count",
    "FilePath",
    "FolderLock",
    "Fraction",
    "LinkMeter",
    "MetricsWriter",
    "Momentum",
    "Positive",
    "ProgressBar",
    "Rate",
    "Seconds",
    "Section",
    "Seed",
    "Share",
    "StopRequest",
    "Text",
    "apply_overrides",
    "cannot_write",
    "check_tables",
    "end_without_waiting",
    "exit_code",
    "format_toml",
    "rank_process",
    "run_facts",
    "write_json",
    "write_text",
]
