"""The GPU benchmark's script: it runs whole without a GPU, and passes nothing off as results."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def run(*arguments, **environment):
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.moe.h200", *map(str, arguments)],
        cwd=ROOT,
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )


def test_a_dry_run_does_everything_once(tmp_path):
    path = tmp_path / "dry.json"
    done = run("--dry-run", "--out", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["topic"] == "moe/h200, dry run in the interpreter"
    rows = {(row["case"], row["metric"]): row for row in found["rows"]}
    checks = [row for (case, _), row in rows.items() if case.startswith("check, ")]
    assert len(checks) == 2 * 2 * 3  # cases, backends, things compared
    assert all(row["met"] for row in checks)
    metrics = {metric for case, metric in rows if case.startswith("FlashMoE paper")}
    assert {
        "first call, with what was not compiled before",
        "forward",
        "forward, speed",
        "forward, share of the measured product ceiling",
        "forward, share of the measured copy ceiling",
        "forward, launches",
        "forward and backward",
        "forward and backward, speed",
        "workspace",
    } <= metrics
    peers = {peer for row in rows.values() for peer in row["peers"]}
    assert {"split", "torch grouped_mm", "torch grouped_mm, compiled"} <= peers
    if importlib.util.find_spec("transformers") is not None:
        assert {f"transformers {name}" for name in ("eager", "grouped_mm", "batched_mm")} <= peers
    assert {f"products in {kind}" for kind in ("bfloat16", "float16", "tf32", "ieee")} | {
        "copy"
    } == {metric for case, metric in rows if case == "the machine"}
    for row in rows.values():
        assert row["ours"] >= 0


def test_without_a_gpu_it_says_so():
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "error: the kernel cannot run here: " in done.stderr
    assert "--dry-run" in done.stderr
    done = run("--dry-run")
    assert done.returncode == 1
    assert "needs --out FILE" in done.stderr


def test_compiles_every_kernel_once_beforehand(tmp_path):
    from argparse import Namespace

    from benchmarks.moe._h200._build import build, pieces
    from benchmarks.moe._h200._cases import checked_cases, timed_cases

    def constants(case):
        sizes = (case.hidden, case.inner, case.experts, case.top_k, case.activation)
        return *sizes, case.dtype, case.precision

    found = pieces(times=True)
    assert len({constants(piece) for piece in found}) == len(found)
    for case in [*timed_cases(), *checked_cases()]:
        piece = next(piece for piece in found if constants(piece) == constants(case))
        assert piece.backward >= case.backward
    assert len(pieces(times=False)) < len(found)
    script = tmp_path / "script.py"
    script.write_text("import sys; assert sys.argv[1] == '--build'; sys.exit('no compiler here')")
    problems = build([str(script)], Namespace(check_only=True), limit_s=60.0)
    assert problems == ["compiling ended with exit code 1: no compiler here"]
    script.write_text("import time; time.sleep(60)")
    problems = build([str(script)], Namespace(check_only=True), limit_s=0.5)
    assert problems == ["compiling did not end in 0 s; the rest comes later"]


def test_a_check_that_raises_is_a_wrong_result_and_names_the_backend(monkeypatch):
    import torch
    from benchmarks.moe._h200 import _checks
    from benchmarks.moe._h200._cases import Case

    from fivefold.errors import FivefoldError

    def broken(_given):
        message = "out of resources"
        raise RuntimeError(message)

    said = []
    case = Case(name="c", tokens=3, hidden=4, inner=4, experts=2, top_k=1)
    device = torch.device("cpu")
    monkeypatch.setattr(_checks, "variants_of", lambda *_, **__: {"split": broken})
    rows = _checks.check(case, device, repetitions=1, say=said.append)
    assert [row.met for row in rows] == [False]
    assert said[-1].startswith("split in c: ")
    assert said[-1].endswith("RuntimeError: out of resources")
    with pytest.raises(FivefoldError, match="1 of 1 checks failed"):
        _checks.wrong_rows(rows)


def test_what_it_computes_by_itself():
    import torch
    from benchmarks.moe._h200._cases import ROUTINGS, timed_cases
    from benchmarks.moe._h200._checks import wrong_rows
    from benchmarks.moe._h200._operands import operands_of
    from benchmarks.moe._h200._sanitizer import errors_in
    from benchmarks.results_file import BenchmarkRow

    from fivefold.errors import FivefoldError

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
    loads = {}
    for routing in ROUTINGS:
        from dataclasses import replace

        case = replace(qwen, tokens=2000, hidden=16, inner=16, routing=routing)
        given = operands_of(case, torch.device("cpu"))
        assert given.ids.sort(-1).values.diff(dim=-1).min() > 0  # distinct
        assert torch.allclose(given.weights.sum(-1), torch.ones(2000))
        loads[routing] = torch.bincount(given.ids.flatten(), minlength=128).sort().values
    assert loads["balanced"].min() > 80  # 125 each on average
    assert loads["worst"].tolist() == [0] * 120 + [2000] * 8
    assert 1000 < loads["Zipf"].max() < 2000
    assert 0 < loads["Zipf"].min() < 60
    assert errors_in("========= ERROR SUMMARY: 3 errors") == 3
    assert errors_in("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)") == 0
    assert errors_in("nothing") is None
    row = BenchmarkRow(case="c", metric="m", unit="ratio", ours=1.0, target=0.1, met=False)
    with pytest.raises(FivefoldError, match="1 of 1 checks failed; the first: c, m is 1"):
        wrong_rows([row])
