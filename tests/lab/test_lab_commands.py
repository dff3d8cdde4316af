"""The commands as a user types them, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fivefold.cli import main
from fivefold.lab import probe_capabilities

if TYPE_CHECKING:
    from pathlib import Path


def _lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fivefold", "lab", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60.0,
    )


def test_run_shows_output_and_hands_on_the_exit_code(tmp_path: Path) -> None:
    done = _lab(
        "run", "--rate", "200Mbit/s", "--allow-unshaped", "--log-folder", str(tmp_path / "logs"),
        "--grace", "2s", "--", "sh", "-c", "echo data; exit $((RANK * 5))",
    )  # fmt: skip
    assert done.returncode == 5
    assert done.stdout == "data\n"
    assert "[host1] data" in done.stderr
    assert "rank 1 on host1 failed with exit code 5" in done.stderr
    assert "lab  failed: rank 1 on host1 first" in done.stderr
    assert f"output: {tmp_path / 'logs'}" in done.stderr


def test_the_commands_own_options_are_not_ours() -> None:
    done = _lab("run", "--allow-unshaped", "--hosts", "1", "-q", "--", "ls", "--help")
    assert done.returncode == 0
    assert done.stdout == ""
    assert "lab  ok: 1 rank ended with 0" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (
            ["--rate", "200Mbit", "--", "true"],
            "'200Mbit' is not a rate",
            "write a number with its unit, such as '200 Mbit/s'",
        ),
        (
            ["--loss", "2", "--", "true"],
            "loss must be a probability in [0, 1); got 2.0",
            "one packet in a hundred is 0.01",
        ),
        (
            ["--host-rate", "fast", "--", "true"],
            "--host-rate 'fast' is not HOST=RATE",
            "write for example 1=50Mbit/s",
        ),
        (
            ["--timeout", "soon", "--", "true"],
            "'soon' is not a duration",
            "write a number with its unit, such as '5 ms'",
        ),
        (
            ["--", "no-such-program"],
            "there is no program 'no-such-program'",
            "give its path, or a name that is found on PATH",
        ),
    ],
)
def test_errors_are_two_lines(
    arguments: list[str],
    error: str,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["fivefold", "lab", "run", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (1 if "no-such-program" in arguments else 2)
    assert tuple(capsys.readouterr()) == ("", f"error: {error}\nhint: {hint}\n")


def test_check_says_the_same_in_words_and_in_json() -> None:
    able = probe_capabilities()
    words, data = _lab("check"), _lab("check", "--json")
    assert words.returncode == data.returncode == (1 if able.shaping == "none" else 0)
    read = json.loads(data.stdout)
    assert read["shaping"] == able.shaping
    assert {item["name"]: item["works"] for item in read["items"]} == {
        item.name: item.works for item in able.items
    }
    for item in able.items:
        untried = able.isolation is None and item.name != "namespaces"
        assert item.works or untried or f"{item.name}: {item.reason}" in words.stdout
        assert (item.reason is None) == (item.fix is None) == item.works
    assert f"links can be given: {able.shaping}" in words.stdout


def test_clean_says_that_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert _lab("clean").stdout == "nothing to remove\n"
