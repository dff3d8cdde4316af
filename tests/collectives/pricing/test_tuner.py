"""Rules for NCCL's tuner plugin, read by the plugin's own way of reading and choosing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.collectives.pricing.tuner import nccl_tuner_rules, tuner_csv
from fivefold.errors import UnsupportedError
from fivefold.network.topology import named_topology, parse_topology, switch

US = 1e-6
LARGEST = 2**64 - 1
# In the plugin's parser all other words silently mean allreduce, ring and simple.
COLLECTIVES = {"broadcast", "reduce", "allgather", "reducescatter", "allreduce"}
ALGORITHMS = {"tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"}
PROTOCOLS = {"ll", "ll128", "simple"}
TOPOLOGIES = {
    "two boxes": named_topology("dgx_h100", boxes=2),
    "four boxes": named_topology("dgx_h100", boxes=4),
    "a100": named_topology("dgx_a100", boxes=3),
    "flat": switch(8, bandwidth="25 GB/s", latency="2 us"),
}
RULES = {name: nccl_tuner_rules(topology) for name, topology in TOPOLOGIES.items()}


def load_config(text):
    """Read the file as ``loadConfig`` of the plugin does: lines by fgets, fields by strtok."""
    configs = []
    for line in text.splitlines(keepends=True):
        assert len(line) < 256  # else fgets makes two of it
        if line[0] in "#\n" or not line.rstrip("\n"):
            continue
        tokens = [token.strip(" \t") for token in line.rstrip("\n").split(",") if token]
        assert 8 <= len(tokens) <= 10
        collective, least, most, algorithm, protocol, *numbers = tokens
        assert collective in COLLECTIVES
        assert algorithm in ALGORITHMS
        assert protocol in PROTOCOLS
        configs.append((collective, int(least), int(most), algorithm, protocol, *map(int, numbers)))
    return configs


def chosen(configs, call, ignored=()):
    """Return algorithm, protocol and channels as ``pluginGetCollInfo`` does for a call."""
    collective, size, hosts, ranks = call
    for one in configs:
        fits = one[0] == collective and one[1] <= size <= one[2] and one[6:8] == (hosts, ranks)
        if fits and one[3:5] not in ignored:  # what NCCL marks as not there
            return one[3:6]
    return None


@given(
    st.sampled_from(list(TOPOLOGIES)), st.sampled_from(sorted(COLLECTIVES)),
    st.integers(0, LARGEST), st.data(),
)  # fmt: skip
def test_every_call_of_every_group_has_a_rule(name, collective, size, data):
    """The plugin gives a call without one a single channel: worse than no plugin at all."""
    rules = RULES[name]
    configs = load_config(tuner_csv(name, rules))
    hosts, ranks = data.draw(st.sampled_from(sorted({(one.hosts, one.ranks) for one in rules})))
    call = collective, size, hosts, ranks
    found = chosen(configs, call)
    assert 1 <= found[2] <= 64  # -1 would be one channel: the plugin begins with 1
    # Without LL128, NVLS and PAT, which not every NCCL has, there is still one.
    rare = [(a, p) for a in ALGORITHMS for p in PROTOCOLS if a not in {"ring", "tree"}]
    rest = chosen(configs, call, ignored=[*rare, ("ring", "ll128"), ("tree", "ll128")])
    assert rest is not None


def test_the_file_says_the_rules():
    configs = load_config(tuner_csv("a,name\nof two lines " + 300 * "x", RULES["two boxes"]))
    assert configs == [
        (
            rule.collective, rule.least_bytes, rule.most_bytes, *rule.choice, rule.hosts,
            rule.ranks,
        )
        for rule in RULES["two boxes"]
    ]  # fmt: skip


def test_all_shapes_of_groups_are_there():
    found = {(rule.hosts, rule.ranks // rule.hosts) for rule in RULES["a100"]}
    assert found == {(h, r) for h in (1, 3) for r in (1, 2, 4, 8)} - {(1, 1)}


def test_the_algorithms_cross_where_the_formulas_of_nccl_do():
    """All-reduces of eight hosts of one GPU each, by tuning.cc: times of both, at both sides."""
    rules = [rule for rule in RULES["flat"] if rule.collective == "allreduce" and rule.ranks == 8]
    rate, levels = 25e9, 3

    def tree_s(size, base_us, step_us, share):
        return (base_us + 2 * levels * step_us) * US + 2 * 7 / 8 * size / (0.92 * share * rate)

    def ring_s(size, base_us, step_us, share):
        return (base_us + 2 * 7 * step_us) * US + 2 * 7 / 8 * size / (share * rate)

    for rule in rules:
        if rule.least_bytes == 0:
            continue
        size = rule.least_bytes * 2**0.5
        known = {
            ("tree", "ll"): tree_s(size, 6.8, 5.0, 1 / 3.8),
            ("ring", "ll"): ring_s(size, 6.6, 5.0, 0.5),
            ("tree", "ll128"): tree_s(size, 14.0, 8.5, 120 / 128),
            ("ring", "ll128"): ring_s(size, 14.0, 8.5, 0.92),
            ("tree", "simple"): tree_s(size, 8.4, 14.0, 1.0),
            ("ring", "simple"): ring_s(size, 8.4, 14.0, 1.0),
        }
        assert rule.time_s == pytest.approx(known[rule.algorithm, rule.protocol], rel=1e-6)
    firsts = {rule.least_bytes: rule for rule in reversed(rules)}.values()
    assert all(
        rule.time_s <= other.time_s for rule in firsts for other in rules
        if other.least_bytes == rule.least_bytes
    )  # fmt: skip
    assert rules[0].algorithm == "tree"
    assert rules[-1].algorithm == "ring"


def test_switches_that_sum_and_single_ranks_have_their_own_algorithms():
    def first(name, collective, size, hosts, ranks):
        return chosen(load_config(tuner_csv(name, RULES[name])), (collective, size, hosts, ranks))[
            0
        ]

    assert first("four boxes", "allreduce", 10**9, 4, 32) == "nvls_tree"
    assert first("four boxes", "allreduce", 10**9, 1, 8) == "nvls"
    assert first("four boxes", "allreduce", 10**9, 4, 8) != "nvls_tree"  # two of each host
    assert first("flat", "allgather", 200_000, 8, 8) == "pat"
    assert {rule.algorithm for rule in RULES["a100"]} == {"tree", "ring", "pat"}
    # The sum in the switch moves each byte up and down once, at NCCL's 0.85 of 0.8 of the links.
    [large] = [
        rule for rule in RULES["four boxes"]
        if (rule.algorithm, rule.ranks, rule.most_bytes) == ("nvls", 8, LARGEST)
    ]  # fmt: skip
    size = large.least_bytes * 2**0.5
    assert large.time_s == pytest.approx(25e-6 + size / (450e9 * 0.8 * 0.85), rel=1e-6)


@pytest.mark.parametrize(("protocol", "bytes_each"), [("simple", 32768), ("ll128", 5120)])
def test_channels_are_those_that_nccl_would_take(protocol, bytes_each):
    """enqueue.cc takes channels away while one has fewer bytes than its threads are worth."""
    for rule in RULES["two boxes"]:
        if rule.protocol == protocol and rule.algorithm in {"ring", "tree"}:
            nc = 64
            while nc > 1 and rule.least_bytes < nc * bytes_each:
                nc -= 1
            assert rule.channels == nc


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (named_topology("mi250", boxes=2), "run RCCL"),
        (parse_topology("fat_tree:2,kind=cpu"), "run gloo"),
        (switch(1, bandwidth="1 GB/s", latency="0 s"), "one rank"),
    ],
)
def test_what_nccl_does_not_run_on_is_refused(topology, message):
    with pytest.raises(UnsupportedError, match=message):
        nccl_tuner_rules(topology)


def test_the_command_writes_the_file_and_says_how_to_load_it(tmp_path):
    path = tmp_path / "tuner.csv"
    words = ["collectives", "tune", "dgx_a100:2", "--output", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert f"NCCL_TUNER_CONFIG_FILE={path}" in "".join(done.output.split("\n"))
    assert path.read_text() == tuner_csv("dgx_a100:2", nccl_tuner_rules(parse_topology(words[2])))


def test_programs_get_the_rules_and_the_environment(tmp_path):
    path = tmp_path / "tuner.csv"
    words = ["collectives", "tune", "switch:2", "--output", str(path), "--json"]
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert found["environment"]["NCCL_TUNER_CONFIG_FILE"] == str(path)
    first = load_config(path.read_text())[0]
    assert tuple(found["rules"][0][key] for key in ("collective", "least_bytes")) == first[:2]
