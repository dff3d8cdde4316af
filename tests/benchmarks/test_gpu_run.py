"""The run on a GPU: it names what hangs, crashes or is wrong, loses no row, and goes on later."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from benchmarks.gpu import results
from benchmarks.gpu.__main__ import main
from benchmarks.gpu._graph_peers import Sampler
from benchmarks.gpu._rows import RowFiles, read_rows
from benchmarks.gpu._runner import Run
from benchmarks.gpu._stages import STAGES
from benchmarks.gpu._wheels import unpack_wheels
from benchmarks.results_file import read_results

import fivefold

ROOT = Path(__file__).parents[2]
FAKES = """
import sys, time
from benchmarks.gpu._runner import Run
from benchmarks.gpu._stage import Metric, Part, Stage

class Fake(Stage):
    def command(self, *, tiny):
        return [sys.executable, __file__, self.key]

def run(report, sizes):
    print("half a line of some library", end="", flush=True)
    for value in sizes["values"]:
        report.row("figure", value, case=sizes.get("case", ""))
    time.sleep(sizes.get("seconds", 0))
    if "metric" in sizes:
        report.row(sizes["metric"], 1)

def stage(key, parts, **more):
    names = {"minutes": 1.0, "decides": "?", "topic": f"gpu/{key}", "real": (), "run": run} | more
    figure = Metric(name="figure", unit="s", right=(0, 10), target=2.0)
    parts = [Part(name=name, limit_s=0.6, sizes=sizes) for name, sizes in parts.items()]
    return Fake(key=key, tiny=parts, metrics=[figure], **names)

STAGES = [
    stage("first", {name: {"values": [1, 2, 6]} for name in "abc"}),
    stage("second", {"d": {"values": [float("nan")]}, "e": {"values": [], "metric": "figures"},
                     "f": {"values": []}, "g": {"values": [3]}}),
    stage("third", {"h": {"values": [1]}}, packages=("no_such_package",)),
]
PEERS = stage("peers", {name: {"values": [1]} for name in "uvw"})
for part, packages in zip(PEERS.tiny, (["numpy"], ["no_peer"], ["no_peer or numpy"])):
    object.__setattr__(part, "packages", packages)
SLOW = [stage("slow", {"s": {"values": [1], "seconds": 30}})]
SLOW += [stage("after", {"t": {"values": [1]}})]

if __name__ == "__main__":
    if sys.argv[1] != "run":
        sys.exit(next(s for s in STAGES + SLOW + [PEERS] if s.key == sys.argv[1]).work(tiny=True))
    from benchmarks.gpu import __main__ as command
    command.STAGES = SLOW
    sys.exit(command.main(["--tiny", "--rows", sys.argv[2]]))
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    path = tmp_path / "fakes.py"
    path.write_text(FAKES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    spec = importlib.util.spec_from_file_location("fakes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(stages, folder, *, minutes=1.0, plant=None):
    shown = []
    made = Run(
        stages, folder, minutes=minutes, tiny=True, show=shown.append,
        plant=lambda stage, step: (plant or {}).get(f"{stage} / {step}", ""),
    )  # fmt: skip
    return made.all(), shown


def statuses(folder):
    return {line["step"]: line["status"] for line in read_rows(folder) if line["event"] == "step"}


def figures(folder, step):
    lines = read_rows(folder)
    return [line["value"] for line in lines if line["event"] == "row" and line["step"] == step]


def test_planted_faults_are_named_and_the_rows_before_them_kept(fakes, tmp_path):
    faults = {"first / a": "hang", "first / b": "crash", "first / c": "wrong"}
    good, shown = run(fakes.STAGES, tmp_path / "rows", plant=faults)
    assert not good
    wanted = {"a": "hung", "b": "crashed", "c": "wrong"}  # planted
    wanted |= {"d": "wrong", "e": "wrong", "f": "wrong", "g": "good"}  # NaN, undeclared, silent
    assert statuses(tmp_path / "rows") == wanted
    assert figures(tmp_path / "rows", "a") == figures(tmp_path / "rows", "b") == [1]
    assert figures(tmp_path / "rows", "c") == [11, 2, 6]
    text = "\n".join(shown)
    assert "first / a: hung: no end in 1 s" in text
    assert "first / b: crashed: signal 6" in text
    assert "no metric 'figures' is declared; there are figure" in text
    assert "f said nothing" in text
    assert "third: left out, not installed: no_such_package" in text
    assert shown[-3] == "first: 1 hung, 1 crashed, 1 wrong"
    before = len(read_rows(tmp_path / "rows"))
    good, shown = run(fakes.STAGES, tmp_path / "rows")  # nothing is tried again
    assert not good
    events = [line["event"] for line in read_rows(tmp_path / "rows")[before:]]
    assert events == ["machine", "stage"]


def test_a_peer_that_is_not_installed_is_left_out_by_name_until_it_is(fakes, tmp_path):
    for _ in range(2):
        good, shown = run([fakes.PEERS], tmp_path / "rows")
        assert good
        assert statuses(tmp_path / "rows") == {"u": "good", "v": "left out", "w": "good"}
        assert sum("peers / v: left out: not installed: no_peer" in line for line in shown) == 1
    (counted, *_) = fakes.PEERS.rows([*read_rows(tmp_path / "rows")])
    assert (counted.ours, counted.target, counted.met) == (2, 2, True)
    object.__setattr__(fakes.PEERS.tiny[1], "packages", ["numpy"])
    assert run([fakes.PEERS], tmp_path / "rows")[0]
    assert statuses(tmp_path / "rows")["v"] == "good"


def test_numpys_sampler_draws_in_neighbours_once_each_up_to_the_fan_out():
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 9, 60)
    indptr = np.concatenate([[0], counts.cumsum()])
    rows = [draw.choice(60, count, replace=False) for count in counts]
    sampler = Sampler(indptr, np.concatenate(rows), fanouts=(4, 2), batch_size=7)
    seen, full = [], 0
    for batch in sampler(np.arange(0, 60, 2)):
        nodes = batch.nodes.numpy()
        assert len(set(nodes)) == len(nodes)
        seen += nodes[: batch.num_seeds].tolist()
        frontier = set(nodes[: batch.num_seeds])
        for fanout, edges in zip((4, 2), batch.edges, strict=True):
            sources, targets = nodes[edges.numpy()]
            for target in frontier:
                mine = sources[targets == target]
                assert set(mine) <= set(rows[target])
                assert len(set(mine)) == len(mine) == min(fanout, counts[target])
                full += len(mine) == fanout < counts[target]
            assert set(targets) <= frontier
            frontier = set(sources) - set(nodes[: batch.num_seeds])
    assert sorted(seen) == [*range(0, 60, 2)]
    assert full > 20  # where something was left


def test_a_second_call_goes_on_where_the_first_ended(fakes, tmp_path):
    stages = fakes.SLOW[:1] + fakes.STAGES[:1]
    good, _ = run(fakes.SLOW, tmp_path, minutes=0.4 / 60)
    assert not good
    assert statuses(tmp_path) == {"s": "no time"}  # neither hung nor tried for ever
    with (tmp_path / "rows-000.jsonl").open("a") as file:
        file.write('{"event": "row", "st')  # what is left of a line
    good, _ = run(stages[1:], tmp_path)
    assert good
    assert statuses(tmp_path) == {"s": "no time", "a": "good", "b": "good", "c": "good"}
    assert sorted(path.name for path in tmp_path.glob("rows-*")) == [
        "rows-000.jsonl", "rows-001.jsonl"
    ]  # fmt: skip


def test_a_step_that_ended_whole_runs_is_left_the_third_time(fakes, tmp_path):
    files = RowFiles(tmp_path)
    for _ in range(2):
        files.write({"event": "begin", "stage": "first", "step": "a"})
    files.close()
    _, shown = run(fakes.STAGES[:1], tmp_path)
    assert statuses(tmp_path) == {"b": "good", "c": "good"}
    assert shown[-1] == "first: 1 hung, 2 good"


def test_files_of_rows_stay_small_and_a_broken_one_is_refused(tmp_path):
    files = RowFiles(tmp_path, most_bytes=60)
    lines = [{"event": "row", "value": number} for number in range(7)]
    for line in lines:
        files.write(line)
    files.close()
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("rows-*"))]
    assert len(sizes) > 2
    assert max(sizes) <= 60
    assert read_rows(tmp_path) == lines
    path = tmp_path / "rows-001.jsonl"
    path.write_text("{\n" + path.read_text())
    with pytest.raises(ValueError, match=r"rows-001.jsonl, line 1 is no JSON: '\{'"):
        read_rows(tmp_path)


def test_who_ends_the_run_leaves_rows_and_no_process(fakes, tmp_path):
    rows = tmp_path / "rows"
    with subprocess.Popen([sys.executable, fakes.__file__, "run", str(rows)]) as parent:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s and not (rows.exists() and figures(rows, "s")):
            time.sleep(0.05)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(timeout=60) == 128 + signal.SIGTERM
    assert figures(rows, "s") == [1]
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(fakes.__file__).encode() in words for words in running)


def in_child(fakes, folder, *, code=""):
    """Start the slow stages in a child of its own; ``code`` runs in it first."""
    code = f"import sys; sys.argv = ['fakes', 'run', {str(folder)!r}]\n{code}\n"
    code += f"import runpy; runpy.run_path({str(fakes.__file__)!r}, run_name='__main__')"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def test_a_run_that_is_killed_leaves_its_rows_and_the_next_call_goes_on(fakes, tmp_path):
    rows = tmp_path / "rows"
    with in_child(fakes, rows) as parent:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s and not (rows.exists() and figures(rows, "s")):
            time.sleep(0.05)
        parent.kill()
        parent.wait(timeout=60)
    assert figures(rows, "s") == [1]
    _, shown = run(fakes.SLOW[1:], rows)
    assert statuses(rows) == {"t": "good"}
    assert shown[-1] == "after: 1 good"


FULL = """
import errno, os
flush, count = os.fsync, []
def full(handle):
    count.append(handle)
    if len(count) > 3:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    flush(handle)
os.fsync = full
"""


def test_a_full_disk_ends_the_run_with_a_message_and_no_process(fakes, tmp_path):
    rows = tmp_path / "rows"
    with in_child(fakes, rows, code=FULL) as parent:
        assert parent.wait(timeout=120) == 1
        said = parent.stderr.read()
    assert said.startswith("error: [Errno 28] No space left on device\nhint: rows that are written")
    assert [line["event"] for line in read_rows(rows)][:3] == ["machine", "begin", "row"]
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(fakes.__file__).encode() in words for words in running)


def test_what_is_cut_at_any_byte_is_read_again(tmp_path):
    files = RowFiles(tmp_path / "whole")
    lines = [{"event": "row", "case": "ä", "value": number} for number in range(3)]
    for line in lines:
        files.write(line)
    files.close()
    whole = (tmp_path / "whole" / "rows-000.jsonl").read_bytes()
    for size in range(len(whole)):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "rows-000.jsonl").write_bytes(whole[:size])
        kept = whole[:size].count(b"\n") + (whole[size : size + 1] == b"\n")
        assert read_rows(folder) == lines[:kept]


def test_minutes_that_are_too_few_for_a_step_leave_it_for_the_next_call(fakes, tmp_path):
    good, shown = run(fakes.STAGES[:1], tmp_path, minutes=0.001)
    assert not good
    assert "not yet" in shown[-1]
    assert set(statuses(tmp_path).values()) <= {"no time", "good"}  # the clock is no fault of it
    assert run(fakes.STAGES[:1], tmp_path)[0]


def test_a_checkout_that_is_not_installed_says_so(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert fivefold.__version__ == "not installed"


def test_wheels_are_unpacked_for_what_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ValueError, match="has no wheels"):
        unpack_wheels(tmp_path)
    for name in ("carried-1.0-py3-none-any.whl", "numpy-0.1-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"{name.split('-')[0]}/__init__.py", "HERE = 7\n")
    assert unpack_wheels(tmp_path) == ["carried-1.0-py3-none-any.whl"]  # numpy is installed
    assert unpack_wheels(tmp_path) == ["carried-1.0-py3-none-any.whl"]
    code = "import carried, numpy; print(carried.HERE, numpy.__version__ > '1')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout == "7 True\n"
    (tmp_path / "other-1.0-cp38-cp38-linux_x86_64.whl").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"other-1.0-cp38.* is of another Python than this one, 3"):
        unpack_wheels(tmp_path)
    (tmp_path / "other-1.0-cp38-cp38-linux_x86_64.whl").rename(tmp_path / "o-1-py3-none-any.whl")
    with pytest.raises(ValueError, match=r"o-1-py3-none-any.whl is damaged"):
        unpack_wheels(tmp_path)


def test_results_are_made_of_the_rows(fakes, tmp_path, monkeypatch, capsys):
    assert results.main([str(tmp_path / "rows")]) == 1
    assert "has no rows of a run" in capsys.readouterr().err
    run(fakes.STAGES[:1], tmp_path / "rows", plant={"first / b": "crash"})
    monkeypatch.setattr(results, "STAGES", fakes.STAGES)
    assert results.main([str(tmp_path / "rows")]) == 1  # never among those of a GPU
    assert "of a tiny run on a processor" in capsys.readouterr().err
    assert results.main([str(tmp_path / "rows"), "--out", str(tmp_path)]) == 0
    found = read_results(tmp_path / "gpu" / "first.json")
    by_case = {(row.case, row.metric): row for row in found.rows}
    right = by_case["first", "steps that were right"]
    assert (right.ours, right.target, right.met) == (2, 3, False)
    figure = by_case["a", "figure"]
    assert (figure.ours, figure.spread, figure.met) == (2, (1, 6), True)
    assert by_case["b", "figure"].spread == (1, 1)  # of the crash: what there was
    assert found.versions["GPU"].startswith("none")
    lines = [line for line in read_rows(tmp_path / "rows") if line["event"] == "machine"]
    lines[0]["versions"]["GPU"] = "another"
    files = RowFiles(tmp_path / "rows")
    files.write(lines[0])
    files.close()
    assert results.main([str(tmp_path / "rows"), "--out", str(tmp_path)]) == 1
    assert "of several GPUs: another, none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "train", "--rows", "x"], "there is no stage 'train'"),
        ([], "--rows None"),
        (["--rows", "x", "--minutes", "0"], "--minutes 0.0"),
        (["--rows", "/proc/rows"], "error: [Errno 2] No such file or directory: '/proc/rows'"),
        (["--rows", "x", "--wheels", "none"], "error: none has no wheels"),
        (["--rows", "x", "--plant", "slow:training"], "--plant 'slow:training'"),
    ],
)
def test_what_cannot_be_run_is_refused(words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(words) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "\nhint: " in said
    assert not list(tmp_path.iterdir())


def test_the_plan_has_a_line_for_each_stage_and_fits(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["--plan", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [record["stage"] for record in table] == [stage.key for stage in STAGES]
    assert sum(record["minutes"] for record in table) <= 28
    assert len({record["results"] for record in table}) == len(table)
    assert main(["--plan"]) == 0
    shown = capsys.readouterr().out
    assert all(record["decides"] in shown for record in table)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.metrics], ids=lambda s: s.key)
def test_a_stage_can_be_wrong_and_its_steps_are_told_apart(stage):
    assert any(metric.right for metric in stage.metrics)
    for tiny in (False, True):
        names = [rung.name for rung in stage.rungs(tiny=tiny)]
        assert len(set(names)) == len(names) > 0
        assert all(part.sizes for part in stage.parts(tiny=tiny))
    devices = {part.sizes.get("device") for part in stage.real}
    assert devices <= {"cuda", None}
    # A call may be ten minutes long.
    assert all(rung.limit_s <= 540 for rung in stage.rungs(tiny=False))


def command(*words, timeout_s=3000):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("fault", "status"), [("hang", "hung"), ("crash", "crashed"), ("wrong", "wrong")]
)
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.key)
def test_every_stage_names_a_planted_fault_and_goes_on(stage, fault, status, tmp_path):
    rungs = stage.rungs(tiny=True)
    first, *others = [rungs[number] for number in stage.order(rungs, tiny=True)]
    done = command("--tiny", "--rows", str(tmp_path), "--only", stage.key, "--plant",
                   f"{fault}:{stage.key} / {first.name}", "--minutes", "50",
                   "--step-s", "120")  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    found = statuses(tmp_path)
    assert found.pop(first.name) == status
    assert found == {each.name: "left out" if each.absent else "good" for each in others}
    if stage.metrics:  # what was said before the fault, or is wrong, is kept
        assert any(line["event"] == "row" for line in read_rows(tmp_path))


GUIDE = ROOT / "docs" / "guides" / "gpu.md"


def commands_of_guide():
    blocks = re.findall(r"```console\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("$ python -m benchmarks.gpu") for line in lines)
    return [shlex.split(line)[2:] for line in lines]


def test_the_guides_command_lines_are_understood(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", [*sys.path])
    runs = [words[2:] for words in commands_of_guide() if words[1] == "benchmarks.gpu"]
    for words in runs:
        assert main([*words, "--plan"]) == 0
    assert capsys.readouterr().out.count("together") == len(runs) == 4
    planted = [word for words in runs for word in words if word.startswith("hang:")]
    steps = [f"{s.key} / {rung.name}" for s in STAGES for rung in s.rungs(tiny=True)]
    assert sum(word.removeprefix("hang:") in step for word in planted for step in steps) == 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_guide_runs_as_printed_with_the_gpus_command_in_its_tiny_form(tmp_path):
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "carried-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("carried.py", "")
    codes = []
    for _, module, *words in commands_of_guide():
        more = []
        if "rows" in words:  # those of the GPU, and what is made of them
            more = ["--out", "results"] if module.endswith("results") else ["--tiny"]
        if "--wheels" in words:
            more += ["--only", "quality"]
        done = subprocess.run(
            [sys.executable, "-m", module, *words, *more],
            cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            timeout=3000, check=False,
        )  # fmt: skip
        codes.append((done.returncode, done.stdout + done.stderr))
    assert [code for code, _ in codes] == [0, 0, 0, 3, 0, 0], codes
    assert set(statuses(tmp_path / "rows-dry").values()) == {"good", "left out"}
    assert sorted(statuses(tmp_path / "rows-fault").values()) == ["good", "good", "hung"]
    for stage in STAGES:
        rows = read_results(tmp_path / "results-dry" / f"{stage.topic}.json").rows
        assert all(row.met for row in rows if row.metric == "steps that were right")
        assert len(rows) > 1


def test_the_command_itself_needs_the_standard_library_only(tmp_path):
    missing = ["torch", "numpy", "triton", "pydantic", "pytest"]
    code = f"import runpy, sys; sys.modules |= dict.fromkeys({missing!r})\n"
    code += "sys.argv = ['gpu', '--tiny', '--rows', 'rows']\n"
    code += "runpy.run_module('benchmarks.gpu', run_name='__main__', alter_sys=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    for stage in STAGES:
        assert f"{stage.key}: left out, not installed: " in done.stdout
    events = [line["event"] for line in read_rows(tmp_path / "rows")]
    assert events == ["machine"] + len(STAGES) * ["stage"]
