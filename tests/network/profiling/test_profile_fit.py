"""Fits and topologies from made-up measurements whose truth is known."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import DataError
from fivefold.network.profiling import Profile
from fivefold.network.profiling.profile import Contention, fit_line, split_latencies
from fivefold.network.topology import read_topology

SIZES = (64, 4096, 65536, 1 << 20, 1 << 22)


def profile_of(alpha_s, rate, *, hosts=None, contention=None, backend="gloo"):
    """A profile without noise from matrices of latencies and rates."""
    alpha_s, rate = np.asarray(alpha_s, float), np.asarray(rate, float)
    times = alpha_s[:, :, None] + np.array(SIZES) / rate[:, :, None]
    times[np.eye(len(rate), dtype=bool)] = np.nan
    names = tuple(hosts or (f"host{rank}" for rank in range(len(rate))))
    return Profile(
        hosts=names, backend=backend, sizes_bytes=SIZES, times_s=times, contention=contention
    )


def crowded(out, into):
    return Contention(
        out_bytes_per_s=np.array(out, float),
        in_bytes_per_s=np.array(into, float),
        all_bytes_per_s=1.0,
        host_out_bytes_per_s={},
    )


def star_rates(up, down):
    return np.minimum(np.array(up)[:, None], np.array(down)[None, :])


@given(
    st.floats(1e-7, 1e-2),
    st.floats(1e-11, 1e-6),
    st.lists(st.integers(1, 1 << 26), min_size=2, max_size=8, unique=True).map(sorted),
)
def test_points_on_a_line_give_that_line(alpha, beta, sizes):
    fit = fit_line(sizes, alpha + beta * np.array(sizes, float))
    scale = alpha + beta * max(sizes)
    assert fit.alpha_s == pytest.approx(alpha, abs=1e-9 * scale)
    assert fit.alpha_s + fit.beta_s_per_byte * max(sizes) == pytest.approx(scale, rel=1e-9)
    np.testing.assert_allclose(fit.residuals, 0.0, atol=1e-7)


def test_one_outlier_does_not_bend_the_line():
    sizes = np.array([1e3, 1e4, 1e5, 1e6, 2e6, 4e6, 8e6])
    times = 1e-4 + 1e-8 * sizes
    times[4] *= 3
    fit = fit_line(sizes, times)
    assert fit.beta_s_per_byte == pytest.approx(1e-8, rel=1e-6)
    assert fit.alpha_s == pytest.approx(1e-4, rel=1e-6)
    assert fit.residuals[4] == pytest.approx(2 / 3, rel=1e-2)


def test_a_token_bucket_shows_in_the_residuals_and_not_in_the_rate():
    # 64 KiB pass at once, the rest at 25 MB/s.
    times = 1e-4 + np.maximum(0, np.array(SIZES) - 65536) / 25e6
    fit = fit_line(SIZES, times)
    assert 1 / fit.beta_s_per_byte == pytest.approx(25e6, rel=1e-6)
    assert fit.alpha_s == pytest.approx(1e-4, rel=0.3)
    assert min(fit.residuals) < -0.9


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ([1], [1.0]),
        ([5, 5], [1.0, 1.0]),
        ([1, 2], [1.0, np.nan]),
        ([1, 2], [0.0, 1.0]),
        ([1, 2], [1.0, np.inf]),
    ],
)
def test_times_that_cannot_be_fitted_are_refused(sizes, times):
    with pytest.raises(DataError):
        fit_line(sizes, times)


@given(st.lists(st.floats(0, 1e-3), min_size=3, max_size=6))
def test_latencies_are_split_so_that_they_add_up(halves):
    halves = np.array(halves)
    rise_s, fall_s = split_latencies(halves[:, None] + halves[None, :])
    np.testing.assert_allclose(rise_s, halves, atol=1e-12)
    np.testing.assert_allclose(fall_s, halves, atol=1e-12)


def route_s(topology, a, b, size):
    route = list(topology.shortest_route(a, b))
    slowest = topology.capacities_bytes_per_s[route].min()
    return topology.latencies_s[route].sum() + size / slowest


def test_one_port_a_rank_becomes_a_switch_that_predicts_every_pair():
    up, down = [25e6, 25e6, 10e6, 25e6], [25e6, 12e6, 25e6, 25e6]
    rates = star_rates(up, down)
    profile = profile_of(np.full((4, 4), 2e-4), rates, contention=crowded(up, down))
    topology = profile.to_topology()
    assert [node.kind for node in topology.nodes].count("switch") == 1
    for a in range(4):
        for b in set(range(4)) - {a}:
            wanted = profile.alpha_s[a, b] + profile.beta_s_per_byte[a, b] * (1 << 20)
            assert route_s(topology, a, b, 1 << 20) == pytest.approx(wanted, rel=1e-6)
    again = read_topology(topology.to_toml())
    np.testing.assert_allclose(again.capacities_bytes_per_s, topology.capacities_bytes_per_s)


def test_links_of_their_own_become_direct_links():
    rates = np.full((4, 4), 10e9)
    both = [30e9] * 4  # sending to three at once is three times as fast
    profile = profile_of(
        np.full((4, 4), 1e-6), rates, hosts=["box"] * 4, contention=crowded(both, both),
        backend="nccl",
    )  # fmt: skip
    topology = profile.to_topology()
    assert topology.num_links == 12
    assert {node.kind for node in topology.nodes} == {"gpu"}
    assert topology.hosts == {"box": (0, 1, 2, 3)}


@pytest.mark.parametrize(("ranks", "measured"), [(2, True), (4, False)])
def test_without_a_measurement_ranks_share_one_port(ranks, measured):
    contention = crowded([90e9] * ranks, [90e9] * ranks) if measured else None
    profile = profile_of(
        np.full((ranks, ranks), 1e-6), np.full((ranks, ranks), 10e9), contention=contention
    )
    assert profile.shares_one_port()


@pytest.mark.parametrize("itself", [np.nan, 0.0, 1e-9])
def test_what_a_rank_takes_to_itself_says_nothing(itself):
    both = [30e9] * 4
    profile = profile_of(
        np.full((4, 4), 1e-6), np.full((4, 4), 10e9), contention=crowded(both, both)
    )
    times = profile.times_s.copy()
    times[np.eye(4, dtype=bool)] = itself * np.array(SIZES)[:]
    assert not dataclasses.replace(profile, times_s=times).shares_one_port()


def test_several_ranks_on_several_hosts_share_a_card():
    hosts = ["a", "a", "b", "b"]
    outside = np.array(hosts)[:, None] != np.array(hosts)[None, :]
    rates, alphas = np.where(outside, 1e9, 50e9), np.where(outside, 1e-5, 1e-6)
    contention = Contention(
        out_bytes_per_s=np.full(4, 1e9),
        in_bytes_per_s=np.full(4, 1e9),
        all_bytes_per_s=1e9,
        host_out_bytes_per_s={"a": 1e9, "b": 1e9},
    )
    profile = profile_of(alphas, rates, hosts=hosts, contention=contention)
    topology = profile.to_topology()
    topology.require_connected()
    assert route_s(topology, 0, 1, 1 << 20) == pytest.approx(1e-6 + (1 << 20) / 50e9, rel=1e-6)
    assert route_s(topology, 0, 2, 1 << 20) == pytest.approx(1e-5 + (1 << 20) / 1e9, rel=1e-6)
    card = next(
        link for link in topology.links if link.source == "a card" and link.target == "switch"
    )
    assert card.capacity_bytes_per_s == pytest.approx(1e9, rel=1e-6)


def test_times_that_do_not_grow_give_a_lower_bound():
    times = np.full((2, 2, 2), 1e-3)
    profile = Profile(hosts=("a", "b"), backend="gloo", sizes_bytes=(1, 2000), times_s=times)
    topology = profile.to_topology()
    np.testing.assert_allclose(topology.capacities_bytes_per_s, 2e6)
    assert "2 rates are lower bounds" in topology.source


def test_noise_in_the_upper_half_falls_back_to_the_whole_range():
    fit = fit_line([0, 1000, 2000], [1e-6, 3.1e-6, 3e-6])
    assert fit.beta_s_per_byte == pytest.approx(1e-9)


def test_a_profile_is_json():
    profile = profile_of(np.full((2, 2), 1e-4), np.full((2, 2), 1e8))
    found = json.loads(json.dumps(profile.to_dict()))
    assert found["hosts"] == ["host0", "host1"]
    assert found["alpha_s"][0][1] == pytest.approx(1e-4)
    with pytest.raises(DataError, match="must have shape"):
        Profile(hosts=("a",), backend="gloo", sizes_bytes=SIZES, times_s=np.zeros((2, 2, 2)))
