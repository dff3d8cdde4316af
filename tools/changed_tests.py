"""Find the tests of what was changed: by git, by who imports what, and by what tests take.

python tools/changed_tests.py [--since REV] [--seconds 60] [--run pytest's arguments]

Changed is what git says of the working tree, and where it says nothing, the last commit. A test
file is the nearer to a change the fewer imports lie between; names that a package hands on count
for the file that defines them. The nearest files are taken until what they took when they were
measured (tests/durations.json) fills the time of two processors; the others are counted.
"""

from __future__ import annotations

import argparse
import ast
import functools
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.durations import known_files  # noqa: E402 - its folder is known from here on

ROOTS = ("src", ".", "tests")  # of modules: fivefold, benchmarks and tools, helpers and oracles
PROCESSORS = 2


def main() -> int:
    """Print the test files, or run them."""
    parser = argparse.ArgumentParser(description="Find the tests of what was changed.")
    parser.add_argument("--since", help="revision to compare with")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the tests, about")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="run them, with pytest's arguments")
    options = parser.parse_args()
    changed = _changed(options.since)
    tests = _nearest_first(changed)
    chosen = _that_fit(tests, options.seconds * PROCESSORS)
    for path in chosen:
        print(path)
    left = len(tests) - len(chosen)
    print(f"{len(changed)} changed files, {len(chosen)} test files", end="", file=sys.stderr)
    print(f"; {left} that depend on them are further away" if left else "", file=sys.stderr)
    if options.run is None or not chosen:
        return 0
    command = [sys.executable, "-m", "pytest", "-m", "not nightly", *options.run, *chosen]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def _changed(since: str | None) -> list[str]:
    if since is None:
        since = "HEAD" if _git("status", "--porcelain") else "HEAD~1"
    new = _git("ls-files", "--others", "--exclude-standard")
    return [*dict.fromkeys(_git("diff", "--name-only", since) + new)]


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def _nearest_first(changed: list[str]) -> list[str]:
    """Return the test files that depend on a change, in the order of their distance."""
    users = defaultdict(set)
    sources = [path for root in ("src", "tests", "benchmarks") for path in _sources(root)]
    for path in sources:
        for used in _uses(path):
            users[used].add(path)
    texts = {path: path.read_text() for path in sources if path.name.startswith("test_")}
    far: dict[Path, int] = {}
    for name in changed:
        path = ROOT / name
        if path.suffix == ".py":
            far[path] = 0
        else:  # data and pages: who names them, and the modules beside them
            far |= {test: 1 for test, text in texts.items() if path.name in text}
            far |= dict.fromkeys(path.parent.glob("*.py"), 1)
    waiting = deque(far)
    while waiting:
        path = waiting.popleft()
        for user in users[path]:
            if user not in far:
                far[user] = far[path] + 1
                waiting.append(user)
    found = [path for path in far if path in texts]
    return [str(path.relative_to(ROOT)) for path in sorted(found, key=lambda p: (far[p], p))]


def _that_fit(tests: list[str], seconds: float) -> list[str]:
    known = known_files()
    chosen: list[str] = []
    for path in tests:
        seconds -= known.get(path, {}).get("processor_s", 1.0)
        if seconds < 0 and chosen:
            break
        chosen.append(path)
    return chosen


def _sources(root: str) -> Iterator[Path]:
    return (ROOT / root).rglob("*.py")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _uses(path: Path) -> set[Path]:
    """Return the files whose names a file imports."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {_file(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {_definer(node.module, alias.name) for alias in node.names}
    conftests = [folder / "conftest.py" for folder in path.parents] if "tests" in path.parts else []
    return {file for file in found if file} | {file for file in conftests if file.exists()}


@functools.cache
def _file(module: str) -> Path | None:
    for root in ROOTS:
        path = (ROOT / root).resolve() / module.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file
    return None


@functools.cache
def _definer(module: str, name: str) -> Path | None:
    """Return the file that defines what a module hands on under a name."""
    if (submodule := _file(f"{module}.{name}")) is not None:
        return submodule
    file = _file(module)
    if file is None or file.name != "__init__.py":
        return file
    for node in _tree(file).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definer(node.module, alias.name)
    return file


if __name__ == "__main__":
    sys.exit(main())
