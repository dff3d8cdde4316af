"""One description of a cluster for every command: cards, tiers, links."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.cli._options import topology_of
from fivefold.collectives.pricing import fabric_from_topology
from fivefold.errors import ConfigurationError
from fivefold.network.topology import read_topology
from fivefold.strategy import load_cluster

CARDS = 'base = "h100-80gb-torchtitan"\ngpus = 16\ngpus_per_node = 8\nnic = "10 Gbit/s"\n'
LINKS = """\
nodes = [
  { name = "a", kind = "cpu", host = "x" },
  { name = "b", kind = "cpu", host = "y" },
]
links = [{ source = "a", target = "b", bandwidth = "12.5 MB/s", both_ways = true }]
"""


def write(folder, text, name="c.toml"):
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(("cards", "rate"), [(1, 1.25e9 / 8), (2, 2.5e9 / 8), (8, 1.25e9)])
def test_cards_of_a_node_are_shared_by_its_gpus(tmp_path, cards, rate):
    cluster = load_cluster(write(tmp_path, f"{CARDS}nics_per_node = {cards}\n"))
    assert cluster.fabric.tiers[1].bandwidth_bytes_per_s == rate
    assert (cluster.fabric.gpus_per_node, cluster.num_gpus) == (8, 16)


def test_a_card_for_each_gpu_where_none_are_counted(tmp_path):
    assert load_cluster(write(tmp_path, CARDS)).fabric.tiers[1].bandwidth_bytes_per_s == 1.25e9


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        (CARDS.replace('"10 Gbit/s"', "10"), "has no unit", "10 Gbit/s.* or .*10 GB/s"),
        (CARDS + '[[tier]]\nname = "cluster"\nbandwidth = 25e9\n', "has no unit", "GB/s"),
        (CARDS + "[device]\nmemory = 80\n", "has no unit", "80 GB.* or .*80 GiB"),
        (CARDS + '[[tier]]\nname = "cluster"\nbandwidth = "1 GB/s"\n', "gives nic and", "per GPU"),
        (CARDS + 'topology = "dgx_a100:2"\n', "beside its own links", "leave out"),
        ('base = "h100-nemo"\nnics_per_node = 2\n', "not what a card", "nic ="),
        (CARDS.replace("= 8", "= 0"), "whole number", "= 8"),
        (LINKS, "describes a network", "base ="),
        (f'base = "cpu-lab"\ntopology = "ring:4"\n{LINKS}', "besides", "leave one"),
        (f'base = "cpu-lab"\n{LINKS}[[tier]]\nname = "cluster"\nbandwidth = "1 GB/s"\n',
         "beside a topology", "leave out bandwidth"),
        ('base = "cpu-lab:x"\n', "whole number from 1 to", "joins at most"),
    ],
)  # fmt: skip
def test_a_description_that_contradicts_itself_is_refused(tmp_path, text, words, hint):
    with pytest.raises(ConfigurationError, match=words) as caught:
        load_cluster(write(tmp_path, text))
    assert re.search(hint, caught.value.hint), caught.value.hint


def test_links_and_gpus_in_one_file_for_planner_and_network(tmp_path):
    path = write(tmp_path, f'base = "cpu-lab"\n{LINKS}[device]\nmemory = "1 GB"\n'
                 '[[tier]]\nname = "cluster"\nefficiency = 0.5\n')  # fmt: skip
    cluster = load_cluster(path)
    assert cluster.device.memory_bytes == 1e9
    assert [(t.bandwidth_bytes_per_s, t.efficiency) for t in cluster.fabric.tiers] == [
        (12.5e6, 0.5)
    ]
    assert cluster.num_gpus == 2
    assert cluster.graph() == read_topology(path) == topology_of(str(path))


def test_files_are_found_beside_the_one_that_names_them(tmp_path):
    write(tmp_path, LINKS, "links.toml")
    path = write(tmp_path, 'base = "cpu-lab"\ntopology = "links.toml"\n')
    assert load_cluster(path).graph().num_ranks == 2


@settings(max_examples=15)
@given(
    gpus=st.sampled_from([1, 2, 4, 8]), nodes=st.integers(2, 9), cards=st.integers(1, 4),
    rate=st.sampled_from([1, 10, 100, 400]),
)  # fmt: skip
def test_the_links_of_tiers_have_the_rates_of_the_tiers(tmp_path_factory, gpus, nodes, cards, rate):
    text = (
        f'base = "h100-nemo"\ngpus = {gpus * nodes}\ngpus_per_node = {gpus}\n'
        f'nic = "{rate} Gbit/s"\nnics_per_node = {cards}\n'
    )
    cluster = load_cluster(write(tmp_path_factory.mktemp("c"), text))
    graph = cluster.graph()
    assert (graph.num_ranks, len(graph.hosts)) == (gpus * nodes, nodes)
    found = {tier.name: tier for tier in fabric_from_topology(graph).tiers}
    for tier in cluster.fabric.tiers:
        if tier.gpus > 1 and (tier.name != "node" or gpus > 1):
            same = found[tier.name].bandwidth_bytes_per_s
            assert same == pytest.approx(tier.bandwidth_bytes_per_s, rel=1e-3)


@pytest.mark.parametrize("where", ["file", "name"])
def test_every_command_takes_it(tmp_path, where):
    cluster = "h100-80gb-torchtitan:16" if where == "name" else str(write(tmp_path, CARDS))
    job = write(tmp_path, 'model = "gpt3-1.3b"\nglobal_batch = 16\n', "job.toml")
    jobs = write(tmp_path, '[[jobs]]\nid = "one"\nranks = [0, 8]\niterations = 2\n'
                 'compute = "1 ms"\nlayers = 2\ngradients = "4 MB"\n', "jobs.toml")  # fmt: skip
    for words in (
        ["plan", job, "--json"], ["simulate", jobs, "--json"], ["topology", "show"],
    ):  # fmt: skip
        option = [] if words[0] == "topology" else ["--cluster"]
        result = CliRunner().invoke(app, [*map(str, words), *option, cluster])
        assert result.exit_code == 0, (words, result.exception)
        assert words[-1] != "--json" or json.loads(result.stdout)
