"""What every run has in common: configuration, folder, metrics, progress, ranks, checkpoints, end.

A configuration is a checked TOML file whose errors name the key and the remedy; files are written
whole or not at all, into a folder that one run at a time holds; a signal is a request to write a
checkpoint and end. Three modules load torch and are imported by their own names: ``ranks`` (the
processes of a run), ``checkpoints`` and ``launch``. This package knows nothing of what is run.
"""

from fivefold.runs._progress import ProgressBar
from fivefold.runs.config import Section, apply_overrides, check_tables, format_toml
from fivefold.runs.ending import StopRequest, exit_code, rank_process
from fivefold.runs.folder import FolderLock, MetricsWriter, write_json, write_text

__all__ = [
    "FolderLock",
    "MetricsWriter",
    "ProgressBar",
    "Section",
    "StopRequest",
    "apply_overrides",
    "check_tables",
    "exit_code",
    "format_toml",
    "rank_process",
    "write_json",
    "write_text",
]
