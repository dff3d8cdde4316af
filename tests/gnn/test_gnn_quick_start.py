"""The commands of the README and the guide do what they say, as they are printed."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from fivefold.cli import main

ROOT = Path(__file__).parents[2]


def commands_of(page, start=""):
    """Commands of the first console block after a heading, without comments."""
    text = (ROOT / page).read_text()
    block = re.search(r"```console\n(.*?)```", text[text.index(start) :], re.DOTALL)[1]
    return [shlex.split(line[2:], comments=True) for line in block.splitlines() if line[:2] == "$ "]


@pytest.mark.slow
@pytest.mark.alone
def test_the_quick_start_runs_as_printed(tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    commands = commands_of("docs/guides/gnn.md", "## Quick start")
    assert [words[:3] for words in commands[:3]] == [
        ["fivefold", "gnn", name] for name in ("generate", "train", "infer")
    ]
    for words in commands:
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
        error = capsys.readouterr().err
        assert not end.value.code, f"{' '.join(words)}: {error}"
    assert (tmp_path / "runs/gnn/report.html").is_file()


def test_the_readme_and_the_example_print_the_same_commands():
    guide = commands_of("docs/guides/gnn.md", "## Quick start")
    text = (ROOT / "README.md").read_text()
    lines = [line[2:] for line in text.splitlines() if line.startswith("$ fivefold gnn ")]
    readme = [shlex.split(line, comments=True) for line in lines]
    assert len(readme) >= 2
    assert all(words in guide for words in readme)
    example = (ROOT / "examples/gnn_train.toml").read_text()
    assert [
        shlex.split(line[1:]) for line in re.findall(r"^#   fivefold.*", example, re.MULTILINE)
    ] == guide
