"""Recipes of other programs: what our own launchers write is read back, what is wrong is found."""

import csv
import dataclasses
import io
import json
import random
import re

import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.errors import ConfigurationError
from fivefold.strategy import (
    ParallelPlan,
    evaluate_plan,
    load_cluster,
    load_model,
    megatron_flags,
    megatron_script,
    target_problem,
    torchtitan_config,
)
from fivefold.strategy.plan import plan_problem
from fivefold.strategy.recipes import check_recipe, check_recipes

CLUSTER = load_cluster("h100-nemo")
# Gradients as Megatron-LM has them beside --bf16 where nothing else is said.
WIDE = dataclasses.replace(CLUSTER.device, gradient_bytes=4.0, gradient_wire_bytes=4.0)
MEGATRON = """#!/bin/bash
#SBATCH --nodes=4
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8   # a comment
NNODES=${SLURM_NNODES:-4}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TP=8
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096   # of Llama 3
    --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --swiglu --untie-embeddings-and-output-weights --position-embedding-type rope
    --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0
    --vocab-size 128256
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2 \\
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce \\
    --micro-batch-size 1 --global-batch-size=128 --bf16
"""
TITAN = """
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 8
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "full"
"""
NEMO = """
trainer:
  num_nodes: 2
  devices: 8
model:
  micro_batch_size: 1
  global_batch_size: 64
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  sequence_parallel: true
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 11008
  num_attention_heads: 32
  encoder_seq_length: 4096
  activation: fast-swiglu
  hidden_dropout: 0.0
  bias: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  optim: {name: distributed_fused_adam}
"""
AUTOMODEL = """
model: {pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}
distributed: {strategy: fsdp2, dp_size: 8, tp_size: 1, cp_size: 1}
step_scheduler: {global_batch_size: 64, local_batch_size: 1}
packed_sequence: {packed_sequence_size: 4096}
"""


def checked(tmp_path, name, text, cluster=CLUSTER):
    path = tmp_path / name
    path.write_text(text)
    return check_recipe(path, cluster)


def test_a_script_of_megatron_is_the_plan_that_it_says(tmp_path):
    found = checked(tmp_path, "run.sh", MEGATRON)
    assert (found.status, found.program, found.assumed) == ("ok", "megatron", ())
    plan = found.prediction.plan
    assert plan == ParallelPlan(
        global_batch=128, data=2, tensor=8, pipeline=2, zero=1, sequence_parallel=True,
        data_overlap=True,
    )  # fmt: skip
    llama = dataclasses.replace(load_model("llama3-8b"), vocab=129024)  # padded to 128 x tensor
    assert found.model.num_parameters == llama.num_parameters
    same = evaluate_plan(llama, WIDE, CLUSTER.fabric, plan=plan)
    assert found.prediction.memory.total_bytes == pytest.approx(same.memory.total_bytes)


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(global_batch=64, data=4, tensor=2, micro_batch=2, zero=1, data_overlap=True),
        ParallelPlan(global_batch=64, data=1, tensor=8, pipeline=4, sequence_parallel=True,
                     recompute="full"),
        ParallelPlan(global_batch=64, data=2, pipeline=4, schedule="interleaved", virtual=2,
                     pipeline_overlap=True, recompute="selective"),
    ],
    ids=["data", "pipeline", "interleaved"],
)  # fmt: skip
def test_the_flags_that_we_write_are_read_as_the_same_plan(tmp_path, plan):
    flags = " ".join(megatron_flags(load_model("llama3-8b"), plan))
    text = f"torchrun --nproc-per-node {plan.num_gpus} pretrain_gpt.py {flags} --vocab-size 128256"
    assert checked(tmp_path, "run.sh", text).prediction.plan == plan


def test_the_module_that_we_write_for_torchtitan_is_read_as_the_same_plan(tmp_path):
    plan = ParallelPlan(
        global_batch=128, data=16, tensor=4, micro_batch=2, zero=3, recompute="full",
        sequence_parallel=True, data_overlap=True,
    )  # fmt: skip
    text = torchtitan_config(load_model("llama3-70b"), plan)
    found = checked(tmp_path, "torchtitan_planned.py", text)
    assert found.prediction.plan == plan
    assert found.model.num_layers == 80


def test_torchtitan_takes_the_gpus_of_the_cluster_and_says_so(tmp_path):
    found = checked(tmp_path, "llama3_70b.toml", TITAN)
    assert found.program == "torchtitan"
    assert found.prediction.plan.num_gpus == 8
    assert found.assumed == ("GPUs: 8",)
    assert found.status == "unknown"  # 70 B parameters do not fit 8 GPUs, and may fit more
    assert [note.name for note in found.reading.decisive()] == ["GPUs"]
    small = checked(tmp_path, "llama3_70b.toml", TITAN, load_cluster("h100-nemo:8"))
    assert small.status == "memory"
    assert found.prediction.memory.total_bytes > CLUSTER.device.memory_bytes


def test_both_forms_of_nemo(tmp_path):
    old, new = checked(tmp_path, "old.yaml", NEMO), checked(tmp_path, "new.yaml", AUTOMODEL)
    assert (old.program, old.prediction.plan.data, old.prediction.plan.zero) == ("nemo", 2, 1)
    assert (new.status, new.prediction.plan.data, new.model.seq_len) == ("ok", 8, 4096)
    both = AUTOMODEL.replace("tp_size: 1", "tp_size: 2, tensor_model_parallel_size: 4")
    assert checked(tmp_path, "both.yaml", both).prediction.plan.tensor == 2
    assert new.model.num_parameters == load_model("llama3-8b").num_parameters


@pytest.mark.parametrize(
    ("name", "text", "old", "new", "said", "line"),
    [
        ("a.sh", MEGATRON, "TP=8", "TP=5", "tensor=5 does not divide", None),
        ("a.sh", MEGATRON, "TP=8", "TP=32", "not a multiple", None),
        ("a.sh", MEGATRON, "TP=8", "TP=0", "tensor parallel degree must be", None),
        ("a.sh", MEGATRON, "size=128", "size=127", "global_batch_size=127 is not a",
         "--global-batch-size=127"),
        ("a.sh", MEGATRON, "--num-attention-heads 32", "--num-attention-heads 30", "heads",
         "--num-attention-heads 30"),
        ("t.toml", TITAN, "degree = 8", "degree = 3", "tensor=3 does not divide num_heads", None),
        ("t.toml", TITAN, "replicate_degree = 1", "replicate_degree = 0", "replicate parallel",
         None),
        ("n.yaml", NEMO, "pipeline_model_parallel_size: 2", "pipeline_model_parallel_size: 3",
         "16 GPUs are not a multiple", None),
        ("n.yaml", NEMO, "micro_batch_size: 1\n", "micro_batch_size: one\n",
         "micro_batch_size must be a whole number; got 'one'", "micro_batch_size: one"),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_fault_is_found_and_its_line(tmp_path, name, text, old, new, said, line):
    assert old in text
    found = checked(tmp_path, name, text.replace(old, new))
    assert found.status == "invalid"
    assert said in found.message
    assert found.hint
    if line is not None:
        assert line in text.replace(old, new).splitlines()[found.line - 1]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.toml", TITAN.replace("70B", "debugmodel"), "'llama3-debugmodel' is not known"),
        ("t.toml", TITAN.replace('"full"', '"memory_budget"'), "memory_budget"),
        (
            "t.toml",
            TITAN.replace('"full"', '"selective"\nselective_ac_option = "two"'),
            "'two' is not",
        ),
        ("a.sh", MEGATRON.replace("--seq-length 8192", ""), "does not say seq_length"),
        ("a.sh", MEGATRON.replace("-size ${TP}", "-size $UNSET"), "only the launch decides"),
        (
            "a.sh",
            MEGATRON.replace("--seq-l", "--num-experts 8 --moe-layer-freq ([1,0]*16) --seq-l"),
            "moe_layer_freq",
        ),
        ("a.sh", MEGATRON.replace("--seq-l", "--linear-attention-freq 4 --seq-l"), "linear_att"),
        ("n.yaml", NEMO.replace("trainer:", "trainer: ["), "is not YAML"),
        ("t.toml", TITAN.replace("[model]", "[model"), "TOML"),
    ],
    ids=range(9),
)
def test_what_says_too_little_is_unknown_and_not_ok(tmp_path, name, text, said):
    found = checked(tmp_path, name, text)
    assert found.status == "unknown"
    assert said in found.message


@pytest.mark.parametrize(
    ("said", "recompute"),
    [
        ('mode = "selective"', "full"),  # of one layer in two, torchtitan's own default
        ('mode = "selective"\nselective_ac_option = "op"', "selective"),
        ('mode = "selective"\nselective_ac_option = "1"', "full"),
        ('mode = "none"', "none"),
    ],
)
def test_what_torchtitan_recomputes(tmp_path, said, recompute):
    found = checked(tmp_path, "t.toml", TITAN.replace('mode = "full"', said))
    assert found.prediction.plan.recompute == recompute


def test_query_groups_count_beside_their_flag_alone(tmp_path):
    assert "--group-query-attention" in MEGATRON
    model = checked(tmp_path, "a.sh", MEGATRON.replace("--group-query-attention", "")).model
    assert model.kv_heads == model.num_heads > load_model("llama3-8b").kv_heads


@pytest.mark.parametrize(
    "flags", ["--moe-layer-freq 1 --mtp-num-layers 0", "--moe-layer-freq [1]*9"]
)
def test_flags_that_change_nothing_are_read(tmp_path, flags):
    text = MEGATRON.replace("--seq-length", f"{flags} --seq-length")
    assert checked(tmp_path, "a.sh", text).status == "ok"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"), ("deepseek-v3-671B", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek-v3"), ("deepseek_v3-16B", "deepseek-v2-lite"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", None), ("deepseek_v3-debugmodel", None),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"),
        ("meta-llama/Llama-3.2-1B", "llama3.2-1b"), ("vit_b16", None),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"), ("moonshotai/Kimi-K2.6", None),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"), ("gpt_oss-20b", "gpt-oss-20b"),
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5-7b"), ("mistralai/Mistral-7B-v0.4", None),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"),
        ("Qwen/Qwen2.5-7B-Instruct-1048", None), ("mistralai/Mixtral-8x22B-Instruct-v0.2", None),
    ],
)  # fmt: skip
def test_another_size_or_version_of_a_known_model_is_unknown(tmp_path, name, known):
    text = AUTOMODEL.replace("meta-llama/Llama-3.1-8B", name)
    found = checked(tmp_path, "recipe.yaml", text)
    if known is None:
        assert found.status == "unknown"
    else:
        assert found.model.num_parameters == load_model(known).num_parameters


def test_our_own_jobs_are_judged_with_their_plan_or_searched_for_one(tmp_path):
    job = 'model = "llama3-8b"\ngpus = {}\nglobal_batch = 8\n'
    found = checked(tmp_path, "a.toml", job.format(8))
    assert found.assumed == ("plan: the fastest of its space",)
    none = checked(tmp_path, "b.toml", job.format(1))
    assert (none.status, none.program) == ("invalid", "fivefold")
    assert "no plan" in none.message
    whole = checked(tmp_path, "c.toml", job.format(8) + "[plan]\ndata = 8\n")
    assert whole.status == "memory"


def test_what_is_no_recipe_is_passed_over(tmp_path):
    (tmp_path / "notes.txt").write_text("num layers and so on")
    (tmp_path / "ci.yaml").write_text("jobs: {build: {runs-on: x}}")
    (tmp_path / "setup.py").write_text("print('ParallelismConf')")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(ConfigurationError, match="holds no recipe"):
        list(check_recipes(tmp_path, CLUSTER))


def test_the_command_in_all_forms(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "good.sh").write_text(MEGATRON)
    told = "data_parallel_shard_degree = 1"
    bad = TITAN.replace("data_parallel_shard_degree = -1", told)
    (tmp_path / "bad, one.toml").write_text(bad)

    def call(*words):
        line = ["plan", "--check", str(tmp_path), "--cluster", "h100-nemo:32", *words]
        return CliRunner().invoke(app, line)

    text = call()
    assert text.exit_code == 1
    assert "1 ok, 1 memory" in text.output
    records = json.loads(call("--json").stdout)
    assert [record["status"] for record in records] == ["memory", "ok"]
    rows = list(csv.DictReader(io.StringIO(call("--csv").stdout)))
    assert float(rows[0]["memory_gib"]) == records[0]["memory_gib"]
    bad, good = call("--github").stdout.splitlines()
    assert re.fullmatch(
        r"::error file=\S.*bad%2C one\.toml,line=\d+,title=[^:,]+::does not .*", bad
    )
    assert good.startswith("::notice file=")
    (tmp_path / "bad, one.toml").unlink()
    assert call().exit_code == 0


def random_plan(draw, model):
    """A plan that may or may not be possible; None where it says so itself."""
    stages, tensor = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4, 8])
    schedule = draw.choice(["1f1b", "interleaved", "interleaved", "zb_v"]) if stages > 1 else "1f1b"
    recompute = draw.choice(["none", "selective", "full"])
    data, micro = draw.choice([2, 4, 8]), draw.choice([1, 2])
    try:
        return ParallelPlan(
            global_batch=data * micro * stages * draw.choice([1, 2]), micro_batch=micro, data=data,
            tensor=tensor, pipeline=stages, context=draw.choice([1, 1, 2]), schedule=schedule,
            virtual={"interleaved": draw.choice([2, 3, 5]), "zb_v": 2}.get(schedule, 1),
            expert=draw.choice([1, 2]) if model.experts else 1,
            expert_tensor=draw.choice([None, 1]) if model.experts and tensor > 1 else None,
            zero=draw.choice([0, 1, 2, 3]), shard=draw.choice([None, 2, 4]), recompute=recompute,
            recompute_layers=draw.choice([None, 1, 2]) if recompute != "none" else None,
            sequence_parallel=tensor > 1, embedding_layers=draw.random() < 0.4, data_overlap=True,
            pipeline_overlap=schedule != "1f1b", order=draw.choice(["tcdp", "tcpd"]),
            dtype=draw.choice(["bf16", "bf16", "fp8", "mxfp8"]),
        )  # fmt: skip
    except ConfigurationError:
        return None


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_what_is_written_is_read_back_and_priced_alike(tmp_path, target):
    draw, checked, file = random.Random(7), 0, tmp_path / "recipe"  # noqa: S311 - no secret
    while checked < 40:
        model = load_model(draw.choice(["llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b"]))
        plan = random_plan(draw, model)
        if plan is None or plan_problem(model, plan) or target_problem(model, plan, target):
            continue
        if target == "megatron":
            text = megatron_script(model, plan, gpus_per_node=8, device=CLUSTER.device)
            file = file.with_suffix(".sh")
        elif model.experts is None:
            text, file = torchtitan_config(model, plan), file.with_suffix(".py")
        else:
            continue
        file.write_text(text)
        verdict = check_recipe(file, CLUSTER)
        assert target != "megatron" or verdict.status in {"ok", "memory"}, verdict.message
        found = verdict.prediction
        asked = evaluate_plan(model, CLUSTER.device, CLUSTER.fabric, plan=plan)
        assert found.time_s == pytest.approx(asked.time_s, rel=0.05), plan
        assert found.memory.total_bytes == pytest.approx(asked.memory.total_bytes, rel=0.08), plan
        checked += 1
