"""``fivefold doctor`` says of this machine what other programs say of it."""

import json
import os
import subprocess
import sys

import pytest
import torch

import fivefold.cli._main as entry


def checks(environment=None):
    command = [sys.executable, "-m", "fivefold", "doctor", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | (environment or {})
    )
    return {check["name"]: check for check in json.loads(done.stdout)}


@pytest.mark.nightly
def test_doctor_agrees_with_the_machine(tmp_path):
    found = checks()
    assert found["processor"]["found"].startswith(f"{len(os.sched_getaffinity(0))} cores")
    assert found["CUDA"]["works"] == torch.cuda.is_available()
    assert found["NCCL"]["works"] == torch.distributed.is_nccl_available()
    assert torch.__version__ in found["torch"]["found"]
    unshare = subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True)
    if unshare.returncode == 0:
        assert found["namespaces"]["works"]
    assert all(check["works"] is not False or check["fix"] for check in found.values())

    # A package that is not there: one that only this test takes away.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'numba' else find(name, *a)\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    without = checks({"PYTHONPATH": path})["numba"]
    assert without["works"] is False
    assert without["fix"] == "pip install 'fivefold[gnn]'"


def test_short_help_and_completion(monkeypatch, capsys):
    for words in (["-h"], ["plan", "-h"], ["lab", "run", "-h"]):
        monkeypatch.setattr("sys.argv", ["fivefold", *words])
        with pytest.raises(SystemExit) as end:
            entry.main()
        assert end.value.code == 0
        assert "Usage:" in capsys.readouterr().out
    environment = os.environ | {
        "_FIVEFOLD_COMPLETE": "complete_bash",
        "COMP_WORDS": "fivefold do",
        "COMP_CWORD": "1",
    }
    code = "import sys; sys.argv = ['fivefold']; from fivefold.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["doctor"]
