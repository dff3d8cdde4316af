"""The harness of benchmarks/gnn: memory limits hold, faults are judged, rows say what was met."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from benchmarks.gnn._harness._fault_process import in_child
from benchmarks.gnn._harness._memory_limit import MemoryLimit
from benchmarks.gnn._harness._rows import rows_of
from benchmarks.gnn._harness._settings import SETTINGS, quick
from benchmarks.results_file import BenchmarkResults, render_markdown

from fivefold.errors import DataError, StorageError

pytestmark = pytest.mark.alone


def use_memory(limit, megabytes):
    code = f"import sys; x = bytearray({megabytes} << 20); sys.stdout.write(str(len(x)))"
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        preexec_fn=limit.enter,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_limit_kills_what_exceeds_it_and_counts_what_does_not():
    with MemoryLimit(64 << 20, name="fivefold-test") as limit:
        if not limit.kind.startswith("cgroup"):
            pytest.skip(f"no memory cgroup can be made here: {limit.kind}")
        folder = limit._folder
        assert use_memory(limit, 30).stdout == str(30 << 20)
        assert 30 << 20 <= limit.peak_bytes() <= 64 << 20
        assert use_memory(limit, 100).returncode == -9
        assert limit.killed() == 1
    assert not folder.exists()


def test_without_a_group_the_address_space_is_limited(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.gnn._harness._memory_limit.V1", tmp_path / "none")
    monkeypatch.setattr("benchmarks.gnn._harness._memory_limit.V2", tmp_path / "none")
    with MemoryLimit(256 << 20) as limit:
        assert limit.kind.startswith("address space")
        assert use_memory(limit, 20).returncode == 0
        assert "MemoryError" in use_memory(limit, 400).stderr
        assert limit.peak_bytes() is None


def test_a_child_that_is_killed_hangs_or_fails_is_told_apart():
    assert in_child(lambda tell: tell() or 7, timeout_s=20).answer == {"result": 7, "reports": 1}

    def reports(tell):
        for _ in range(5):
            tell("stage", 1, 5)

    assert in_child(reports, timeout_s=20, kill_at=3).killed
    assert in_child(lambda _t: time.sleep(30), timeout_s=20, kill_after_s=0.05).killed
    assert in_child(lambda _t: time.sleep(30), timeout_s=0.2).hung
    assert in_child(lambda _t: os._exit(3), timeout_s=20).error["class"] == "exit 3"

    def fails(error):
        def run(_tell):
            raise error

        return in_child(run, timeout_s=20)

    assert fails(StorageError("no", hint="do that")).actionable
    assert not fails(DataError("no")).actionable


def made_up_run(seconds, *, read=0, cached=50, stop=10, wrong=0):
    return {
        "scaled_s": seconds, "seconds": seconds, "start": 0, "stop": stop, "bytes_read": read,
        "process_bytes_read": read, "rows_requested": 100, "rows_cached": cached, "requests": 5,
        "wrong_rows": wrong, "before": [1e6, 1.0], "after": [1e6, 1.0], "peak_bytes": 900,
    }  # fmt: skip


def made_up(wrong=0):
    setting = quick(SETTINGS[0])
    row_bytes = setting.row_bytes
    details = {"rows on disk": 1.5 * setting.nodes}
    prepared = {"seconds": 4.0, "bytes_written": 10, "details": details, "batches": 10}
    names = ("mmap", "Ginex", "DiskGNN", "ours static")
    return {
        "setting": json.loads(json.dumps(asdict(setting))),
        "sampling": {"seconds": 2.0, "batches": 10},
        "prepared": dict.fromkeys(names, prepared),
        "runs": {
            "mmap": [made_up_run(20.0, cached=0, stop=2)] * 3,
            "Ginex": [made_up_run(s, read=400 * row_bytes, stop=4) for s in (10.0, 6.0, 8.0)],
            "DiskGNN": [made_up_run(2.0, read=100 * row_bytes)] * 3,
            "ours static": [made_up_run(1.0, read=51 * row_bytes, wrong=wrong)] * 3,
        },
        "plain": {"rows": 300, "rows_per_s": 70.0, "amplification": 16000.0},
        "limit_kind": "cgroup v1",
        "limit_bytes": 1000,
        "feature_bytes": 3000,
        "topology_bytes": 10,
        "probes": [],
    }


def test_rows_compare_turn_by_turn_and_say_what_was_met():
    rows = {row.metric: row for row in rows_of(made_up())}
    ginex = rows["speed-up of ours static over Ginex (scaled from 4 of 10 batches)"]
    assert (ginex.ours, ginex.spread, ginex.met) == (8.0, (6.0, 10.0), True)
    assert rows["speed-up of ours static over DiskGNN"].met
    amplification = rows["read amplification, ours static"]
    assert amplification.ours == pytest.approx(1.02)
    assert amplification.met
    assert amplification.peers == {"Ginex": 8.0, "DiskGNN": 2.0}
    assert rows["disk blow-up, ours static"].ours == 1.5
    assert not rows["share of sequential bandwidth, ours static"].met
    even = rows["break-even of ours static with mmap (scaled from 2 of 10 batches)"]
    assert even.ours == pytest.approx((2.0 + 4.0 - 4.0) / 19.0)
    assert rows["wrong rows among those compared, all systems"].met
    assert rows["peak memory under cgroup v1, Ginex"].met


def test_one_wrong_row_is_seen():
    rows = {row.metric: row for row in rows_of(made_up(wrong=1))}
    assert rows["wrong rows among those compared, all systems"].met is False


def test_all_settings_have_names_and_cases_of_their_own():
    rows = rows_of(made_up())
    results = BenchmarkResults(
        topic="t", date="d", commit=None, command="c", machine={}, versions={}, rows=tuple(rows)
    )
    assert "speed-up" in render_markdown(results)
    assert len({setting.case for setting in SETTINGS}) == len(SETTINGS)
    assert all(setting.nodes >= 4_000_000 for setting in SETTINGS)
