"""What this machine lets the lab do, found by trying it in throw-away namespaces.

A probe that fails keeps the tool's own message as the reason, with what would fix it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

_SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin"
_TOOL_TIMEOUT_S = 30.0
_ISOLATE = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_AS_USER = ("--user", "--map-root-user")
_INSTALL = "install the package iproute2 (or iproute)"
_UNTRIED: tuple[str | None, str | None] = ("not tried without namespaces", "as for namespaces")
_HOSTS = "hosts with a network of their own"
_HTB = "tc qdisc add dev lo root handle 1: htb"
_FILTER = "protocol ip prio 1 u32 match ip dsfield 0x20 0xe0 flowid 1:1"
_PROBES = {  # command, what it is for, what would make it work
    "bridge": (
        "ip link add name probe type bridge",
        "the switch between the hosts",
        "load the kernel module 'bridge', or use a kernel with CONFIG_BRIDGE",
    ),
    "veth": (
        "ip link add name probe type veth peer name peer",
        "cables between hosts and switch",
        "load the kernel module 'veth', or use a kernel with CONFIG_VETH",
    ),
    "tbf": (
        "tc qdisc add dev lo root tbf rate 1mbit burst 4kb latency 10ms",
        "rates",
        "load the kernel module 'sch_tbf', or use a kernel with CONFIG_NET_SCH_TBF",
    ),
    "netem": (
        "tc qdisc add dev lo root netem delay 1ms",
        "delay, jitter and loss in the kernel",
        "none needed while 'tun' works: the relay does it; else load the module 'sch_netem'",
    ),
    "tun": (
        "ip tuntap add dev probe mode tun",
        "delay, jitter and loss through the user-space relay",
        "make /dev/net/tun available to this user (module 'tun', or the container's --device)",
    ),
    "htb": (
        _HTB,
        "priority classes on links",
        "load the kernel module 'sch_htb', or use a kernel with CONFIG_NET_SCH_HTB",
    ),
    "u32": (
        f"{_HTB} && tc filter add dev lo parent 1: {_FILTER}",
        "telling the classes of packets apart",
        "load the modules 'sch_htb' and 'cls_u32', or use a kernel with CONFIG_NET_CLS_U32 as well",
    ),
}


@dataclass(frozen=True)
class Capability:
    """One thing that the lab can use."""

    name: str
    meaning: str
    works: bool
    reason: str | None = None
    fix: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """All that was tried."""

    isolation: str | None
    items: tuple[Capability, ...]

    def __getitem__(self, name: str) -> Capability:
        for item in self.items:
            if item.name == name:
                return item
        raise KeyError(name)

    @property
    def shaping(self) -> str:
        """Return ``"none"``, ``"rate"`` or ``"rate, delay, jitter, loss"``."""
        works = {item.name for item in self.items if item.works}
        rates = works >= {"namespaces", "bridge", "veth", "tbf"}
        if works >= {"namespaces", "tun"} or (rates and "netem" in works):
            return "rate, delay, jitter, loss"
        return "rate" if rates else "none"


def find_tool(name: str) -> str | None:
    """Return the path of a system tool, also where an ordinary user's PATH leaves out ``sbin``."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}")


def isolation_command(isolation: str) -> list[str]:
    """Return the command that runs what follows it in private namespaces."""
    extra = _AS_USER if isolation == "user namespaces" else ()
    return [find_tool("unshare") or "unshare", *extra, *_ISOLATE]


@cache
def probe_capabilities() -> Capabilities:
    """Try everything; takes about a tenth of a second, once per process."""
    isolation, reason = _probe_isolation()
    works = isolation is not None
    fix = None if works else _isolation_fix()
    items = [Capability("namespaces", _HOSTS, works, reason, fix)]
    for name, (command, meaning, remedy) in _PROBES.items():
        failure, fix = _UNTRIED
        if isolation is not None:
            failure, fix = _try(isolation, command), None
            if failure is not None:
                fix = remedy if find_tool(command.split()[0]) else _INSTALL
        items.append(Capability(name, meaning, failure is None, failure, fix))
    return Capabilities(isolation, tuple(items))


def _probe_isolation() -> tuple[str | None, str | None]:
    if find_tool("unshare") is None:
        return None, "the tool 'unshare' is missing"
    candidates = ["root", "user namespaces"] if os.geteuid() == 0 else ["user namespaces"]
    reasons = []
    for candidate in candidates:
        failure = run_tool([*isolation_command(candidate), "true"])
        if failure is None:
            return candidate, None
        reasons.append(failure.replace("unshare: unshare failed", "unshare failed"))
    return None, "; then in user namespaces: ".join(reasons)


def _isolation_fix() -> str:
    if find_tool("unshare") is None:
        return "install the package util-linux"
    if os.geteuid() == 0:
        return (
            "in a container: start it with --privileged, or with CAP_SYS_ADMIN and CAP_NET_ADMIN; "
            "elsewhere: sysctl user.max_net_namespaces above 0"
        )
    return (
        "run as root, or let users make namespaces: sysctl user.max_user_namespaces above 0, and "
        "where they exist kernel.unprivileged_userns_clone=1 and "
        "kernel.apparmor_restrict_unprivileged_userns=0"
    )


def _try(isolation: str, command: str) -> str | None:
    tool = command.split(maxsplit=1)[0]
    path = find_tool(tool)
    if path is None:
        return f"the tool '{tool}' is missing"
    script = " && ".join(
        f"{shlex.quote(path)} {part.split(maxsplit=1)[1]}" for part in command.split(" && ")
    )
    return run_tool([*isolation_command(isolation), "sh", "-c", script])


def run_tool(argv: list[str], *, lines: str = "") -> str | None:
    """Run a system tool, with what it reads; return why it failed, None where it did not."""
    try:
        done = subprocess.run(
            argv, input=lines, capture_output=True, text=True, check=False, timeout=_TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return " ".join(done.stderr.split()) or f"{argv[0]} ended with {done.returncode}"
