"""The addresses at which a command and all that it starts listen."""

import contextlib
import ipaddress
import re
import time
from pathlib import Path

_LISTEN = "0A"


def _family_of(pid):
    """A process and all that it started, as far as they share this network namespace."""
    here = Path("/proc/self/ns/net").readlink()
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    with contextlib.suppress(OSError):
        return [one for one in found if Path(f"/proc/{one}/ns/net").readlink() == here]
    return []


def listeners(pids):
    """Addresses at which these processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    match = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
                    inodes |= {match[1]} if match else set()
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                parts = [words[i : i + 4][::-1] for i in range(0, len(words), 4)]
                found.add(str(ipaddress.ip_address(b"".join(parts))))
    return found


def is_loopback(address):
    plain = ipaddress.ip_address(address)
    return (getattr(plain, "ipv4_mapped", None) or plain).is_loopback


def addresses_while_it_runs(process, *, until_first=False, timeout_s=120):
    """All addresses at which a process and its children listened until it ended."""
    found, deadline_s = set(), time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline_s:
        found |= listeners(_family_of(process.pid))
        if until_first and found:
            break
        time.sleep(0.05)
    return found
