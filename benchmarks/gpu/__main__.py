"""Measures on one GPU all that the project needs from one, the most valuable first.

Stages run one after another, their steps in children with a limit of time each. What hangs, crashes
or is wrong is named and left; every row is on the disk at once, in files of at most 15 MiB. Another
call with the same folder goes on where the last ended, however it ended: where a machine takes
commands of ten minutes, call it three times with --minutes 9.

    python -m benchmarks.gpu --rows FOLDER --minutes 28 [--wheels FOLDER]
    python -m benchmarks.gpu --plan [--json]             the stages; nothing is run
    python -m benchmarks.gpu --rows FOLDER --tiny        everything, tiny, on a processor
    python -m benchmarks.gpu.results FOLDER              results files of the rows

Exit codes: 0 where all steps are done and were right (a peer that is not installed is left out by
name), 1 for wrong arguments, 3 where not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from benchmarks.gpu._runner import Run, plan_table
from benchmarks.gpu._stage import Stage
from benchmarks.gpu._stages import STAGES
from benchmarks.gpu._wheels import unpack_wheels
from benchmarks.ladder import put_checkout_first

_FAULTS = ("hang", "wrong", "crash")
_HINT = (
    "rows that are written are kept; give --rows a folder with room that may be written, --wheels "
    "one of `pip download --only-binary :all: --python-version` of this Python, and call it again"
)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=28.0, help="all the time there is")
    parser.add_argument("--step-s", type=float, help="longest time of a step, for all of them")
    parser.add_argument("--rows", type=Path, help="folder of the rows")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of what is not installed")
    parser.add_argument("--only", default="", help="only these stages, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a processor")
    parser.add_argument("--plan", action="store_true", help="show the stages and run nothing")
    parser.add_argument("--json", action="store_true", help="--plan as JSON")
    parser.add_argument(
        "--plant", default="", help="KIND:STAGE / STEP: a fault (hang, wrong or crash) in a step"
    )
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    return parser


def _chosen(words: str) -> list[Stage] | str:
    """Return the named stages in their order, or the name that there is not."""
    names = [word.strip() for word in words.split(",") if word.strip()]
    unknown = [name for name in names if name not in {stage.key for stage in STAGES}]
    if unknown:
        return unknown[0]
    return [stage for stage in STAGES if not names or stage.key in names]


def _show_plan(stages: list[Stage], *, as_json: bool) -> None:
    table = plan_table(stages)
    if as_json:
        print(json.dumps(table, indent=2))
        return
    for record in table:
        needs = ", ".join(("torch", *record["needs"]))  # type: ignore[misc]
        print(f"{record['stage']:10}{record['minutes']:5.1f} min  {record['decides']}")
        print(f"{'':21}needs {needs}; {record['results']}")
    print(f"{'together':10}{sum(stage.minutes for stage in stages):5.1f} min")


def _prepare_environment(*, tiny: bool) -> None:
    put_checkout_first()
    os.environ["PYTHONUNBUFFERED"] = "1"
    if tiny:
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def main(words: list[str]) -> int:
    """Parse, and run."""
    parser = _arguments()
    options = parser.parse_args(words)
    _prepare_environment(tiny=options.tiny)
    stages = _chosen(options.work or options.only)
    if isinstance(stages, str):
        known = ", ".join(stage.key for stage in STAGES)
        sys.stderr.write(f"error: there is no stage {stages!r}\nhint: use some of {known}\n")
        return 1
    if options.work:
        return stages[0].work(tiny=options.tiny)
    if options.plan:
        _show_plan(stages, as_json=options.json)
        return 0
    kind = options.plant.partition(":")[0]
    if options.rows is None or options.minutes <= 0 or (options.plant and kind not in _FAULTS):
        sys.stderr.write(
            f"error: --rows {options.rows}, --minutes {options.minutes}, --plant {options.plant!r} "
            "cannot be run\nhint: --rows takes a folder, --minutes more than 0, --plant "
            f"KIND:STAGE / STEP with a KIND of {', '.join(_FAULTS)}; or use --plan\n"
        )
        return 1
    signal.signal(signal.SIGTERM, _end)
    try:
        return _run(stages, options)
    except (OSError, ValueError) as reason:
        sys.stderr.write(f"error: {reason}\nhint: {_HINT}\n")
        return 1


def _run(stages: list[Stage], options: argparse.Namespace) -> int:
    if options.wheels is not None:
        print(f"from wheels: {len(unpack_wheels(options.wheels))} packages", flush=True)
    kind, _, place = options.plant.partition(":")
    run = Run(
        stages,
        options.rows,
        minutes=options.minutes,
        step_s=options.step_s,
        tiny=options.tiny,
        plant=lambda stage, step: kind if place and place in f"{stage} / {step}" else "",
        show=lambda text: print(text, flush=True),
    )
    return 0 if run.all() else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
