"""Send 5 MB between two emulated hosts on links of different speed, and compare with the rate.

Run it with ``python examples/lab_two_hosts.py``. It needs Linux with network namespaces, as root or
as an ordinary user where the kernel allows that; elsewhere it says what is missing and ends.
"""

from __future__ import annotations

import sys

from fivefold.errors import UnsupportedError
from fivefold.lab import LabSpec, run_lab

TRANSFER = """
import os, socket, time

size = 5_000_000
if os.environ["RANK"] == "0":  # host0 receives
    with socket.create_server((os.environ["MASTER_ADDR"], 5000)) as server:
        peer, _ = server.accept()
    peer.sendall(b"go")
    start, left = time.perf_counter(), size
    while left > 0:
        left -= len(peer.recv(1 << 20))
    print(size / (time.perf_counter() - start))
else:  # host1 sends
    for _ in range(500):
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], 5000))
            break
        except OSError:
            time.sleep(0.02)
    peer.recv(2)
    peer.sendall(bytes(size))
peer.close()
"""


def main() -> None:
    """Measure three clusters."""
    for rate, delay in (("50Mbit/s", "0ms"), ("200Mbit/s", "0ms"), ("200Mbit/s", "5ms")):
        spec = LabSpec(hosts=2, rate=rate, delay=delay)
        try:
            result = run_lab(spec, [sys.executable, "-c", TRANSFER], timeout_s=30.0, stream=False)
        except UnsupportedError as error:
            print(f"nothing to show on this machine: {error}")
            return
        measured = float(result.ranks[0].stdout()) * 8 / 1e6
        print(f"{spec.describe()}: measured {measured:.0f} Mbit/s ({result.lab['means']})")


if __name__ == "__main__":
    main()
