"""The few Linux calls that the lab needs and Python 3.11 does not offer.

Namespaces (``setns``, ``unshare``), mounts, ``prctl`` and TUN devices, each raising OSError as
the functions in ``os`` do. Knows nothing of clusters.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_TUN_F_CSUM = 0x01
VNET_HEADER_BYTES = 10

_libc = ctypes.CDLL(None, use_errno=True)


def _own_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_network_namespace() -> int:
    """Make a network namespace; it lives as long as the returned descriptor."""
    home = _own_namespace()
    try:
        _call("unshare", _CLONE_NEWNET)
        made = _own_namespace()
        _call("setns", home, _CLONE_NEWNET)
        return made
    finally:
        os.close(home)


@contextmanager
def entered(namespace_fd: int | None) -> Iterator[None]:
    """Run the body, and what it starts, in another network namespace; None stays."""
    if namespace_fd is None:
        yield
        return
    home = _own_namespace()
    try:
        _call("setns", namespace_fd, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", home, _CLONE_NEWNET)
    finally:
        os.close(home)


def become_host(namespace_fd: int, *, name: str, folder: Path) -> None:
    """Turn this process into one on another host; called between fork and exec.

    Takes the network namespace, a host name of its own, an ``/etc/hosts`` that knows the cluster
    and a ``/sys`` that shows the host's interfaces. The last two are conveniences: where the
    kernel forbids their mounts, the process runs without them.
    """
    _call("setns", namespace_fd, _CLONE_NEWNET)
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
    encoded, scratch = name.encode(), folder / "sys"
    _call("sethostname", encoded, len(encoded))
    with suppress(OSError):
        _mount(folder / "hosts", Path("/etc/hosts"), None, _MS_BIND)
    with suppress(OSError):
        # Only two folders of sysfs differ between network namespaces; binding them alone keeps
        # what is mounted below /sys, such as control groups.
        _mount(Path("sysfs"), scratch, b"sysfs", 0)
        try:
            for inside in ("devices/virtual/net", "class/net"):
                _mount(scratch / inside, Path("/sys") / inside, None, _MS_BIND)
        finally:
            _call("umount2", os.fsencode(scratch), _MNT_DETACH)


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def become_subreaper() -> None:
    """Adopt the orphans among all later descendants."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def open_tun(name: str) -> int:
    """Make a TUN device in the current network namespace.

    Packets carry a ten-byte virtio header, which lets the kernel leave out TCP checksums: the
    relay passes it on unchanged.
    """
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(fd, _TUNSETIFF, request)
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM)
    except OSError:
        os.close(fd)
        raise
    return fd


def _mount(source: Path, target: Path, kind: bytes | None, flags: int) -> None:
    paths = os.fsencode(source), os.fsencode(target)
    _call("mount", *paths, kind, ctypes.c_ulong(flags), None)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
