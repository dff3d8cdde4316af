"""The text form: the same figures, plain where there is no terminal."""

from __future__ import annotations

import io
import subprocess
import sys

from rich.console import Console

from fivefold.report import build_report, print_page, report_text


def _plain(path):
    file = io.StringIO()
    print_page(report_text(build_report([path])), file=file)
    return file.getvalue()


def test_plain_text_has_no_escape_codes_and_no_boxes(comparison):
    text = _plain(comparison)
    assert "\x1b" not in text
    assert not set("│─┃━╇") & set(text)


def test_table_rows_hold_the_hand_computed_figures(comparison):
    lines = _plain(comparison).splitlines()
    ddp = next(line for line in lines if line.startswith("DDP "))
    assert ddp.split() == (
        "DDP 2,731 1.00x 33 % 64 % 20 % 12.6 MB 2.000 3.240 50 s 50 s".split()  # noqa: SIM905 - as read
    )


def test_bars_are_proportional(comparison):
    lines = _plain(comparison).splitlines()
    bar = next(line for line in lines if line.startswith("DDP") and "CCC" in line)
    # 60 characters for 50 s: 16 s of computation, 32 s of waiting, 2 s of validation
    assert (bar.count("C"), bar.count("w"), bar.count("v")) == (19, 39, 2)


def test_setting_notes_and_caveats_are_printed(tmp_path, make_run):
    lab = {"hosts": 2, "shaped": False, "reason": "no [red] namespaces"}
    make_run(tmp_path / "co2", "co2", lab=lab, finished=False)
    text = _plain(tmp_path)
    assert "! Unshaped: no [red] namespaces." in text
    assert "NOT SHAPED (no [red] namespaces)" in text
    assert "note: CO2 (tau 8): no result" in text
    assert "CO2 (tau 8) (unfinished)" in text


def test_a_terminal_gets_colours(comparison, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    file = io.StringIO()
    assert Console(file=file).is_terminal  # what the variable is for
    print_page(report_text(build_report([comparison])), file=file)
    assert "\x1b[" in file.getvalue()
    assert "█" in file.getvalue()


def test_importing_the_room_loads_no_heavy_package():
    heavy = {"torch", "numpy", "matplotlib", "typer"}
    code = f"import sys, fivefold.report; sys.exit(str({heavy} & set(sys.modules) or ''))"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert answer.stderr.strip() == ""
