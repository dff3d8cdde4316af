"""Makes the planned network real, inside the supervisor's private namespaces.

Hosts are network namespaces held open by descriptors of this process: nothing is registered
anywhere, so the kernel removes them when the process ends, however it ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fivefold.errors import UnsupportedError
from fivefold.lab._capabilities import find_tool
from fivefold.lab._linux import entered, new_network_namespace, open_tun
from fivefold.lab._plan import SWITCH, Step, host_name, plan_bridge, plan_relay
from fivefold.lab._plan_topology import plan_topology

if TYPE_CHECKING:
    from pathlib import Path

    from fivefold.lab._spec import LabSpec

_STEP_TIMEOUT_S = 30.0
_RELAY_END_S = 2.0


@dataclass
class Network:
    """The hosts' namespaces and, where there is one, the relay.

    Args:
        host_fds: One descriptor of a network namespace per host.
        relay: The relay process, or None.
        node_fds: One descriptor per node of a topology that is no host.
    """

    host_fds: list[int]
    relay: subprocess.Popen[bytes] | None = None
    node_fds: list[int] = field(default_factory=list)
    _tools: dict[str, str] = field(default_factory=dict)

    def apply(self, steps: list[Step]) -> None:
        """Carry out a plan.

        Raises:
            UnsupportedError: A step failed; names the command and what it said.
        """
        for step in steps:
            self._apply_step(step)

    def end_relay(self) -> None:
        """Let the relay write its counts and end."""
        if self.relay is None or self.relay.returncode is not None:
            return
        self.relay.terminate()
        try:
            self.relay.wait(_RELAY_END_S)
        except subprocess.TimeoutExpired:
            self.relay.kill()

    def _apply_step(self, step: Step) -> None:
        own = f"/proc/{os.getpid()}/fd"
        argv = [
            f"{own}/{self.fd_of(word.removeprefix('@'))}" if word.startswith("@") else word
            for word in step.argv
        ]
        argv[0] = self._tool(argv[0])
        with entered(self.fd_of(step.namespace)):
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                check=False,
                timeout=_STEP_TIMEOUT_S,
                input="".join(f"{line}\n" for line in step.lines),
            )
        if done.returncode != 0:
            raise UnsupportedError(
                f"'{' '.join(step.argv)}' failed in {step.namespace}: {done.stderr.strip()}",
                hint="'fivefold lab check' says what this machine can do",
            )

    def fd_of(self, namespace: str) -> int | None:
        """Descriptor of a namespace; None for the supervisor's own, where the switch is."""
        if namespace == SWITCH:
            return None
        if namespace.startswith("node"):
            return self.node_fds[int(namespace.removeprefix("node"))]
        return self.host_fds[int(namespace.removeprefix("host"))]

    def _tool(self, name: str) -> str:
        if name not in self._tools:
            path = find_tool(name)
            if path is None:
                raise UnsupportedError(f"the tool '{name}' is missing", hint="install iproute2")
            self._tools[name] = path
        return self._tools[name]


def build_network(spec: LabSpec, *, means: str | None, counts_path: Path) -> Network:
    """Make hosts and links.

    Args:
        spec: The cluster.
        means: ``"relay"``, what ends with ``"+netem"``, or anything else for a bridge with
            rates only.
        counts_path: Where the relay writes its counts when it ends.

    Returns:
        The network; it lives as long as this process.

    Raises:
        UnsupportedError: The kernel or a tool refuses a step.
    """
    try:
        network = Network([new_network_namespace() for _ in range(spec.hosts)])
        if spec.topology is not None and means is not None:
            count, steps = plan_topology(spec)
            network.node_fds = [new_network_namespace() for _ in range(count)]
            network.apply(steps)
        elif means == "relay":
            network.relay = _start_relay(network, spec, counts_path)
        else:
            network.apply(plan_bridge(spec, netem=means is not None and means.endswith("+netem")))
    except OSError as error:
        raise UnsupportedError(
            f"the network could not be made: {error}",
            hint="'fivefold lab check' says what this machine can do",
        ) from error
    return network


def _start_relay(network: Network, spec: LabSpec, counts_path: Path) -> subprocess.Popen[bytes]:
    tun_fds = []
    for host, host_fd in enumerate(network.host_fds):
        with entered(host_fd):
            tun_fds.append(open_tun("eth0"))
        network.apply([step for step in plan_relay(spec) if step.namespace == host_name(host)])
    job: dict[str, Any] = {
        "spec": spec.to_dict(),
        "tun_fds": tun_fds,
        "counts_path": str(counts_path),
    }
    relay = subprocess.Popen(
        [sys.executable, "-P", "-m", "fivefold.lab._relay", json.dumps(job)],
        pass_fds=tun_fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    # Only the relay may hold the devices: if it dies, they go, and the ranks see it.
    for fd in tun_fds:
        os.close(fd)
    return relay
