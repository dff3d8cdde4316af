"""Programs as a person runs them, forked from a process that has made their imports already.

A fresh interpreter spends seconds on ``import torch`` and what the first optimizer loads. Here one
process executes a program's own import statements, once, and each run is a fork of it, with files,
an exit code and exit functions of its own. Only modules are not taken apart at its end, which costs
another second, and what a script has made only where that is asked for.
"""

from __future__ import annotations

import ast
import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

_IMPORT = ast.Import | ast.ImportFrom
_TIMEOUT_S = 240.0


class Done(NamedTuple):
    """What a program ended with; a negative code is the signal that ended it."""

    code: int
    out: str
    err: str


class Forker:
    """The process that forks programs; ends with the ``with`` block."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", __file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, script: Path, folder: Path) -> Done:
        """Run a script in a folder, and say how it ended."""
        return self._run(script, folder, [{}])[0]

    def run_ranks(self, script: Path, folder: Path, *, destroys: bool = True) -> list[Done]:
        """Run a script in two ranks, as an agent of torchrun does, whose store outlives both.

        ``destroys`` says whether the script's objects are destroyed before the process ends.
        """
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        world |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        places = [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        return self._run(script, folder, places, destroys=destroys)

    def _run(
        self,
        script: Path,
        folder: Path,
        environments: list[dict[str, str]],
        *,
        destroys: bool = True,
    ) -> list[Done]:
        request = {"script": str(script), "folder": str(folder), "destroys": destroys}
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        print(json.dumps(request | {"environments": environments}), file=self._process.stdin)
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks programs has ended"
        return [Done(*each) for each in json.loads(answer)]


def _make_imports(script: str) -> None:
    """Execute the import statements that a program begins with; it will meet their errors."""
    body = ast.parse(Path(script).read_text()).body
    imports: list[ast.stmt] = [each for each in body if isinstance(each, _IMPORT)]
    try:
        exec(compile(ast.Module(imports, []), script, "exec"), {})  # noqa: S102 - our own examples
        import torch._dynamo  # noqa: F401 - by the first optimizer otherwise
    except ImportError:
        return


def _become(rank: int, request: dict[str, Any]) -> dict[str, Any]:
    """Make this fork what a shell would have started, and return what it was asked for."""
    os.setsid()
    os.chdir(request["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(_files(rank, request), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(request["environments"][rank])
    sys.argv = [request["script"]]
    sys.path.insert(0, str(Path(request["script"]).parent))
    return request


def _files(rank: int, request: dict[str, Any]) -> list[Path]:
    return [Path(request["folder"]) / f".{stream}-{rank}" for stream in ("out", "err")]


def _codes(programs: list[int]) -> list[int]:
    """Wait for programs, and end whatever they leave or do not get done."""
    codes: dict[int, int] = {}
    end_s = time.monotonic() + _TIMEOUT_S
    while len(codes) < len(programs) and time.monotonic() < end_s:
        for program in set(programs) - set(codes):
            found, status = os.waitpid(program, os.WNOHANG)
            if found:
                codes[program] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for program in programs:
        try:
            os.killpg(program, signal.SIGKILL)
        except ProcessLookupError:
            continue
        if program not in codes:
            codes[program] = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    return [codes[program] for program in programs]


def _serve() -> dict[str, Any] | None:
    """Answer until nobody asks any more; return in each fork what it is to run."""
    for line in sys.stdin:
        request = json.loads(line)
        _make_imports(request["script"])
        gc.freeze()  # or every fork would walk through, and so copy, all that is loaded
        programs = []
        for rank in range(len(request["environments"])):
            program = os.fork()
            if program == 0:
                return _become(rank, request)
            programs.append(program)
        codes = _codes(programs)
        texts = [[p.read_text() for p in _files(rank, request)] for rank in range(len(programs))]
        done = [[code, *text] for code, text in zip(codes, texts, strict=True)]
        sys.stdout.write(json.dumps(done) + "\n")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    asked = _serve()
    if asked is None:
        os._exit(0)  # nothing was begun, and to take all modules apart takes seconds
    made: dict[str, Any] | None = runpy.run_path(asked["script"], run_name="__main__")
    if asked["destroys"]:
        made = None
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
