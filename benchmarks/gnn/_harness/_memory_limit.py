"""Hold a process and its children to so many bytes of memory, and see how many they took.

A memory cgroup of version 1 or 2 counts everything: anonymous memory, page cache, kernel memory.
Where neither can be made (no root, no controller) the address space is limited instead, which
counts what is mapped rather than what is used; which of the three it was is said in ``kind``.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Self

__all__ = ["MemoryLimit", "drop_caches"]

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")
_REMOVAL_PATIENCE_S = 5.0


class MemoryLimit:
    """A group of processes with a memory limit; a context manager that removes it again.

    Args:
        limit_bytes: The limit; None only measures.
        name: Of the group; the process id is added.
    """

    def __init__(self, limit_bytes: int | None, *, name: str = "fivefold") -> None:
        self.limit_bytes = limit_bytes
        self.kind = "none"
        self._folder: Path | None = None
        name = f"{name}-{os.getpid()}-{time.monotonic_ns() % 10**9}"
        for kind, root, make in (
            ("cgroup v1", V1, self._make_v1),
            ("cgroup v2", V2, self._make_v2),
        ):
            try:
                make(root / name)
            except OSError:
                continue
            self.kind, self._folder = kind, root / name
            return
        if limit_bytes is not None:
            self.kind = "address space (no cgroup could be made)"

    def _make_v1(self, folder: Path) -> None:
        if not (V1 / "memory.limit_in_bytes").exists():
            raise FileNotFoundError(V1)
        folder.mkdir()
        try:
            if self.limit_bytes is not None:
                (folder / "memory.limit_in_bytes").write_text(str(self.limit_bytes))
        except OSError:
            folder.rmdir()
            raise

    def _make_v2(self, folder: Path) -> None:
        if "memory" not in (V2 / "cgroup.controllers").read_text().split():
            raise FileNotFoundError(V2)
        folder.mkdir()
        try:
            limit = "max" if self.limit_bytes is None else str(self.limit_bytes)
            (folder / "memory.max").write_text(limit)
        except OSError:
            folder.rmdir()
            raise

    def enter(self) -> None:
        """Move the calling process in; its children are born inside. For ``preexec_fn``."""
        if self._folder is not None:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        elif self.limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (self.limit_bytes, self.limit_bytes))

    def peak_bytes(self) -> int | None:
        """Most bytes that were in use at once, page cache included; None where nobody counts."""
        return self._read("memory.max_usage_in_bytes", "memory.peak")

    def used_bytes(self) -> int | None:
        """Bytes in use now, page cache included; None where nobody counts."""
        return self._read("memory.usage_in_bytes", "memory.current")

    def anonymous_bytes(self) -> int | None:
        """Bytes in use now that are no page cache."""
        if self._folder is None:
            return None
        lines = (self._folder / "memory.stat").read_text().splitlines()
        found = dict(line.split() for line in lines)
        return int(found.get("total_rss", found.get("anon", 0)))

    def reset_peak(self) -> None:
        """Begin to count anew, where the kernel lets us."""
        if self._folder is not None and self.kind == "cgroup v1":
            (self._folder / "memory.max_usage_in_bytes").write_text("0")

    def failures(self) -> int | None:
        """How often the limit was hit: by the page cache too, so it need not mean harm."""
        return self._read("memory.failcnt", "")

    def killed(self) -> int:
        """Processes that the kernel killed for memory."""
        if self._folder is None:
            return 0
        for name in ("memory.oom_control", "memory.events"):
            path = self._folder / name
            if path.exists():
                found = dict(line.split() for line in path.read_text().splitlines())
                return int(found.get("oom_kill", 0))
        return 0

    def _read(self, name_v1: str, name_v2: str) -> int | None:
        name = name_v1 if self.kind == "cgroup v1" else name_v2
        if self._folder is None or not name or not (self._folder / name).exists():
            return None
        return int((self._folder / name).read_text())

    def close(self) -> None:
        """Remove the group; its processes must have ended."""
        if self._folder is None:
            return
        deadline_s = time.monotonic() + _REMOVAL_PATIENCE_S
        while True:
            try:
                self._folder.rmdir()
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
            else:
                self._folder = None
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def drop_caches() -> bool:
    """Forget all clean pages of the page cache; False where this user may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True
