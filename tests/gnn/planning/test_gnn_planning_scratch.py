"""Where planning puts what does not fit its memory: a place that is named, within the budget."""

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fivefold.errors import InfeasibleError, StorageError
from fivefold.gnn.planning import Budgets, _caches, make_plan
from helpers.gnn_planning import Batches, Disk, features_of

BATCHES = [np.arange(first, first + 400, 2) for first in range(0, 400, 40)]


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """All spills; and nothing may go to the system's folder for temporary files."""
    monkeypatch.setattr(
        _caches.KeptArrays.__init__, "__kwdefaults__", {"scratch": None, "memory_bytes": 99}
    )
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")


def samples_in(folder):
    return Batches(BATCHES, num_nodes=800, path=folder / "samples.fvf")


def plan_of(samples, *, disk_bytes=10**8, **options):
    budgets = Budgets(host_bytes=20_000, disk_bytes=disk_bytes)
    return make_plan(samples, features_of(800, 512), budgets, Disk(), buffer_batches=0, **options)


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_it_goes_beside_the_samples_or_where_it_is_told(policy, tmp_path):
    beside = plan_of(samples_in(tmp_path), policy=policy)
    told = plan_of(samples_in(Path("/nowhere")), policy=policy, scratch_folder=tmp_path)
    assert beside.fingerprint == told.fingerprint
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named():
    with pytest.raises(
        StorageError, match=r"scratch file of planning.*in /nowhere.*scratch_folder"
    ):
        plan_of(samples_in(Path("/nowhere")))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_said_with_what_is_free(number, tmp_path, monkeypatch):
    real = tempfile.TemporaryFile

    def full(*arguments, **options):
        file = real(*arguments, **options)

        class Full:
            write, close = file.write, file.close

            def flush(self):
                raise OSError(number, os.strerror(number))

        return Full()

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(StorageError, match=os.strerror(number)) as caught:
        plan_of(samples_in(tmp_path))
    assert ("free)" in caught.value.message) == (number != errno.EIO)
    assert "data.store" in caught.value.hint


def test_it_counts_towards_the_disk_budget(tmp_path):
    with pytest.raises(InfeasibleError, match="disk budget of 4 kB"):
        plan_of(samples_in(tmp_path), disk_bytes=4000)
