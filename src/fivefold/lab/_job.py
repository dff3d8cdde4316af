"""What the supervisor is told of a run, and what its ranks find in their environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.lab._plan import AGGREGATOR_PORT, address_of, aggregator_address
from fivefold.lab._spec import LabSpec

_PORT = 29500
_AGGREGATION = "FIVEFOLD_AGGREGATION"
_DEFAULTS = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores; more threads than cores only wait
    "PYTHONUNBUFFERED": "1",  # so that logs are complete also when a rank is killed
}


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


@dataclass(frozen=True)
class LabFacts:
    """What the ranks may know of their links; becomes the variable ``FIVEFOLD_LAB``.

    Args:
        spec: What was asked for.
        means: How the links are made: ``tbf``, ``htb``, either with ``+netem``, ``relay``; None
            where unshaped.
        reason: Why the links are unshaped; None where they are shaped.
    """

    spec: LabSpec
    means: str | None
    reason: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the facts as JSON can hold them."""
        spec = self.spec
        return {
            "hosts": spec.hosts,
            "nproc_per_host": spec.nproc_per_host,
            "rate_bytes_per_s": spec.rate_bytes_per_s,
            "host_rates_bytes_per_s": {str(host): spec.rate_of(host) for host in spec.host_rates},
            "delay_s": spec.delay_s,
            "jitter_s": spec.jitter_s,
            "loss": spec.loss,
            "shaped": self.means is not None,
            "means": self.means,
            "reason": self.reason,
            "mtu": spec.mtu,
            "topology": spec.topology,
            "classes": spec.classes,
            "host_classes": {str(host): own for host, own in spec.host_classes.items()},
            "aggregation": {
                node: f"{aggregator_address(spec, node)}:{AGGREGATOR_PORT}"
                for node in sorted(spec.aggregators)
            },
        }


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks meet."""

    address: str = address_of(0)
    port: int = _PORT
    interface: str = "eth0"


def rank_environment(
    rank: int, facts: LabFacts, *, base: Mapping[str, str], meet: Rendezvous
) -> dict[str, str]:
    """Return the environment of one rank."""
    spec = facts.spec
    host, local_rank = divmod(rank, spec.nproc_per_host)
    # A torchrun around the lab must not make its ranks wait for that torchrun's store.
    kept = {key: value for key, value in base.items() if not key.startswith("TORCHELASTIC_")}
    own = {
        "RANK": rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": spec.nproc_per_host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": spec.hosts,
        "NODE_RANK": host,
        "MASTER_ADDR": meet.address,
        "MASTER_PORT": meet.port,
        "GLOO_SOCKET_IFNAME": meet.interface,
        "TP_SOCKET_IFNAME": meet.interface,
        "FIVEFOLD_LAB": json.dumps(facts.to_dict()),
    }
    if len(spec.aggregators) == 1:  # the backend "fivefold" then sums there without being told
        (node,) = spec.aggregators
        kept = {_AGGREGATION: f"{aggregator_address(spec, node)}:{AGGREGATOR_PORT}", **kept}
    return {**_DEFAULTS, **kept, **{key: str(value) for key, value in own.items()}}
