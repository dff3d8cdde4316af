"""An aggregating switch in a process of its own."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from typing import Any, Self

from fivefold.errors import CommunicationError
from fivefold.network.aggregation.pool import SwitchState

_START_S = 30.0
_END_S = 10.0


def _text(name: str, value: Any) -> str:
    """An option's value with the unit that a number of it is in."""
    unit = {"slot_bytes": "B", "expire": "s"}.get(name, "")
    return str(value) if isinstance(value, str) else f"{value}{unit}"


class SwitchProcess:
    """A switch that runs as a child process until it is stopped, killed, or left.

    Args:
        **options: Options of ``python -m fivefold.network.aggregation`` without their dashes, such
            as ``slots=16``, ``slot_bytes="64KiB"`` or ``port=5000``.

    Raises:
        CommunicationError: It did not start.
    """

    def __init__(self, **options: Any) -> None:
        words = [
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", _text(name, value))
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fivefold.network.aggregation", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.address: str = self._read_line()["address"]

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def _read_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it is a pipe"
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.kill()
            raise CommunicationError(f"the switch did not start: {self._errors or 'no answer'}")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> SwitchState:
        """End it in good order.

        Returns:
            Its counts.

        Raises:
            CommunicationError: It ended otherwise.
        """
        self._process.terminate()
        out, errors = self._communicate()
        if self._process.returncode or not out:
            raise CommunicationError(f"the switch failed: {errors.strip()[-500:]}")
        return SwitchState(**json.loads(out))

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process.poll() is None:
            self._process.kill()
        self._errors = self._communicate()[1].strip()

    def _communicate(self) -> tuple[str, str]:
        with contextlib.suppress(ValueError):  # it was read before
            return self._process.communicate(timeout=_END_S)
        return "", ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
