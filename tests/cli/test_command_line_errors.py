"""What a failed command says and returns: two lines and 1, 2 or 3, whatever went wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

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
        (("plann",), "no such command 'plann'. Did you mean 'plan'", "fivefold --help"),
        (("plan",), "missing argument 'JOB'", "fivefold plan --help"),
        (("plan", "nothere.toml", "--cluster", "x"), "does not exist", "fivefold plan"),
        (("topology", "show", "ring:4", "--jsn"), "no such option: --jsn", "topology show"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_ends_with_2(shell, words, said, hint):
    code, out, err = shell(*words)
    assert code == 2
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert second.startswith("hint: see ")
    assert hint in second


@pytest.mark.parametrize(
    "words",
    [
        ("topology", "show", "nowhere:4"),
        ("topology", "show", "ring:4", "--bandwidth", "50 GP"),
        ("collectives", "synthesize", "all_reduce", "ring:4", "--size", "much"),
        ("collectives", "bench", "all_reduce", "ring:4", "--sizes", "64KB,x"),
        ("collectives", "synthesize", "all_reduce", "ring:4", "--output", "a.txt"),
        ("ablate", "--cluster", "switch:4", "--sizes", "0"),
        ("lab", "run", "--host-class", "0", "--", "true"),
        ("lab", "run", "--timeout", "soon", "--", "true"),
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_a_value_that_an_option_or_argument_does_not_take_ends_with_2(shell, words):
    code, out, err = shell(*words)
    assert (code, out) == (2, "")
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_what_is_wrong_in_a_file_ends_with_1(shell, tmp_path):
    (tmp_path / "topology.toml").write_text("nodes = 3")
    assert shell("topology", "show", tmp_path / "topology.toml")[0] == 1
    (tmp_path / "job.toml").write_text('model = "llama3-8b"\ngpus = 0')
    assert shell("plan", tmp_path / "job.toml", "--cluster", "h100-nemo")[0] == 1


def test_a_request_that_nothing_satisfies_ends_with_3(shell, tmp_path):
    job = 'model = "llama3-70b"\ngpus = 1\nglobal_batch = 1\n'
    (tmp_path / "job.toml").write_text(job)
    code, _, err = shell("plan", tmp_path / "job.toml", "--cluster", "h100-nemo")
    assert code == 3, err


def test_a_group_without_a_command_shows_its_commands(shell):
    code, out, err = shell("topology")
    assert code == 2
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
        (InfeasibleError("too large"), 3, ["error: too large", "hint: see fivefold --help"]),
        (ConfigurationError("a\nb \x1b[2J", hint="c\n d"), 1, ["error: a b  [2J", "hint: c d"]),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), 1,
         ["error: /a: Permission denied", "hint: check the path and its permissions"]),
        (OSError(errno.ENOSPC, "No space left on device"), 1,
         ["error: No space left on device",
          "hint: free space there, then run the same command again"]),
        (OSError(errno.EIO, "Input/output error"), 1,
         ["error: internal error: OSError: [Errno 5] Input/output error",
          "hint: run it as fivefold --debug ... for the traceback, and report it"]),
        (ZeroDivisionError("oh"), 1,
         ["error: internal error: ZeroDivisionError: oh",
          "hint: run it as fivefold --debug ... for the traceback, and report it"]),
    ],
)  # fmt: skip
def test_every_error_has_its_code_and_two_lines(shell, monkeypatch, error, code, words):
    _raising(monkeypatch, error)
    got, out, err = shell()
    assert (got, out, err.splitlines()) == (code, "", words)


@pytest.mark.parametrize(
    "words",
    [
        ("topology", "show", "ring:4"),
        ("topology", "convert", "fully_connected:150"),
        ("topology", "list"),
        ("--help",),
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_a_reader_that_leaves_ends_the_command_without_a_word(words):
    line = [sys.executable, "-c", "from fivefold.cli import main; main()"]
    read, write = os.pipe()
    os.close(read)  # left before the first line
    ended = subprocess.run(
        [*line, *words], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")
    with subprocess.Popen(
        [*line, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline()  # as head -1 does
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) in {0, 1}  # few lines are all written before the reader leaves


def test_a_full_disk_behind_standard_output_is_told():
    line = [sys.executable, "-c", "from fivefold.cli import main; main()", "topology", "list"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert [one.partition(":")[0] for one in ended.stderr.splitlines()] == ["error", "hint"]


def test_ctrl_c_ends_with_130_and_one_line(shell, monkeypatch):
    _raising(monkeypatch, KeyboardInterrupt())
    assert shell() == (130, "", "interrupted\n")


def test_ctrl_c_within_a_command_does_the_same(shell, monkeypatch):
    from fivefold.network.topology import text

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(text, "catalogue", interrupted)
    assert shell("topology", "list") == (130, "", "interrupted\n")


def test_debug_shows_where(shell, monkeypatch):
    _raising(monkeypatch, ConfigurationError("tau is 0"))
    with pytest.raises(ConfigurationError):
        shell("--debug")


def test_an_exit_code_of_a_command_is_kept(shell, monkeypatch):
    monkeypatch.setattr(entry, "app", lambda **_: 124)
    assert shell()[0] == 124
