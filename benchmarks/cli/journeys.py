"""Times the problem pages as a stranger types them: fresh clone, fresh environment, every command.

The commit of this checkout is cloned, ``make setup`` installs it into the clone, and the console
blocks of each page of ``docs/problems`` run there one after another, with empty caches of their own
(pip's too: packages are downloaded). Seconds of the clock and of the processor are those of each
command with all its processes; a page's total has the installation in it. Each is done once, as by
somebody who has come for the first time.

    python -m benchmarks.cli.journeys [--page NAME] [--quick]
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, write_results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cli" / "journeys.json"
TARGET_S = 15 * 60.0
LONGEST_S = 1800.0


@dataclass(frozen=True, slots=True)
class Timed:
    """One command: its seconds on the clock, and of the processor in all its processes."""

    command: str
    wall_s: float
    processor_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """A clone with an environment and caches of its own."""

    folder: Path
    home: Path

    def run(self, command: str) -> Timed:
        """Type a command in the clone, and say how long it took."""
        print(f"$ {command}", flush=True)
        path = os.pathsep.join((str(self.folder / ".venv" / "bin"), os.environ["PATH"]))
        kept = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
        began_s, before_s = time.monotonic(), _children_s()
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=kept | {"HOME": str(self.home), "PATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )
        wall_s, processor_s = time.monotonic() - began_s, _children_s() - before_s
        if ended.returncode != 0:
            raise SystemExit(f"{command} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
        print(f"  {wall_s:.1f} s, {processor_s:.1f} s of the processor", flush=True)
        return Timed(command, wall_s, processor_s)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def commands_of(page: Path) -> list[str]:
    """List what a page's console blocks have after their prompts."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line[:2] == "$ "]


def rows_of(name: str, install: list[Timed], timed: list[Timed]) -> list[BenchmarkRow]:
    """Return a page's rows: each command, and both totals with the installation."""
    rows = [
        BenchmarkRow(case=f"{name}: {one.command}", metric=metric, unit="s", ours=seconds)
        for one in timed
        for metric, seconds in (("wall", one.wall_s), ("processor", one.processor_s))
    ]
    every = [*install, *timed]
    wall_s = sum(one.wall_s for one in every)
    case = f"{name}: the whole page with installation"
    return [
        *rows,
        BenchmarkRow(
            case=case, metric="wall", unit="s", ours=wall_s, target=TARGET_S,
            met=wall_s <= TARGET_S,
        ),
        BenchmarkRow(
            case=case, metric="processor", unit="s", ours=sum(one.processor_s for one in every)
        ),
    ]  # fmt: skip


def main() -> None:
    """Walk the pages, and write what each took."""
    pages = sorted((ROOT / "docs" / "problems").glob("*.md"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", choices=[page.stem for page in pages], help="only this one")
    parser.add_argument("--quick", action="store_true", help="install, list; write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="journeys-") as name:
        home = Path(name) / "home"
        home.mkdir()
        place = Place(Path(name) / "fivefold", home)
        subprocess.run(["git", "clone", "--quiet", ROOT, place.folder], check=True)
        install = [place.run("make setup")]
        rows = rows_of("every page", [], install)[:2]
        for page in pages:
            if arguments.page in {None, page.stem} and not arguments.quick:
                timed = [place.run(command) for command in commands_of(page)]
                rows += rows_of(page.stem, install, timed)
    if arguments.page is None and not arguments.quick:
        write_results(RESULTS, topic="cli/journeys", rows=rows)


if __name__ == "__main__":
    main()
