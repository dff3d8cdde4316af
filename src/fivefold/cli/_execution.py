"""A plan on the emulated cluster: one host per rank of the topology."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fivefold.codesign import ClusterPlan, JobSpec, read_measurements, write_order
from fivefold.errors import CommunicationError
from fivefold.lab import LabSpec, run_lab
from fivefold.network.topology import Topology

__all__ = ["run_in_the_lab"]

_MTU = 60000  # small frames would cost the hosts' processors more than the job does


def run_in_the_lab(
    topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan, *, timeout_s: float
) -> Mapping[str, float]:
    """Run a plan and return mean seconds per iteration of each job."""
    with tempfile.TemporaryDirectory(prefix="fivefold-execute-") as folder:
        order = Path(folder) / "order.json"
        write_order(order, jobs, plan, topology=topology)
        command = [sys.executable, "-m", "fivefold.codesign._execute", str(order)]
        spec = LabSpec.of_topology(topology, mtu=_MTU)
        result = run_lab(spec, command, timeout_s=timeout_s, stream=False).check()
        found = read_measurements(result.ranks[0].stdout().splitlines())
    if set(found) != {job.job_id for job in jobs}:
        message = "the run ended without measurements"
        raise CommunicationError(message, hint="look at the logs that the lab names")
    return found
