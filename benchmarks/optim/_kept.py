"""Outcomes of finished runs, so that an interrupted benchmark goes on where it stopped.

A kept outcome is used only while the code that it depends on is the same, byte for byte: the
workload, the runner, the trainer, and, but for DDP, the engine. It is a file of
JSON lines.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import fivefold
from benchmarks.optim._runner import WORLD_SIZE, Outcome
from benchmarks.optim._settings import DDP, Setting

__all__ = ["KeptOutcomes"]

_SCRIPTS = ("_workload.py", "_runner.py")


class KeptOutcomes:
    """Finished runs by setting, seed and number of steps.

    Args:
        path: The file; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._code = {engine: _fingerprint(engine=engine) for engine in (False, True)}
        self._found: dict[str, Outcome] = {}
        if path is not None and path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            self._found = {line["key"]: Outcome(**line["outcome"]) for line in lines}

    def get(self, setting: Setting, seed: int, steps: int) -> Outcome | None:
        """The outcome of such a run, if there is one of the same code."""
        return self._found.get(self._key(setting, seed, steps))

    def put(self, setting: Setting, seed: int, steps: int, outcome: Outcome) -> None:
        """Keep an outcome."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            line = {"key": self._key(setting, seed, steps), "outcome": asdict(outcome)}
            file.write(json.dumps(line) + "\n")

    def _key(self, setting: Setting, seed: int, steps: int) -> str:
        code = self._code[setting.method != DDP]
        return f"{code} {setting.label} seed {seed} steps {steps} workers {WORLD_SIZE}"


def _fingerprint(*, engine: bool) -> str:
    package = Path(fivefold.__path__[0])
    files = sorted((package / "train").glob("*.py"))
    files += [Path(__file__).with_name(name) for name in _SCRIPTS]
    if engine:
        files += sorted((package / "optim").glob("*.py"))
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
