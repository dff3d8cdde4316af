"""Max-min fair rates against exact fractions, an LP, and cases solved by hand."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fivefold.errors import ConfigurationError
from fivefold.network.simulation import max_min_rates
from oracles.exact_fluid import exact_rates


@st.composite
def problems(draw, *, with_groups=True):
    num_links = draw(st.integers(1, 6))
    capacities = draw(st.lists(st.integers(1, 12), min_size=num_links, max_size=num_links))
    flow = st.fixed_dictionaries(
        {
            "route": st.lists(st.integers(0, num_links - 1), max_size=4),
            "weight": st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 4)]),
            "cap": st.sampled_from([None, None, Fraction(1), Fraction(3)]),
            "priority": st.integers(0, 2),
            "group": st.sampled_from([None, None, 0, 1]) if with_groups else st.none(),
        }
    )
    flows = draw(st.lists(flow, min_size=1, max_size=9))
    for one in flows:
        if one["group"] is not None:
            one["priority"] = one["group"]
    return flows, capacities


def solve(flows, capacities):
    return max_min_rates(
        [flow["route"] for flow in flows],
        capacities,
        weights=[float(flow["weight"]) for flow in flows],
        caps_bytes_per_s=[np.inf if flow["cap"] is None else float(flow["cap"]) for flow in flows],
        priorities=[flow["priority"] for flow in flows],
        groups=[-1 if flow["group"] is None else flow["group"] for flow in flows],
    )


@given(problems())
def test_rates_are_those_of_exact_water_filling(problem):
    flows, capacities = problem
    exact = exact_rates(flows, capacities)
    wanted = [np.inf if rate is None else float(rate) for rate in exact]
    np.testing.assert_allclose(solve(flows, capacities), wanted, rtol=1e-11, atol=1e-10)


def lexicographic_by_lp(routes, capacities):
    """Raise the least rate as far as it goes, fix those that cannot rise, and repeat."""
    count, matrix = len(routes), np.zeros((len(capacities), len(routes)))
    for flow, route in enumerate(routes):
        for link in route:
            matrix[link, flow] += 1
    fixed = {}
    while len(fixed) < count:
        # Variables: rates, then the common least rate of those still open.
        rows = [np.append(row, 0.0) for row in matrix]
        limits = list(map(float, capacities))
        for flow in range(count):
            row = np.zeros(count + 1)
            row[flow] = -1.0
            row[-1] = 0.0 if flow in fixed else 1.0
            rows.append(row)
            limits.append(-fixed.get(flow, 0.0))
        goal = np.zeros(count + 1)
        goal[-1] = -1.0
        bounds = [(0, None)] * (count + 1)
        least = -linprog(goal, np.array(rows), limits, bounds=bounds, method="highs").fun
        for flow in [f for f in range(count) if f not in fixed]:
            own = np.zeros(count + 1)
            own[flow] = -1.0
            floors = [*bounds[:-1], (least * (1 - 1e-9), least * (1 - 1e-9))]
            best = linprog(own, np.array(rows), limits, bounds=floors, method="highs")
            if -best.fun <= least * (1 + 1e-6):
                fixed[flow] = least
    return np.array([fixed[flow] for flow in range(count)])


@pytest.mark.parametrize("seed", range(12))
def test_rates_are_those_of_a_lexicographic_linear_program(seed):
    random = np.random.default_rng(seed)
    capacities = random.uniform(1.0, 10.0, 5)
    routes = [random.choice(5, random.integers(1, 4), replace=False).tolist() for _ in range(7)]
    found = max_min_rates(routes, capacities)
    np.testing.assert_allclose(found, lexicographic_by_lp(routes, capacities), rtol=1e-6)


def has_bottleneck(routes, capacities, rates):
    """The textbook's test of fairness: each flow is among the fastest on some full link."""
    loads = np.zeros(len(capacities))
    for route, rate in zip(routes, rates, strict=True):
        np.add.at(loads, route, rate)
    highest = np.zeros(len(capacities))
    for route, rate in zip(routes, rates, strict=True):
        np.maximum.at(highest, route, rate)
    full = loads >= np.array(capacities) * (1 - 1e-9)
    assert np.all(loads <= np.array(capacities) * (1 + 1e-9))
    return all(
        any(full[link] and rate >= highest[link] * (1 - 1e-9) for link in route)
        for route, rate in zip(routes, rates, strict=True)
    )


@pytest.mark.parametrize("seed", range(5))
def test_every_flow_of_a_large_random_network_has_a_bottleneck(seed):
    random = np.random.default_rng(seed)
    capacities = 10.0 ** random.uniform(6, 11, 400)
    routes = [random.choice(400, random.integers(1, 9), replace=False) for _ in range(3000)]
    assert has_bottleneck(routes, capacities, max_min_rates(routes, capacities))


def test_a_thousand_senders_to_one_receiver_share_its_link():
    # Sender i has its own link i; link 1000 is the receiver's.
    routes = [[sender, 1000] for sender in range(1000)]
    rates = max_min_rates(routes, np.append(np.full(1000, 5.0), 10.0))
    np.testing.assert_allclose(rates, 0.01, rtol=1e-13)


def test_one_slow_sender_leaves_its_share_to_the_others():
    rates = max_min_rates([[0, 3], [1, 3], [2, 3]], [1.0, 100.0, 100.0, 10.0])
    np.testing.assert_allclose(rates, [1.0, 4.5, 4.5])


def test_the_parking_lot_halves_at_every_link():
    # One long flow crosses all three links, each of which also carries a short one.
    rates = max_min_rates([[0, 1, 2], [0], [1], [2]], [2.0, 4.0, 8.0])
    np.testing.assert_allclose(rates, [1.0, 1.0, 3.0, 7.0])


def test_coupled_flows_run_at_the_rate_of_the_slowest():
    rates = max_min_rates([[0], [1], [1]], [1.0, 10.0], groups=[7, 7, -1])
    np.testing.assert_allclose(rates, [1.0, 1.0, 9.0])


def test_a_lower_class_gets_nothing_of_a_full_link():
    rates = max_min_rates([[0], [0, 1], [1]], [10.0, 4.0], priorities=[0, 5, 9])
    np.testing.assert_allclose(rates, [10.0, 0.0, 4.0])


def test_tiny_and_huge_weights_do_not_lose_precision():
    weights = [1e9, 1.0, 1.0]
    rates = max_min_rates([[0, 1], [0], [0, 2]], [10.0, 1.0, 2.0], weights=weights)
    np.testing.assert_allclose(rates, [1.0, 7.0, 2.0], rtol=1e-12)


def test_what_nothing_limits_is_unlimited():
    assert max_min_rates([[], [0]], [3.0]).tolist() == [np.inf, 3.0]
    assert max_min_rates([[]], [3.0], caps_bytes_per_s=2.0).tolist() == [2.0]
    assert max_min_rates([], [3.0]).tolist() == []


def test_a_link_that_is_used_twice_carries_both():
    np.testing.assert_allclose(max_min_rates([[0, 0], [0]], [6.0]), [2.0, 2.0])
    routes = np.array([0, 1, 2]), np.array([0, 0]), np.array([2.0, 1.0])
    np.testing.assert_allclose(max_min_rates(routes, [6.0]), [2.0, 2.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"routes": [[3]]}, "flow 0 uses link 3, but there are 2 links"),
        ({"routes": [[-1]]}, "uses link -1"),
        ({"weights": [0.0]}, "weights must all be more than zero"),
        ({"weights": [1.0, 1.0]}, "1 values"),
        ({"caps_bytes_per_s": [-1.0]}, "caps_bytes_per_s must all be more than zero"),
        ({"priorities": [0.5]}, "whole numbers"),
        ({"capacities_bytes_per_s": [np.nan, 1.0]}, "capacities"),
        ({"routes": [[0], [1]], "groups": [1, 1], "priorities": [0, 1]}, "different priorities"),
    ],
)
def test_bad_input_is_named(arguments, message):
    given = {"routes": [[0]], "capacities_bytes_per_s": [1.0, 1.0], **arguments}
    with pytest.raises(ConfigurationError, match=message):
        max_min_rates(given.pop("routes"), given.pop("capacities_bytes_per_s"), **given)


def test_offsets_that_do_not_fit_are_refused():
    with pytest.raises(ConfigurationError, match="rise from 0"):
        max_min_rates((np.array([0, 5]), np.array([0])), [1.0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_long_coupled_routes_take_what_their_links_one_by_one_take(seed):
    """Hundreds of links of one flow, many of them with the same flows: none is left out wrongly."""
    draw = np.random.default_rng(seed)
    capacities = draw.integers(1, 9, 300).astype(float)
    long = [draw.choice(300, 200).tolist() for _ in range(3)]
    short = [draw.choice(300, 3, replace=False).tolist() for _ in range(20)]
    rates = max_min_rates([*long, *short], capacities)
    apart = [[link] for route in long for link in route]
    groups = [number for number, route in enumerate(long) for _ in route]
    each = max_min_rates([*apart, *short], capacities, groups=[*groups, *[-1] * len(short)])
    firsts = [groups.index(number) for number in range(3)]
    np.testing.assert_allclose(rates, [*each[firsts], *each[len(apart) :]], rtol=1e-11)
