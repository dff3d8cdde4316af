"""Lists the benchmarks with the rows that they last wrote: ``python -m benchmarks [WORD]``."""

from __future__ import annotations

import argparse
import ast
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results_file import BenchmarkResults, BenchmarkRow, read_results


@dataclass(frozen=True, slots=True)
class Topic:
    """A benchmark: ``optim/peers``, the first line of its docstring, its newest results."""

    name: str
    purpose: str
    results: BenchmarkResults | None

    def lines(self) -> list[str]:
        """Say what it measures, how to run it, and what it found."""
        command = f"python -m benchmarks.{self.name.replace('/', '.')}"
        lines = [f"{self.name}: {self.purpose}", f"  {command}"]
        if self.results is None:
            return [*lines, "  no results yet"]
        lines.append(f"  {self.results.date}, commit {(self.results.commit or 'unknown')[:12]}")
        return [*lines, *(f"  {_row(row)}" for row in self.results.rows)]


def find_topics(folder: Path) -> list[Topic]:
    """List the scripts of a benchmarks folder by name; what begins with ``_`` is no topic.

    A folder with a ``__main__.py`` is one command, with the newest results of any of its topics.
    """
    written = [read_results(path) for path in sorted((folder / "results").rglob("*.json"))]
    topics = []
    for script in sorted(folder.glob("*/*.py")):
        whole = script.with_name("__main__.py")
        if script != whole and (script.name.startswith("_") or whole.exists()):
            continue
        path = script.parent if script == whole else script.with_suffix("")
        name = path.relative_to(folder).as_posix()
        own = [each for each in written if each.topic == name or each.topic.startswith(f"{name}/")]
        newest = max(own, key=lambda results: results.date, default=None)
        docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
        topics.append(Topic(name, (docstring or "(no description)").splitlines()[0], newest))
    return topics


def _row(row: BenchmarkRow) -> str:
    text = f"{row.case}: {row.metric} {row.ours:.4g} {row.unit}"
    if row.spread is not None:
        text += f" ({row.spread[0]:.4g} to {row.spread[1]:.4g})"
    text += "".join(f", {name} {value:.4g}" for name, value in row.peers.items())
    if row.limit is not None:
        text += f", limit {row.limit:.4g}"
    if row.target is not None:
        text += f", target {row.target:.4g} {'met' if row.met else 'NOT met'}"
    return text


def main() -> None:
    """Print the topics whose names contain a word, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only topics whose name contains it")
    word = parser.parse_args().word
    for topic in find_topics(Path(__file__).parent):
        if word in topic.name:
            print("\n".join(topic.lines()))


if __name__ == "__main__":
    main()
