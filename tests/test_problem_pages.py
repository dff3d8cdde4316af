"""The problem pages do what they say, as they are printed, with the files that they ship."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from fivefold.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "problems").glob("*.md"))
LONG = {"advise", "lab", "train", "report"}  # these and what needs their runs: nightly


def commands_of(page):
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line[:2] == "$ "]
    return [shlex.split(line, comments=True) for line in lines]


def is_long(words):
    return bool(LONG & {words[1], *words[2:3]}) or words[-1].startswith("runs/")


def run(words, monkeypatch, capfd):
    assert words[0] == "fivefold"
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    seen = capfd.readouterr()
    assert not ended.value.code, f"{' '.join(words)}: {seen.err}"
    return seen.out + seen.err


@pytest.fixture
def place(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    scripts = str(Path(sys.executable).parent)  # lab run looks for fivefold there
    monkeypatch.setenv("PATH", os.pathsep.join([scripts, os.environ["PATH"]]))


def test_there_are_five():
    assert len(PAGES) == 5
    assert all(commands_of(page) for page in PAGES)
    assert all(len(page.read_text().splitlines()) <= 45 for page in PAGES)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_plans_of_a_page_run_as_printed(page, monkeypatch, capfd):
    for words in commands_of(page):
        if not is_long(words):
            assert run(words, monkeypatch, capfd), words


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.lab
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_whole_pages_run_as_printed(page, monkeypatch, capfd):
    for words in commands_of(page):
        run(words, monkeypatch, capfd)
