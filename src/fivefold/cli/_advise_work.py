"""The work of ``fivefold advise``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.cli._options import show
from fivefold.errors import FivefoldError
from fivefold.files import read_json
from fivefold.optim.advise import JobTimes, Option
from fivefold.report.page import DataTable
from fivefold.units import format_bytes, format_duration_s

# Run by Python as it starts. Once torch is loaded it begins to watch; a sitecustomize of the
# machine's own, which this one hides, is run as well.
_SITE = """\
import importlib.util, os, sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module
        def load_and_watch(module):
            load(module)
            from pathlib import Path
            from fivefold.optim.advise import watch
            watch(Path(os.environ["FIVEFOLD_ADVISE_FILE"]),
                  steps=int(os.environ["FIVEFOLD_ADVISE_STEPS"]))
        spec.loader.exec_module = load_and_watch
        return spec

sys.meta_path.insert(0, Finder())
here = os.path.dirname(os.path.abspath(__file__))
others = [each for each in sys.path if os.path.abspath(each) != here]
own = PathFinder.find_spec("sitecustomize", others)
if own is not None and own.loader is not None:
    own.loader.exec_module(importlib.util.module_from_spec(own))
"""
_ENDING_S = 3.0
_WAITING = "of a step is waiting"


def measured_times(command: list[str], steps: int) -> JobTimes:
    with tempfile.TemporaryDirectory(prefix="fivefold-advise-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        found = folder / "times.json"
        path = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {
            "PYTHONPATH": path, "FIVEFOLD_ADVISE_FILE": str(found),
            "FIVEFOLD_ADVISE_STEPS": str(steps),
        }  # fmt: skip
        # Not to standard output, which is the advice's.
        code = _run_job(command, environment)
        if not found.exists():
            raise FivefoldError(
                f"the job ended with exit code {code} before {steps} steps were measured on rank 0",
                hint="it must take steps with a torch.optim optimizer; on other machines than "
                "rank 0's nothing is printed; fewer steps: --steps",
            )
        record = read_json(found)
    if "error" in record:
        raise FivefoldError(record["error"], hint=record["hint"])
    lists = {name: tuple(value) for name, value in record.items() if isinstance(value, list)}
    return JobTimes(**(record | lists))


def _run_job(command: list[str], environment: Mapping[str, str]) -> int:
    job = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    try:
        return job.wait()
    except KeyboardInterrupt:
        # It was pressed for the job too, whose launcher ends its workers: killed at once, as
        # subprocess.run does, it would leave them behind. They may be stuck in an all-reduce.
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            job.wait(_ENDING_S)
        for process in [*_below(job.pid), job.pid] if job.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        raise


def _below(process: int) -> Iterator[int]:
    for file in Path("/proc").glob(f"{process}/task/*/children"):
        for child in map(int, file.read_text(encoding="ascii").split()):
            yield from (*_below(child), child)


def show_options(times: JobTimes, options: list[Option]) -> None:
    rows = tuple(
        (
            f"{'-> ' if one.recommended else '   '}{one.rule or 'as it is'}", one.codec,
            format_duration_s(one.step_s), f"{times.step_s / one.step_s:.2f}",
        )
        for one in options
    )  # fmt: skip
    title = "what a step would take (predicted but for the first)"
    table = DataTable.of((title, "codec", "step", "times as fast"), rows, text_columns=(1,))
    show(_summary(times), table, *_words(next(one for one in options if one.recommended)))


def _summary(times: JobTimes) -> str:
    sent, took = times.sizes_bytes[-1], times.all_reduce_s[-1]
    step = f"{times.ranks} ranks, {format_duration_s(times.step_s)} a step"
    if times.compute_s is not None:
        waits = 1.0 - times.alone_s / times.step_s
        step += (
            f", {format_duration_s(times.alone_s)} without the all-reduce: {waits:.0%} {_WAITING}"
        )
    else:
        step += " (no DDP was found: communication inside it counts as compute)"
    return f"{step}\nan all-reduce of {format_bytes(sent)} takes {format_duration_s(took)}"


def _words(chosen: Option) -> Any:
    if not chosen.rule:
        yield "stay with what you have: a rule that hides the rest would learn less per token"
        return
    yield "take DDP away and write:"
    yield "    from fivefold.optim import DelayCorrected, OuterSync"
    codec = "" if chosen.codec == "fp32" else f', codec="{chosen.codec}"'
    yield f"    sync = OuterSync(model, optimizer, rule={chosen.rule}{codec})"
    yield "    ...  # sync.step() after each optimizer.step(), sync.finalize() at the end"
    yield (
        "local steps learn less per token than DDP: docs/guides/which_rule_when.md has how much. "
        "DelayedGradients is the closest to DDP with Muon, and the farthest with AdamW"
    )
