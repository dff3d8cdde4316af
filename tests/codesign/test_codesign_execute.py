"""Plans that are run for real: who may, what the lab is told, and that they take the time."""

import json
import pickle

import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.codesign import ClusterPlan, JobPlan, JobSpec, run_plan
from fivefold.codesign.baselines import null_plan
from fivefold.codesign.execute import (
    check_executable,
    execution_command,
    lab_options,
    read_measurements,
    read_order,
    write_order,
)
from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.lab import LabSpec, run_lab
from fivefold.network.topology import (
    Aggregation,
    Link,
    Node,
    Topology,
    parse_topology,
    read_topology,
    switch,
)
from fivefold.tasks import LayerCost


def job(name="a", ranks=(0, 1), **more):
    layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=1000, **more)
    return JobSpec(job_id=name, ranks=ranks, layers=(layer,), iterations=3)


def summing(topology, kind, **more):
    return topology.with_aggregation(
        Aggregation(**{"slots": 64, "slot_bytes": 65536, **more}), kinds=(kind,)
    )


def test_what_is_written_is_read():
    jobs = [job(), job("b", (2, 3))]
    plan = null_plan(switch(4), jobs, algorithm="ring")
    assert read_measurements(["x", json.dumps({"iteration_s": {"a": 1.0}})]) == {"a": 1.0}
    assert read_measurements([]) == {}
    assert ClusterPlan.from_json(plan.to_json()) == plan


def test_an_order_survives_its_file(tmp_path):
    jobs = [job(), job("b", (2, 3))]
    plan = null_plan(switch(4), jobs, algorithm="ring")
    path = tmp_path / "order.json"
    write_order(path, jobs, plan, topology=switch(4))
    order = read_order(path)
    assert (list(order.jobs), order.plan) == (jobs, plan)
    assert order.channels == {"a": ("reduce 0",), "b": ("reduce 0",)}
    assert read_topology(order.topology) == switch(4)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "fivefold.codesign.order/2"}'])
def test_a_file_that_is_no_order_is_refused(tmp_path, text):
    path = tmp_path / "order.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="is no plan to be run") as caught:
        read_order(path)
    assert "--output" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("jobs", "changes", "message"),
    [
        ([job(all_to_all_bytes=8)], {}, "sends all-to-all"),
        ([job(), job("b", (1, 2))], {}, "share rank 1"),
    ],
)
def test_plans_that_cannot_be_run_are_refused(jobs, changes, message):
    plan = ClusterPlan({j.job_id: JobPlan(order=j.ranks, **changes) for j in jobs})
    with pytest.raises(UnsupportedError, match=message):
        check_executable(jobs, plan, topology=switch(4))


def test_hosts_of_several_ranks_reduce_in_rings_only():
    topology = parse_topology("leaf_spine:2,leaves=1,spines=1,gpus=2,bandwidth=25MB/s")
    one = job(ranks=(0, 1, 2, 3))
    for algorithm, message in (("hierarchical", "hosts of several ranks"), ("ring", None)):
        plan = ClusterPlan({"a": JobPlan(order=one.ranks, algorithm=algorithm)})
        if message is None:
            check_executable([one], plan, topology=topology)
        else:
            with pytest.raises(UnsupportedError, match=message):
                check_executable([one], plan, topology=topology)


@pytest.mark.parametrize(
    ("ranks", "more", "message"),
    [
        ((0, 1, 2, 3), {}, "is aggregated at leaf0, leaf1"),
        ((0, 1), {"slot_bytes": 256}, "slots of 256 bytes"),
        ((0, 1), {"rate_bytes_per_s": 1e9}, "a rate of its own"),
    ],
)
def test_sums_that_one_software_switch_cannot_make_are_refused(ranks, more, message):
    topology = summing(parse_topology("leaf_spine:4,leaves=2,spines=1"), "tor", **more)
    plan = ClusterPlan({"a": JobPlan(order=ranks, algorithm="in_network", root="leaf0", slots=1)})
    with pytest.raises(UnsupportedError, match=message):
        check_executable([job(ranks=ranks)], plan, topology=topology)


def test_the_lab_is_told_classes_sums_and_paths():
    topology = summing(parse_topology("leaf_spine:4,leaves=2,spines=2"), "tor", slots=8)
    jobs = [job(ranks=(0, 1)), job("b", (2, 3))]
    plan = ClusterPlan(
        {
            "a": JobPlan(order=(0, 1), algorithm="in_network", root="leaf0", slots=1, priority=1),
            "b": JobPlan(order=(2, 3), priority=3),
        }
    )
    found = lab_options(topology, jobs, plan)
    assert found["classes"] == 4
    assert found["host_classes"] == {0: 1, 1: 1, 2: 3, 3: 3}
    assert found["aggregators"] == {"leaf0": {"slots": 8, "slot_bytes": 65536}}
    assert set(found["routes"]) == {(2, 3), (3, 2)}, "sums go where the switch is"
    spec = LabSpec.of_topology(topology, **found)
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301 - as the relay gets it
    plain = lab_options(topology, jobs, null_plan(topology, jobs, algorithm="ring"))
    assert (plain["classes"], plain["host_classes"], plain["aggregators"]) == (1, {}, {})


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.distributed
def test_a_plan_takes_about_as_long_as_predicted(tmp_path):
    """One job of two hosts: 0.3 s of sleep and 2.5 MB each way at 12.5 MB/s, 0.2 s."""
    path = tmp_path / "jobs.toml"
    path.write_text(
        "[[jobs]]\nid = 'a'\ngpus = 2\ncompute = 0.3\ngradients = '2.5 MB'\nlayers = 1\n"
        "iterations = 3\n"
    )
    result = CliRunner().invoke(
        app,
        ["execute", str(path), "--cluster", "switch:2,bandwidth=12.5MB/s", "--co-designs", "none",
         "--json", "--output", str(tmp_path / "plan.json")],
    )  # fmt: skip
    if isinstance(result.exception, UnsupportedError):
        pytest.skip(f"this machine cannot make the links: {result.exception.message}")
    found = json.loads(result.stdout)["a"]
    assert found["predicted_s"] == pytest.approx(0.5)
    assert 0.49 <= found["measured_s"] <= 1.0  # a loaded machine is later, never earlier
    order = read_order(tmp_path / "plan.json")
    assert [spec.job_id for spec in order.jobs] == ["a"]


def test_a_plan_brings_its_own_cluster(tmp_path):
    path = tmp_path / "plan.json"
    write_order(path, [job()], null_plan(switch(2), [job()], algorithm="ring"), topology=switch(2))
    result = CliRunner().invoke(app, ["lab", "run", "--hosts", "4", str(path)])
    assert isinstance(result.exception, ConfigurationError)
    assert "brings its own cluster" in str(result.exception)
    result = CliRunner().invoke(app, ["lab", "run", str(tmp_path / "none.json")])
    assert "is no plan to be run" in str(result.exception)


def _one_way_ring(order):
    """A ring of links that are fast in one direction only."""
    links = []
    for source, target in zip(order, (*order[1:], order[0]), strict=True):
        ends = f"gpu{source}", f"gpu{target}"
        links.append(Link(*ends, bandwidth_bytes_per_s=12.5e6))
        links.append(Link(*reversed(ends), bandwidth_bytes_per_s=1.25e6))
    return Topology("one way", [Node(f"gpu{n}", "gpu") for n in range(len(order))], links)


def _measured(tmp_path, topology, jobs, plan):
    path = tmp_path / "order.json"
    write_order(path, jobs, plan, topology=topology)
    spec = LabSpec.of_topology(topology, mtu=60000, **lab_options(topology, jobs, plan))
    try:
        result = run_lab(spec, execution_command(path), timeout_s=100, stream=False,
                         log_folder=tmp_path / "logs")  # fmt: skip
    except UnsupportedError as error:
        pytest.skip(f"this machine cannot make the links: {error.message}")
    return read_measurements(result.check().ranks[0].stdout().splitlines()), result.aggregation


def sized(name, ranks, compute_s, size_bytes):
    layer = LayerCost(forward_s=0.0, backward_s=compute_s, gradient_bytes=size_bytes)
    return JobSpec(job_id=name, ranks=ranks, layers=(layer,), iterations=2)


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.distributed
def test_bytes_go_along_the_planned_ring_in_its_direction(tmp_path):
    """Three hosts, 1.5 MB: 2 MB per edge, 0.16 s the fast way round; 1.6 s the other."""
    order = (0, 2, 1)
    topology, jobs = _one_way_ring(order), [sized("a", (0, 1, 2), 0.1, 1_500_000)]
    plan = ClusterPlan({"a": JobPlan(order=order)})
    assert run_plan(topology, jobs, plan).iteration_s["a"] == pytest.approx(0.26)
    found, _ = _measured(tmp_path, topology, jobs, plan)
    assert 0.25 <= found["a"] <= 1.0


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.distributed
def test_classes_and_sums_together_take_about_the_predicted_time(tmp_path):
    """`a` is aggregated at the spine and first on the uplinks; `b` has what `a` leaves."""
    topology = parse_topology("leaf_spine:4,leaves=2,spines=1,oversubscription=2,bandwidth=6MB/s")
    topology = summing(topology, "core")
    jobs = [sized("a", (0, 2), 0.3, 1_500_000), sized("b", (1, 3), 0.1, 1_500_000)]
    plan = ClusterPlan(
        {
            "a": JobPlan(order=(0, 2), algorithm="in_network", root="spine0", slots=1),
            "b": JobPlan(order=(1, 3), priority=1),
        }
    )
    predicted = run_plan(topology, jobs, plan).iteration_s
    assert predicted["a"] == pytest.approx(0.55)
    assert predicted["b"] > 0.35 + 0.1
    found, sums = _measured(tmp_path, topology, jobs, plan)
    for name in "ab":
        # A loaded machine is later; earlier only by what token buckets let through at once.
        assert 0.9 * predicted[name] <= found[name] <= 2.5 * predicted[name]
    # Two warm-ups and two iterations; chunks of 64 KiB.
    assert sums["spine0"]["hits"] == 2 + 2 * 23
