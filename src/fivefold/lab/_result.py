"""What a run hands back: exit codes, times and where the output is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fivefold.errors import CommunicationError

if TYPE_CHECKING:
    from pathlib import Path

_SIGNAL_EXIT = 128
_TIMEOUT_EXIT = 124  # as the tool `timeout` has it
_TAIL_LINES = 15


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How one rank ended.

    Args:
        rank: Global rank.
        host: Index of its host.
        exit_code: Its exit code; minus the signal's number where a signal ended it.
        wall_s: From the start of the ranks to its end.
        stdout_path: File with what it wrote to standard output.
        stderr_path: File with what it wrote to standard error.
    """

    rank: int
    host: int
    exit_code: int
    wall_s: float
    stdout_path: Path
    stderr_path: Path

    def stdout(self) -> str:
        """What it wrote to standard output.

        Raises:
            OSError: The file is gone.
        """
        return self.stdout_path.read_text(encoding="utf-8", errors="replace")

    def stderr(self) -> str:
        """What it wrote to standard error.

        Raises:
            OSError: The file is gone.
        """
        return self.stderr_path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True)
class LabResult:
    """How a run ended.

    Args:
        ranks: One entry per rank.
        first_failed_rank: The rank that failed first; None where all ended with 0.
        timed_out: Whether the time limit ended the run.
        wall_s: From the start of the ranks to the end of the last.
        log_folder: Folder of the ranks' output.
        lab: The cluster as the ranks saw it in ``FIVEFOLD_LAB``.
        sums: What each switch that sums counted, as
            :class:`fivefold.network.aggregation.SwitchState` names it; a switch that died is not
            there.
    """

    ranks: tuple[RankResult, ...]
    first_failed_rank: int | None
    timed_out: bool
    wall_s: float
    log_folder: Path
    lab: dict[str, Any]
    sums: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """What a shell would show: 0, 124 after the time limit, else the first failing rank's."""
        if self.timed_out:
            return _TIMEOUT_EXIT
        if self.first_failed_rank is None:
            return 0
        code = self.ranks[self.first_failed_rank].exit_code
        return _SIGNAL_EXIT - code if code < 0 else code

    def check(self) -> LabResult:
        """Raise where a rank failed.

        Returns:
            This result, where all ranks ended with 0.

        Raises:
            CommunicationError: The run failed; the message ends with the failing rank's last lines.
        """
        if self.exit_code == 0:
            return self
        if self.first_failed_rank is None:
            raise CommunicationError(
                f"the lab's time limit ended the run after {self.wall_s:.1f} s"
            )
        failed = self.ranks[self.first_failed_rank]
        tail = "\n".join(failed.stderr().splitlines()[-_TAIL_LINES:])
        limit = "; the time limit ended the run" if self.timed_out else ""
        raise CommunicationError(
            f"rank {failed.rank} on host{failed.host} ended with {failed.exit_code}{limit}; "
            f"its last lines were:\n{tail}",
            hint=f"all output is in {self.log_folder}",
        )
