"""The compiler runs once, before the first test and outside of any test's own time."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiled():
    from fivefold.network.simulation import Compute, Flow, max_min_rates, simulate
    from fivefold.network.topology import line

    max_min_rates([[0]], [1.0])
    pair = line(2, bandwidth=1.0)
    tasks = [Compute("c", 1.0), Flow("f", *pair.ranks, 2.0, pair.shortest_route(0, 1))]
    simulate(pair, tasks, until_s=1.5, record_rates=True)
