"""What a machine without a network lacks, from a folder of wheels: unpacked, never installed.

The standard library only. A wheel is an archive of what lies in site-packages.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import zipfile
from pathlib import Path

__all__ = ["unpack_wheels"]


def unpack_wheels(wheels: Path) -> list[str]:
    """Let this process and its children import what the wheels hold and is not installed.

    Returns:
        Names of the wheels that were taken.

    Raises:
        ValueError: There are none, or one is damaged or of another Python.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        message = f"{wheels} has no wheels"
        raise ValueError(message)
    taken = [wheel for wheel in found if not _is_installed(wheel)]
    site = wheels / f"unpacked-{sys.implementation.cache_tag}"
    for wheel in taken:
        _require_fit(wheel)
        done = site / f".{wheel.name}"
        if done.exists():
            continue
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        except zipfile.BadZipFile as reason:
            message = f"{wheel} is damaged: {reason}"
            raise ValueError(message) from reason
        done.touch()
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*([given] if given else []), str(site.resolve())])
    sys.path.append(str(site.resolve()))
    return [wheel.name for wheel in taken]


def _is_installed(wheel: Path) -> bool:
    try:
        importlib.metadata.distribution(wheel.name.split("-")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _require_fit(wheel: Path) -> None:
    """Refuse what is of another Python: its import would fail in the middle of a stage."""
    python, abi = wheel.stem.split("-")[-3:-1]
    minor = re.fullmatch(r"cp3(\d+)", python)
    own = sys.version_info.minor
    if minor and (int(minor[1]) > own or (abi != "abi3" and int(minor[1]) != own)):
        message = f"{wheel.name} is of another Python than this one, 3.{own}"
        raise ValueError(message)
