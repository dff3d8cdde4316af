"""What limits a run: every line is the prediction asked again, of a job, of jobs, of a run."""

import dataclasses
import json
import math

import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.codesign import (
    ClusterPlan,
    JobSpec,
    explain_jobs,
    explain_plan,
    explain_run,
    run_plan,
)
from fivefold.codesign.baselines import null_plan
from fivefold.codesign.explain import LAYERS
from fivefold.errors import ConfigurationError, DataError, InfeasibleError
from fivefold.network.topology import parse_topology, switch
from fivefold.strategy import (
    Job,
    ParallelPlan,
    SearchSpace,
    evaluate_plan,
    load_cluster,
    load_model,
    search_plans,
)
from fivefold.tasks import LayerCost

CLUSTER = load_cluster("h100-nemo")
MODEL = load_model("gpt3-1.3b")
SPACE = SearchSpace(num_gpus=32, global_batch=64, zero=(0, 1), recompute=("none", "full"))
PLAN = ParallelPlan(
    global_batch=64, data=8, tensor=2, pipeline=2, micro_batch=2, recompute="full", zero=1
)


def slower(factor):
    """The cluster with links between nodes slower by a factor."""
    node, *outer = CLUSTER.fabric.tiers
    tiers = tuple(
        dataclasses.replace(tier, bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s / factor)
        for tier in outer
    )
    fabric = dataclasses.replace(CLUSTER.fabric, tiers=(node, *tiers))
    return dataclasses.replace(CLUSTER, fabric=fabric)


@pytest.fixture(scope="module")
def given():
    return explain_plan(Job(model=MODEL, space=SPACE, plan=PLAN), slower(4))


def asked(plan, cluster):
    return evaluate_plan(MODEL, cluster.device, cluster.fabric, plan=plan)


def test_every_setting_is_the_prediction_of_the_plan_that_has_it(given):
    settings = [change for change in given.changes if change.settings]
    assert len(settings) >= 5
    for change in settings:
        found = asked(dataclasses.replace(PLAN, **change.settings), slower(4))
        assert change.seconds == pytest.approx(found.time_s, rel=1e-12), change.action
        assert change.saves_s == pytest.approx(given.seconds - found.time_s)
        assert found.fits
    assert given.seconds == asked(PLAN, slower(4)).time_s
    assert sum(given.parts_s.values()) == pytest.approx(given.seconds)
    assert [one.saves_s for one in given.changes] == sorted(
        (one.saves_s for one in given.changes), reverse=True
    )


def test_a_split_that_is_not_the_fastest_is_told_the_fastest(given):
    best = search_plans(MODEL, CLUSTER.device, slower(4).fabric, space=SPACE, top=1).best[0]
    named = [change for change in given.changes if change.action.startswith("split it as")]
    assert best.time_s in [change.seconds for change in named if change.kind == "setting"]
    assert min(change.seconds for change in named) <= best.time_s


def test_links_twice_as_fast_are_the_prediction_on_twice_the_links(given):
    name = CLUSTER.fabric.tiers[-1].name
    (twice,) = (c for c in given.changes if c.action == f"links of {name!r} twice as fast")
    assert twice.seconds == asked(PLAN, slower(2)).time_s
    (half,) = (c for c in given.changes if c.kind == "risk")
    assert half.seconds == asked(PLAN, slower(8)).time_s
    assert half.saves_s < 0


def test_bounds_are_not_beaten_by_what_can_be_set_in_their_layer(given):
    assert {change.layer for change in given.changes} >= {*LAYERS, "compute"}
    for layer in ("tasks", "collectives"):
        bound = min(c.seconds for c in given.changes if c.layer == layer and c.kind == "bound")
        assert all(
            c.seconds >= bound - 1e-12
            for c in given.changes
            if c.layer == layer and c.kind == "setting"
        )


@pytest.mark.parametrize(("factor", "limit"), [(1, "compute"), (300, "network")])
def test_a_slow_network_limits_and_a_fast_one_does_not(factor, limit):
    plan = ParallelPlan(global_batch=256, data=32, micro_batch=8, zero=1, data_overlap=True)
    space = dataclasses.replace(SPACE, global_batch=256, tensor=(1,), pipeline=(1,))
    found = explain_plan(Job(model=MODEL, space=space, plan=plan), slower(factor))
    assert found.limit == limit
    local = [c for c in found.changes if "synchronise every" in c.action]
    if factor > 1:  # advice, though no limit: it changes what is learnt
        (one,) = local
        assert one.kind == "convergence"
        assert one.seconds < found.best_of("network").seconds


def test_no_bound_is_worse_than_the_plan():
    """Of a pipeline and data parallelism over slow links, which send side by side."""
    plan = ParallelPlan(
        global_batch=24, data=2, tensor=4, pipeline=3, virtual=2, schedule="zb_v", zero=1,
        data_overlap=True, pipeline_overlap=True,
    )  # fmt: skip
    space = SearchSpace(num_gpus=24, global_batch=24)
    found = explain_plan(Job(model=MODEL, space=space, plan=plan), slower(32))
    assert min(change.saves_s for change in found.changes if change.kind == "bound") > 0


def test_a_plan_that_does_not_fit_is_refused():
    plan = ParallelPlan(global_batch=64, data=32)
    job = Job(model=load_model("llama3-70b"), space=SPACE, plan=plan)
    with pytest.raises(InfeasibleError, match="does not fit"):
        explain_plan(job, CLUSTER)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"b"', '"c"', "the plan is of jobs a, c, not of a, b"),
        ('"order": [1, 3]', '"order": [1, 5]', "other ranks than its own"),
        ("[[0, 2, 0, 5]", "[[0, 2, 0, 7]", "uses links that"),
        ("[[0, 2, 0, 5]", "[[0, 2, 99]", "uses links that"),
        ('"ring_or_tree"', '"rings"', "algorithm must be"),
        ('"shift_s": 0.0', '"shift_s": "0"', "shift_s must be"),
        ('"bucket_bytes": null', '"bucket_bytes": -1', "bucket_bytes of a job's plan"),
        ("{", "\udcff", "this is no plan"),
    ],
)
def test_a_plan_of_other_jobs_or_damaged_is_refused(tmp_path, old, new, said):
    jobs, cluster = two_jobs(), switch(4)
    text = json.dumps(json.loads(null_plan(cluster, jobs).to_json()))
    assert old in text
    file, described = tmp_path / "plan.json", tmp_path / "jobs.toml"
    file.write_text(text.replace(old, new), errors="surrogateescape")
    entry = '[[jobs]]\nid = "{}"\nranks = [{}]\ncompute = 0.3\ngradients = "1 GB"\n'
    described.write_text(entry.format("a", "0, 2") + entry.format("b", "1, 3"))
    asked = ["explain", str(described), "--cluster", "switch:4", "--plan", str(file)]
    found = CliRunner().invoke(app, asked).exception
    assert isinstance(found, ConfigurationError)
    assert said in str(found)


def two_jobs():
    layers = (LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10**9),) * 2
    return [
        JobSpec(job_id=name, ranks=ranks, layers=layers, iterations=4)
        for name, ranks in (("a", (0, 2)), ("b", (1, 3)))
    ]


def test_jobs_are_simulated_again_with_each_change():
    topology = parse_topology("leaf_spine:4,leaves=2,spines=1,oversubscription=4,bandwidth=2GB/s")
    jobs = two_jobs()
    found = explain_jobs(topology, jobs)
    plan = null_plan(topology, jobs)
    now = run_plan(topology, jobs, plan).completion_s
    assert found.seconds == pytest.approx(sum(now.values()) / 2)
    alone = [
        run_plan(topology, [job], ClusterPlan({job.job_id: plan.jobs[job.job_id]})) for job in jobs
    ]
    (bound,) = (c for c in found.changes if c.action == "every job alone")
    expected = sum(sum(one.completion_s.values()) for one in alone) / 2
    assert bound.seconds == pytest.approx(expected)
    assert bound.layer == "flows"
    assert bound.saves_s > 0


def test_jobs_that_send_next_to_nothing_are_limited_by_compute():
    layers = (LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=1000),)
    job = JobSpec(job_id="a", ranks=(0, 1), layers=layers, iterations=4)
    assert explain_jobs(switch(2, bandwidth="10 GB/s"), [job]).limit == "compute"


def run_folder(folder, *, method, compute, waits, in_flight, rate=None, steps=10):
    ranks = folder / "ranks"
    ranks.mkdir(parents=True)
    lab = {"hosts": 2, "rate_bytes_per_s": rate, "shaped": True, "delay_s": 0.0}
    manifest = {
        "schema": 1, "fivefold": "0", "label": "a run", "world_size": 2, "method": method,
        "hosts": 2, "lab": lab,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "config.toml").write_text(f'[sync]\nmethod = "{method}"\n')
    (folder / "metrics.jsonl").write_text("")
    result = {
        "schema": 1, "method": method, "label": "a run", "steps": steps, "tokens": 100 * steps,
        "wall_s": steps * (compute + waits),
        "seconds": {"compute": steps * compute, "exposed_communication": steps * waits},
        "communication": {
            "in_flight_s": steps * in_flight, "exposed_wait_s": steps * waits,
            "payload_bytes": 1_000_000 * steps, "collectives": steps,
        },
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_measured_run_of_ddp_is_told_the_tau_that_hides_its_messages(tmp_path):
    # 0.2 s of compute, 1.0 s in flight of which 0.9 are waited for
    folder = run_folder(
        tmp_path / "run", method="ddp", compute=0.2, waits=0.9, in_flight=1.0, rate=1.6e6
    )
    found = explain_run(folder)
    assert found.seconds == pytest.approx(1.1)
    assert found.limit == "network"
    by_name = {change.action: change for change in found.changes}
    local = next(c for name, c in by_name.items() if "local updates" in name)
    tau = int(local.action.rpartition(" ")[2])
    assert tau == math.ceil(1.1 * 1.0 / 0.2)
    assert local.seconds == pytest.approx(0.2)  # all hidden: only compute is left
    # half the time in flight, as much of it hidden as before: 0.5 - 0.1 is waited for
    assert by_name["links twice as fast"].seconds == pytest.approx(0.2 + 0.4)
    # 2 (n-1)/n of 1 MB at 1.6 MB/s: 0.625 s
    assert by_name["all-reduces at the link's full rate"].seconds == pytest.approx(0.2 + 0.525)
    assert by_name["all communication beside compute"].seconds == pytest.approx(0.2 + 0.8)


def test_a_tau_that_was_chosen_is_the_one_to_change(tmp_path):
    folder = run_folder(
        tmp_path / "run", method="delay_corrected", compute=0.2, waits=0.1, in_flight=0.2
    )
    (folder / "config.toml").write_text('[sync]\nmethod = "delay_corrected"\ntau = "auto"\n')
    points = [{"event": "sync", "step": step, "wall_s": 1.0, "tau": step} for step in (6, 12)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    assert any("tau = 14 instead of 12" in c.action for c in explain_run(folder).changes)


def test_waits_after_the_last_step_limit_no_step(tmp_path):
    folder = run_folder(tmp_path / "run", method="co2", compute=1.0, waits=0.5, in_flight=0.5)
    result = json.loads((folder / "result.json").read_text())
    result["waits"] = {"last all-reduce": 5.0}  # all that was waited for in ten steps
    (folder / "result.json").write_text(json.dumps(result))
    found = explain_run(folder)
    assert found.seconds == pytest.approx(1.0)
    assert found.limit == "compute"


def test_a_run_that_waits_for_nothing_is_limited_by_compute(tmp_path):
    folder = run_folder(tmp_path / "run", method="co2", compute=1.0, waits=0.0, in_flight=0.5)
    assert explain_run(folder).limit == "compute"


def test_a_folder_of_two_runs_is_refused(tmp_path):
    for name in "ab":
        run_folder(tmp_path / name, method="ddp", compute=1.0, waits=0.0, in_flight=0.5)
    with pytest.raises(DataError, match="holds 2 runs"):
        explain_run(tmp_path)


def test_the_command_explains_all_three(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('model = "gpt3-1.3b"\ngpus = 8\nglobal_batch = 32\n')
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[[jobs]]\nid="a"\ngpus=2\ncompute="0.1 s"\ngradients="1 GB"\niterations=3\n')
    run = run_folder(tmp_path / "run", method="ddp", compute=0.2, waits=0.9, in_flight=1.0)
    for words in (
        [job, "--cluster", "h100-nemo"],
        [jobs, "--cluster", "switch:4,bandwidth=1GB/s"],
        [run],
    ):
        shown = CliRunner().invoke(app, ["explain", *map(str, words)])
        assert shown.exit_code == 0, shown.output
        assert "limit: " in shown.output
        record = json.loads(CliRunner().invoke(app, ["explain", *map(str, words), "--json"]).stdout)
        assert record["limit"] in {*LAYERS, "compute"}
        assert record["limit"] in shown.output
