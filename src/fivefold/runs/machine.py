"""Facts that a run is read with: program, machine, command, bytes on the link, processor time."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fivefold

_CPU_FILE = Path("/proc/cpuinfo")
_STATUS_FILE = Path("/proc/self/status")
_QUEUE_FILE = Path("/proc/self/schedstat")  # of the main thread
_NETWORK_FILE = Path("/proc/self/net/dev")  # of this process's network namespace


def run_facts() -> dict[str, Any]:
    """Return what every run's manifest.json says: versions, command, time and machine."""
    return {
        "fivefold": fivefold.__version__,
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


class ProcessMeter:
    """Meter of this process's processor time and memory since it was made."""

    def __init__(self, before: dict[str, Any] | None = None) -> None:
        self._before = before or {"wall_s": 0.0, "cpu_s": 0.0, "queued_s": 0.0}
        self._started_s = time.perf_counter()
        self._cpu_s, self._queued_s = _cpu_s(), _queued_s()

    def record(self) -> dict[str, Any]:
        """Return processor seconds, the wait for a processor, and the most memory held.

        ``waited_for_cpu`` is the share of the time in which the main thread was ready to run and
        another thread had its processor; None where the system does not count it.
        """
        wall_s = self._before["wall_s"] + time.perf_counter() - self._started_s
        now_s, share = _queued_s(), None
        queued_s = self._before["queued_s"]
        if now_s is not None and self._queued_s is not None and queued_s is not None:
            queued_s += now_s - self._queued_s
            share = queued_s / max(wall_s, 1e-9)
        return {
            "wall_s": wall_s,
            "cpu_s": self._before["cpu_s"] + _cpu_s() - self._cpu_s,
            "queued_s": queued_s,
            "waited_for_cpu": share,
            "memory_bytes": _peak_bytes(),
        }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _queued_s() -> float | None:
    """Return the seconds that the main thread spent on a run queue; None where not counted."""
    try:
        return int(_QUEUE_FILE.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def _peak_bytes() -> int:
    """Return the most memory of the process: of its GPU where it uses one, else resident."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    if _STATUS_FILE.exists():
        for line in _STATUS_FILE.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


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
