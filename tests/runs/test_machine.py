"""What a process is said to have used, over several starts."""

import resource
import time

import pytest

from fivefold.runs.machine import ProcessMeter


def test_what_a_process_used_goes_on_where_an_earlier_start_left_it():
    before = {"wall_s": 100.0, "cpu_s": 50.0, "queued_s": 10.0}
    meter, alone = ProcessMeter(before), ProcessMeter()
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < 0.2:
        pass
    record, own = meter.record(), alone.record()
    assert 0.2 <= own["wall_s"] < 20
    assert 0 < own["cpu_s"] <= own["wall_s"] * 64
    for key, value in before.items():
        if own[key] is not None:
            assert record[key] == pytest.approx(value + own[key], abs=0.1)
    if own["waited_for_cpu"] is not None:
        assert own["waited_for_cpu"] == pytest.approx(own["queued_s"] / own["wall_s"])
        assert record["waited_for_cpu"] == pytest.approx(record["queued_s"] / record["wall_s"])
    # The system's other account of the same figure, in KiB on Linux.
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert own["memory_bytes"] == pytest.approx(held, rel=0.2)
