"""The GPU benchmark's ladder: it goes on after whatever happens in a step, and names the rung."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.ladder import Limits, Rung, climb
from benchmarks.moe._gpu._cases import KINDS, ROUTINGS, Case, of_kind, timed_cases
from benchmarks.moe._gpu._exact import Exact
from benchmarks.moe._gpu._operands import operands_of

from oracles.experts import expected, relative

ROOT = Path(__file__).parents[2]
CHILD = """
import json, os, sys, time
def say(**line): print(json.dumps(line), flush=True)
print("some warning of a library", flush=True)
say(event="ready")
for line in sys.stdin:
    order = json.loads(line)
    fault = order["fault"]
    if fault == "hang": time.sleep(60)
    if fault == "hang, but says so":
        say(event="control", step="s", words={"tickets taken": {"found": 7, "expected": None}})
        time.sleep(60)
    if fault == "crash":
        print("Segmentation fault here", flush=True); os.abort()
    if fault == "compiles": say(event="compiled", kernel="k"); time.sleep(1.5)
    step, allowed = str(order["step"]), len(order["allowed"])
    say(event="row", step=step, metric="allowed", unit="", value=allowed)
    say(event="end", step="s", good=fault != "wrong", seconds=0.1, problem=None)
"""
RUNGS = "count and place,first product,second product,combine,split,fused,launches,backward"
RUNGS = [*RUNGS.split(","), "whole backward", "exchange", "two ranks"]


def climbed(faults, child=CHILD, **limits):
    """The lines of a ladder whose steps are (backend, kind, fault)."""
    steps = [
        Rung(rung=f"rung {n}", name=f"step {n}", backend=b, kind=k, needs=(b,) if b else ())
        for n, (b, k, _) in enumerate(faults)
    ]
    lines = []
    good = climb(
        steps,
        [sys.executable, "-c", child],
        limits=Limits(**{"budget_s": 60.0, "step_s": 3.0} | limits),
        say=lines.append,
        plant=lambda step: faults[steps.index(step)][2],
    )
    return good, lines


def statuses(lines):
    return [line["status"] for line in lines if line["event"] == "step"]


def test_a_fault_disqualifies_its_backend_in_its_data_type_only():
    began_s = time.monotonic()
    good, lines = climbed(
        [
            ("split", "bf16", ""),
            ("fused", "bf16", "hang"),
            ("fused", "bf16", ""),
            ("fused", "fp16", "crash"),
            ("split", "fp16", "wrong"),
            ("fused", "tf32", ""),
            ("", "bf16", ""),
            ("", "fp16", ""),
            ("backward", "bf16", "hang, but says so"),
        ]
    )
    assert time.monotonic() - began_s < 40
    assert not good
    wanted = ["good", "hung", "skipped", "crashed", "wrong", "good", "good", "good", "hung"]
    assert statuses(lines) == wanted
    by_step = {line["step"]: line for line in lines if line["event"] == "step"}
    assert [by_step[f"step {n}"]["rung"] for n in (1, 3)] == ["rung 1", "rung 3"]
    assert by_step["step 2"]["reason"] == "fused in bf16 is disqualified by: step 1"
    assert "signal 6" in by_step["step 3"]["reason"]
    assert any("Segmentation fault here" in text for text in by_step["step 3"]["tail"])
    allowed = {line["step"]: line["value"] for line in lines if line["event"] == "row"}
    assert [allowed[n] for n in "567"] == [2, 1, 0]  # of fused and split, in that data type
    (control,) = (line for line in lines if line["event"] == "control")
    assert control["words"]["tickets taken"]["found"] == 7
    assert lines[-1]["event"] == "summary"
    assert set(lines[-1]["disqualified"]) == {
        "fused in bf16", "fused in fp16", "split in fp16", "backward in bf16"
    }  # fmt: skip


def test_compiling_is_given_time_and_the_budget_is_kept():
    good, lines = climbed([("fused", "bf16", "compiles"), ("fused", "bf16", "")], step_s=1.0)
    assert good  # the first took longer than that
    assert statuses(lines) == ["good", "good"]
    steps = [("fused", "bf16", "hang")] + 5 * [("split", "bf16", "")]
    _, lines = climbed(steps, budget_s=0.5, step_s=1.0)
    assert statuses(lines) == ["hung"] + 5 * ["no time"]
    assert lines[-2]["reason"] == "the budget of 0 s is used up"


@pytest.mark.parametrize("child", ["import no_such_module", "print(1)", "raise SystemExit(0)"])
def test_a_child_that_does_not_start_is_tried_twice(child):
    good, lines = climbed(4 * [("split", "bf16", "")], child=child)
    assert not good
    assert statuses(lines) == ["not started", "not started", "skipped", "skipped"]
    assert lines[-2]["reason"] == "the child does not start"
    if "module" in child:
        assert "no_such_module" in lines[0]["tail"][-1]


def ladder(*arguments, before="", timeout_s=250):
    pytest.importorskip("triton")
    code = f"{before}\nimport runpy, sys; sys.argv = ['gpu', *{list(arguments)!r}]\n"
    code += "runpy.run_module('benchmarks.moe.gpu', run_name='__main__', alter_sys=True)"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("TRITON_")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
def test_needs_torch_and_triton_only():
    missing = ["pydantic", "rich", "click", "transformers", "safetensors", "scipy", "numba"]
    before = f"import sys; sys.modules |= dict.fromkeys({missing!r})"
    done = ladder("--list", before=before)
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()
    assert len(set(names)) == len(names) > 150
    for programs in (1, 2, 16, 132):
        assert f"fused / bf16 / usual / {programs} programs" in names
    for rung in (*RUNGS, "timing", "timeline", "training", "sweep", "tuned"):
        assert any(name.startswith(rung) for name in names), rung
    assert sum(name.startswith("sweep") for name in names) >= 3 * 16


@pytest.mark.nightly
def test_wrong_arguments_are_refused():
    done = ladder("--rungs", "fuse")
    assert done.returncode == 1
    assert "error: no rung 'fuse'\nhint: use some of machine, count and place" in done.stderr


@pytest.mark.nightly
def test_kernels_one_by_one_in_the_interpreter_with_one_that_is_wrong(tmp_path):
    rows = tmp_path / "rows.jsonl"
    done = ladder(
        "--interpret", "--rungs", "machine,combine,split", "--only", "", "--plant",
        "wrong:combine / fp32 / odd;crash:combine / bf16", "--rows", str(rows), "--budget-s", "45",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert lines == [json.loads(line) for line in done.stdout.splitlines()]
    found = {line["step"]: line["status"] for line in lines if line["event"] == "step"}
    assert found["machine"] == "good"
    assert found["combine / bf16 / usual"] == "crashed"
    assert found["combine / fp16 / usual"] == "good"
    assert found["combine / fp32 / odd sizes"] == "wrong"
    assert found["split / fp32 / usual"] == found["split / bf16 / usual"] == "skipped"
    out = tmp_path / "gpu.json"
    assert ladder("--convert", str(rows), "--out", str(out)).returncode == 0
    results = json.loads(out.read_text())
    assert results["topic"] == "moe/gpu"
    assert any(row["met"] is False for row in results["rows"])


@pytest.mark.nightly
def test_a_timeline_of_tickets_shows_the_phases_in_their_order():
    done = ladder("--interpret", "--rungs", "timeline")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    at = {line["metric"]: line["value"] for line in lines if line["event"] == "row"}
    names = ("chunks counted", "first products", "second products", "tickets")
    shares = [at[f"{name}: all seen at"] for name in names]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1
    assert at["tickets that went back"] == 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", ["hang", "wrong", "crash"])
@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_names_a_planted_fault(rung, fault):
    done = ladder(
        "--interpret", "--rungs", rung, "--only", "usual", "--plant", f"{fault}:{rung}",
        "--step-s", "60", "--budget-s", "600", timeout_s=1200,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    wanted = {"hang": "hung", "wrong": "wrong", "crash": "crashed"}[fault]
    assert steps[0]["status"] == wanted
    assert steps[0]["rung"] == rung
    if fault == "hang" and rung in {"fused", "launches", "exchange"}:
        (control, *_) = (line for line in lines if line["event"] == "control")
        assert any("tickets" in name for name in control["words"])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_everything_once_in_the_interpreter():
    done = ladder("--interpret", "--budget-s", "3000", timeout_s=3500)
    assert done.returncode == 0, done.stdout[-2000:]
    assert set(json.loads(done.stdout.splitlines()[-1])) == {
        *("event", "good", "left out", "disqualified")  # who tunes itself needs a GPU
    }


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_cubins_are_made_without_a_gpu_and_found_again(tmp_path):
    pieces = ["--build", str(tmp_path), "--only", "fused, : T 300, H 512, I 256, E 64, K 4, swiglu"]
    for round_ in range(2):
        done = ladder(*pieces, timeout_s=1500)
        assert done.returncode == 0, done.stderr
        assert "built" in done.stdout
        if round_ == 0:
            seen = {path: path.stat().st_mtime for path in tmp_path.rglob("*.cubin")}
    assert seen
    assert {path: path.stat().st_mtime for path in tmp_path.rglob("*.cubin")} == seen
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".cubin", ".json"}


def test_triton_finds_what_is_left_of_a_folder_that_was_moved(tmp_path):
    pytest.importorskip("triton")
    from benchmarks.moe._gpu._build import settle
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    made, moved = tmp_path / "made", tmp_path / "moved"
    with knobs.cache.scope():
        knobs.cache.dir = str(made)
        cache = FileCacheManager("key")
        files = {name: cache.put("x", name) for name in ("k.ptx", "k.cubin", "k.json")}
        cache.put_group("k.json", files)
        Path(files["k.ptx"]).unlink()
        made.rename(moved)
        settle(moved)
        knobs.cache.dir = str(moved)
        found = FileCacheManager("key").get_group("k.json")
    assert found == {name: str(moved / "key" / name) for name in ("k.cubin", "k.json")}


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu"])
@pytest.mark.parametrize("weight_on_input", [False, True])
def test_what_is_right_is_right(activation, weight_on_input):
    case = Case(
        name="c", tokens=23, hidden=8, inner=12, experts=5, top_k=1 if weight_on_input else 2,
        activation=activation, dtype=torch.float64, biases=True, weight_on_input=weight_on_input,
        routing="dropped",
    )  # fmt: skip
    given = operands_of(case, torch.device("cpu"))
    named = {
        "x": given.x, "w13": given.w13, "w2": given.w2, "topk_ids": given.ids,
        "topk_weights": given.weights, "b13": given.b13, "b2": given.b2,
    }  # fmt: skip
    exact = Exact(case, given)
    wanted = expected(named, activation, weight_on_input=weight_on_input)
    assert relative(exact.out.detach(), wanted.detach()) < 1e-12
    assert torch.allclose(exact.combined(exact.outputs), exact.out)
    tiles = exact.tiles(4)
    assert [first for _, first, _ in tiles[1:]] == [stop for *_, stop in tiles[:-1]]
    assert tiles[-1][2] == len(exact.slot_of_row) == int((given.ids >= 0).sum())


def test_the_cases_are_those_that_were_published():
    cases = timed_cases()
    assert len({str(case) for case in cases}) == len(cases)
    assert {case.routing for case in cases} == set(ROUTINGS)
    by_name = {case.name: case for case in reversed(cases)}
    # Published: 0.275 TFLOP of the paper's shape at 8K tokens; 0.618 and 5.77 of the models.
    paper, qwen, mixtral = (
        by_name[name] for name in ("FlashMoE paper", "Qwen3-30B-A3B", "Mixtral-8x7B")
    )
    assert paper.flops == 4 * 8192 * 2 * 2048 * 2048
    assert [round(case.flops / 1e12, 3) for case in (qwen, mixtral)] == [0.618, 5.772]
    assert qwen.least_bytes(128) == 2 * (3 * 128 * 2048 * 768 + 2 * 8192 * 2048)
    assert {str(of_kind(paper, kind)) for kind in KINDS} > {str(paper)}
    loads = {}
    for routing in ROUTINGS:
        case = replace(qwen, tokens=2000, hidden=16, inner=16, routing=routing)
        given = operands_of(case, torch.device("cpu"))
        assert given.ids.sort(-1).values.diff(dim=-1).min() > 0  # distinct
        assert torch.allclose(given.weights.sum(-1), torch.ones(2000))
        loads[routing] = torch.bincount(given.ids.flatten(), minlength=128).sort().values
    assert loads["balanced"].min() > 80  # 125 each on average
    assert loads["worst"].tolist() == [0] * 120 + [2000] * 8
    assert 1000 < loads["Zipf"].max() < 2000
    assert 0 < loads["Zipf"].min() < 60
