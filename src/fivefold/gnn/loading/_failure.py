"""Errors of background work, with the stage and the batch they belong to."""

from __future__ import annotations

from fivefold.errors import FivefoldError, StorageError


class StallError(StorageError, TimeoutError):
    """A stage of the pipeline did not finish a batch in time; names the stage and the batch.

    Examples:
        >>> issubclass(StallError, TimeoutError)
        True
    """


def with_place(error: BaseException, *, stage: str, batch: int) -> BaseException:
    """The error with its stage and batch in the message, of the same class where it is ours."""
    place = f"stage {stage!r} of batch {batch}"
    if isinstance(error, FivefoldError) and type(error).__init__ is FivefoldError.__init__:
        return type(error)(f"{place}: {error.message}", hint=error.hint)
    error.add_note(f"in {place} of the loading pipeline")
    return error
