"""``fivefold report`` as a shell sees it."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from fivefold.cli._report import report_command
from fivefold.errors import DataError


@pytest.fixture
def call():
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("report")(report_command)
    app.callback()(lambda: None)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_report_prints_and_writes_one_page_and_a_timeline_per_run(call, comparison):
    answer = call("report", comparison)
    assert answer.exit_code == 0
    assert answer.stdout.startswith("CO2 (tau 8) trained 2.82x as fast as DDP")
    written = sorted(path.relative_to(comparison) for path in comparison.rglob("*.html"))
    assert [str(path) for path in written] == ["report.html"]
    assert len(list(comparison.rglob("timeline.json"))) == 3
    assert "report.html" in answer.stderr


def test_report_of_several_folders_goes_above_them(call, comparison):
    call("report", comparison / "ddp", comparison / "co2")
    assert (comparison / "report.html").exists()


def test_json_goes_to_stdout_alone(call, comparison):
    answer = call("report", "--json", "--no-html", comparison)
    assert len(json.loads(answer.stdout)["runs"]) == 3
    assert not list(comparison.rglob("*.html"))
    assert not list(comparison.rglob("timeline.json"))


def test_output_names_the_page(call, comparison, tmp_path):
    call("report", comparison / "co2", "--output", tmp_path / "x.html")
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({"plan.toml": "[plan]", "mesh.json": "{}"}, "fivefold plan JOB"),
        ({"plan.json": "{}", "decisions.jsonl": ""}, "fivefold simulate JOBS"),
        ({"any.json": '{"schema": "fivefold.codesign.order/2"}'}, "fivefold simulate JOBS"),
        ({"ring.json": '{"schema": "fivefold.schedule.1"}'}, "fivefold collectives synthesize"),
        (
            {
                "a.json": '{"schema": "fivefold.schedule.1"}',
                "b.json": '{"schema": "fivefold.codesign/1"}',
            },
            "fivefold collectives synthesize",
        ),
        ({"other.json": "{}", "notes.txt": ""}, "'fivefold train' and 'make demo' write it"),
    ],
)
def test_what_other_commands_wrote_is_told_apart(call, tmp_path, files, command):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    error = call("report", tmp_path).exception
    assert isinstance(error, DataError)
    assert command in error.hint


def test_a_plans_file_is_told_apart_too(call, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text('{"schema": "fivefold.codesign/1"}')
    assert "--report FILE.html" in call("report", file).exception.hint
