"""The tests on a GPU, each with its message: those that fail are to be understood afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu._stage import Metric, Part, Report, Stage

__all__ = ["TESTS"]

_ROOT = Path(__file__).parents[2]
_FAILED = "failed"
_KEPT = 6000  # characters of a message, from its end
# Those of the engine first, and those whose process touches the GPU itself last.
_FILES = (
    *("tests/gpu/test_outer_sync_cuda.py", "tests/gpu/test_outer_sync_order.py"),
    *("tests/gpu/test_train_cuda.py", "tests/gpu/test_gnn_cuda.py"),
    *("tests/moe/test_backward_on_gpu.py", "tests/moe/test_fused_on_gpu.py"),
    "tests/moe/test_moe_exchange_on_gpu.py",
)


class _Recorder:
    """A plugin that says what became of each test when it ends, not when all have."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.said = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Say a test's outcome."""
        if report.when != "call" and report.outcome == "passed":
            return
        message = report.longreprtext[-_KEPT:] if report.failed else ""
        more = {"outcome": report.outcome, "message": message, "seconds": report.duration}
        printed = report.capstdout[-_KEPT:]
        self._report.row(_FAILED, float(report.failed), case=report.nodeid, printed=printed, **more)
        self.said += 1

    def pytest_collectreport(self, report: Any) -> None:
        """Say what could not even be collected."""
        if report.failed:
            message = report.longreprtext[-_KEPT:]
            self._report.row(_FAILED, 1.0, case=report.nodeid, outcome="error", message=message)
            self.said += 1


def _run(report: Report, sizes: Mapping[str, Any]) -> None:
    import os  # noqa: PLC0415 - with what follows

    import pytest  # noqa: PLC0415 - may be missing

    os.environ |= sizes.get("environment", {})
    words = ["-m", "", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=sys", "-q"]
    words += ["--rootdir", str(_ROOT), str(_ROOT / sizes["file"])]
    words += ["-k", sizes["only"]] if "only" in sizes else []
    recorder = _Recorder(report)
    code = pytest.main(words, plugins=[recorder])
    if not recorder.said:
        message = f"pytest ended with exit code {code} and ran nothing"
        raise RuntimeError(message)


TESTS = Stage(
    key="tests",
    minutes=3.0,
    decides="Which tests fail on this GPU, and with which message?",
    topic="gpu/tests",
    run=_run,
    real=[Part(name=name, limit_s=240.0, sizes={"file": name}) for name in _FILES],
    tiny=[
        Part(
            name=_FILES[2],
            limit_s=240.0,
            sizes={
                "file": _FILES[2], "only": "timed",
                "environment": {"FIVEFOLD_GPU_TESTS_ON": "cpu"},
            },
        )
    ],
    metrics=[Metric(name=_FAILED, unit="tests", right=(0.0, 0.0))],
    packages=("numpy", "pydantic", "pytest", "pytest_timeout", "hypothesis"),
    alone=True,
)  # fmt: skip
