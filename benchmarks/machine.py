"""What a benchmark ran on; the standard library only."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["describe_machine"]


def describe_machine() -> dict[str, Any]:
    """Describe this machine without naming it: processor, cores, memory, system."""
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
