"""Reading run folders: whole ones, ones still going on, damaged ones."""

from __future__ import annotations

import json

import pytest

from fivefold.errors import DataError
from fivefold.report import read_run, read_runs
from fivefold.report._reader import find_runs


def test_runs_are_found_at_any_depth_and_ordered_by_method(comparison):
    assert [path.name for path in find_runs([comparison.parent])] == ["co2", "ddp", "none"]
    assert [run.name for run in read_runs([comparison])] == ["none", "ddp", "co2"]


def test_a_run_named_twice_is_read_once(comparison):
    assert [run.name for run in read_runs([comparison / "co2", comparison])][-1] == "co2"
    assert len(find_runs([comparison / "co2", comparison])) == 3


def test_runs_with_equal_folder_names_get_longer_ones(tmp_path, make_run):
    for seed in ("seed0", "seed1"):
        make_run(tmp_path / seed / "co2", "co2")
    assert [run.name for run in read_runs([tmp_path])] == ["seed0/co2", "seed1/co2"]


def test_spans_of_all_ranks_lie_on_one_time_axis(comparison):
    run = read_run(comparison / "co2")
    starts = [rank.spans[0].start_s for rank in run.ranks]
    assert starts == [1_790_000_000.0, 1_790_000_000.0]  # though their clocks differ by 37 s


def test_after_a_resume_spans_follow_the_new_clock_line(comparison):
    path = comparison / "co2" / "ranks" / "rank0.jsonl"
    resumed = [
        {"event": "clock", "unix_s": 1_790_000_500.0, "perf_s": 3.0},
        {"event": "span", "lane": "compute", "name": "step 65", "start_s": 4.0, "end_s": 4.5},
    ]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in resumed)
    last = read_run(comparison / "co2").ranks[0].spans[-1]
    assert (last.start_s, last.end_s) == (1_790_000_501.0, 1_790_000_501.5)


def test_an_unfinished_run_is_read_and_said(tmp_path, make_run):
    run = read_run(make_run(tmp_path / "co2", "co2", finished=False))
    assert run.status == "unfinished"
    assert run.result is None
    assert run.notes == ("no result: the run is still going on, or it was killed",)


def test_a_torn_last_line_is_left_out_and_said(comparison):
    path = comparison / "co2" / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"event": "train", "step": 65, "tok')
    run = read_run(comparison / "co2")
    assert run.metrics.train[-1].step == 64
    assert "metrics.jsonl: the last line is torn and was left out" in run.notes


def test_a_torn_line_in_the_middle_is_an_error_that_names_it(comparison):
    path = comparison / "ddp" / "metrics.jsonl"
    path.write_text('{"event": "train", "st\n' + path.read_text())
    with pytest.raises(DataError, match=r"metrics\.jsonl line 1 is not JSON.*damaged"):
        read_run(comparison / "ddp")


def test_missing_files_become_notes(comparison):
    folder = comparison / "co2"
    (folder / "config.toml").unlink()
    (folder / "metrics.jsonl").unlink()
    (folder / "ranks" / "rank1.jsonl").unlink()
    notes = " / ".join(read_run(folder).notes)
    assert "config.toml is missing" in notes
    assert "no metrics yet" in notes
    assert "no timeline of rank 1" in notes


def test_of_many_missing_timelines_a_few_are_named(comparison):
    path = comparison / "co2" / "manifest.json"
    path.write_text(path.read_text().replace('"world_size": 2', '"world_size": 1000000000'))
    notes = " / ".join(read_run(comparison / "co2").notes)
    assert "no timeline of rank 2, 3, 4, 5, 6 and 999,999,993 more" in notes


def test_spans_that_cannot_be_placed_are_counted(comparison):
    path = comparison / "co2" / "ranks" / "rank0.jsonl"
    span = {"event": "span", "lane": "compute", "name": "x", "start_s": 2.0, "end_s": 1.0}
    path.write_text(json.dumps(span) + "\n" + path.read_text() + json.dumps(span) + "\n")
    run = read_run(comparison / "co2")
    assert any(note.startswith("rank 0: 2 spans left out") for note in run.notes)


@pytest.mark.parametrize(
    ("event", "status", "note"),
    [
        ({"event": "end", "step": 40, "tokens": 1, "wall_s": 9, "reason": "stopped"}, "stopped",
         "the run was stopped at step 40, before its end"),
        ({"event": "end", "step": 64, "tokens": 1, "wall_s": 9, "reason": "finished"}, "finished",
         "the run finished, but result.json is missing: fewer figures are known"),
        ({"event": "resume", "step": 32, "wall_s": 5.0, "checkpoint": "step-32"}, "unfinished",
         "resumed from a checkpoint at step 32"),
    ],
)  # fmt: skip
def test_how_a_run_ended_is_said(tmp_path, make_run, event, status, note):
    folder = make_run(tmp_path / "co2", "co2", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    run = read_run(folder)
    assert run.status == status
    assert note in run.notes


def test_a_run_that_was_stopped_and_went_on_is_not_stopped(tmp_path, make_run):
    folder = make_run(tmp_path / "co2", "co2", finished=False)
    stopped = {"event": "end", "step": 40, "tokens": 1, "wall_s": 9, "reason": "stopped"}
    resumed = {"event": "resume", "step": 40, "wall_s": 9.0, "checkpoint": "step-40"}
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (stopped, resumed))
    assert read_run(folder).status == "unfinished"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("manifest.json", "{", r"manifest\.json is not JSON.*hint|damaged"),
        ("manifest.json", '{"schema": 2}', r"schema 2; this fivefold reads schema 1"),
        (
            "manifest.json",
            '{"schema": 1}',
            r"manifest\.json does not fit: fivefold: Field required",
        ),
        ("result.json", "[]", r"result\.json does not fit"),
        ("config.toml", "[run", r"config\.toml is not TOML"),
        ("metrics.jsonl", "3\n", r"line 1 is not an event"),
        ("metrics.jsonl", '{"event": "train"}\n', r"line 1 does not fit: step: Field required"),
        ("ranks/rank0.jsonl", '{"event": "clock"}\n', r"line 1 does not fit: KeyError"),
    ],
)
def test_damage_is_an_error_that_names_the_file(comparison, name, content, message):
    (comparison / "co2" / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_run(comparison / "co2")
    assert caught.value.hint


def test_folders_without_runs_are_errors_with_a_hint(tmp_path):
    with pytest.raises(DataError, match=r"no run found in .*a run's folder holds manifest\.json"):
        find_runs([tmp_path])
    with pytest.raises(DataError, match="does not exist"):
        find_runs([tmp_path / "nothing"])
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a folder"):
        find_runs([tmp_path / "file"])
    with pytest.raises(DataError, match=r"holds no manifest\.json"):
        read_run(tmp_path)


def test_fields_of_a_newer_trainer_are_ignored(comparison):
    path = comparison / "co2" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "blue"}))
    assert read_run(comparison / "co2").manifest.method == "co2"


def test_a_result_that_the_run_outlived_is_not_used(comparison):
    point = {"event": "validation", "step": 80, "tokens": 163_840, "wall_s": 25.0}
    with (comparison / "co2" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "resume", "step": 64, "wall_s": 19.0}) + "\n")
        file.write(json.dumps(point | {"bits_per_byte": 1.8}) + "\n")
    run = read_run(comparison / "co2")
    assert run.result is None
    assert run.status == "unfinished"
    assert "result.json is from step 64; the run went on, so it is not used" in run.notes
