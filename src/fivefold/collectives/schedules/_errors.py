"""What a schedule that does not do its collective raises."""

from __future__ import annotations

from fivefold.errors import DataError


class ScheduleError(DataError):
    """A schedule is wrong: it names the first broken transfer, or the condition that is not met.

    Args:
        message: What is wrong.
        hint: What to do next.
        transfer: Index of the first broken transfer; None where a postcondition is not met.

    Examples:
        >>> ScheduleError("transfer 3 sends what rank 1 does not hold", transfer=3).transfer
        3
    """

    def __init__(
        self, message: str, *, hint: str | None = None, transfer: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.transfer = transfer

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.message, self.hint, self.transfer))


def _rebuild(message: str, hint: str | None, transfer: int | None) -> ScheduleError:
    return ScheduleError(message, hint=hint, transfer=transfer)
