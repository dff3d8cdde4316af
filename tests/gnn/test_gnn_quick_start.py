"""The commands of the README and the guide do what they say, as they are printed."""

import re
import shlex
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from fivefold.cli import main

ROOT = Path(__file__).parents[2]


def commands_of(page, start=""):
    """Commands of the first console block after a heading, without comments."""
    text = (ROOT / page).read_text()
    block = re.search(r"```console\n(.*?)```", text[text.index(start) :], re.DOTALL)[1]
    return [shlex.split(line[2:], comments=True) for line in block.splitlines() if line[:2] == "$ "]


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


@pytest.mark.alone
def test_graphs_of_several_types_are_trained_as_printed(tmp_path, monkeypatch, capsys):
    heading = "### Several types of nodes and edges"
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/guides/gnn.md").read_text()
    block = re.search(r"```python\n(.*?)```", text[text.index(heading) :], re.DOTALL)[1]
    with warnings.catch_warnings():  # of deprecations in torch, on import of PyG
        warnings.simplefilter("ignore")
        exec(block, {})  # noqa: S102
    commands = commands_of("docs/guides/gnn.md", heading)
    assert [words[2] for words in commands] == ["ingest", "train", "infer"]
    for words in commands:
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        assert not end.value.code, f"{' '.join(words)}: {shown.err}"
    assert "test accuracy 0." in shown.out
    example = (ROOT / "examples/gnn_typed.toml").read_text()
    assert [
        shlex.split(line[1:]) for line in re.findall(r"^#   fivefold.*", example, re.MULTILINE)
    ] == commands


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
