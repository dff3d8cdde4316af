"""Scripts beside a test that say what they found in lines of JSON, each run once, in a child.

Triton's interpreter has to be chosen before triton is imported, and compiling needs it left out.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def environment(*, interpreted):
    """The variables of a child whose kernels are interpreted, or compiled."""
    found = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    found |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return found | {"TRITON_INTERPRET": "1"} if interpreted else found


def lines_of(script, *arguments, key, interpreted, timeout_s=1100, **variables):
    """What a script printed, by the value of a key."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment(interpreted=interpreted) | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {line[key]: line for line in map(json.loads, done.stdout.splitlines())}


def check_case(found, tolerances):
    """What a script's case found: an error within its tolerance, or that it holds, or a refusal.

    ``tolerances`` may have the case's; a string instead must stand in what was refused.
    """
    assert "failed" not in found, found["failed"]
    assert found.get("holds", True)
    wanted = tolerances.get(found["case"], 2e-6)
    if isinstance(wanted, str):
        assert wanted in found["refused"]
    elif "error" in found:
        assert found["error"] < wanted
    else:
        assert "holds" in found
