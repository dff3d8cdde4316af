"""What the caller's half of a run tells the supervisor's half, once, at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the caller asks of the supervisor.

    Args:
        spec: The cluster, as :meth:`LabSpec.to_dict` writes it.
        means: How links are made; None is unshaped.
        reason: Why they are unshaped.
        isolated: Whether hosts are namespaces.
        command: What each rank runs.
        port: Port of the rendezvous.
        timeout_s: Longest run.
        grace_s: The grace period.
        log_folder: Gets the ranks' output.
        run_folder: Private files of this run.
        stream: Whether output is also shown.
    """

    spec: dict[str, Any]
    means: str | None
    reason: str | None
    isolated: bool
    command: list[str]
    port: int
    timeout_s: float | None
    grace_s: float
    log_folder: str
    run_folder: str
    stream: bool
