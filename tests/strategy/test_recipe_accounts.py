"""The account of a recipe: every flag has one place, what is read matters, nothing is guessed."""

import fnmatch
import json
import re
import tomllib
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.strategy import load_cluster
from fivefold.strategy.recipes import check_recipe, check_recipes

CLUSTER = load_cluster("h100-nemo")
MODEL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
    " --group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu --vocab-size 128256"
    " --untie-embeddings-and-output-weights --position-embedding-type rope --disable-bias-linear"
    " --hidden-dropout 0.0 --bf16 --use-distributed-optimizer --micro-batch-size 1"
    " --global-batch-size 128 "
)
SPLIT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
TITAN = {
    "model": {"name": "llama3", "flavor": "70B"},
    "training": {"local_batch_size": 1, "seq_len": 8192},
    "parallelism": {"data_parallel_shard_degree": 8},
    "activation_checkpoint": {"mode": "full"},
}


def script(flags, *, before="", nodes="4"):
    return f"{before}torchrun --nproc_per_node 8 --nnodes {nodes} pretrain_gpt.py {MODEL}{flags}\n"


def checked(tmp_path, text, name="a.sh", cluster=CLUSTER, **more):
    path = tmp_path / name
    path.write_text(text)
    return check_recipe(path, cluster, **more)


def titan(**changed):
    tables = {section: TITAN.get(section, {}) | changed.get(section, {})
              for section in {**TITAN, **changed}}  # fmt: skip
    return "".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for section, keys in tables.items()
    )


def test_sequence_parallelism_of_one_rank_is_switched_off(tmp_path):
    flags = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --sequence-parallel"
    found = checked(tmp_path, script(flags))
    assert found.status == "ok"
    assert not found.prediction.plan.sequence_parallel
    why = {note.name: note.why for note in found.reading.read}["--sequence-parallel"]
    assert "switched off" in why


def test_virtual_stages_have_two_spellings(tmp_path):
    new = checked(tmp_path, script(SPLIT + "--num-virtual-stages-per-pipeline-rank 4"))
    old = checked(tmp_path, script(SPLIT + "--num-layers-per-virtual-pipeline-stage 4"))
    assert new.prediction.plan == old.prediction.plan
    assert new.prediction.plan.virtual == 4


def test_scores_that_are_kept_do_not_fit(tmp_path):
    flags = "--transformer-impl local --attention-backend unfused"
    assert checked(tmp_path, script(SPLIT + flags)).status == "memory"
    assert checked(tmp_path, script(SPLIT)).status == "ok"


def test_states_that_all_ranks_share(tmp_path):
    flags = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    found = checked(tmp_path, script(flags)).prediction
    # 8.03 B parameters x (2 + 4 + 12) bytes over 32 ranks.
    assert found.memory.states_bytes == pytest.approx(8.03e9 * 18 / 32, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ("", 4), ("--grad-reduce-in-bf16", 2), ("--main-grads-dtype bf16", 2),
        ("--accumulate-allreduce-grads-in-fp32", 4), ("--main-grads-dtype fp32", 4),
    ],
)  # fmt: skip
def test_gradients_of_bf16_are_accumulated_in_32_bits(tmp_path, flags, width):
    found = checked(tmp_path, script(SPLIT + flags)).prediction.memory
    plain = checked(tmp_path, script(SPLIT + "--grad-reduce-in-bf16")).prediction.memory
    parameters = 8.05e9 / 4  # of a rank, with the embedding of one end
    more = found.total_bytes - plain.total_bytes
    assert more == pytest.approx((width - 2) * parameters, rel=0.1)


@pytest.mark.parametrize("default", ['"4"', "'4'", "4", '${OTHER:-"4"}'])
def test_a_default_may_be_quoted_or_stand_in_another(tmp_path, default):
    text = script(SPLIT, before=f"NNODES=${{SLURM_NNODES:-{default}}}\n", nodes="$NNODES")
    found = checked(tmp_path, text)
    assert (found.status, found.prediction.plan.num_gpus) == ("ok", 32)
    assert found.assumed == ("GPUs: 32",)


def test_nodes_that_the_launch_decides_refuse_nothing(tmp_path):
    text = script("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4",
                  before="NNODES=${SLURM_NNODES:-1}\n", nodes="$NNODES")  # fmt: skip
    assert checked(tmp_path, text).status == "unknown"
    assert checked(tmp_path, text.replace("${SLURM_NNODES:-1}", "1")).status == "invalid"


@pytest.mark.parametrize(
    "program",
    ["tools/run_text_generation_server.py", "tools/checkpoint/convert.py", "inference/gpt.py"],
)
def test_what_trains_nothing_is_no_training(tmp_path, program):
    found = checked(tmp_path, script(SPLIT).replace("pretrain_gpt.py", program))
    assert found.status == "no training"


def test_pieces_that_another_script_uses_are_unknown(tmp_path):
    found = checked(tmp_path, f'MODEL_ARGS="{MODEL}"\n')
    assert found.status == "unknown"
    assert "starts no program" in found.message


@pytest.mark.parametrize(
    "branch",
    [
        "TP=2\nif [ -n $BIG ]; then TP=8; fi\n",
        "TP=2\nif [ -n $BIG ]; then\nif [ -n $A ]; then\nB=1\nfi\nTP=8\nfi\n",
    ],
    ids=["plain", "behind another"],
)
def test_a_value_that_branches_decide_is_not_guessed(tmp_path, branch):
    found = checked(tmp_path, script("--tensor-model-parallel-size $TP", before=branch))
    assert found.status == "unknown"
    assert "only the launch decides" in found.message


def test_a_flag_in_a_branch_is_assumed(tmp_path):
    before = "ARGS='--sequence-parallel'\nif [ -n $R ]; then ARGS+=' --recompute-activations'; fi\n"
    found = checked(tmp_path, script("--tensor-model-parallel-size 2 $ARGS", before=before))
    assert found.assumed == ("branch with --recompute-activations: taken",)
    assert "--sequence-parallel" in {note.name for note in found.reading.read}


LEAVE_OUT = [
    ("", "--sequence-parallel $EXTRA_ARGS", "$EXTRA_ARGS"),
    ("", '--sequence-parallel "$@"', "$@"),
    ("", "--lr 1 ${MORE[@]}", "${MORE[@]}"),
    ("", "--no-masked-softmax-fusion $X", "$X"),
    ("", "-tp 8", "-tp"),
    ("", "--frobnicate", "--frobnicate"),
    ("source ./conf/common.sh\n", "", "source ./conf/common.sh"),
    (
        "if [ $A ]; then AC='--recompute-activations'; else AC='--lr 1'; fi\n",
        "$AC",
        "branch with --recompute-activations",
    ),
    (
        "if [ $A ]; then X='--lr 1 $EXTRA'; else X='--lr 1'; fi\n",
        "$X",
        "$EXTRA",
    ),
    ('if [ $A ]; then X="--lr 1 $(cat x)"; else X="--lr 1 --save y"; fi\n', "$X", "${X}"),
    ("", "${FP8:+--fp8-format hybrid}", "branch with --fp8-format"),
    ("if [ $A ]; then X='--fp8-format hybrid'; fi\n", "$X", "branch with --fp8-format"),
    ('[[ -n $A ]] && X="--num-experts 8"\n', "$X", "branch with --num-experts"),
]


@pytest.mark.parametrize(("before", "flags", "name"), LEAVE_OUT)
def test_what_another_place_gives_is_decisive(tmp_path, before, flags, name):
    found = checked(tmp_path, script(SPLIT + flags, before=before))
    assert name in {note.name for note in found.reading.decisive()}
    assert found.status == "unknown"


def test_modules_are_recomputed_by_either_word_for_selective(tmp_path):
    words = ("--recompute-activations", "--recompute-granularity selective")
    flags = [f"{SPLIT}{word} --recompute-modules mlp" for word in words]
    one, other = (checked(tmp_path, script(text)) for text in flags)
    assert one.prediction.memory == other.prediction.memory
    for found in (one, other):
        assert "--recompute-modules" in {note.name for note in found.reading.left_out}


@pytest.mark.parametrize(
    ("before", "flags"),
    [
        ("", "--recompute-granularity $RG"), ("", "--fp8-format $FMT"),
        ("", "--optimizer '<name>'"), ("L=32; [ -n $A ] && L=80\n", "--num-layers $L"),
        ("if [ $A ]; then L=80; fi\n", "--num-layers $L"),
        ("[ $A ] || X='--num-layers 80'\n", "$X"), ("", "--optimizer `choose`"),
    ],
)  # fmt: skip
def test_a_value_that_the_launch_decides_is_unknown(tmp_path, before, flags):
    found = checked(tmp_path, script(SPLIT + flags, before=before))
    assert found.status == "unknown"
    assert "only the launch decides" in found.message


@pytest.mark.parametrize(
    ("before", "flags"),
    [
        ("", "--fp8-format none"), ("", "${UNSET_BUT_KNOWN:+--fp8-format hybrid}"),
        ("ARGS=(  # layers (per model)\n  --lr $((2*(1+1)))  # of the base\n)\n", "${ARGS[@]}"),
        ("", "2>&1 | tee log"), ("", "> log"), ("cat <<EOF\ndon't --num-layers 3\nEOF\n", ""),
        ("", "--lr 1e-4 --clip-grad -1"), ("CUDA_DEVICE_MAX_CONNECTIONS=1 ", ""),
        ('A=1 B="c d" env C=2 ', ""), ("[ -d x ] || mkdir x; ", ""),
    ],
)  # fmt: skip
def test_a_script_of_usual_forms_is_the_same_recipe(tmp_path, before, flags):
    known = "UNSET_BUT_KNOWN=\n"
    found = checked(tmp_path, known + script(SPLIT + flags, before=before))
    plain = checked(tmp_path, script(SPLIT), "plain.sh")
    assert (found.status, found.prediction) == (plain.status, plain.prediction)


@pytest.mark.parametrize(
    ("launch", "gpus"),
    [
        ("torchrun --nproc-per-node gpu --nnodes 4", 32),
        ("torchrun --nproc-per-node auto --nnodes 2", 16),
        ("torchrun --nproc-per-node 8 --nnodes 1:4", 32),
        ("accelerate launch --num_processes 64", 64),
        ("deepspeed --num_gpus 8 --num_nodes 4", 32),
        ("srun --ntasks=64 --gpus-per-task=1 python", 64), ("mpirun -np 64 python", 64),
        ("#SBATCH -N 4\n#SBATCH --gres=gpu:4\nsrun python", 16),
        ("#SBATCH -N4\n#SBATCH --ntasks-per-node 8\nsrun python", 32),
        ("#SBATCH --nodes=4\nsrun -n 4 torchrun --nproc_per_node 8", 32),
    ],
)  # fmt: skip
def test_gpus_as_launchers_say_them(tmp_path, launch, gpus):
    found = checked(tmp_path, f"{launch} pretrain_gpt.py {MODEL}{SPLIT}\n")
    assert found.prediction.plan.num_gpus == gpus
    assert found.status == "ok"


def test_a_count_of_gpus_that_the_launch_decides_may_turn_the_verdict(tmp_path):
    large = MODEL.replace("32 --hidden-size 4096", "80 --hidden-size 8192")
    flags = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    flags += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    line = f"torchrun --nproc_per_node 8 --nnodes {{}} pretrain_gpt.py {large}{flags}\n"
    assert checked(tmp_path, line.format(1)).status == "memory"
    assert checked(tmp_path, line.format("${NNODES:-1}")).status == "unknown"


METHOD = "--recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ("--use-torch-fsdp2 --pipeline-model-parallel-size 2", "invalid"),
        ("--use-torch-fsdp2", "invalid"), ("--fp16", "invalid"), ("--squared-relu", "invalid"),
        ("--num-experts 8 --moe-layer-freq ([0]*40+[1]*20)", "invalid"),
        ("--num-experts 8 --moe-layer-freq ([0]*2+[1]*30)", "memory"),
        ("--recompute-granularity full", "invalid"),
        ("--recompute-granularity full --recompute-method block", "invalid"),
        (f"--recompute-granularity full {METHOD}", "ok"),
        ("--hybrid-attention-ratio 0.1", "unknown"), ("--num_layers 80", "unknown"),
        ("--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", "unknown"),
        ("--spec mine layers", "unknown"),
    ],
)  # fmt: skip
def test_what_megatron_lm_refuses(tmp_path, flags, status):
    assert checked(tmp_path, script(flags)).status == status


def test_the_program_of_hybrid_models_wants_a_pattern(tmp_path):
    found = checked(tmp_path, script(SPLIT).replace("pretrain_gpt", "pretrain_mamba"))
    assert found.status == "unknown"


def test_strategies_of_automodel(tmp_path):
    text = (
        "step_scheduler: {{global_batch_size: 64, local_batch_size: 1}}\n"
        "model: {{pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}}\n"
        "distributed: {{strategy: {}, dp_size: 8}}\npacked_sequence: {{packed_sequence_size: 64}}\n"
    )

    def plan(strategy):
        return checked(tmp_path, text.format(strategy), "a.yaml")

    assert plan("dpp").status == "unknown"
    assert plan("megatron_fsdp, zero_dp_strategy: 1").prediction.plan.zero == 1
    assert plan("megatron_fsdp").prediction.plan.zero == plan("fsdp2").prediction.plan.zero == 3
    assert plan("ddp").prediction.plan.zero == 0


def test_gpus_that_are_not_said_suit_the_experts(tmp_path):
    lines = "".join(
        f"  {flag.partition(' ')[0]}: {flag.partition(' ')[2] or 'true'}\n"
        for flag in (MODEL + SPLIT.replace("parallel-size 2 --s", "parallel-size 4 --s")
                     + "--num-experts 8 --expert-model-parallel-size 4").split(" --")
        for flag in [flag if flag.startswith("--") else f"--{flag}"]
    )  # fmt: skip
    found = checked(tmp_path, "MODEL_ARGS:\n" + lines, "m.yaml")
    assert found.status in {"ok", "unknown"}
    assert "GPUs" in {note.name for note in found.reading.assumed}
    assert found.prediction.plan.data % 4 == 0


def test_adapters_are_priced_and_nested_models_are_not_flattened(tmp_path):
    text = (
        "step_scheduler: {global_batch_size: 64, local_batch_size: 2}\n"
        "model: {pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B}\n"
        "distributed: {strategy: fsdp2, dp_size: none, ep_size: 8}\n"
        "packed_sequence: {packed_sequence_size: 4096}\n"
    )
    whole = checked(tmp_path, text, "a.yaml")
    peft = "peft: {target_modules: ['*_proj'], dim: 16, alpha: 32}\n"
    found = checked(tmp_path, text + peft, "a.yaml")
    assert found.model.adapters.rank == 16
    assert found.prediction.memory.states_bytes < 0.5 * whole.prediction.memory.states_bytes
    teacher = "teacher_model: {pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}\n"
    assert checked(tmp_path, text + teacher, "a.yaml").model.experts.num_experts == 128


def test_a_model_may_be_given_beside_the_recipe(tmp_path):
    text = "step_scheduler: {global_batch_size: 8}\nmodel: {pretrained_model_name_or_path: a/b}\n"
    (tmp_path / "a.yaml").write_text(text + "distributed: {dp_size: 8}\n")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
    }))  # fmt: skip
    line = ["plan", "--check", str(tmp_path), "--cluster", "h100-nemo", "--json"]
    without = json.loads(CliRunner().invoke(app, line).stdout)
    assert without[0]["status"] == "unknown"
    assert "--model" in without[0]["hint"]
    given_model = json.loads(CliRunner().invoke(app, [*line, "--model", str(config)]).stdout)
    assert given_model[0]["status"] == "ok"


def test_the_whole_account_is_shown(tmp_path):
    (tmp_path / "a.sh").write_text(script(SPLIT + "--log-interval 10 --frobnicate 3"))
    line = ["plan", "--check", str(tmp_path), "--cluster", "h100-nemo"]
    record = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)[0]
    assert record["status"] == "unknown"
    assert [one["name"] for one in record["reading"]["left_out"]] == ["--frobnicate"]
    assert record["reading"]["left_out"][0]["decisive"] is True
    shown = CliRunner().invoke(app, [*line, "--verbose"]).output
    assert "--log-interval: logging" in shown
    assert "--log-interval: logging" not in CliRunner().invoke(app, line).output
    alone = CliRunner().invoke(app, ["plan", "job.toml", "--cluster", "h100-nemo", "--verbose"])
    assert alone.exit_code == 2


BASE = SPLIT + "--optimizer adam "
READ = [
    "--attention-backend unfused", "--fp8-format hybrid", "--overlap-grad-reduce",
    "--optimizer-cpu-offload", "--cpu-offloading",
    "--exp-avg-dtype bf16", "--exp-avg-sq-dtype fp8", "--main-params-dtype fp16",
    "--main-grads-dtype bf16", "--grad-reduce-in-bf16", "--optimizer sgd",
    "--optimizer muon", "--num-virtual-stages-per-pipeline-rank 2", "--mtp-num-layers 1",
    "--window-size 128,0", "--kv-channels 64", "--tp-comm-overlap", "--use-tp-pp-dp-mapping",
    "--num-distributed-optimizer-instances 2", "--context-parallel-size 2",
    "--num-experts 8", "--multi-latent-attention",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
]  # fmt: skip


@pytest.mark.parametrize("flag", READ)
def test_a_flag_that_is_read_changes_time_or_memory(tmp_path, flag):
    plain, found = checked(tmp_path, script(BASE)), checked(tmp_path, script(BASE + flag))
    read = {note.name for note in found.reading.read}
    assert {word for word in flag.split() if word.startswith("--")} <= read
    before, after = plain.prediction, found.prediction
    assert (before.time_s, before.memory.total_bytes) != (after.time_s, after.memory.total_bytes)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"converters": ["float8"]}}, {"training": {"dtype": "bfloat16"}},
        {"training": {"enable_cpu_offload": True}}, {"optimizer": {"name": "Muon"}},
        {"training": {"mixed_precision_reduce": "float32"}},
        {"parallelism": {"fsdp_reshard_after_forward": "never"}},
        {"activation_checkpoint": {"mode": "none"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_key_of_torchtitan_that_is_read_changes_time_or_memory(tmp_path, changed):
    plain = checked(tmp_path, titan(), "t.toml").prediction
    found = checked(tmp_path, titan(**changed), "t.toml")
    name = ".".join(next((section, *keys) for section, keys in changed.items()))
    assert name in {note.name for note in found.reading.read}
    after = found.prediction
    assert (plain.time_s, plain.memory.total_bytes) != (after.time_s, after.memory.total_bytes)


def test_states_of_16_bits_fit_where_others_do_not(tmp_path):
    (tmp_path / "b.toml").write_text('base = "b200-nemo"\nstack = "torchtitan-2024.12"\ngpus = 8\n')
    cluster = load_cluster(tmp_path / "b.toml")
    changed = {
        "training": {"dtype": "bfloat16", "mixed_precision_reduce": "bfloat16"},
        "optimizer": {"early_step_in_backward": True},
        "compile": {"enable": True, "components": ["model", "loss"]},
    }
    assert checked(tmp_path, titan(**changed), "t.toml", cluster).status == "ok"
    assert checked(tmp_path, titan(), "t.toml", cluster).status != "ok"


KNOWN = (
    "log-interval", "lr", "save", "data-path", "cuda-graph-impl", "fp8-format", "num-experts",
    "recompute-modules", "moe-layer-freq", "sequence-parallel", "hybrid-layer-pattern", "optimizer",
    "pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers", "rampup-batch-size",
    "expert-tensor-parallel-size", "window-size", "attention-backend", "exp-avg-dtype",
    "num-layers", "micro-batch-size", "kv-channels", "vocab-size", "step-batch-size-schedule",
)  # fmt: skip
NAMES = st.one_of(
    st.sampled_from(KNOWN), st.from_regex(r"[a-z]{2,8}(-[a-z0-9]{1,6}){0,3}", fullmatch=True)
)
WORDS = ["", "none", "bf16", "'a b'", "$X", '"4"', "1,0", '${NAME:-"2"}', "${NAME:-3}"]
VALUES = st.one_of(st.integers(-1, 64).map(str), st.sampled_from(WORDS))


@given(st.lists(st.tuples(NAMES, VALUES), max_size=12), st.booleans())
def test_every_flag_stands_in_exactly_one_list(tmp_path_factory, flags, grouped):
    words = " ".join(f"--{name} {value}".strip() for name, value in flags)
    text = script(f"{SPLIT} {words}")
    if grouped:
        text = f"ARGS=(\n  {words}\n)\n" + script(SPLIT + " ${ARGS[@]}")
    found = checked(tmp_path_factory.mktemp("recipe"), text)
    reading = found.reading
    lists = [reading.read, reading.assumed, reading.left_out, reading.harmless]
    names = [note.name for notes in lists for note in notes]
    for flag in {f"--{name}" for name, _ in flags} | {"--num-layers", "--swiglu"}:
        assert names.count(flag) == 1, (flag, found.status, found.message)
    assert len(names) == len(set(names))
    if reading.decisive():
        assert found.status == "unknown"


FOREIGN = {
    "k8s.yaml": "apiVersion: v1\nparallel: 1\n---\nkind: X\n",
    "chart.yaml": "parallelism: {{ .Values.tp }}\n",
    "p.toml": 'model = "x"\n# parallelism\n',
    "broken.toml": "a = # parallelism\n",
    "number.yaml": "defaults: 3\npolicy: {model_name: x}\n",
    "table.yaml": "defaults: {a: 1}\npolicy: {model_name: x}\n",
    "cloud.yaml": 'policy: !Sub "${A}-b"\n',
    "two.yaml": "a: parallel\n---\nb: 2\n",
    "date.yaml": "parallel: 2020-13-45\n",
    "loop.yaml": "parallel: &x {a: *x}\n",
    "modules.yaml": "modules: {a: {framework: [1], model: {a: 1}}, b: 3}\nparallel: 1\n",
    "readme.txt": "use\npython train.py\nor --num-layers 32 --hidden-size 4096 to start\n",
    "old.py": "print 'ParallelismConfig'\n",
    "words.sh": "echo '--num-layers 32 --hidden-size 4096'\n",
}


def test_files_of_others_are_passed_over(tmp_path):
    for name, text in FOREIGN.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.sh").write_bytes(b"# \xe9\n")
    (tmp_path / "a.sh").write_text(script(SPLIT))
    found = {one.path.name: one.status for one in check_recipes(tmp_path, CLUSTER)}
    assert found.pop("modules.yaml", "unknown") == "unknown"
    assert found == {"a.sh": "ok"}


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 99), st.floats(0, 9), st.text("ab$:"))
SECTIONS = st.sampled_from([
    "model", "policy", "defaults", "trainer", "modules", "framework", "config", "distributed",
    "step_scheduler", "MODEL_ARGS", "train", "parallelism", "training", "flavor", "cluster",
    "micro_batch_size", "tp_size", "--num-layers", "peft", "global_batch", "optim", "data",
    "language_model", "model_parallel", "recipe", "generation", "name",
])  # fmt: skip
TREES = st.dictionaries(
    SECTIONS,
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SECTIONS, inner, max_size=4),
        max_leaves=8,
    ),
    max_size=6,
)


@given(TREES)
def test_no_table_stops_the_check(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("tree") / "a.yaml"
    path.write_text(json.dumps(tree))
    check_recipe(path, CLUSTER)
    lines = [f"{key} = {json.dumps(value)}" for key, value in tree.items()
             if isinstance(value, str | int | float) and "-" not in key]  # fmt: skip
    for name in ("model", "parallelism", "training"):
        if isinstance(inner := tree.get(name), dict):
            plain = {key: one for key, one in inner.items() if isinstance(one, str | int | float)}
            lines += [f"[{name}]"]
            lines += [f"{json.dumps(key)} = {json.dumps(one)}" for key, one in plain.items()]
    path = path.with_suffix(".toml")
    path.write_text("\n".join(lines))
    check_recipe(path, CLUSTER)


FLAGS = tomllib.loads(
    (files("fivefold.strategy._recipes") / "flags.toml").read_text(encoding="utf-8")
)
RULES = [
    (part, name) for part, table in FLAGS.items()
    for kind in ("harmless", "left_out") for rule in table.get(kind, ()) for name in rule["names"]
]  # fmt: skip


def test_no_name_of_the_lists_shadows_another():
    for part in FLAGS:
        names = [name for own, name in RULES if own == part]
        wide = [name for own, name in RULES if own in {part, "all"} and "*" in name]
        assert len(names) == len(set(names))
        for name in names:
            assert not [one for one in wide if one != name and fnmatch.fnmatchcase(name, one)], name


def test_only_sections_and_files_have_wildcards():
    wide = {name for _, name in RULES if "*" in name}
    odd = {name for name in wide if not name.endswith(".*") and not name.startswith("source.")}
    assert odd <= {"teacher_*", "reward*"}


@pytest.mark.parametrize("part", ["all", "megatron"])
def test_an_invented_flag_is_decisive_however_it_begins(tmp_path, part):
    names = [
        name for own, name in RULES if own == part and re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", name)
    ]
    invented = [f"{name}_zz".replace("_", "-") for name in names]
    found = checked(tmp_path, script(SPLIT + " ".join(f"--{name}" for name in invented)))
    decisive = {note.name for note in found.reading.decisive()}
    assert {f"--{name}" for name in invented} <= decisive


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ("--yaml-cfg big.yaml", "unknown"), ("--kitchen-recipe-number 3", "unknown"),
        ("--data-parallel-size 4", "unknown"), ("--mamba-state-dim 9", "ok"),
        ("--moe-token-dispatcher-type alltoall", "ok"), ("--attention-output-gate", "unknown"),
        ("--mtp-use-repeated-layer", "unknown"), ("--log-interval 3 --lr 1e-4 --save x", "ok"),
        ("--weight-decay 0.1 --adam-beta1 0.9 --clip-grad 1.0 --train-iters 5", "ok"),
        ("--no-use-distributed-optimizer", "unknown"), ("--default-lr 3", "unknown"),
    ],
)  # fmt: skip
def test_flags_that_only_look_like_harmless_ones(tmp_path, flags, status):
    assert checked(tmp_path, script(SPLIT + flags)).status == status


@pytest.mark.parametrize(
    ("changed", "list_of"),
    [
        ({"optimizer": {"name": "SGD"}}, "left_out"), ({"ema": {"enable": True}}, "left_out"),
        ({"training": {"mixed_precision_param": "float32"}}, "left_out"),
        ({"training": {"mixed_precision_param": "bfloat16"}}, "harmless"),
        ({"parallelism": {"expert_tensor_parallel_degree": 4}}, "left_out"),
        ({"hf_config_overrides": {"num_hidden_layers": 4}}, "left_out"),
    ],
    ids=range(6),
)  # fmt: skip
def test_a_value_decides_whether_a_key_of_torchtitan_is_harmless(tmp_path, changed, list_of):
    found = checked(tmp_path, titan(**changed), "t.toml", load_cluster("h100-nemo:64")).reading
    name = ".".join(next((section, *keys) for section, keys in changed.items()))
    assert name in {note.name for note in getattr(found, list_of)}
