"""Times the search for the best plan of GPT-3 175B on 1,024 A100, beside Calculon.

Ours goes through the whole space by bounds and columns; without bounds a reduced space must give
the same best. Calculon (a clone of it is given as a folder, arXiv 2306.04234) needs days for its
space, so a random sample of it is timed and its rate is given. As common judges both evaluators
rate both plans, ours and the best that Calculon found among its sample and around our plan, of
those that fit in memory by both.

    python -m benchmarks.strategy.search [--calculon FOLDER] [--sample 400]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results_file import BenchmarkRow, median_and_spread, write_results
from fivefold.strategy import (
    ParallelPlan,
    PlanPrediction,
    SearchSpace,
    evaluate_plan,
    load_cluster,
    load_model,
    search_plans,
)
from fivefold.strategy.plan import plan_problem

RESULTS = Path(__file__).parents[1] / "results" / "strategy" / "search.json"
GPUS, BATCH = 1024, 1536
REPETITIONS = 5
CALCULON_SPACE = 11_698_528  # configurations that its llm-optimal-execution counts here
_JUDGE = """
import json, logging, sys, time
from calculon.llm import Llm
from calculon.system import System
from calculon.io import read_json_file
app = Llm.Application(read_json_file('models/gpt3-175B.json'))
system = System(read_json_file('systems/a100_80g.json'))
answers = []
for execution in json.load(sys.stdin):
    started = time.perf_counter()
    try:
        model = Llm(app, logging.Logger('x'))
        model.compile(system, Llm.Execution.from_json(execution))
        model.run(system)
        seconds = execution['batch_size'] / model.get_stats_json(False)['sample_rate']
    except (Llm.Error, AssertionError):
        seconds = None
    answers.append([seconds, time.perf_counter() - started])
json.dump(answers, sys.stdout)
"""


def note(text: str) -> None:
    """Say how far it is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def same_space(**changed: Any) -> SearchSpace:
    """What Calculon's search chooses from; stages and networks follow from the place of a rank."""
    settings: dict[str, Any] = {
        "num_gpus": GPUS, "global_batch": BATCH, "zero": (0, 1), "regather": (False, True),
        "tensor_overlap": ("none", "ring", "pipe"), "data_overlap": (False, True),
        "pipeline_overlap": (False,), "offload": (False, True),
    }  # fmt: skip
    return SearchSpace(**{**settings, **changed})


def wide_space() -> SearchSpace:
    """Calculon's and more: ZeRO-2, -3, placement of stages, stages that send beside compute."""
    return same_space(
        zero=(0, 1, 2, 3), pipeline_overlap=(False, True), orders=("tcdp", "tcpd"),
        schedules=("1f1b", "interleaved", "gpipe", "zb_1p", "zb_2p"),
    )  # fmt: skip


def ours() -> tuple[list[BenchmarkRow], ParallelPlan]:
    """Whole spaces by bounds, a reduced one both ways, and 16,384 GPUs."""
    model, cluster = load_model("gpt3-175b"), load_cluster("a100-megatron")
    rows = []
    for name, space in (("Calculon's choices", same_space()), ("wide", wide_space())):
        runs = [
            search_plans(model, cluster.device, cluster.fabric, space=space)
            for _ in range(REPETITIONS)
        ]
        seconds, spread = median_and_spread([run.seconds for run in runs])
        note(
            f"{name}: {runs[0].num_plans} plans in {seconds:.2f} s, {runs[0].best[0].time_s:.3f} s"
        )
        case = f"175B on 1,024 A100, {name}: {runs[0].num_plans} plans"
        rows.append(BenchmarkRow(case=case, metric="time of the search", unit="s", ours=seconds,
                                 spread=spread, target=60.0, met=seconds <= 60.0))  # fmt: skip
    reduced = same_space(tensor=(4, 8), offload=(False,))
    by_bounds = search_plans(model, cluster.device, cluster.fabric, space=reduced)
    times, whole = [], by_bounds
    for _ in range(REPETITIONS):
        whole = search_plans(model, cluster.device, cluster.fabric, space=reduced, bounds=False)
        times.append(whole.num_evaluated / whole.seconds)
    same = whole.best[0].plan == by_bounds.best[0].plan
    rate, spread = median_and_spread(times)
    note(f"exhaustive: {rate:.0f} plans/s, same best: {same}")
    rows.append(BenchmarkRow(case=f"exhaustive, {whole.num_evaluated} plans", unit="plans/s",
                             metric="rate of evaluation", ours=rate, spread=spread,
                             target=1e4, met=rate >= 1e4))  # fmt: skip
    rows.append(BenchmarkRow(case="bounds against exhaustive, reduced space", unit="ratio",
                             metric="best time found", target=1.0, met=same,
                             ours=by_bounds.best[0].time_s / whole.best[0].time_s))  # fmt: skip
    rows.append(_large())
    fair = search_plans(model, cluster.device, cluster.fabric, space=same_space(offload=(False,)))
    return rows, fair.best[0].plan


def _large() -> BenchmarkRow:
    cluster = load_cluster("h100-nemo")
    space = SearchSpace(
        num_gpus=16384, global_batch=2048, context=(1, 2, 4, 8, 16),
        tensor_overlap=("none", "ring", "pipe"), data_overlap=(False, True),
        schedules=("1f1b", "interleaved", "zb_1p", "zb_v"), orders=("tcdp", "tcpd"),
    )  # fmt: skip
    runs = [
        search_plans(load_model("llama3-405b"), cluster.device, cluster.fabric, space=space)
        for _ in range(REPETITIONS)
    ]
    seconds, spread = median_and_spread([run.seconds for run in runs])
    note(f"16,384 GPUs: {runs[0].num_plans} plans in {seconds:.2f} s")
    return BenchmarkRow(
        case=f"Llama-3 405B on 16,384 H100: {runs[0].num_plans} plans", metric="time of the search",
        unit="s", ours=seconds, spread=spread, target=60.0, met=seconds <= 60.0,
    )  # fmt: skip


def execution(plan: ParallelPlan, nets: tuple[int, int, int]) -> dict[str, Any]:
    """A plan in Calculon's words."""
    kinds = {"none": "none", "selective": "attn_only", "full": "full"}
    return {
        "num_procs": plan.num_gpus, "tensor_par": plan.tensor, "pipeline_par": plan.pipeline,
        "data_par": plan.data, "tensor_par_net": nets[0], "pipeline_par_net": nets[1],
        "data_par_net": nets[2], "batch_size": plan.global_batch,
        "microbatch_size": plan.micro_batch, "datatype": "float16", "fused_activation": True,
        "attention_type": "multihead", "activation_recompute": kinds[plan.recompute],
        "pipeline_interleaving": plan.virtual,
        "optimizer_sharding": plan.zero > 0 and plan.data > 1,
        "tensor_par_comm_type": "rs_ag" if plan.sequence_parallel else "ar",
        "tensor_par_overlap": plan.tensor_overlap,
        "seq_par_ag_redo": plan.sequence_parallel and plan.regather and plan.recompute != "full",
        "data_par_overlap": plan.data_overlap and plan.data > 1,
        "weight_offload": plan.offload_weights,
        "activations_offload": plan.offload_activations,
        "optimizer_offload": plan.offload_optimizer, "training": True,
    }  # fmt: skip


def judge(folder: Path, executions: list[dict[str, Any]]) -> list[tuple[float | None, float]]:
    """Calculon's seconds per iteration, and the seconds it took."""
    answer = subprocess.run(
        [sys.executable, "-c", _JUDGE], input=json.dumps(executions), text=True, check=True,
        capture_output=True, cwd=folder, env={"PYTHONPATH": str(folder), "PATH": "/usr/bin"},
    )  # fmt: skip
    return [(seconds, took) for seconds, took in json.loads(answer.stdout)]


def best_of(folder: Path, plan: ParallelPlan) -> float | None:
    """Calculon's time of a plan on the networks that suit it best."""
    nets = itertools.product((0, 1), (0, 1), (0, 1))
    found = judge(folder, [execution(plan, chosen) for chosen in nets])
    times = [seconds for seconds, _ in found if seconds is not None]
    return min(times) if times else None


def sample_plans(count: int) -> list[ParallelPlan]:
    """Random plans of the common space that both can evaluate."""
    model, generator = load_model("gpt3-175b"), random.Random(0)  # noqa: S311 - a sample
    plans: list[ParallelPlan] = []
    while len(plans) < count:
        tensor, pipeline = 2 ** generator.randint(0, 5), 2 ** generator.randint(0, 5)
        data = GPUS // (tensor * pipeline)
        if BATCH % data:
            continue
        local = BATCH // data
        sizes = [b for b in range(1, 17) if local % b == 0]
        chunks = [v for v in range(1, 97) if 96 % (pipeline * v) == 0] if pipeline > 1 else [1]
        virtual = generator.choice(chunks)
        parallel = tensor > 1 and generator.random() < 0.5
        plan = ParallelPlan(
            global_batch=BATCH, micro_batch=generator.choice(sizes), data=data, tensor=tensor,
            pipeline=pipeline, virtual=virtual,
            schedule="interleaved" if virtual > 1 else "1f1b", zero=generator.randint(0, 1),
            recompute=generator.choice(("none", "selective", "full")), sequence_parallel=parallel,
            data_overlap=generator.random() < 0.5,
            tensor_overlap=generator.choice(("none", "ring", "pipe")) if tensor > 1 else "none",
        )  # fmt: skip
        if plan_problem(model, plan) is None:
            plans.append(plan)
    return plans


def neighbours(plan: ParallelPlan) -> list[ParallelPlan]:
    """Plans around ours, so that Calculon's side gets a good start too."""
    around = []
    model = load_model("gpt3-175b")
    for tensor, pipeline, size, virtual in itertools.product(
        (4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 3, 6, 12)
    ):
        data = GPUS // (tensor * pipeline)
        if BATCH % (data * size) or (pipeline == 1 and virtual > 1):
            continue
        other = dataclasses.replace(
            plan, tensor=tensor, pipeline=pipeline, data=data, micro_batch=size, virtual=virtual,
            schedule="interleaved" if virtual > 1 else "1f1b",
        )  # fmt: skip
        if plan_problem(model, other) is None:
            around.append(other)
    return around


def beside_calculon(folder: Path, plan: ParallelPlan, count: int) -> list[BenchmarkRow]:
    """Calculon's rate, and both plans before both judges."""
    plans = [*sample_plans(count), *neighbours(plan)]
    # As Calculon's user would set it: tensor groups within the node, if they fit there.
    chosen = [execution(one, (int(one.tensor > 8), 1, 1)) for one in plans]
    answers = judge(folder, chosen)
    took = [seconds for _, seconds in answers]
    rate = len(took) / sum(took)
    note(f"Calculon: {len(took)} configurations, {rate:.1f} a second")
    found = [(seconds, plans[i]) for i, (seconds, _) in enumerate(answers) if seconds is not None]
    rows = [
        BenchmarkRow(case=f"Calculon, sample of {len(took)}", metric="rate of evaluation",
                     unit="plans/s", ours=rate),
        BenchmarkRow(case="Calculon, whole space at that rate", metric="time of the search",
                     unit="h", ours=CALCULON_SPACE / rate / 3600),
    ]  # fmt: skip
    return rows + both_judges(folder, plan, found)


def both_judges(
    folder: Path, plan: ParallelPlan, found: list[tuple[float, ParallelPlan]]
) -> list[BenchmarkRow]:
    """Our plan and Calculon's best, by either evaluator, among plans that fit by both.

    With a sharded optimizer Calculon keeps the gradients of one layer only. Megatron-LM, whose
    memory is published (arXiv 2205.05198), adds them up over micro-batches and keeps all, so that
    some of what Calculon lets in would not run; its best of those has rows of its own.
    """
    model, cluster = load_model("gpt3-175b"), load_cluster("a100-megatron")

    def rated(one: ParallelPlan) -> PlanPrediction:
        return evaluate_plan(model, cluster.device, cluster.fabric, plan=one)

    anything, free = min(found, key=lambda pair: pair[0])
    seconds, theirs = min((pair for pair in found if rated(pair[1]).fits), key=lambda pair: pair[0])
    mine_s, ours_there = rated(plan).time_s, best_of(folder, plan)
    note(f"by Calculon: ours {ours_there}, its best that fits {seconds:.3f}; {theirs}")
    note(f"by ours: ours {mine_s:.3f}, its best that fits {rated(theirs).time_s:.3f}; {plan}")
    if ours_there is None:
        message = "Calculon refuses our plan"
        raise SystemExit(message)
    peer = "Calculon's best of its sample"
    return [
        BenchmarkRow(case="best plan that fits by both, our evaluator", unit="s", ours=mine_s,
                     metric="time of an iteration", peers={peer: rated(theirs).time_s},
                     target=rated(theirs).time_s, met=mine_s <= rated(theirs).time_s),
        BenchmarkRow(case="best plan that fits by both, Calculon's evaluator", unit="s",
                     metric="time of an iteration", ours=ours_there, peers={peer: seconds},
                     target=seconds, met=ours_there <= seconds),
        BenchmarkRow(case="best plan that fits by Calculon alone, Calculon's evaluator", unit="s",
                     metric="time of an iteration", ours=ours_there, peers={peer: anything}),
        BenchmarkRow(case="that plan by Megatron-LM's published memory (80 GiB)", unit="GiB",
                     metric="memory of the fullest GPU",
                     ours=rated(plan).memory.total_bytes / 2**30,
                     peers={peer: rated(free).memory.total_bytes / 2**30}),
    ]  # fmt: skip


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calculon", type=Path, help="a clone of Calculon")
    parser.add_argument("--sample", type=int, default=400)
    arguments = parser.parse_args()
    rows, plan = ours()
    if arguments.calculon is not None:
        rows += beside_calculon(arguments.calculon.resolve(), plan, arguments.sample)
    command = "python -m benchmarks.strategy.search --calculon FOLDER"
    write_results(RESULTS, topic="strategy/search", rows=rows, command=command)


if __name__ == "__main__":
    main()
