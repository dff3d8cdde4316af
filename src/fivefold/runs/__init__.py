"""What every run has in common: its configuration, its files, how it stops and how it ends.

A configuration is a checked TOML file whose errors name the key and the remedy; files are written
whole or not at all, into a folder that one run at a time holds; a signal is a request to write a
checkpoint and end. This room knows nothing of what is run and loads no torch.
"""

from fivefold.runs._ending import end_without_waiting, exit_code
from fivefold.runs._files import MetricsWriter, cannot_write, write_json, write_text
from fivefold.runs._lock import FolderLock
from fivefold.runs._section import (
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
)
from fivefold.runs._stop import StopRequest
from fivefold.runs._toml import apply_overrides, format_toml, readable_error

__all__ = [
    "Bytes",
    "Count",
    "FilePath",
    "FolderLock",
    "Fraction",
    "MetricsWriter",
    "Momentum",
    "Positive",
    "Rate",
    "Seconds",
    "Section",
    "Seed",
    "Share",
    "StopRequest",
    "Text",
    "apply_overrides",
    "cannot_write",
    "end_without_waiting",
    "exit_code",
    "format_toml",
    "readable_error",
    "write_json",
    "write_text",
]
