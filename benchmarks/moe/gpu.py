"""The first ten minutes on a GPU: a ladder of checks and times that always returns something.

A parent that never touches the GPU gives one step after another to a child, with a limit of time
for each. Rungs, in order: the machine; the kernels that count and place, against torch; first
product, second product and combination one by one against float64, with a map of the tiles that are
wrong; the split backend; the single kernel with 1, 2, 16 and 132 programs; 1,000 launches without a
pause; the launches of the backward one by one, and together; one launch for 1, 2 and 4 virtual
ranks; times beside the peers that are installed; a sweep of tiles. A step that is wrong, crashes or
hangs disqualifies its backend in its data type and nothing else. One that hangs says its tickets,
counters and flags, expected and found, before it is ended. Every row is one line of JSON, written
at once. Needs the standard library, torch and triton; not installed peers are left out.

    python -m benchmarks.moe.gpu --rows rows.jsonl
    python -m benchmarks.moe.gpu --build FOLDER        without a GPU: compile the steps' kernels
    python -m benchmarks.moe.gpu --cubins FOLDER       with what was compiled
    python -m benchmarks.moe.gpu --interpret           everything, tiny, in Triton's interpreter:
                                                       shows that it works, says nothing of speed
    python -m benchmarks.moe.gpu --convert rows.jsonl --out benchmarks/results/moe/gpu.json

Exit codes: 0 where all steps were run and right, 1 for wrong arguments, 3 where not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ladder import Limits, climb, put_checkout_first


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="append all lines to this file as well")
    parser.add_argument("--rungs", default="", help="only these, separated by commas")
    parser.add_argument("--only", default="", help="only steps whose name contains this")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--step-s", type=float, help="longest time of a step, for all of them")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--list", action="store_true", help="print the steps' names")
    parser.add_argument("--cubins", type=Path, help="folder of --build")
    parser.add_argument("--build", type=Path, help="compile for sm_90a into this folder, no GPU")
    parser.add_argument("--convert", type=Path, help="rows to make a results file of")
    parser.add_argument("--out", type=Path, help="the results file")
    parser.add_argument(
        "--plant",
        default="",
        help="KIND:TEXT;...: a fault (hang, wrong or crash) in steps that contain TEXT",
    )
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    return parser.parse_args()


def _prepare_environment(arguments: argparse.Namespace) -> None:
    """Before torch and triton are loaded, which look at it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler counts launches, and talks
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")
    put_checkout_first()
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.cubins is not None:
        os.environ["TRITON_CACHE_DIR"] = str(arguments.cubins.resolve())
        os.environ["FIVEFOLD_CUBINS"] = "1"


def _climb(arguments: argparse.Namespace) -> int:
    from benchmarks.moe._gpu._steps import Step, steps_of  # noqa: PLC0415

    rungs = set(filter(None, arguments.rungs.split(",")))
    faults = [fault.partition(":")[::2] for fault in arguments.plant.split(";") if fault]

    def say(line: dict[str, Any]) -> None:
        written = json.dumps(line)
        sys.stdout.write(written + "\n")
        sys.stdout.flush()
        if arguments.rows is not None:
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(written + "\n")

    def chosen(step: Step) -> bool:
        return (not rungs or step.rung in rungs) and arguments.only in step.name

    if not (arguments.interpret or arguments.list):
        _say_gpu(say)
    steps = steps_of(tiny=arguments.interpret)
    unknown = rungs - {step.rung for step in steps}
    if unknown:
        known = ", ".join(dict.fromkeys(step.rung for step in steps))
        sys.stderr.write(f"error: no rung {min(unknown)!r}\nhint: use some of {known}\n")
        return 1
    if arguments.list:
        for step in filter(chosen, steps):
            sys.stdout.write(step.name + "\n")
        return 0
    command = [sys.executable, "-m", "benchmarks.moe.gpu", "--work"]
    command += ["--interpret"] if arguments.interpret else []
    good = climb(
        steps,
        command,
        limits=Limits(budget_s=arguments.budget_s, step_s=arguments.step_s),
        order=[number for number, step in enumerate(steps) if chosen(step)],
        say=say,
        plant=lambda step: next((kind for kind, text in faults if text in step.name), ""),
    )
    return 0 if good else 3


def _say_gpu(say: Callable[[dict[str, Any]], None]) -> None:
    """What the driver says of the GPU, whatever torch and triton can do."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit"]
    try:
        done = subprocess.run(
            [*query, "--format=csv"], capture_output=True, text=True, timeout=20, check=False
        )
        text = (done.stdout or done.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as reason:
        text = f"{type(reason).__name__}: {reason}"
    say({"event": "note", "text": text})


def main() -> int:
    """Parse, and run."""
    arguments = _arguments()
    _prepare_environment(arguments)
    if arguments.convert is not None:
        from benchmarks.moe._gpu._convert import convert  # noqa: PLC0415 - pydantic

        return convert(arguments.convert, arguments.out)
    if arguments.build is not None:
        from benchmarks.moe._gpu._build import build  # noqa: PLC0415 - see above

        return build(arguments.build, arguments.share, arguments.only)
    if arguments.cubins is not None:
        from benchmarks.moe._gpu._build import settle  # noqa: PLC0415 - see above

        settle(arguments.cubins)
    if arguments.work:
        from benchmarks.moe._gpu._steps import work  # noqa: PLC0415 - see above

        return work(tiny=arguments.interpret)
    return _climb(arguments)


if __name__ == "__main__":
    sys.exit(main())
