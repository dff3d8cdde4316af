"""Makes the planned network real, inside the supervisor's private namespaces.

Hosts are network namespaces held open by descriptors of this process: nothing is registered
anywhere, so the kernel removes them when the process ends, however it ends.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.errors import UnsupportedError
from fivefold.lab._linux import entered, new_network_namespace, open_tun
from fivefold.lab._plan import (
    AGGREGATOR_PORT,
    SWITCH,
    Step,
    aggregator_address,
    host_name,
    namespace_of,
    plan_bridge,
    plan_relay,
    plan_topology,
)
from fivefold.lab.capabilities import find_tool, run_tool

if TYPE_CHECKING:
    from fivefold.lab._spec import LabSpec


_RELAY_END_S = 2.0
_START_S = 60.0  # a loaded machine may take seconds to import
_TURN_S = 0.05
_END_S = 3.0


@dataclass
class Network:
    """Descriptors of the namespaces by name and, where there is one, the relay.

    The switch is in the supervisor's own namespace, which has none.
    """

    fds: dict[str, int]
    relay: subprocess.Popen[bytes] | None = None

    def apply(self, steps: list[Step]) -> None:
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
            f"{own}/{self.fds[word.removeprefix('@')]}" if word.startswith("@") else word
            for word in step.argv
        ]
        if (path := find_tool(argv[0])) is None:
            raise UnsupportedError(f"the tool '{argv[0]}' is missing", hint="install iproute2")
        argv[0] = path
        with entered(self.fds.get(step.namespace)):
            failure = run_tool(argv, lines="".join(f"{line}\n" for line in step.lines))
        if failure is not None:
            raise UnsupportedError(
                f"'{' '.join(step.argv)}' failed in {step.namespace}: {failure}",
                hint="'fivefold lab check' says what this machine can do",
            )


def build_network(spec: LabSpec, *, means: str | None, counts_path: Path) -> Network:
    try:
        network = Network({host_name(host): new_network_namespace() for host in range(spec.hosts)})
        if spec.topology is not None and means is not None:
            count, steps = plan_topology(spec)
            network.fds |= {f"node{number}": new_network_namespace() for number in range(count)}
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
    for host_fd in network.fds.values():
        with entered(host_fd):
            tun_fds.append(open_tun("eth0"))
    network.apply(plan_relay(spec))
    job = base64.b64encode(pickle.dumps((spec, tun_fds, counts_path))).decode()
    relay = subprocess.Popen(
        [sys.executable, "-P", "-m", "fivefold.lab._relay", job],
        pass_fds=tun_fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    # Only the relay may hold the devices: if it dies, they go, and the ranks see it.
    for fd in tun_fds:
        os.close(fd)
    return relay


class Aggregators:
    """All aggregating switches of a run, each in the namespace of its node.

    One that dies is not started again: its clients sum by themselves.
    """

    def __init__(self, spec: LabSpec, network: Network, folder: Path, *, control_fd: int) -> None:
        self._processes = {
            node: _aggregator(spec, network, folder, node) for node in sorted(spec.aggregators)
        }
        end_s = time.monotonic() + _START_S
        for node, process in self._processes.items():
            out = _output(folder, node)
            while not out.stat().st_size:
                if process.poll() is not None:
                    raise UnsupportedError(
                        f"the aggregating switch {node} did not start: {_last_words(folder, node)}",
                        hint="check its options; the messages are in the log folder",
                    )
                if time.monotonic() > end_s:
                    raise UnsupportedError(
                        f"the aggregating switch {node} was not ready within {_START_S:g} s",
                        hint="the machine is busy: end other programs, and start again",
                    )
                if select.select([control_fd], (), (), _TURN_S)[0]:
                    return  # the run is to end; the supervisor reads why

    def end(self) -> None:
        """Let them write their counts and end."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def read_counts(folder: Path, nodes: list[str]) -> dict[str, dict[str, int]]:
    """Return what each aggregating switch counted; a switch that died has no entry."""
    found: dict[str, dict[str, int]] = {}
    for node in nodes:
        with suppress(OSError, ValueError):
            last = json.loads(_output(folder, node).read_text(encoding="utf-8").splitlines()[-1])
            if "hits" in last:
                found[node] = last
    return found


_UNITS = {"slot_bytes": "B", "expire": "s"}  # of the switch's options, where they are numbers


def _aggregator(
    spec: LabSpec, network: Network, folder: Path, node: str
) -> subprocess.Popen[bytes]:
    options: dict[str, Any] = {
        "host": aggregator_address(spec, node),
        "port": AGGREGATOR_PORT,
        **spec.aggregators[node],
    }
    words: list[str] = []
    for name, value in options.items():
        unit = "" if isinstance(value, str) else _UNITS.get(name, "")
        words += [f"--{name.replace('_', '-')}", f"{value}{unit}"]
    namespace = SWITCH if spec.topology is None else namespace_of(spec, node)
    with (
        _output(folder, node).open("wb") as out,
        _output(folder, node).with_suffix(".err").open("wb") as err,
        entered(network.fds.get(namespace)),
    ):
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "fivefold.network.aggregation", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )


def _output(folder: Path, node: str) -> Path:
    # Names of nodes may have slashes in them, as host0/nic1 has.
    return folder / f"aggregation-{node.replace('/', '-')}.out"


def _last_words(folder: Path, node: str) -> str:
    text = _output(folder, node).with_suffix(".err").read_text(encoding="utf-8", errors="replace")
    return " ".join(text.split()[-60:]) or "no answer in time"
