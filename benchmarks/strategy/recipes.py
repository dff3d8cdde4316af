"""Checks the recipes of public repositories: how many are judged, and that those that run pass.

The recipes are copies that somebody makes of the repositories; nothing of theirs lies here. Those
of Megatron-LM's functional tests run as shipped, every day, on nodes of eight GPUs: a verdict that
one is invalid or does not fit is false. Of all folders it is counted how many get a verdict.

    python -m benchmarks.strategy.recipes megatron-lm=FOLDER nemo-rl=FOLDER ...
"""

from __future__ import annotations

import argparse
import collections
import re
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, write_results
from fivefold.strategy import load_cluster
from fivefold.strategy.recipes import RecipeVerdict, check_recipes

RESULTS = Path(__file__).parents[1] / "results" / "strategy" / "recipes.json"
RUN_AS_SHIPPED = "tests/functional_tests/test_cases"
CLUSTERS = {"primus": "mi300x-primus"}  # others are H100's
TUNED = ("megatron-lm", "nemo-launcher", "automodel", "primus", "nemo-rl")  # looked at before
REASONS = 6  # that are shown of a folder
JUDGED = ("ok", "invalid", "memory", "unknown")


def note(text: str) -> None:
    """Say how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def reason_of(verdict: RecipeVerdict) -> str:
    """Why a verdict is unknown, without the names and numbers of the recipe."""
    if verdict.reading.decisive():
        return "what was assumed or left out could turn the verdict over"
    plain = re.sub(r"'[^']*'|\d[\d.,]*|\$\S+", "...", verdict.message)
    return re.sub(r"\s+", " ", plain)[:80]


def rows_of(name: str, folder: Path, found: list[RecipeVerdict]) -> Iterator[BenchmarkRow]:
    """Counts of a folder, and why some of its recipes are unknown."""
    counts = collections.Counter(str(one.status) for one in found)
    judged = sum(counts[status] for status in JUDGED)
    case = f"{name} ({'tuned on' if name in TUNED else 'judge'})"
    for status, count in sorted(counts.items()):
        yield BenchmarkRow(case=case, metric=status, unit="recipes", ours=count)
    share = 100.0 * counts["unknown"] / max(judged, 1)
    yield BenchmarkRow(
        case=case, metric="share of unknown", unit="%", ours=share, target=40.0, met=share < 40.0
    )
    runs = [one for one in found if RUN_AS_SHIPPED in one.path.relative_to(folder).as_posix()]
    for status in ("invalid", "memory") if runs else ():
        false = sum(one.status == status for one in runs)
        metric = f"false {status}, of {len(runs)} that run as shipped"
        yield BenchmarkRow(
            case=case, metric=metric, unit="recipes", ours=false, target=0, met=not false
        )
    reasons = collections.Counter(reason_of(one) for one in found if one.status == "unknown")
    for reason, count in reasons.most_common(REASONS):
        yield BenchmarkRow(case=case, metric=f"unknown: {reason}", unit="recipes", ours=count)


def main() -> None:
    """Check the folders and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    rows: list[BenchmarkRow] = []
    total = 0
    for word in parser.parse_args().folders:
        name, _, place = word.partition("=")
        folder = Path(place)
        found = list(check_recipes(folder, load_cluster(CLUSTERS.get(name, "h100-nemo"))))
        total += len(found)
        note(f"{name}: {dict(collections.Counter(one.status for one in found))}")
        rows += rows_of(name, folder, found)
    rows.append(BenchmarkRow(case="all folders", metric="recipes", unit="files", ours=total))
    command = "python -m benchmarks.strategy.recipes NAME=FOLDER ..."
    write_results(RESULTS, topic="strategy/recipes", rows=rows, command=command)


if __name__ == "__main__":
    main()
