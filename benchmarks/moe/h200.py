"""Measures the single kernel on a Hopper GPU: builds, checks, then times it against its peers.

First all kernels are compiled, by several processes. Then correctness: all our backends against
float64 on fresh random operands, forward and gradients in bfloat16, float16, TF32 and IEEE float32,
and the bits of repeated calls; where a check fails nothing is timed. Then the machine's own
ceilings (square products, a copy), and every case of ``_h200/_cases.py`` in turns with grouped_mm
pipelines of torch (also compiled), the experts backends of transformers, Liger-Kernel and our own
split backend, as far as they are installed; each call after the caches were written over. Last
compute-sanitizer, where there is one. Made to end within eight minutes; cases that time did not
allow are named. What there is of results lies beside the results file, named .partial.json, until
all is done; a kernel that hangs ends the script, which says where.

    python -m benchmarks.moe.h200                 needs a GPU of compute capability 9.0 or more
    python -m benchmarks.moe.h200 --check-only    the checks alone
    python -m benchmarks.moe.h200 --dry-run --out FILE
                                                  everything once at tiny sizes in Triton's CPU
                                                  interpreter: shows that the script works, and
                                                  says nothing about speed

Exit codes: 0, or 1 for wrong arguments, 2 without a GPU, 3 where a result is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_DEFAULT_BUDGET_S = 450.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check-only", action="store_true", help="correctness, no times")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU; needs --out")
    parser.add_argument("--budget-s", type=float, default=_DEFAULT_BUDGET_S, help="seconds in all")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="results file, ending in .json")
    parser.add_argument("--small-calls", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--build", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Parse, and run."""
    arguments = _arguments()
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler counts launches, and talks
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        if arguments.out is None:
            sys.stderr.write(
                "error: a dry run needs --out FILE\nhint: its numbers are no results\n"
            )
            return 1
    from benchmarks.moe._h200._run import run  # noqa: PLC0415 - loads triton, which looks at the environment

    return run(arguments, ("-m", "benchmarks.moe.h200"))


if __name__ == "__main__":
    sys.exit(main())
