"""Pages of plans: their charts say what the simulation said."""

import pytest

from fivefold.codesign import (
    ClusterPlan,
    CoDesigns,
    JobPlan,
    JobSpec,
    ablation_page,
    plan_cluster,
    plan_page,
    run_plan,
)
from fivefold.codesign.ablation import AblationRow
from fivefold.codesign.page_lanes import job_timeline, layer_timelines, link_timeline, unrolled
from fivefold.errors import ConfigurationError
from fivefold.network.topology import Aggregation, fat_tree, parse_topology, switch
from fivefold.report import render_html
from fivefold.report.page import Decision, DecisionLog, Folded, Timeline
from fivefold.tasks import LayerCost

LAYER = LayerCost(forward_s=1.0, backward_s=2.0, gradient_bytes=10**9)


def job(name, ranks, **more):
    return JobSpec(job_id=name, ranks=ranks, layers=(LAYER,) * 2, **{"iterations": 4} | more)


def window_of(topology, jobs, plan):
    outcome = run_plan(topology, jobs, plan)
    return unrolled(topology, jobs, plan, outcome), outcome


@pytest.mark.parametrize("arrival_s", [0.0, 7.0])
def test_iterations_written_out_end_when_the_simulation_says(arrival_s):
    cluster = switch(4, bandwidth="1 GB/s")
    jobs = [job("a", (0, 1)), job("b", (1, 2), arrival_s=arrival_s)]
    plan = ClusterPlan({j.job_id: JobPlan(order=j.ranks, bucket_bytes=None) for j in jobs})
    window, outcome = window_of(cluster, jobs, plan)
    for one in jobs:
        count = window.iterations[one.job_id]
        end = window.result.finish_of((count - 1, (one.job_id, "iteration")))
        if count == one.iterations:
            assert end - one.arrival_s == pytest.approx(outcome.completion_s[one.job_id])
    assert window.start_s == arrival_s
    assert window.end_s > window.start_s


def test_the_chart_of_a_job_has_its_layers_its_waits_and_its_messages():
    """Two layers of 2 s back, 1 s forward, 1 s of ring each: 2+2, then 1 s exposed, 1+1."""
    cluster = switch(2, bandwidth="1 GB/s")
    jobs = [job("a", (0, 1))]
    plan = ClusterPlan({"a": JobPlan(order=(0, 1), bucket_bytes=None)})
    window, _ = window_of(cluster, jobs, plan)
    chart = job_timeline(window, jobs)
    compute, network = chart.lanes
    first = [s for s in compute.spans if s.end_s <= 7.0 + 1e-9]
    found = {(s.kind, s.label): (s.start_s, s.end_s) for s in first}
    assert found["backward", "1"] == (0.0, 2.0)
    assert found["backward", "0"] == (2.0, 4.0)
    assert found["exposed_communication", ""] == pytest.approx((4.0, 5.0))
    assert found["forward", "0"] == pytest.approx((5.0, 6.0))
    sent = [(s.label, s.start_s, s.end_s) for s in network.spans[:2]]
    assert sent == [("1", 2.0, pytest.approx(3.0)), ("0", 4.0, pytest.approx(5.0))]
    (folded,) = layer_timelines(window, jobs)
    layers = folded.part
    assert [lane.name for lane in layers.lanes] == ["layer 0", "layer 1"]
    assert sorted(s.kind for s in layers.lanes[0].spans) == ["backward", "forward", "reduce"]


def test_links_carry_what_the_jobs_ask_of_them():
    """Two jobs over one pair of links at 1 GB/s: each edge 1 GB twice per iteration."""
    cluster = switch(2, bandwidth="1 GB/s")
    jobs = [job("a", (0, 1)), job("b", (0, 1))]
    plan = ClusterPlan({j.job_id: JobPlan(order=(0, 1), bucket_bytes=None) for j in jobs})
    window, _ = window_of(cluster, jobs, plan)
    chart = link_timeline(window, jobs, cluster)
    assert len(chart.lanes) == 4  # two up, two down
    for lane in chart.lanes:
        for load in lane.loads:
            assert max(load.shares) == pytest.approx(0.5)
            steps = zip(load.times_s, load.times_s[1:], load.shares, strict=False)
            carried = sum((b - a) * share * 1e9 for a, b, share in steps)
            # The window of 2.5 iterations of 8 s ends at 20 s; the fifth reduction begins at 18 s.
            assert carried == pytest.approx(5e9)


def test_sums_in_the_network_are_drawn_too():
    able = fat_tree(4).with_aggregation(
        Aggregation(slots=512, slot_bytes=1024, rate_bytes_per_s=None, dtypes=("fp32",))
    )
    jobs = [job("a", (0, 1, 2, 3), iterations=2)]
    found = plan_cluster(able, jobs, CoDesigns(vertical=True, host_net=True))
    assert found.plan.jobs["a"].algorithm == "in_network"
    window = unrolled(able, jobs, found.plan, found.outcome)
    assert [load.kind for load in link_timeline(window, jobs, able).lanes[0].loads] == ["job0"]


def parts_of(page, kind):
    return [part for section in page.sections for part in section.parts if isinstance(part, kind)]


def test_the_page_of_a_plan_has_every_decision_and_renders():
    cluster = parse_topology("fat_tree:4,gpus=2,bandwidth=12.5GB/s")
    jobs = [job("a", tuple(range(0, 16, 2))), job("b", tuple(range(1, 16, 2)), weight=2.0)]
    found = plan_cluster(cluster, jobs)
    page = plan_page(cluster, jobs, found, command="fivefold simulate")
    (log,) = parts_of(page, DecisionLog)
    assert [c.who for c in log.decisions] == [record.layer for record in found.decisions]
    for choice in log.decisions:
        assert isinstance(choice, Decision)
        if choice.alternatives and choice.taken:
            assert choice.chosen == min(choice.alternatives, key=lambda item: item[1])[0]
    assert len(parts_of(page, Timeline)) + len(parts_of(page, Folded)) >= 3
    text = render_html(page)
    assert "What the links carry" in text
    assert "data:image/" in text


def test_measured_times_stand_beside_the_predicted_ones():
    cluster = switch(2, bandwidth="1 GB/s")
    jobs = [job("a", (0, 1))]
    found = plan_cluster(cluster, jobs, CoDesigns.none())
    predicted = found.outcome.iteration_s["a"]
    page = plan_page(cluster, jobs, found, measured={"a": 1.1 * predicted})
    assert page.sections[0].heading == "Predicted and measured"
    assert ("10.0 %", "off in the mean", "measured against predicted") in page.tiles
    assert page.caveats == ()
    with pytest.raises(ConfigurationError, match="'a' was not measured"):
        plan_page(cluster, jobs, found, measured={})


def test_the_page_of_an_ablation_draws_each_row():
    rows = [
        AblationRow(
            label=label, to_null=ratio, to_null_interval=(ratio - 0.1, ratio + 0.1), to_best=ratio,
            to_best_interval=(ratio - 0.1, ratio + 0.1), tail_to_null=ratio, jobs_worse=0,
            jobs_worse_than_best=0, jobs=4, seeds=2,
        )
        for label, ratio in (("none", 1.0), ("V", 0.7), ("B1", 0.8))
    ]  # fmt: skip
    page = ablation_page(rows, cluster="c")
    assert page.tiles[0] == ("-30.0 %", "mean completion time", "V against B0, today")
    bars = page.sections[0].parts[0]
    assert [(row.label, row.low) for row in bars.rows][1] == ("V", pytest.approx(0.6))
    assert bars.marks == (("B0", 1.0), ("B1", 0.8))
    with pytest.raises(ConfigurationError):
        ablation_page([], cluster="c")
