"""Measure what each test costs in processor time, and write tests/durations.json.

python tools/measure_tests.py [--anew] [--rows FILE] [pytest's arguments]

Without arguments it runs what `make tests` runs. Of several measurements of a case the least is
kept, for the first user of an import or a compiled loop pays for the others; --anew forgets those
made before. Prints tests and processor minutes of each package.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.durations import FILE, TOLD_S, known_files  # noqa: E402 - its folder is known now

Files = dict[str, dict[str, Any]]


def main() -> int:
    """Run the tests with a meter, and merge what they took into the file."""
    parser = argparse.ArgumentParser(description="Measure tests, write tests/durations.json.")
    parser.add_argument("--anew", action="store_true", help="forget earlier measurements")
    parser.add_argument("--rows", type=Path, help="take these rows; run nothing")
    options, arguments = parser.parse_known_args()
    code, rows = (0, options.rows.read_text()) if options.rows else _run(arguments)
    files = _merged(rows, {} if options.anew else known_files())
    lines = ",\n".join(f"{json.dumps(path)}: {json.dumps(files[path])}" for path in sorted(files))
    FILE.write_text(f'{{"files": {{\n{lines}\n}}}}\n')
    _show(files)
    return code


def _run(arguments: list[str]) -> tuple[int, str]:
    pytest = [sys.executable, "-m", "pytest", *arguments]
    command = pytest if arguments else ["make", "--no-print-directory", "tests"]
    with tempfile.NamedTemporaryFile() as file:
        environment = {**os.environ, "FIVEFOLD_MEASURE_TESTS": file.name}
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        return code, Path(file.name).read_text()


def _merged(rows: str, known: Files) -> Files:
    """Put what was measured in the place of what is known of the same files."""
    took: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for row in map(json.loads, rows.splitlines()):
        path, _, case = row["case"].partition("::")
        before_s = known.get(path, {}).get("long", {}).get(case, float("inf"))
        took[path][case] = min(row["processor_s"], before_s, took[path].get(case, float("inf")))
    files = {path: file for path, file in known.items() if (ROOT / path).exists()}
    for path, cases in took.items():
        unseen = set(files.get(path, {}).get("long", {})) - set(cases)
        cases |= {case: files[path]["long"][case] for case in unseen}
        files[path] = {
            "cases": len(cases),
            "processor_s": round(sum(cases.values()), 1),
            "long": {case: round(s, 2) for case, s in sorted(cases.items()) if s > TOLD_S},
        }
    return files


def _show(files: Files) -> None:
    packages: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0, 0])
    for path, file in files.items():
        package = packages["/".join(Path(path).parts[1:-1][:1]) or "."]
        package[0] += file["cases"]
        package[1] += file["processor_s"]
        package[2] += sum(seconds > 1 for seconds in file["long"].values())
    print(f"{'package':14} {'cases':>6} {'processor min':>14} {'over 1 s':>9}")
    for name, (cases, seconds, long) in sorted(packages.items()):
        print(f"{name:14} {cases:6.0f} {seconds / 60:14.2f} {long:9.0f}")


if __name__ == "__main__":
    sys.exit(main())
