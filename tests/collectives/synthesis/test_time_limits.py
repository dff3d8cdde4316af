"""Every method ends within its limit and the stated slack, with a schedule or a clear error."""

import time

import numba
import pytest

from fivefold.collectives.schedules import all_gather, all_to_all, verify_schedule
from fivefold.collectives.synthesis import SynthesisOptions, synthesize
from fivefold.errors import InfeasibleError, UnsupportedError
from fivefold.network.topology import named_topology, ring, torus

LIMIT_S = 0.5
SLACK_S = 2.0  # as the guide states it
MACHINE_S = 3.0  # for verifying, pricing and a loaded machine

LARGE = [
    ("taccl", all_gather(8, 1000), named_topology("dgx1")),
    ("flow", all_to_all(64), torus((8, 8))),
    ("trees", all_gather(128), named_topology("dgx_a100", boxes=16)),
    ("matching", all_gather(64, 200), torus((8, 8))),
]


@pytest.mark.alone
@pytest.mark.parametrize(("method", "collective", "network"), LARGE, ids=[row[0] for row in LARGE])
def test_a_method_ends_within_its_limit(method, collective, network):
    small = all_to_all(4) if method == "flow" else all_gather(4)
    synthesize(small, ring(4), size_bytes=4.0, method=method)  # compiles what it needs
    began_s = time.perf_counter()
    try:
        found = synthesize(collective, network, size_bytes=1e6, method=method, time_limit_s=LIMIT_S)
    except (InfeasibleError, UnsupportedError):
        found = None
    spent_s = time.perf_counter() - began_s
    if found is not None:
        verify_schedule(found.schedule, topology=network)
    assert spent_s < LIMIT_S + SLACK_S + MACHINE_S


def test_taccl_keeps_what_it_has_when_the_time_is_over():
    network = named_topology("dgx1")
    found = synthesize(
        all_gather(8, 20), network, size_bytes=1e6, method="taccl", time_limit_s=0.01
    )
    assert (
        verify_schedule(found.schedule, topology=network, check_times=True).num_transfers
        == 8 * 7 * 20
    )


@pytest.mark.alone
def test_compiling_takes_nothing_from_the_limit():
    network = named_topology("dgx1")
    for method in ("library", "trees"):
        synthesize("all_gather", network, size_bytes=1e6, method=method)  # compiles what it needs

    def compile_long(_):
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + 2 * LIMIT_S:
            numba.njit(lambda x: x + 1)(1)

    options = SynthesisOptions(progress=compile_long)
    found = synthesize("all_gather", network, size_bytes=1e6, time_limit_s=LIMIT_S, options=options)
    assert [attempt.method for attempt in found.log[:2]] == ["library", "paths"]
    assert found.log[1].time_s is not None  # else its note is "no time left"
