"""Where planning puts what does not fit its memory: a place that is named, within the budget."""

import errno
import os
import tempfile

import numpy as np
import pytest

from fivefold.errors import InfeasibleError, StorageError
from fivefold.gnn.planning import BatchList, Budgets, FeatureInfo, _kept, make_plan

BATCHES = [np.arange(first, first + 400, 2) for first in range(0, 400, 40)]


class Disk:
    sequential_read_bytes_per_s = sequential_write_bytes_per_s = 1e9

    def seconds(self, requests, size_bytes):
        return requests * 1e-5 + size_bytes / 1e9


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """All spills; and nothing may go to the system's folder for temporary files."""
    monkeypatch.setattr(
        _kept.KeptArrays.__init__, "__kwdefaults__", {"scratch": None, "memory_bytes": 99}
    )
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")


def samples_in(folder):
    samples = BatchList(BATCHES, num_nodes=800)
    if folder is not None:
        samples.path = folder / "samples.fvf"
    return samples


def plan_of(samples, *, disk_bytes=10**8, **options):
    features = FeatureInfo(num_nodes=800, row_bytes=512, fingerprint="x")
    budgets = Budgets(host_bytes=20_000, disk_bytes=disk_bytes)
    return make_plan(samples, features, budgets, Disk(), buffer_batches=0, **options)


@pytest.mark.parametrize("policy", ["static", "belady"])
def test_it_goes_beside_the_samples_or_where_it_is_told(policy, tmp_path):
    beside = plan_of(samples_in(tmp_path), policy=policy)
    told = plan_of(samples_in(None), policy=policy, scratch_folder=tmp_path)
    assert beside.fingerprint == told.fingerprint
    assert not list(tmp_path.iterdir())


def test_the_system_s_folder_is_the_last_resort_and_its_refusal_is_said():
    with pytest.raises(
        StorageError, match=r"scratch file of planning.*in /nowhere.*scratch_folder"
    ):
        plan_of(samples_in(None))


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
