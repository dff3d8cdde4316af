"""Checks the recipes of public repositories: how many are judged, and that those that run pass.

The recipes are copies that somebody makes of the repositories; nothing of theirs lies here. Those
of Megatron-LM's functional tests run as shipped, every day, on nodes of eight GPUs: a verdict that
one is invalid or does not fit is false. Of all folders it is counted how many get a verdict.

    python -m benchmarks.strategy.recipes megatron-lm=FOLDER nemo-rl=FOLDER ... [--judge FOLDER]

With a copy of Megatron-LM its own ``validate_args`` says of each recipe whether it is refused.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.results_file import BenchmarkRow, write_results
from benchmarks.strategy._megatron_judge import Judge, command_of
from fivefold.errors import ConfigurationError
from fivefold.strategy import Cluster, load_cluster
from fivefold.strategy.recipes import RecipeVerdict, check_recipe, check_recipes

RESULTS = Path(__file__).parents[1] / "results" / "strategy" / "recipes.json"
RUN_AS_SHIPPED = "tests/functional_tests/test_cases"
# The GPU that a recipe is for, by words of its path: a cluster, and the bytes of a GPU where it is
# another (data sheets of MI325X and MI355X). Without a word it is an H100, or Primus's MI300X.
HARDWARE = (
    (re.compile(r"mi325x"), "mi300x-primus", 256e9),
    (re.compile(r"mi355x"), "mi300x-primus", 288e9),
    (re.compile(r"mi300x|primus"), "mi300x-primus", None),
    (re.compile(r"^[\w-]*torchtitan.*gb300"), "h100-80gb-torchtitan", 288e9),
    (re.compile(r"^[\w-]*torchtitan.*b200"), "h100-80gb-torchtitan", 180e9),
    (re.compile(r"^[\w-]*torchtitan"), "h100-80gb-torchtitan", None),
    (re.compile(r"gb300"), "gb200-nemo", 288e9), (re.compile(r"gb200|\dn4g"), "gb200-nemo", 186e9),
    (re.compile(r"b200"), "h100-nemo", 180e9), (re.compile(r"h200"), "h100-nemo", 141e9),
    (re.compile(r""), "h100-nemo", None),
)  # fmt: skip
ENDINGS = (".toml", ".yaml", ".yml", ".sh", ".py", ".txt")
TUNED = ("megatron-lm", "nemo-launcher", "automodel", "primus", "nemo-rl")  # looked at before
REASONS = 14  # that are shown of a folder
# Reasons that are of what no reader is for: other programs, other kinds of models.
OTHERS = re.compile(
    r"has no reader here|diffusion|images|another kind|recipe_args|encoder beside|Flux|Wan"
)
JUDGED = ("ok", "invalid", "memory", "unknown")


def note(text: str) -> None:
    """Say how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


@functools.cache
def cluster_of(path: str) -> Cluster:
    """Return the cluster that a recipe is for."""
    found = next(one for one in HARDWARE if one[0].search(path.lower()))
    cluster = load_cluster(found[1])
    if found[2] is None:
        return cluster
    device = dataclasses.replace(cluster.device, memory_bytes=found[2])
    return dataclasses.replace(cluster, device=device)


def verdicts(name: str, folder: Path) -> Iterator[RecipeVerdict]:
    """Yield what is found of a folder's recipes, each on the GPU that it is for."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in ENDINGS and path.is_file():
            where = cluster_of(f"{name}/{path.relative_to(folder).as_posix()}")
            if path.name == "config_registry.py":  # a recipe in each function
                with contextlib.suppress(ConfigurationError):
                    yield from check_recipes(path, where)
            elif (found := check_recipe(path, where)) is not None:
                yield found


def reason_of(verdict: RecipeVerdict) -> str:
    """Why a verdict is unknown, without the names and numbers of the recipe."""
    if decisive := verdict.reading.decisive():
        known = sorted({one.name for one in decisive} & {"GPUs", "sequence length", "tower"})
        if known:
            return f"{' and '.join(known)} could turn the verdict over"
        return "other things assumed or left out could turn the verdict over"
    plain = re.sub(r"'[^']*'|\d[\d.,]*|\$\S+", "...", verdict.message)
    return re.sub(r"\s+", " ", plain)[:80]


def judged_by_megatron(judge: Judge, found: list[RecipeVerdict]) -> dict[Path, str]:
    """Return why Megatron-LM itself refuses a recipe, empty where it does not."""
    said = {}
    for one in found:
        if one.status in {"ok", "memory", "invalid"} and one.program == "megatron":
            flags, environment = command_of(one.path)
            gpus = 8 if one.prediction is None else one.prediction.plan.num_gpus
            said[one.path] = judge.refuses(flags, environment, gpus)
            if bool(said[one.path]) != (one.status == "invalid"):
                note(f"{one.path.parent.name}/{one.path.name}: {one.status}; {said[one.path]}")
    return said


def rows_of_judge(
    case: str, found: list[RecipeVerdict], said: Mapping[Path, str]
) -> Iterator[BenchmarkRow]:
    """Rows of how often a verdict and Megatron-LM's own validation agree."""
    pairs = collections.Counter(
        (one.status == "invalid", bool(said[one.path])) for one in found if one.path in said
    )
    names = {
        (False, False): "both accept",
        (True, True): "both refuse",
        (False, True): "Megatron-LM alone refuses",
        (True, False): "refused here alone",
    }
    for pair, name in names.items():
        alone = pair == (True, False)
        yield BenchmarkRow(
            case=case, metric=f"validate_args: {name}", unit="recipes", ours=pairs[pair],
            target=0 if alone else None, met=not pairs[pair] if alone else None,
        )  # fmt: skip


def rows_of(
    name: str, folder: Path, found: list[RecipeVerdict], said: Mapping[Path, str]
) -> Iterator[BenchmarkRow]:
    """Counts of a folder, and why some of its recipes are unknown.

    A recipe that Megatron-LM's own validation refuses (``said``) is not refused falsely.
    """
    counts = collections.Counter(str(one.status) for one in found)
    judged = sum(counts[status] for status in JUDGED)
    case = f"{name} ({'tuned on' if name in TUNED else 'judge'})"
    for status, count in sorted(counts.items()):
        yield BenchmarkRow(case=case, metric=status, unit="recipes", ours=count)
    share = 100.0 * counts["unknown"] / max(judged, 1)
    yield BenchmarkRow(
        case=case, metric="share of unknown", unit="%", ours=share, target=40.0, met=share < 40.0
    )
    others = sum(one.status == "unknown" and bool(OTHERS.search(one.message)) for one in found)
    own = 100.0 * (counts["unknown"] - others) / max(judged - others, 1)
    metric = f"share of unknown without {others} of other programs and kinds of models"
    yield BenchmarkRow(case=case, metric=metric, unit="%", ours=own)
    runs = [one for one in found if RUN_AS_SHIPPED in one.path.relative_to(folder).as_posix()]
    for status in ("invalid", "memory") if runs else ():
        false = sum(one.status == status and not said.get(one.path) for one in runs)
        metric = f"false {status}, of {len(runs)} that run as shipped"
        yield BenchmarkRow(
            case=case, metric=metric, unit="recipes", ours=false, target=0, met=not false
        )
    if said:
        yield from rows_of_judge(case, found, said)
    reasons = collections.Counter(reason_of(one) for one in found if one.status == "unknown")
    for reason, count in reasons.most_common(REASONS):
        yield BenchmarkRow(case=case, metric=f"unknown: {reason}", unit="recipes", ours=count)


def main() -> None:
    """Check the folders and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--judge", type=Path, help="a copy of Megatron-LM, whose validation judges")
    rows: list[BenchmarkRow] = []
    total = 0
    given = parser.parse_args()
    for word in given.folders:
        name, _, place = word.partition("=")
        folder = Path(place)
        found = list(verdicts(name, folder))
        total += len(found)
        note(f"{name}: {dict(collections.Counter(one.status for one in found))}")
        judge = Judge(given.judge) if given.judge and name == "megatron-lm" else None
        said = {} if judge is None else judged_by_megatron(judge, found)
        rows += rows_of(name, folder, found, said)
    rows.append(BenchmarkRow(case="all folders", metric="recipes", unit="files", ours=total))
    command = "python -m benchmarks.strategy.recipes NAME=FOLDER ..."
    write_results(RESULTS, topic="strategy/recipes", rows=rows, command=command)


if __name__ == "__main__":
    main()
