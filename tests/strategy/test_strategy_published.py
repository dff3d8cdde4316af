"""Published iteration times: rows that no constant was fitted to are judged."""

import json
from pathlib import Path
from statistics import fmean, median

import pytest
from benchmarks.strategy._calibration import MeasuredRun, fit_constants, with_constants
from benchmarks.strategy._orders import MeasuredPlan, order_rows
from benchmarks.strategy._rows import model_of

from fivefold.strategy import ModelSpec, ParallelPlan, evaluate_plan, load_cluster, load_model
from fivefold.strategy.plan import plan_problem

TABLES = Path(__file__).parent / "tables"


def rows_of(name, cluster=None):
    for row in json.loads((TABLES / f"{name}.json").read_text())["rows"]:
        if cluster is None or row["cluster"] == cluster:
            yield row, model_of(row)


def predicted_s(row, model):
    """The fastest micro-batch that fits, where the source does not print it."""
    cluster = load_cluster(row["cluster"])
    plan, times = row["plan"], []
    for size in (1, 2, 4, 8) if "micro_batch" not in plan else (plan["micro_batch"],):
        if (plan["global_batch"] // plan.get("data", 1)) % size:
            continue
        candidate = ParallelPlan(**{**plan, "micro_batch": size})
        if plan_problem(model, candidate) is None:
            found = evaluate_plan(model, cluster.device, cluster.fabric, plan=candidate)
            times.append((not found.fits, found.time_s))
    return min(times)[1]


def judged_errors(name, cluster=None):
    return [
        predicted_s(row, model) / row["measured_s"] - 1
        for row, model in rows_of(name, cluster)
        if row["role"] == "judge"
    ]


@pytest.mark.parametrize(
    ("name", "cluster", "bar"),
    [
        ("megatron_sc21", None, 0.06),
        ("megatron_zero3", "a100-megatron", 0.06),
        ("korthikanti", None, 0.04),
        ("megatron_core", None, 0.12),
        ("torchtitan", None, 0.12),
        ("llmfoundry_h100", None, 0.06),
        ("llmfoundry_a100", None, 0.08),
        ("maxtext_h100", None, 0.04),
        ("nvidia_gb200", None, 0.04),
        ("zero_fsdp", "a100-fsdp", 0.2),
    ],
)
def test_mean_error_of_judged_rows(name, cluster, bar):
    assert fmean(abs(error) for error in judged_errors(name, cluster)) <= bar


def test_median_error_on_h100():
    errors = judged_errors("nvidia_h100")
    assert len(errors) == 60
    assert median(abs(error) for error in errors) <= 0.04


def test_sign_of_the_slope_over_gpus():
    """Weak scaling: more GPUs take longer in every family, as was measured."""
    times = {}
    for row, model in rows_of("nvidia_h100"):
        family, gpus, dtype = row["case"].rsplit(", ", 2)
        if family in {"GPT-3 175B", "Llama-3.1 405B", "Llama-3.1 70B", "Nemotron4 340B"}:
            times.setdefault((family, dtype), []).append(
                (int(gpus.split()[0]), row["measured_s"], predicted_s(row, model))
            )
    assert len(times) == 8
    for points in times.values():
        points.sort()
        assert points[-1][1] > points[0][1]
        assert points[-1][2] > points[0][2]


def test_zero_3_falls_with_the_gpus():
    rows = list(rows_of("megatron_zero3", "a100-deepspeed"))

    def speed(pair, seconds):
        plan = pair[0]["plan"]
        return plan["global_batch"] / plan["data"] / seconds

    for first, later in ((0, 1), (0, 2), (3, 4), (3, 5)):
        pairs = rows[first], rows[later]
        measured = [speed(pair, pair[0]["measured_s"]) for pair in pairs]
        ours = [speed(pair, predicted_s(*pair)) for pair in pairs]
        assert ours[1] / ours[0] == pytest.approx(measured[1] / measured[0], rel=0.15)


def test_tensor_and_pipeline_beat_zero_3_at_every_published_size():
    ptd = {row["plan"]["data"] * 96: predicted_s(row, model)
           for row, model in rows_of("megatron_zero3", "a100-megatron")
           if row["case"].startswith("PTD 174.6B")}  # fmt: skip
    sharded = {row["plan"]["data"]: predicted_s(row, model)
               for row, model in rows_of("megatron_zero3", "a100-deepspeed")
               if row["case"].startswith("ZeRO-3 174.6B")}  # fmt: skip
    assert set(ptd) == set(sharded) == {384, 768, 1536}
    assert all(ptd[gpus] < sharded[gpus] for gpus in ptd)
    assert sharded[1536] / ptd[1536] > 2.5


def test_fitting_finds_constants_that_made_the_runs():
    start = load_cluster("a100-megatron")
    truth = {"gemm_efficiency": 0.71, "cluster.efficiency": 0.52}
    made = with_constants(start, truth)
    model = ModelSpec(name="x", num_layers=24, hidden=2048, num_heads=16, seq_len=2048, vocab=51200)
    plans = [
        ParallelPlan(global_batch=64, data=32, micro_batch=2),
        ParallelPlan(global_batch=64, data=4, tensor=8, micro_batch=2),
        ParallelPlan(global_batch=64, data=2, tensor=16, micro_batch=2),
    ]
    runs = [
        MeasuredRun(case=str(i), model=model, plan=plan, measured_s=evaluate_plan(
            model, made.device, made.fabric, plan=plan).time_s)
        for i, plan in enumerate(plans)
    ]  # fmt: skip
    limits = {"gemm_efficiency": (0.3, 1.0), "cluster.efficiency": (0.2, 1.0)}
    assert fit_constants(start, runs, limits=limits).constants == pytest.approx(truth, rel=1e-3)


def test_every_fitted_row_is_marked_and_every_table_names_its_source():
    for path in TABLES.glob("*.json"):
        table = json.loads(path.read_text())
        assert table["source"]
        roles = [row["role"] for row in table["rows"]]
        assert set(roles) <= {"fit", "judge"}
        assert roles.count("judge") > roles.count("fit")


def test_regret_and_order_by_hand():
    """Four plans: the third is picked and 10 % slower than the best; one pair of six is wrong."""
    model = load_model("gpt3-1.3b")
    plans = [ParallelPlan(global_batch=64, data=8, micro_batch=size) for size in (1, 2, 4, 8)]
    times = [(1.0, 1.0), (1.2, 1.3), (1.1, 0.9), (2.0, 1.9)]
    rows = [
        MeasuredPlan("a", model, plan, measured_s, predicted_s)
        for plan, (measured_s, predicted_s) in zip(plans, times, strict=True)
    ]
    other = ParallelPlan(global_batch=128, data=8)  # another job, of one plan
    found = order_rows("t", [*rows, MeasuredPlan("a", model, other, 9.0, 1.0)])
    values = {line.metric: line.ours for line in found if "4 plans" in line.case}
    assert values["regret of the predicted best plan"] == pytest.approx(10.0)
    assert values["Kendall's tau of measured and predicted times"] == pytest.approx(4 / 6)
    assert values["groups whose regret is within 2 %"] == 0.0
    # A plan measured twice counts once, at its mean: it ties with the second, and nothing is wrong.
    again = order_rows("t", [*rows, MeasuredPlan("a", model, plans[0], 1.4, 1.0)])
    values = {line.metric: line.ours for line in again if "4 plans" in line.case}
    assert values["Kendall's tau of measured and predicted times"] == pytest.approx(1.0)
    assert values["regret of the predicted best plan"] == pytest.approx(0.0)
