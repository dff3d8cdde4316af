"""Help shows brackets as they were written: ``[plan]`` is a table of a file, and no style."""

import re

import pytest
import typer

import fivefold.cli._main as entry

TREE = typer.main.get_command(entry.app)


def _commands(command, words=()):
    yield pytest.param(command, id=" ".join(words) or "fivefold")
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, (*words, name))


@pytest.mark.parametrize("command", list(_commands(TREE)))
def test_the_help_of_every_command_shows_its_brackets(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    texts = [command.help, *(getattr(one, "help", None) for one in command.params)]
    raw = " ".join(text for text in texts if text).replace("\\[", "[")
    with command.make_context("x", [], resilient_parsing=True) as context:
        typer.echo(command.get_help(context))
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for written in re.findall(r"\[+/?[A-Za-z_.]+\]+", raw):
        assert written in shown
    assert "\\[" not in shown


def test_plan_names_the_table_that_it_judges(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fivefold", "plan", "--help"])
    with pytest.raises(SystemExit):
        entry.main()
    assert "[plan]" in capsys.readouterr().out


def test_examples_stand_on_lines_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fivefold", "plan", "--help"])
    monkeypatch.setenv("TERMINAL_WIDTH", "120")
    with pytest.raises(SystemExit):
        entry.main()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    examples = [line for line in lines if line.startswith("$ fivefold plan")]
    assert len(examples) == 2
