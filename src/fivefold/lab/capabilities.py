"""What this machine lets the lab do, found by trying it in throw-away namespaces.

Each probe is one short command in namespaces of its own, so that nothing remains of it. A probe
that fails keeps the tool's own message as the reason, with what would fix it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

_SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin"
_PROBE_TIMEOUT_S = 20.0
_ISOLATE = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_AS_USER = ("--user", "--map-root-user")
_INSTALL = "install the package iproute2 (or iproute)"
_PROBES = {
    "bridge": "ip link add name probe type bridge",
    "veth": "ip link add name probe type veth peer name peer",
    "tbf": "tc qdisc add dev lo root tbf rate 1mbit burst 4kb latency 10ms",
    "netem": "tc qdisc add dev lo root netem delay 1ms",
    "tun": "ip tuntap add dev probe mode tun",
    "htb": "tc qdisc add dev lo root handle 1: htb",
    "u32": "tc qdisc add dev lo root handle 1: htb && tc filter add dev lo parent 1: protocol ip "
    "prio 1 u32 match ip dsfield 0x20 0xe0 flowid 1:1",
}
_UNTRIED: tuple[str | None, str | None] = ("not tried without namespaces", "as for namespaces")
_MEANING = {
    "namespaces": "hosts with a network of their own",
    "bridge": "the switch between the hosts",
    "veth": "cables between hosts and switch",
    "tbf": "rates",
    "netem": "delay, jitter and loss in the kernel",
    "tun": "delay, jitter and loss through the user-space relay",
    "htb": "priority classes on links",
    "u32": "telling the classes of packets apart",
}
_FIXES = {
    "bridge": "load the kernel module 'bridge', or use a kernel with CONFIG_BRIDGE",
    "veth": "load the kernel module 'veth', or use a kernel with CONFIG_VETH",
    "tbf": "load the kernel module 'sch_tbf', or use a kernel with CONFIG_NET_SCH_TBF",
    "netem": "none needed while 'tun' works: the relay does it; else load the module 'sch_netem'",
    "tun": "make /dev/net/tun available to this user (module 'tun', or the container's --device)",
    "htb": "load the kernel module 'sch_htb', or use a kernel with CONFIG_NET_SCH_HTB",
    "u32": "load the kernel modules 'sch_htb' and 'cls_u32', or use a kernel with "
    "CONFIG_NET_SCH_HTB and CONFIG_NET_CLS_U32",
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
        """Look one up by name."""
        for item in self.items:
            if item.name == name:
                return item
        raise KeyError(name)

    @property
    def shaping(self) -> str:
        """Return ``"none"``, ``"rate"`` or ``"rate, delay, jitter, loss"``."""
        works = {item.name for item in self.items if item.works}
        if works >= {"namespaces", "tun"} or works >= {
            "namespaces",
            "bridge",
            "veth",
            "tbf",
            "netem",
        }:
            return "rate, delay, jitter, loss"
        return "rate" if works >= {"namespaces", "bridge", "veth", "tbf"} else "none"


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
    items = [
        Capability(
            "namespaces",
            _MEANING["namespaces"],
            works=isolation is not None,
            reason=reason,
            fix=None if isolation else _isolation_fix(),
        )
    ]
    for name, command in _PROBES.items():
        failure, fix = _UNTRIED
        if isolation is not None:
            failure = _try(isolation, command)
            fix = None if failure is None else _fix(name, command)
        items.append(Capability(name, _MEANING[name], failure is None, failure, fix))
    return Capabilities(isolation, tuple(items))


def _probe_isolation() -> tuple[str | None, str | None]:
    if find_tool("unshare") is None:
        return None, "the tool 'unshare' is missing"
    candidates = ["root", "user namespaces"] if os.geteuid() == 0 else ["user namespaces"]
    reasons = []
    for candidate in candidates:
        failure = _run([*isolation_command(candidate), "true"])
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
    return _run([*isolation_command(isolation), "sh", "-c", script])


def _fix(name: str, command: str) -> str:
    return _INSTALL if find_tool(command.split(maxsplit=1)[0]) is None else _FIXES[name]


def _run(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return " ".join(done.stderr.split()) or f"{argv[0]} ended with {done.returncode}"
