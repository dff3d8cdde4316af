"""Scripts beside a test that say what they found in lines of JSON, each run once, in a child.

Triton's interpreter has to be chosen before triton is imported, and compiling needs it left out.
"""

import json
import os
import subprocess
import sys
import time
import traceback
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


def lines_of_cases(script, request):
    """What a script of cases printed, of the cases that this session has chosen, by their names."""
    mine = [item for item in request.session.items if item.path == request.path]
    chosen = [each.callspec.params.get("name") for each in mine if hasattr(each, "callspec")]
    chosen = filter(None, chosen)
    return lines_of(script, *dict.fromkeys(chosen), key="case", interpreted=True)


def run_cases(cases):
    """Run the cases that the command line names, and print a line for each; in the child.

    What the last one says of itself is the names of all, so that none is forgotten unseen.
    """
    for name in sys.argv[1:]:
        began = time.process_time()
        try:
            result = cases[name]()
        except Exception:  # noqa: BLE001 - the parent shows it
            result = {"failed": traceback.format_exc()}
        result |= {"case": name, "cpu_s": round(time.process_time() - began, 2)}
        print(json.dumps(result), flush=True)  # noqa: T201 - read by the parent
    print(json.dumps({"case": "all", "names": [*cases]}))  # noqa: T201 - as above


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
