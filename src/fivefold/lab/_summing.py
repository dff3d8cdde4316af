"""The switches of a run that sum: processes in the namespaces of their nodes.

Each runs ``python -m fivefold.network.aggregation`` with the node's own address, which the hosts
reach over their shaped links. One that dies is not started again: its clients sum by themselves,
as they would with a switch that failed. Address and, after a run, counts are in the log folder.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.errors import UnsupportedError
from fivefold.lab._linux import entered
from fivefold.lab._plan import AGGREGATOR_PORT, SWITCH, aggregator_address
from fivefold.lab._plan_topology import namespace_of

if TYPE_CHECKING:
    from fivefold.lab._network import Network
    from fivefold.lab._spec import LabSpec

_START_S = 60.0  # a loaded machine may take seconds to import
_TURN_S = 0.05
_END_S = 3.0


class SummingSwitches:
    """All summing switches of a run.

    Args:
        spec: The cluster.
        network: Its namespaces.
        folder: Gets ``aggregation-NODE.out`` and ``.err``.
        control_fd: Waiting ends early where this becomes readable.

    Raises:
        UnsupportedError: One did not start.
    """

    def __init__(self, spec: LabSpec, network: Network, folder: Path, *, control_fd: int) -> None:
        self._processes = {
            node: _start(spec, network, folder, node) for node in sorted(spec.aggregators)
        }
        end_s = time.monotonic() + _START_S
        for node, process in self._processes.items():
            out = _output(folder, node)
            while not out.stat().st_size:
                if process.poll() is not None or time.monotonic() > end_s:
                    raise UnsupportedError(
                        f"the summing switch {node} did not start: {_said(folder, node)}",
                        hint="check its options; the messages are in the log folder",
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
    """What each summing switch counted; a switch that died has none.

    Args:
        folder: The log folder.
        nodes: Names of the switches.

    Returns:
        Counts by switch, as :class:`fivefold.network.aggregation.SwitchState` names them.
    """
    found: dict[str, dict[str, int]] = {}
    for node in nodes:
        with suppress(OSError, ValueError):
            last = json.loads(_output(folder, node).read_text(encoding="utf-8").splitlines()[-1])
            if "hits" in last:
                found[node] = last
    return found


def _start(spec: LabSpec, network: Network, folder: Path, node: str) -> subprocess.Popen[bytes]:
    options: dict[str, Any] = {
        "host": aggregator_address(spec, node),
        "port": AGGREGATOR_PORT,
        **spec.aggregators[node],
    }
    words = [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    namespace = SWITCH if spec.topology is None else namespace_of(spec, node)
    with (
        _output(folder, node).open("wb") as out,
        _output(folder, node).with_suffix(".err").open("wb") as err,
        entered(network.fd_of(namespace)),
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


def _said(folder: Path, node: str) -> str:
    text = _output(folder, node).with_suffix(".err").read_text(encoding="utf-8", errors="replace")
    return " ".join(text.split()[-60:]) or "no answer in time"
