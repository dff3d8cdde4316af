"""What a failed command says and returns: two lines and 1, 2 or 3, whatever went wrong."""

from __future__ import annotations

import errno
import sys

import pytest

import fivefold.cli._main as entry
from fivefold.errors import ConfigurationError, InfeasibleError


@pytest.fixture
def shell(monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fivefold", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            entry.main()
        seen = capsys.readouterr()
        return ended.value.code, seen.out, seen.err

    return call


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (("plann",), "no such command 'plann'. Did you mean 'plan'?", "fivefold --help"),
        (("plan",), "missing argument 'job'", "fivefold plan --help"),
        (("plan", "nothere.toml", "--cluster", "x"), "does not exist", "fivefold plan"),
        (("topology", "show", "ring:4", "--jsn"), "no such option: --jsn", "topology show"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_the_users_error_and_not_an_infeasible_request(
    shell, words, said, hint
):
    code, out, err = shell(*words)
    assert code == 1
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert second.startswith("hint: see ")
    assert hint in second


def test_a_group_without_a_command_shows_its_commands(shell):
    code, out, err = shell("topology")
    assert code == 1
    assert "convert" in out + err
    assert "error:" not in err


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_what_was_asked_for_is_no_error(shell, flag):
    assert shell(flag)[0] == 0


def _raising(monkeypatch, error):
    def app(**_):
        raise error

    monkeypatch.setattr(entry, "app", app)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigurationError("tau is 0", hint="use 1"), 1, ["error: tau is 0", "hint: use 1"]),
        (InfeasibleError("too large"), 2, ["error: too large", "hint: see fivefold --help"]),
        (ConfigurationError("a\nb \x1b[2J", hint="c\n d"), 1, ["error: a b  [2J", "hint: c d"]),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), 1,
         ["error: /a: Permission denied", "hint: check the path and its permissions"]),
        (OSError(errno.ENOSPC, "No space left on device"), 1,
         ["error: No space left on device",
          "hint: free space there, then run the same command again"]),
        (OSError(errno.EIO, "Input/output error"), 3,
         ["error: internal error: OSError: [Errno 5] Input/output error",
          "hint: run again with --debug for the traceback, and report it"]),
        (ZeroDivisionError("oh"), 3,
         ["error: internal error: ZeroDivisionError: oh",
          "hint: run again with --debug for the traceback, and report it"]),
    ],
)  # fmt: skip
def test_every_error_has_its_code_and_two_lines(shell, monkeypatch, error, code, words):
    _raising(monkeypatch, error)
    got, out, err = shell()
    assert (got, out, err.splitlines()) == (code, "", words)


def test_ctrl_c_ends_with_130_and_says_nothing(shell, monkeypatch):
    _raising(monkeypatch, KeyboardInterrupt())
    assert shell() == (130, "", "")


def test_debug_shows_where(shell, monkeypatch):
    _raising(monkeypatch, ConfigurationError("tau is 0"))
    with pytest.raises(ConfigurationError):
        shell("--debug")


def test_an_exit_code_of_a_command_is_kept(shell, monkeypatch):
    monkeypatch.setattr(entry, "app", lambda **_: 124)
    assert shell()[0] == 124
