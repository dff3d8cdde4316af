"""The cost model against hand-made tables, and the probe on a real folder."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, StorageError
from fivefold.gnn.storage import DiskProfile, probe_disk

FIELDS = {
    "sequential_read_bytes_per_s": 1e9,
    "sequential_write_bytes_per_s": 2e9,
    "random_read_iops": 10_000.0,
    "request_latency_s": 1e-4,
    "backend": "threads",
    "direct": True,
}


def profile(table):
    return DiskProfile(**FIELDS, bytes_per_s_by_request_bytes=table)


def test_the_cost_is_that_of_the_table_at_its_sizes_and_straight_between():
    # 1000 bytes take 1 ms, 3000 bytes take 2 ms.
    made = profile({1000: 1e6, 3000: 1.5e6})
    assert made.seconds(10, 10_000) == pytest.approx(10e-3)
    assert made.seconds(10, 30_000) == pytest.approx(20e-3)
    assert made.seconds(10, 20_000) == pytest.approx(15e-3)
    assert made.seconds(10, 10) == pytest.approx(10e-3)  # bound by requests
    assert made.seconds(1, 30_000) == pytest.approx(20e-3)  # bound by bandwidth
    assert made.seconds(0, 0) == 0.0


def test_without_a_table_the_other_numbers_are_used():
    made = profile({})
    assert made.seconds(100, 409_600) == pytest.approx(100 / 10_000)
    assert made.seconds(5, 5 << 20) == pytest.approx((5 << 20) / 1e9)


@given(
    table=st.dictionaries(st.integers(1, 10**7), st.floats(1.0, 1e12), min_size=1, max_size=6),
    sizes=st.tuples(st.floats(0, 1e8), st.floats(0, 1e8)),
)
def test_longer_requests_never_cost_less_and_more_requests_cost_more(table, sizes):
    made = profile(table)
    low, high = sorted(sizes)
    assert made.request_seconds(low) <= made.request_seconds(high) * (1 + 1e-9)
    assert made.seconds(3, 3 * low) == pytest.approx(3 * made.request_seconds(low))


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_speeds_are_refused(speed):
    with pytest.raises(ConfigurationError):
        profile({4096: speed})
    with pytest.raises(ConfigurationError):
        DiskProfile(**{**FIELDS, "random_read_iops": speed}, bytes_per_s_by_request_bytes={})


def test_impossible_requests_are_refused():
    with pytest.raises(ConfigurationError):
        profile({}).seconds(-1, 5)
    with pytest.raises(ConfigurationError):
        profile({}).request_seconds(-1)
    with pytest.raises(ConfigurationError):
        profile({-5: 1.0})


def test_a_probe_leaves_nothing_behind_and_is_remembered(tmp_path):
    one = probe_disk(tmp_path, seconds=0.2, size_bytes=8 << 20, fresh=True)
    assert list(tmp_path.iterdir()) == []
    assert probe_disk(tmp_path, seconds=0.2) is one
    assert one.random_read_iops == pytest.approx(one.bytes_per_s_by_request_bytes[4096] / 4096)
    assert one.details["file_bytes"] == 8 << 20
    assert one.backend in {"io_uring", "threads"}
    assert "random 4 KiB" in one.explain()
    assert np.isfinite(one.seconds(1000, 1000 * 65536))


def test_impossible_probes_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError):
        probe_disk(tmp_path, seconds=0)
    with pytest.raises(ConfigurationError):
        probe_disk(tmp_path, size_bytes=5)
    with pytest.raises(StorageError, match="No such file"):
        probe_disk(tmp_path / "missing")
    monkeypatch.setattr("fivefold.gnn.storage._disk.free_bytes", lambda _folder: 1000)
    with pytest.raises(StorageError, match=r"too few to probe .* needs 83\.9 MB"):
        probe_disk(tmp_path, fresh=True)
