"""Plans that are run for real: who may, and that a small one takes the predicted time."""

import json

import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.codesign import (
    ClusterPlan,
    JobPlan,
    JobSpec,
    check_executable,
    null_plan,
    read_measurements,
    write_order,
)
from fivefold.codesign._execute import _read_order
from fivefold.errors import UnsupportedError
from fivefold.network.topology import switch
from fivefold.tasks import LayerCost


def job(name="a", ranks=(0, 1), **more):
    layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=1000, **more)
    return JobSpec(job_id=name, ranks=ranks, layers=(layer,), iterations=3)


def test_what_is_written_is_read():
    jobs = [job(), job("b", (2, 3))]
    plan = null_plan(switch(4), jobs)
    assert read_measurements(["x", json.dumps({"iteration_s": {"a": 1.0}})]) == {"a": 1.0}
    assert read_measurements([]) == {}
    assert ClusterPlan.from_json(plan.to_json()) == plan


def test_an_order_survives_its_file(tmp_path):
    jobs = [job(), job("b", (2, 3))]
    plan = null_plan(switch(4), jobs)
    write_order(tmp_path / "order.json", jobs, plan, topology=switch(4))
    channels = {"a": ["reduce 0"], "b": ["reduce 0"]}
    assert _read_order(tmp_path / "order.json") == (jobs, plan, channels)


@pytest.mark.parametrize(
    ("jobs", "changes", "message"),
    [
        ([job()], {"algorithm": "hierarchical"}, "only rings"),
        ([job()], {"priority": 1}, "priority class"),
        ([job(all_to_all_bytes=8)], {}, "only rings"),
        ([job(), job("b", (1, 2))], {}, "share rank 1"),
    ],
)
def test_plans_that_cannot_be_run_are_refused(jobs, changes, message):
    plan = ClusterPlan({j.job_id: JobPlan(order=j.ranks, **changes) for j in jobs})
    with pytest.raises(UnsupportedError, match=message):
        check_executable(jobs, plan)


@pytest.mark.lab
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
         "--json"],
    )  # fmt: skip
    if isinstance(result.exception, UnsupportedError):
        pytest.skip(f"this machine cannot make the links: {result.exception.message}")
    found = json.loads(result.stdout)["a"]
    assert found["predicted_s"] == pytest.approx(0.5)
    assert 0.49 <= found["measured_s"] <= 1.0  # a loaded machine is later, never earlier
