"""The compiler of hot loops (numba), with one clear error where it is not installed.

Every room takes its decorator from here and nothing else of this file's kind exists.
"""

from __future__ import annotations

import functools

from fivefold.errors import UnsupportedError

try:
    import numba
except ImportError as error:  # pragma: no cover - the development environment has it
    message = "numba is not installed, and fivefold compiles its hot loops with it"
    raise UnsupportedError(message, hint="pip install 'fivefold[all]'") from error

__all__ = ["njit", "numba"]

# Without the GIL, so that threads run loops side by side; kept on disk, for a compilation takes
# seconds and is the same in every process.
njit = functools.partial(numba.njit, nogil=True, cache=True)
