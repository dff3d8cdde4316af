"""Facts that a run is read with: program, machine, command, bytes on the link."""

from __future__ import annotations

import ipaddress
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

_CPU_FILE = Path("/proc/cpuinfo")
_NETWORK_FILE = Path("/proc/self/net/dev")  # of this process's network namespace


def run_facts() -> dict[str, Any]:
    """Return what every run's manifest.json says: versions, command, time and machine."""
    return {
        "fivefold": version("fivefold"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "command": _command(sys.argv),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(),
        },
    }


def _command(argv: list[str]) -> list[str]:
    """Return the command line as a person would type it, without paths to programs."""
    program = Path(argv[0]).name
    if program == "_worker.py":  # started by the launcher of `fivefold train --nproc`
        return ["fivefold", "train", *argv[1:]]
    return ["fivefold" if program == "__main__.py" else program, *argv[1:]]


def _cpu_name() -> str:
    if _CPU_FILE.exists():
        for line in _CPU_FILE.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class LinkMeter:
    """Bytes that this host's interface carried since the meter was made.

    The interface is the one that gloo is told to use, else the loopback where the ranks meet
    on this host; where neither is known there is no figure rather than a wrong one.
    """

    def __init__(self, before: dict[str, Any] | None = None) -> None:
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME") or _loopback()
        self._start = _counters(self._interface)
        self._before = before or {"sent": 0, "received": 0}

    def record(self) -> dict[str, Any] | None:
        """Return interface, bytes sent and received; None where they are not known."""
        now = _counters(self._interface)
        if now is None or self._start is None:
            return None
        sent, received = now[0] - self._start[0], now[1] - self._start[1]
        return {
            "interface": self._interface,
            "sent": self._before["sent"] + sent,
            "received": self._before["received"] + received,
        }


def _loopback() -> str | None:
    address = os.environ.get("MASTER_ADDR", "")
    try:
        local = ipaddress.ip_address(address).is_loopback
    except ValueError:
        local = address == "localhost"
    return "lo" if local else None


def _counters(interface: str | None) -> tuple[int, int] | None:
    """Return the bytes sent and received by an interface since it came up."""
    if interface is None or not _NETWORK_FILE.exists():
        return None
    for line in _NETWORK_FILE.read_text(encoding="utf-8").splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == interface:
            fields = columns.split()
            return int(fields[8]), int(fields[0])
    return None
