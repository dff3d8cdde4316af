"""Jobs described by a model and devices: layer 1's plans as tasks, collectives and flows."""

import json
import math

import pytest
from typer.testing import CliRunner

from fivefold import strategy
from fivefold.cli._main import app
from fivefold.codesign import ClusterPlan, CoDesigns, JobPlan, JobSpec, plan_cluster, run_plan
from fivefold.codesign.baselines import null_plan
from fivefold.codesign.coordinator import plan_single
from fivefold.codesign.jobs import Split, mesh_ranks
from fivefold.codesign.simulate import alone_quote, iteration_of, schedule_iteration
from fivefold.codesign.steps import steps_of
from fivefold.codesign.workloads import job_from_plan as job_of
from fivefold.codesign.workloads import load_jobs
from fivefold.collectives.pricing import FabricSpec, Tier
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.network.topology import HostSpec, leaf_spine, line, switch
from fivefold.strategy.cluster import DeviceSpec
from fivefold.strategy.demand import axis_groups, plan_demand
from fivefold.tasks import LayerCost
from fivefold.tasks.iteration import IterationDemand, Message

GPT = strategy.ModelSpec(
    name="small", num_layers=8, hidden=2048, num_heads=16, seq_len=1024, vocab=32000
)
DEVICE = DeviceSpec(
    name="gpu", peak_flops=300e12, memory_bytes=80e9, memory_bandwidth_bytes_per_s=2e12,
    multiprocessors=108,
)  # fmt: skip
NODE, NET = 100e9, 10e9


def alone_iteration_s(topology, job, plan):
    """Return seconds of an iteration with the network to itself."""
    return schedule_iteration(job, plan, alone_quote(topology, job, plan)).end_s


def fabric(gpus=4, hosts=4):
    """What leaf_spine below is, without latency and with all of its bandwidth."""
    plain = {"efficiency": 1.0, "base_s": 0.0, "hop_s": 0.0}
    return FabricSpec(
        name="even",
        tiers=(
            Tier(name="node", gpus=gpus, bandwidth_bytes_per_s=NODE, **plain),
            Tier(name="net", gpus=gpus * hosts, bandwidth_bytes_per_s=NET, **plain),
        ),
    )


def hosts(number=4, gpus=4):
    """Every GPU has a port of its own, and so has NVLink."""
    return leaf_spine(
        number, leaves=1, spines=1, bandwidth=NET,
        host=HostSpec(gpus=gpus, nvlink=NODE),
    )  # fmt: skip


def job_from_plan(topology, described, ranks):
    return job_of(topology, *described, ranks, job_id="a", iterations=2)


def described(plan=None, *, gpus=16, batch=16, **space):
    job = strategy.Job(
        model=GPT, plan=plan, space=strategy.SearchSpace(num_gpus=gpus, global_batch=batch, **space)
    )
    devices = strategy.Cluster(name="even", device=DEVICE, fabric=fabric())
    return job, devices


def ring_s(size, number, rate, rounds):
    return rounds * size * (number - 1) / number / rate


@pytest.mark.parametrize("axis", ["tensor", "data", "pipeline", "expert", "shard", "expert_data"])
def test_groups_of_an_axis_hold_every_position_once(axis):
    plan = strategy.ParallelPlan(global_batch=16, data=4, tensor=2, pipeline=2, expert=2)
    groups = axis_groups(plan, axis)
    assert sorted(p for group in groups for p in group) == list(range(16))
    assert {len(group) for group in groups} == {plan.group(axis).size}
    assert axis_groups(plan, "tensor")[1] == (2, 3)
    assert axis_groups(plan, "pipeline")[0] == (0, 8)


@pytest.mark.parametrize(
    "plan",
    [
        strategy.ParallelPlan(global_batch=16, data=16, zero=0),
        strategy.ParallelPlan(global_batch=16, data=4, tensor=4),
        strategy.ParallelPlan(global_batch=16, data=2, pipeline=8, micro_batch=2),
        strategy.ParallelPlan(global_batch=16, data=16, zero=3),
    ],
    ids=["data", "tensor", "pipeline", "zero3"],
)
def test_a_demand_on_free_links_takes_what_layer_1_computes(plan):
    """Compute of the demand is layer 1's own time where links cost nothing."""
    plain = {"efficiency": 1.0, "base_s": 0.0, "hop_s": 0.0}
    free = FabricSpec(
        name="free", tiers=(Tier(name="all", gpus=16, bandwidth_bytes_per_s=1e30, **plain),)
    )
    expected_s = strategy.evaluate_plan(GPT, DEVICE, free, plan=plan).time_s
    found = plan_demand(GPT, DEVICE, plan, gpus_per_node=16)
    assert found.compute_s == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_plan_sends_activations_twice_a_layer_and_the_gradients_of_the_fuller_stage(accumulated):
    """Narayanan et al., 3.2 and 4.1: two all-reduces a layer each way; stages send b s h / t."""
    plan = strategy.ParallelPlan(
        global_batch=8 * accumulated, data=4, tensor=2, pipeline=2, micro_batch=2, zero=0
    )
    found = plan_demand(GPT, DEVICE, plan)
    h, activations = GPT.hidden, 2 * 2 * GPT.seq_len * GPT.hidden
    assert {(m.kind, m.phase, m.size_bytes) for m in found.p2p} == {
        ("send", "forward", activations // 2),
        ("return", "backward", activations // 2),
    }
    sent = {(m.axis, m.phase): m.size_bytes * found.segments for m in found.messages}
    half = GPT.num_layers // 2
    assert sent.pop(("tensor", "forward")) == half * 2 * activations
    assert sent.pop(("tensor", "backward")) == half * 2 * activations
    # The matrices and the embedding are split; it has learned positions, which the head has not.
    tables = (GPT.vocab + GPT.seq_len) * h
    first = (half * 12 * h**2 + tables) / 2 * DEVICE.gradient_wire_bytes
    assert sent.pop(("data", "reduce")) == pytest.approx(first, rel=1e-3)
    assert not sent
    assert not plan_demand(GPT, DEVICE, strategy.ParallelPlan(global_batch=8, data=8)).p2p


@pytest.mark.parametrize(
    ("plan", "sent_s"),
    [
        # All gradients round as many rings over 16 ranks as a host has ports.
        (
            strategy.ParallelPlan(global_batch=16, data=16),
            lambda m: ring_s(m["data"], 16, 4 * NET, 2),
        ),
        # Four tensor ranks of a host; data rings over hosts, one port each.
        (
            strategy.ParallelPlan(global_batch=16, data=4, tensor=4),
            lambda m: ring_s(m["tensor"], 4, NODE, 2) + ring_s(m["data"], 4, NET, 2),
        ),
        # Scattered, then gathered: the bytes of a ring again.
        (
            strategy.ParallelPlan(global_batch=16, data=4, tensor=4, zero=1),
            lambda m: ring_s(m["tensor"], 4, NODE, 2) + ring_s(m["shard"], 4, NET, 1),
        ),
    ],
    ids=["data", "tensor", "zero1"],
)
def test_an_iteration_alone_is_the_sum_of_its_parts(plan, sent_s):
    """One bucket, forward waits for all: nothing overlaps but the buckets' own compute."""
    topology = hosts()
    job = job_from_plan(topology, described(plan), range(16))
    demand = job.splits[0].demand
    sizes = {}
    for m in demand.messages:
        times = demand.micro_batches if m.phase in {"forward", "backward"} else 1
        sizes[m.axis] = sizes.get(m.axis, 0) + times * demand.segments * m.size_bytes
    choice = JobPlan(order=job.ranks, bucket_bytes=0)
    expected_s = demand.compute_s + sent_s(sizes)
    if plan.zero:  # what is updated first is gathered beside the updates of the rest
        expected_s -= demand.optimizer_s * (1 - 1 / demand.segments)
    assert alone_iteration_s(topology, job, choice) == pytest.approx(expected_s, rel=1e-3)
    found = run_plan(topology, [job], ClusterPlan({"a": choice}))
    assert found.iteration_s["a"] == pytest.approx(expected_s, rel=1e-3)


def test_stages_send_to_their_neighbours_only():
    topology = hosts()
    plan = strategy.ParallelPlan(global_batch=16, data=4, pipeline=4, micro_batch=2)
    job = job_from_plan(topology, described(plan), range(16))
    ((forward,),) = steps_of(
        topology, job, JobPlan(order=job.ranks), kind="send over pipeline", size_bytes=5.0
    )
    (phase,) = forward.phases()
    assert set(phase.edges) == {(a, a + 4) for a in range(12)}
    ((backward,),) = steps_of(
        topology, job, JobPlan(order=job.ranks), kind="return over pipeline", size_bytes=5.0
    )
    (back,) = backward.phases()
    assert set(back.edges) == {(b, a) for a, b in phase.edges}
    graph = iteration_of(job, JobPlan(order=job.ranks), lambda *_: 0.0)
    sent = [t.size_bytes for t in graph.communication if t.kind == "send over pipeline"]
    activations = 2 * 2 * GPT.seq_len * GPT.hidden  # 2 bytes, two samples
    assert sum(sent) == 2 * activations  # two micro-batches


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_message_is_in_the_iteration_as_often_as_it_is_sent(micro_batches):
    plan = strategy.ParallelPlan(global_batch=2 * micro_batches, data=2, tensor=2)
    messages = (
        Message(axis="tensor", kind="all_reduce", size_bytes=7, phase="forward"),
        Message(axis="tensor", kind="all_reduce", size_bytes=11, phase="backward", hidden=True),
        Message(axis="data", kind="all_reduce", size_bytes=13, phase="reduce"),
        Message(axis="shard", kind="all_gather", size_bytes=17, phase="gather"),
    )
    demand = IterationDemand(
        segments=3, micro_batches=micro_batches, forward_s=0.1, backward_s=0.2,
        messages=messages, bubble_s=0.3, optimizer_s=0.6,
    )  # fmt: skip
    split = Split(
        name="x", plan=plan, demand=demand, ranks=(0, 1, 2, 3), nominal_s=1.0, memory_bytes=1.0
    )
    job = JobSpec(job_id="a", ranks=(0, 1, 2, 3), splits=(split,))
    for bucket in (None, 0, 20):
        for overlap in (False, True):
            choice = JobPlan(order=job.ranks, bucket_bytes=bucket, overlap_forward=overlap)
            graph = iteration_of(job, choice, lambda *_: 0.0)
            sizes = {}
            for task in graph.communication:
                sizes[task.kind] = sizes.get(task.kind, 0) + task.size_bytes
            assert sizes == {
                "all_reduce over tensor": 3 * micro_batches * 18,
                "all_reduce over data": 3 * 13,
                "all_gather over shard": 3 * 17,
            }
            assert sum(t.duration_s for t in graph.compute) == pytest.approx(demand.compute_s)


def test_tensor_groups_stay_inside_hosts():
    two = leaf_spine(3, leaves=1, spines=1, host=HostSpec(gpus=4))
    assert mesh_ranks(two, (0, 4, 1, 5, 8, 9), tensor=2) == (0, 1, 4, 5, 8, 9)
    assert mesh_ranks(two, range(8), tensor=8) == tuple(range(8))  # whole hosts
    with pytest.raises(InfeasibleError, match="across hosts") as caught:
        mesh_ranks(two, (0, 1, 2, 4, 5, 6), tensor=2, who="job 'x'")
    assert "over 1" in caught.value.hint
    placed = job_from_plan(two, described(gpus=8, batch=8, tensor=(4,)), (0, 4, 1, 5, 2, 6, 3, 7))
    for group in placed.splits[0].groups("tensor"):
        assert len({two.host_of(rank) for rank in group}) == 1


@pytest.mark.slow
def test_layers_below_may_change_layer_1s_choice():
    """Nominal links are fast, the real ones slow: what sends less between hosts wins."""
    topology = hosts()
    slow = leaf_spine(4, leaves=4, spines=1, bandwidth=NET / 50, host=HostSpec(gpus=4, nvlink=NODE))
    job = job_from_plan(slow, described(zero=(0,)), range(16))
    start = null_plan(slow, [job]).jobs["a"]
    null = plan_single(slow, job, start, CoDesigns())
    assert null.plan.split == 0
    assert null.decisions[0].layer == "strategy"
    assert null.decisions[0].co_designs == ()
    assert set(null.decisions[0].alternatives) == {split.name for split in job.splits}
    found = plan_single(slow, job, start, CoDesigns(vertical=True))
    record = found.decisions[0]
    assert record.layer == "strategy"
    assert found.plan.split != 0
    assert record.decision == job.splits[found.plan.split].name
    priced = alone_iteration_s(slow, job, found.plan)
    assert record.alternatives[record.decision] == pytest.approx(priced)
    assert priced == min(record.alternatives.values())
    # On the links that layer 1 takes for granted there is less to gain.
    near = job_from_plan(topology, described(zero=(0,)), range(16))
    usual = null_plan(topology, [near]).jobs["a"]
    same = plan_single(topology, near, usual, CoDesigns(vertical=True)).plan
    gain = alone_iteration_s(slow, job, start) / priced
    usual_s, same_s = (alone_iteration_s(topology, near, plan) for plan in (usual, same))
    assert gain > usual_s / same_s


@pytest.mark.slow
def test_jobs_of_both_kinds_share_a_cluster_and_nobody_loses():
    topology = hosts()
    model = job_from_plan(topology, described(gpus=8, batch=8), (0, 1, 2, 3, 4, 5, 6, 7))
    layer = LayerCost(forward_s=0.01, backward_s=0.02, gradient_bytes=10**8)
    plain = JobSpec(job_id="b", ranks=tuple(range(8, 16)), layers=(layer,) * 2, iterations=3)
    found = plan_cluster(topology, [model, plain])
    assert found.worse == ()
    assert ClusterPlan.from_json(found.plan.to_json()) == found.plan
    layers = {record.layer for record in found.decisions}
    assert "strategy" in layers
    none = plan_cluster(topology, [model, plain], CoDesigns.none())
    assert none.plan == none.baseline
    assert [record.layer for record in none.decisions] == ["strategy"]


JOBS = """
[[jobs]]
id = "a"
gpus = 4
model = "llama3-8b"
devices = "h100-nemo"
batch = 8
iterations = 2
search = {tensor = [1, 2], zero = [1, 3]}
"""


def load(tmp_path, text, topology):
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    return load_jobs(path, topology)


def test_a_described_job_in_a_file(tmp_path):
    (job,) = load(tmp_path, JOBS, switch(4, bandwidth="50 GB/s"))
    assert job.ranks == (0, 1, 2, 3)
    assert {split.plan.tensor for split in job.splits} <= {1, 2}
    room = strategy.load_cluster("h100-nemo").device.memory_bytes
    assert all(split.memory_bytes <= room for split in job.splits)
    assert len(job.splits) == len({split.name for split in job.splits})
    fixed = JOBS.replace("search = {tensor = [1, 2], zero = [1, 3]}",
                         "plan = {data = 2, tensor = 2, zero = 1}")  # fmt: skip
    (one,) = load(tmp_path, fixed, switch(4))
    assert [split.plan.tensor for split in one.splits] == [2]


@pytest.mark.parametrize(
    ("change", "error", "message", "hint"),
    [
        (("gpus = 4", "gpus = 16"), InfeasibleError, "16 ranks, and 4 of 4", "4 or fewer"),
        (("gpus = 4", "ranks = [0, 9]"), InfeasibleError, "rank 9", "fewer"),
        (("batch = 8\n", ""), ConfigurationError, "lacks batch", "devices and batch"),
        (("batch", "compute = 1\nbatch"), ConfigurationError, "cannot have compute", "give"),
        (("batch", "layers = 8\nbatch"), ConfigurationError, "cannot have layers", "give"),
        (('"h100-nemo"', '"h100-nem"'), ConfigurationError, "unknown", "h100-nemo"),
        (('"llama3-8b"', '"llama3-9b"'), ConfigurationError, "llama3-9b", "llama3-8b"),
        (("tensor", "tensr"), ConfigurationError, "tensr", "tensor"),
        (("tensor = [1, 2]", "tensor = [3]"), InfeasibleError, "no split of 4 GPUs", "change"),
        (('"llama3-8b"', '"llama3-70b"'), InfeasibleError, "memory binds", "nearest changes"),
        (("search = {tensor = [1, 2], zero = [1, 3]}", "plan = {data = 8}"), InfeasibleError,
         "takes 8 GPUs, the job has 4", "data = 4"),
        (("search = {tensor = [1, 2], zero = [1, 3]}", "plan = {data = 4}"), InfeasibleError,
         "memory binds", "leave out"),
    ],
)  # fmt: skip
def test_errors_of_a_described_job(tmp_path, change, error, message, hint):
    with pytest.raises(error) as caught:
        load(tmp_path, JOBS.replace(*change), switch(4))
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert caught.value.exit_code == (3 if error is InfeasibleError else 1)


def test_a_disconnected_cluster_is_refused(tmp_path):
    whole = line(4)
    with pytest.raises(InfeasibleError, match="disconnected"):
        load(tmp_path, JOBS, whole.with_links(whole.links[:2]))


@pytest.mark.nightly
def test_simulate_says_how_a_model_is_split(tmp_path):
    path = tmp_path / "jobs.toml"
    path.write_text(JOBS)
    cluster = ["--cluster", "switch:4,bandwidth=50GB/s"]
    shown = CliRunner().invoke(app, ["simulate", str(path), *cluster, "--co-designs", "V"])
    assert shown.exit_code == 0, shown.output
    assert "ZeRO" in shown.output
    result = CliRunner().invoke(app, ["simulate", str(path), *cluster, "--json"])
    record = json.loads(result.stdout)
    assert math.isfinite(record["jobs"]["a"]["iteration_s"])
    assert record["plan"]["jobs"]["a"]["split"] >= 0
