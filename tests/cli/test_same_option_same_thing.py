"""An option that several commands have means the same in all; every command answers -h."""

from typing import get_args

import pytest
import typer

from fivefold.cli._main import app
from fivefold.strategy import TARGETS


def commands(command, name="fivefold"):
    below = getattr(command, "commands", {})
    if not below:
        yield name, command
    for word in below:
        yield from commands(below[word], f"{name} {word}")


ALL = dict(commands(typer.main.get_command(app)))


def options(command):
    return {word: found for found in command.params for word in found.opts if word[0] == "-"}


@pytest.mark.parametrize("name", [name for name in ALL if "--output" in options(ALL[name])])
def test_output_is_the_one_thing_that_the_command_makes(name):
    output = options(ALL[name])["--output"]
    assert output.opts == ["--output", "-o"]
    assert output.metavar in {"FILE", "FOLDER"}


def test_what_several_commands_take_has_one_form():
    assert len(ALL) > 30
    takes_value = {}
    for name, command in ALL.items():
        for word, option in options(command).items():
            takes_value.setdefault(word, {}).setdefault(option.is_flag, []).append(name)
    assert {word: kinds for word, kinds in takes_value.items() if len(kinds) > 1} == {}


@pytest.mark.parametrize("name", ALL)
def test_every_command_answers_h(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [*name.split(), "-h"])
    code = app([*name.split()[1:], "-h"], prog_name="fivefold", standalone_mode=False)
    assert code in {0, None}
    assert f"Usage: {name}" in capsys.readouterr().out


def test_a_plan_is_made_for_every_program_that_can_run_one():
    programs = options(ALL["fivefold plan"])["--for"].type_descriptor.annotation
    assert get_args(programs) == TARGETS
