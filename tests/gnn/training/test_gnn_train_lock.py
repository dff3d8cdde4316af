"""Two runs in one folder: the second is refused while the first is at work."""

import os
import subprocess
import sys

import pytest

from fivefold.errors import FivefoldError
from fivefold.gnn.training import train_graph
from fivefold.runs import FolderLock

HOLD = """
import pathlib, sys
from fivefold.runs import FolderLock
with FolderLock(pathlib.Path(sys.argv[1]), "run.output"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_trainer_is_refused_and_the_first_goes_on(make_config):
    config = make_config(mode="memory", epochs=1)
    refused = []

    def second(_text):
        with pytest.raises(FivefoldError) as caught:
            train_graph(config)
        refused.append(caught.value)

    # The plan is shown in the middle of a run of mode "disk".
    train_graph(make_config(epochs=1), show=second)
    assert len(refused) == 1
    assert str(os.getpid()) in refused[0].message
    assert refused[0].hint
    assert train_graph(make_config(epochs=1)).epochs == 1  # the lock goes with the run


@pytest.mark.distributed
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(FivefoldError, match=str(child.pid)):
            FolderLock(tmp_path, "this").__enter__()
    finally:
        child.kill()
        child.communicate()
    with FolderLock(tmp_path, "this"):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()
