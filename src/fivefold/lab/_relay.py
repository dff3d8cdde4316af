"""The relay: one process that carries every packet between the hosts' TUN devices.

For machines whose kernel has no ``netem``. It reads packets, asks the fabric (``_fabric``) when
each one arrives, and writes it out then. Started by the supervisor inside the private namespaces
as ``python -m fivefold.lab._relay JOB``; ends with SIGTERM, which makes it write its counts.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from fivefold.lab._fabric import Conditions, Fabric, Link
from fivefold.lab._linux import VNET_HEADER_BYTES
from fivefold.lab._plan import BURST_S, FRAME_OVERHEAD_BYTES, queue_bytes, relay_mtu
from fivefold.lab._spec import LabSpec

_READ_BYTES = 65_536 + VNET_HEADER_BYTES
_PACKETS_PER_TURN = 32
_IDLE_S = 1.0
_IPV4 = 4
_LAST_ADDRESS_BYTE = VNET_HEADER_BYTES + 19  # the destination's last byte in an IPv4 header
_PRIORITY = -10
_FULL_RATE_BYTES_PER_S = 12.5e9


def build_fabric(spec: LabSpec) -> Fabric:
    """The fabric of a specification.

    Examples:
        >>> build_fabric(LabSpec(hosts=2, rate="200Mbit/s", delay="5ms")).next_event_s() is None
        True
    """
    conditions = Conditions(
        delay_s=spec.delay_s,
        jitter_s=spec.jitter_s,
        loss=spec.loss,
        burst_s=BURST_S,
        seed=spec.seed,
    )
    return Fabric(_links(spec), _links(spec), conditions=conditions)


def main(arguments: list[str]) -> None:
    """Relay until SIGTERM.

    Args:
        arguments: One JSON object: ``spec``, ``tun_fds`` (one per host) and ``counts_path``.

    Raises:
        SystemExit: At SIGTERM, with 0.
    """
    job = json.loads(arguments[0])
    with suppress(OSError):  # only root may; without it, busy ranks make the relay a little late
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    fabric = build_fabric(LabSpec.from_dict(job["spec"]))
    counts_path = Path(job["counts_path"])

    def end(*_: object) -> None:
        counts_path.write_text(json.dumps(asdict(fabric.counts)) + "\n", encoding="utf-8")
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        _turn(fabric, job["tun_fds"])


def _turn(fabric: Fabric, tun_fds: list[int]) -> None:
    next_s = fabric.next_event_s()
    wait_s = _IDLE_S if next_s is None else max(next_s - time.monotonic(), 0.0)
    # select() waits in microseconds, poll and epoll only in milliseconds.
    ready, _, _ = select.select(tun_fds, (), (), min(wait_s, _IDLE_S))
    for fd in ready:
        _take_packets(fabric, fd, tun_fds)
    for delivery in fabric.advance(time.monotonic()):
        # A device that is down or full drops what it cannot take, as a network card would.
        with suppress(OSError):
            os.write(tun_fds[delivery.destination], delivery.packet)


def _take_packets(fabric: Fabric, fd: int, tun_fds: list[int]) -> None:
    source = tun_fds.index(fd)
    for _ in range(_PACKETS_PER_TURN):
        try:
            packet = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if len(packet) <= _LAST_ADDRESS_BYTE or packet[VNET_HEADER_BYTES] >> 4 != _IPV4:
            continue
        destination = packet[_LAST_ADDRESS_BYTE] - 1
        if 0 <= destination < len(tun_fds):
            size_bytes = len(packet) - VNET_HEADER_BYTES + FRAME_OVERHEAD_BYTES
            fabric.send(
                time.monotonic(),
                source=source,
                destination=destination,
                packet=packet,
                size_bytes=size_bytes,
            )


def _links(spec: LabSpec) -> list[Link]:
    links = []
    for host in range(spec.hosts):
        rate = spec.rate_of(host)
        held = queue_bytes(spec, rate or _FULL_RATE_BYTES_PER_S, mtu=relay_mtu(spec))
        links.append(Link(rate, queue_bytes=held))
    return links


if __name__ == "__main__":
    main(sys.argv[1:])
