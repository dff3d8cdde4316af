"""``metrics.jsonl``: what a new and a resumed run find in it, and what is never written."""

import json
import math

import pytest

from fivefold.errors import CheckpointError
from fivefold.runs import MetricsWriter, write_json


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def filled(path):
    writer = MetricsWriter(path, resumed_step=None)
    for step in (2, 4, 6):
        writer.write("train", step=step, loss=1.0 / step)
    writer.close()
    with path.open("ab") as file:
        file.write(b'{"event": "tra')  # killed within a line
    return path


def test_a_new_run_begins_with_an_empty_file(tmp_path):
    path = filled(tmp_path / "run" / "metrics.jsonl")
    MetricsWriter(path, resumed_step=None).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(("step", "kept"), [(1, []), (4, [2, 4]), (5, [2, 4]), (9, [2, 4, 6])])
def test_a_resumed_run_keeps_the_steps_that_it_does_not_do_again(tmp_path, step, kept):
    path = filled(tmp_path / "metrics.jsonl")
    writer = MetricsWriter(path, resumed_step=step)
    writer.write("resume", step=step)
    writer.close()
    assert [line["step"] for line in lines(path)] == [*kept, step]


def test_an_event_is_there_at_once_and_numbers_that_json_lacks_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, resumed_step=None)
    writer.write("train", step=1, loss=math.nan, norms=[math.inf, 2.0], more={"x": -math.inf})
    assert lines(path) == [
        {"event": "train", "step": 1, "loss": None, "norms": [None, 2.0], "more": {"x": None}}
    ]
    writer.close()
    write_json(tmp_path / "result.json", {"loss": math.nan})
    assert json.loads((tmp_path / "result.json").read_text()) == {"loss": None}


def test_a_folder_that_cannot_be_written_is_said_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"write .*metrics\.jsonl: File exists;"):
        MetricsWriter(tmp_path / "file" / "metrics.jsonl", resumed_step=None)
