"""Samples drawn in the background: the right ones, with errors handed on, and nothing hangs."""

import threading
import time

import numpy as np
import pytest

from fivefold.errors import ConfigurationError, DataError
from fivefold.gnn.sampling import NeighborSampler, SampleRefresher, Topology, sample_epochs

pytestmark = pytest.mark.alone

SETTINGS = {"batch_size": 10, "epochs": 2}


def sampler(fanouts=(3, 3)):
    rng = np.random.default_rng(0)
    return NeighborSampler(
        Topology(np.arange(0, 4001, 8), rng.integers(0, 500, 4000)), fanouts, seed=2
    )


def no_threads_left():
    return not [t for t in threading.enumerate() if t.name.startswith("fivefold-refresher")]


def test_files_are_those_of_offline_sampling(tmp_path):
    with SampleRefresher(
        sampler(), range(60), tmp_path / "new", **SETTINGS, first_epoch=3, keep=None
    ) as refresher:
        for first_epoch in (3, 5, 7):
            assert refresher.next_epoch == first_epoch
            path = tmp_path / f"expected-{first_epoch}"
            expected = sample_epochs(
                sampler(), range(60), path, **SETTINGS, first_epoch=first_epoch
            )
            with refresher.take(60) as samples, expected:
                assert samples.fingerprint == expected.fingerprint
                assert samples.first_epoch == first_epoch
    assert no_threads_left()
    assert {"samples-3.fvf", "samples-5.fvf", "samples-7.fvf"} <= {
        path.name for path in (tmp_path / "new").iterdir()
    }


def test_only_the_newest_files_are_kept(tmp_path):
    with SampleRefresher(sampler(), range(60), tmp_path, **SETTINGS, keep=2) as refresher:
        for _ in range(4):
            refresher.take(60).close()
    names = {path.name for path in tmp_path.glob("samples-?.fvf")}
    assert {"samples-4.fvf", "samples-6.fvf"} <= names  # perhaps 8, too
    assert not {"samples-0.fvf", "samples-2.fvf"} & names


def test_the_next_file_is_made_without_being_asked_for(tmp_path):
    with SampleRefresher(sampler(), range(60), tmp_path, **SETTINGS, cpu_share=1.0) as refresher:
        refresher.take(60).close()
        deadline = time.monotonic() + 60
        while not refresher.ready and time.monotonic() < deadline:
            time.sleep(0.01)
        assert refresher.ready
        assert (tmp_path / "samples-2.fvf").exists()


def test_errors_reach_the_caller_and_another_call_tries_again(tmp_path):
    blocked = tmp_path / "samples-0.fvf"
    blocked.write_bytes(b"something else" * 1000)
    with SampleRefresher(sampler(), range(60), tmp_path, **SETTINGS) as refresher:
        with pytest.raises(DataError):
            refresher.take(60)
        blocked.unlink()
        try:
            samples = refresher.take(60)
        except DataError:  # the second try had begun before the file was out of the way
            samples = refresher.take(60)
        with samples:
            assert samples.num_batches == 12
    assert no_threads_left()


def test_a_sampler_that_fails_says_so(tmp_path):
    topology = Topology([0, 1, 2], [1, 9], check=False)
    with (
        SampleRefresher(
            NeighborSampler(topology, [1]), [0, 1], tmp_path, batch_size=1, epochs=1
        ) as refresher,
        pytest.raises(DataError, match="node 9"),
    ):
        refresher.take(60)


def test_closing_is_quick_and_a_new_refresher_goes_on(tmp_path):
    many = {"batch_size": 1, "epochs": 500}
    refresher = SampleRefresher(sampler(), range(400), tmp_path, **many, cpu_share=1e-4)
    with pytest.raises(TimeoutError, match="epoch 0"):
        refresher.take(0.02)
    start = time.monotonic()
    refresher.close()
    refresher.close()
    assert time.monotonic() - start < 5
    assert no_threads_left()
    with pytest.raises(ConfigurationError, match="closed"):
        refresher.take()
    assert not (tmp_path / "samples-0.fvf").exists()
    assert (tmp_path / "samples-0.fvf.partial").exists()


def test_a_finished_file_is_taken_up_again(tmp_path):
    with (
        SampleRefresher(sampler(), range(60), tmp_path, **SETTINGS) as refresher,
        refresher.take(60) as samples,
    ):
        fingerprint = samples.fingerprint
    made = (tmp_path / "samples-0.fvf").stat().st_ino
    with (
        SampleRefresher(sampler(), range(60), tmp_path, **SETTINGS) as refresher,
        refresher.take(60) as samples,
    ):
        assert samples.fingerprint == fingerprint
    assert (tmp_path / "samples-0.fvf").stat().st_ino == made


def test_it_rests_for_its_share(tmp_path):
    naps = []

    class Condition(threading.Condition):
        def wait_for(self, predicate, timeout=None):
            naps.append(timeout)
            return super().wait_for(predicate, 0)

    refresher = SampleRefresher(sampler(), range(60), tmp_path, **SETTINGS, cpu_share=0.5)
    refresher.take(60).close()
    refresher.close()
    refresher = SampleRefresher.__new__(SampleRefresher)
    refresher.cpu_share, refresher._closed, refresher._waiting = 0.2, False, 0
    refresher._changed = Condition()
    refresher._awake_since = time.monotonic() - 3.0
    refresher._rest(1, 2)
    assert naps == [pytest.approx(12.0, abs=0.5)]
    assert time.monotonic() - refresher._awake_since < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu_share": 0.0}, "cpu_share"),
        ({"cpu_share": 1.5}, "cpu_share"),
        ({"keep": 0}, "keep"),
        ({"epochs": 0}, "epochs 0"),
        ({"train_ids": []}, "0 training nodes"),
        ({"train_ids": [7, 7]}, "more than once"),
        ({"train_ids": [500]}, "out of range"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, change, message):
    settings = {"train_ids": range(9), "folder": tmp_path, **SETTINGS}
    with pytest.raises(ConfigurationError, match=message):
        SampleRefresher(sampler(), **settings | change)
    assert no_threads_left()
