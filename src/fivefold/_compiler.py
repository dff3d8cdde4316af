"""The compiler of hot loops (numba), with one clear error where it is not installed.

Every room takes its decorator from here and nothing else of this file's kind exists.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fivefold.errors import UnsupportedError

try:
    import numba
except ImportError as error:  # pragma: no cover - the development environment has it
    message = "numba is not installed, and fivefold compiles its hot loops with it"
    raise UnsupportedError(message, hint="pip install 'fivefold[all]'") from error

__all__ = ["njit", "numba"]


def njit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``numba.njit`` without the GIL and kept on disk, also right after one file changed.

    Without the GIL, so that threads run loops side by side; kept on disk, for a compilation takes
    seconds and is the same in every process. Numba looks only at the file of the function itself
    when it decides whether what is kept is still good, but compiled code contains what it calls
    from other files. So the stamp is made of all files of a room that hold compiled code.
    """
    if function is None:
        return functools.partial(njit, **options)
    made = numba.njit(function, nogil=True, cache=True, **options)
    kept = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if kept is not None and hasattr(kept, "_source_stamp"):
        room = _room_of(Path(inspect.getfile(function)))
        kept._source_stamp = (_stamp_of(room), kept._source_stamp)  # noqa: SLF001 - no public way
    return made


def _room_of(file: Path) -> Path:
    package = Path(__file__).parent
    return package / file.relative_to(package).parts[0] if file.is_relative_to(package) else file


@functools.cache
def _stamp_of(room: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(room.rglob("*.py")) if room.is_dir() else [room]:
        content = file.read_bytes()
        if b"fivefold._compiler" in content:
            digest.update(content)
    return digest.hexdigest()
