"""Commands and imports that the pages print exist, with the options that they are given."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from fivefold.cli._main import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "log.md"),
]


def blocks(page, *languages):
    return re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page):
    for block in blocks(page, "console", "sh", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s(?:&&|\||;|--)\s", line[2:] if line[:2] == "$ " else ""):
                words = shlex.split(part, comments=True)
                if "fivefold" in words:
                    own = words[words.index("fivefold") + 1 :]
                    ends = [own.index(word) for word in (">", "2>", "<", "&") if word in own]
                    yield own[: min(ends, default=len(own))]


def require_known(words):
    """Parse a command line without running it; a wrong name or option raises."""
    command = typer.main.get_command(app)
    context = click.Context(command, info_name="fivefold")
    while hasattr(command, "commands"):
        if not words or words[0].startswith("-"):
            return
        name, command, words = command.resolve_command(context, words)
        context = click.Context(command, info_name=name, parent=context)
    command.make_parser(context).parse_args(list(words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_printed_commands_and_imports_exist(page):
    for words in commands(page):
        require_known(words)
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fivefold"):
                module = importlib.import_module(node.module)
                missing = [one.name for one in node.names if not hasattr(module, one.name)]
                assert not missing, (node.module, missing)


def test_a_wrong_option_would_be_seen():
    assert sum(len(list(commands(page))) for page in PAGES) > 60
    with pytest.raises(Exception, match="No such option: --gpuz"):  # typer has a click of its own
        require_known(["plan", "job.toml", "--gpuz", "8"])
