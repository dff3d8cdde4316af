"""The compiler of hot loops (numba), with one clear error where it is not installed.

Every package takes its decorator from here and nothing else of this file's kind exists.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from fivefold.errors import UnsupportedError

try:
    import numba
    from numba.core import event
except ImportError as error:  # pragma: no cover - the development environment has it
    message = "numba is not installed, and fivefold compiles its hot loops with it"
    raise UnsupportedError(message, hint="pip install 'fivefold[all]'") from error

__all__ = ["compiled_s", "njit", "numba"]

_LOG = logging.getLogger(__name__)
SILENT_S = 2.0  # of compiling, before it is said what is waited for
PATIENCE_S = 10.0  # a turn takes milliseconds; who was stopped in the middle of it holds up no one


def njit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile like ``numba.njit`` without the GIL, kept on disk, also right after one file changed.

    Without the GIL, so that threads run loops side by side; kept on disk, for a compilation takes
    seconds and is the same in every process. Numba looks only at time and size of the function's
    own file when it decides whether what is kept is still good, but compiled code contains what it
    calls from other files. So the stamp is the content of all files of a package that hold compiled
    code, and what is kept outlives the installation of the same files anew.

    Processes take turns at what is kept: numba writes which file holds which argument types before
    it writes that file, and of two processes that add types to one function at the same moment
    both may take the same file, so that one's calls would run the other's code.
    """
    if function is None:
        return functools.partial(njit, **options)
    made = numba.njit(function, nogil=True, cache=True, **options)
    kept = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if kept is not None and hasattr(kept, "_source_stamp"):
        package = _package_of(Path(inspect.getfile(function)))
        kept._source_stamp = _stamp_of(package)  # noqa: SLF001 - there is no public way
        kept.load, kept.save = _in_turn(kept, "load"), _in_turn(kept, "save")
    return made


class _Clock(event.Listener, threading.local):
    """Seconds that each thread has spent between the beginnings and ends of an event."""

    spent_s, _depth, _since_s = 0.0, 0, 0.0

    def on_start(self, _: Any) -> None:
        """Start counting at the outermost function."""
        if not self._depth:
            self._since_s = time.perf_counter()
        self._depth += 1

    def on_end(self, _: Any) -> None:
        """Stop counting at the outermost function."""
        self._depth -= 1
        if not self._depth:
            self.spent_s += time.perf_counter() - self._since_s


_CLOCK = _Clock()
event.register("numba:compiler_lock", _CLOCK)


class _Notice(_Clock):
    """Says once that loops are compiled, not loaded, where that takes long."""

    is_said = False

    def on_start(self, event: Any) -> None:
        """Speak before a function that follows some seconds of compiling others."""
        if self.spent_s > SILENT_S and not _Notice.is_said:
            _Notice.is_said = True
            _LOG.info("compiling loops, once after an installation: about half a minute")
        super().on_start(event)


event.register("numba:compile", _Notice())


def compiled_s() -> float:
    """Return the seconds that this thread has spent on compiling or loading hot loops."""
    return _CLOCK.spent_s


def _in_turn(kept: Any, name: str) -> Callable[..., Any]:
    """Return a method that one process at a time runs for each folder of a function's files."""
    method, folder = getattr(kept, name), Path(kept._cache_path)  # noqa: SLF001 - no public way

    @functools.wraps(method)
    def alone(*arguments: Any) -> Any:
        with _turn_in(folder):
            return method(*arguments)

    return alone


@contextlib.contextmanager
def _turn_in(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which ends with the process and is not inherited by its children."""
    try:
        lock = (folder / "numba.lock").open("ab")
    except OSError:  # no such folder yet, or one that only others may write
        yield
        return
    with lock:
        until_s = time.monotonic() + PATIENCE_S
        while not _is_ours(lock) and time.monotonic() < until_s:
            time.sleep(0.002)
        yield


def _is_ours(lock: IO[bytes]) -> bool:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.ENOLCK  # a file system without locks: go on without
    return True


def _package_of(file: Path) -> Path:
    root = Path(__file__).parent
    return root / file.relative_to(root).parts[0] if file.is_relative_to(root) else file


@functools.cache
def _stamp_of(package: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(package.rglob("*.py")) if package.is_dir() else [package]:
        content = file.read_bytes()
        if b"fivefold._compiler" in content:
            digest.update(content)
    return digest.hexdigest()
