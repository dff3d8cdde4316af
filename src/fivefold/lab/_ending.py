"""When a run is over and what the ranks that remain are told. Sans-I/O; the clock is the caller's.

A rank that fails gives the others the grace period to end by themselves, so that their own errors
are seen; then they get SIGTERM, and after the grace period once more SIGKILL. A time limit and a
request to stop begin with SIGTERM.
"""

from __future__ import annotations

import signal


class Ending:
    """The rules by which a run ends.

    Args:
        ranks: Number of ranks.
        started_s: Start on the caller's clock.
        timeout_s: Longest run; None has no limit.
        grace_s: The grace period.

    Examples:
        >>> ending = Ending(2, started_s=0.0, timeout_s=None, grace_s=30.0)
        >>> ending.rank_ended(5.0, rank=1, code=3)
        >>> ending.next_s, ending.due(35.0).name, ending.next_s
        (35.0, 'SIGTERM', 65.0)
    """

    def __init__(
        self, ranks: int, *, started_s: float, timeout_s: float | None, grace_s: float
    ) -> None:
        self.running = set(range(ranks))
        self.first_failure: int | None = None
        self.timed_out = False
        self._grace_s = grace_s
        self._timeout_at_s = None if timeout_s is None else started_s + timeout_s
        self._terminate_at_s: float | None = None
        self._kill_at_s: float | None = None

    def rank_ended(self, now_s: float, *, rank: int, code: int) -> None:
        """A rank has ended with an exit code."""
        self.running.discard(rank)
        if code != 0 and self.first_failure is None:
            self.first_failure = rank
            if self._kill_at_s is None and self._terminate_at_s is None:
                self._terminate_at_s = now_s + self._grace_s

    def stop(self, now_s: float) -> None:
        """Someone asks the run to stop."""
        if self._kill_at_s is None:
            self._terminate_at_s = now_s

    def kill(self, now_s: float) -> None:
        """Someone does not want to wait any longer."""
        self._terminate_at_s = None
        self._kill_at_s = now_s

    @property
    def next_s(self) -> float | None:
        """When :meth:`due` has to be asked next, if nothing happens before; None is never."""
        times = (self._timeout_at_s, self._terminate_at_s, self._kill_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    def due(self, now_s: float) -> signal.Signals | None:
        """The signal that the ranks still running get now, if any."""
        if self._timeout_at_s is not None and now_s >= self._timeout_at_s:
            self._timeout_at_s = None
            self.timed_out = True
            self.stop(now_s)
        if self._terminate_at_s is not None and now_s >= self._terminate_at_s:
            self._terminate_at_s = None
            self._kill_at_s = now_s + self._grace_s
            return signal.SIGTERM
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill_at_s = now_s + self._grace_s
            return signal.SIGKILL
        return None
