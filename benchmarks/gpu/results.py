"""Makes the results files of a run on a GPU from its rows: nothing is measured by it.

python -m benchmarks.gpu.results FOLDER [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu._rows import read_rows
from benchmarks.gpu._stages import STAGES
from benchmarks.results_file import write_results

_RESULTS = Path(__file__).parents[1] / "results"


def main(words: list[str]) -> int:
    """Write a file for each stage that has rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.results", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="of the rows")
    parser.add_argument("--out", type=Path, help="folder of the results files")
    options = parser.parse_args(words)
    lines = read_rows(options.folder)
    machines = [line for line in lines if line["event"] == "machine" and "stage" not in line]
    if not machines:
        sys.stderr.write(
            f"error: {options.folder} has no rows of a run\n"
            "hint: python -m benchmarks.gpu --rows FOLDER writes them\n"
        )
        return 1
    if options.out is None and any(line["tiny"] for line in machines):
        sys.stderr.write(
            "error: the rows are of a tiny run on a processor, which are no results\n"
            "hint: --out FOLDER writes them elsewhere\n"
        )
        return 1
    if len({line["versions"]["GPU"] for line in machines}) > 1:
        names = sorted({line["versions"]["GPU"] for line in machines})
        sys.stderr.write(
            f"error: the rows are of several GPUs: {', '.join(names)}\n"
            "hint: keep the rows of each in a folder of its own\n"
        )
        return 1
    for stage in STAGES:
        own = [line for line in lines if line.get("stage") == stage.key and "step" in line]
        rows = list(stage.rows(own)) if own else []
        if not rows:
            print(f"{stage.key}: no rows")
            continue
        path = (options.out or _RESULTS) / f"{stage.topic}.json"
        write_results(
            path, topic=stage.topic, rows=rows, versions=machines[-1]["versions"],
            command=f"python -m benchmarks.gpu --rows FOLDER --only {stage.key}",
            machine=machines[-1]["machine"],
        )  # fmt: skip
        print(f"{stage.key}: {len(rows)} rows in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
