"""Fixtures that say what this machine can emulate; a test asks for what it needs."""

from __future__ import annotations

import pytest

from fivefold.lab import probe_capabilities


def _need(*names: str) -> None:
    able = probe_capabilities()
    missing = [able[name] for name in names if not able[name].works]
    if missing:
        pytest.skip("; ".join(f"{item.name}: {item.reason}" for item in missing))


@pytest.fixture
def bridge_works() -> None:
    _need("namespaces", "bridge", "veth", "tbf")


@pytest.fixture
def relay_works() -> None:
    _need("namespaces", "tun")


@pytest.fixture
def classes_work() -> None:
    _need("namespaces", "bridge", "veth", "htb", "u32")
