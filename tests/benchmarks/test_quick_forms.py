"""Each benchmark's look at itself runs whole, in an empty folder and once more in the same one."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import find_topics

FOLDER = Path(__file__).parents[2] / "benchmarks"
LONGEST_S = 3000.0


def options_of(script):
    """The options that a script's parser takes, as it is written."""
    calls = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Call)]
    made = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    return {name.value for call in made for name in call.args if isinstance(name, ast.Constant)}


TOPICS = [
    topic.name
    for topic in find_topics(FOLDER)
    if (FOLDER / f"{topic.name}.py").exists()  # not a folder that is one command
    and "--quick" in options_of(FOLDER / f"{topic.name}.py")
]


def results():
    """What lies in the folder of results, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in (FOLDER / "results").rglob("*")}


def test_quick_forms_are_found_where_they_are_written():
    scripts = [path for path in FOLDER.glob("*/[!_]*.py") if '"--quick"' in path.read_text()]
    assert sorted(TOPICS) == sorted(path.relative_to(FOLDER).as_posix()[:-3] for path in scripts)
    assert len(TOPICS) > 20


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(2 * LONGEST_S + 60)
@pytest.mark.parametrize("name", TOPICS)
def test_a_quick_form_runs_whole_in_an_empty_folder_and_once_more(name, tmp_path):
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", f"benchmarks.{name.replace('/', '.')}", "--quick"]
    before = results()
    for turn in ("first", "second"):
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )
        assert ended.returncode == 0, f"{turn} run:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    assert results() == before, "a look writes no results"
