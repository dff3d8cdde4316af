"""A value that a recipe's program would not know changes the verdict or is named: no guess."""

import functools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.strategy import load_cluster
from fivefold.strategy.recipes import check_recipe

MEGATRON = """torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py
--num-layers 32
--hidden-size 4096
--ffn-hidden-size 14336
--num-attention-heads 32
--num-query-groups 8
--seq-length 8192
--vocab-size 128256
--micro-batch-size 1
--global-batch-size 128
--tensor-model-parallel-size 2
--pipeline-model-parallel-size 2
--context-parallel-size 1
--num-virtual-stages-per-pipeline-rank 4
--position-embedding-type rope
--hidden-dropout 0.0
--recompute-granularity full
--recompute-method block
--recompute-num-layers 1
--transformer-impl transformer_engine
--attention-backend flash
--main-grads-dtype bf16
--exp-avg-dtype fp32
--optimizer adam
--optimizer-offload-fraction 1.0
--fp8-format hybrid
--fp8-recipe tensorwise
--window-size 4096,0
--rampup-batch-size 32 32 65324
--data-parallel-sharding-strategy optim_grads_params
--group-query-attention --swiglu --untie-embeddings-and-output-weights --disable-bias-linear
--bf16 --use-megatron-fsdp --optimizer-cpu-offload --no-overlap-p2p-communication
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
global_batch_size = 32
seq_len = 4096
dtype = "float32"
mixed_precision_reduce = "float32"
enable_cpu_offload = false
[parallelism]
data_parallel_shard_degree = 8
data_parallel_replicate_degree = 1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_layers_per_stage = 4
enable_async_tensor_parallel = false
[compile]
enable = true
[optimizer]
name = "AdamW"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
  torch_dtype: bfloat16
  attn_implementation: sdpa
  use_flash_attention: true
ci: {nodes: 1}
step_scheduler:
  global_batch_size: 64
  local_batch_size: 1
dist_env:
  nproc_per_node: 8
distributed:
  strategy: fsdp2
  tp_size: 2
  cp_size: 1
  pp_size: 2
  dp_replicate_size: 1
  sequence_parallel: true
  activation_checkpointing: true
  pipeline:
    pp_schedule: interleaved1f1b
    layers_per_stage: 4
peft:
  dim: 8
  peft_scheme: lora
  match_all_linear: true
quantization:
  load_in_4bit: false
packed_sequence:
  packed_sequence_size: 2048
optimizer:
  _target_: torch.optim.AdamW
  exp_avg_dtype: float32
  master_weights: false
fp8:
  enabled: true
  recipe_name: tensorwise
"""
NEMO = """trainer:
  num_nodes: 4
  devices: 8
  precision: bf16
model:
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 2
  encoder_seq_length: 4096
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  activation: fast-swiglu
  bias: false
  position_embedding_type: rope
  make_vocab_size_divisible_by: 128
  override_vocab_size: 128256
  megatron_amp_O2: true
  sequence_parallel: true
  activations_checkpoint_granularity: full
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 1
  hidden_dropout: 0.1
  fp8: false
  optim: {name: distributed_fused_adam}
  data: {data_prefix: none}
"""

RECIPES = {"a.sh": MEGATRON, "t.toml": TITAN, "a.yaml": AUTOMODEL, "n.yaml": NEMO}
CLUSTERS = {name: load_cluster("h100-80gb-torchtitan" if name == "t.toml" else "h100-nemo")
            for name in RECIPES}  # fmt: skip
# Texts that may be anything, and what the word for its program is.
FREE = ("recipe:", "model._target_", "pretrained_model_name", "name =", "flavor", "torchrun",
        "_target_: nemo")  # fmt: skip


def checked(folder, name, text):
    path = folder / name
    path.write_text(text.replace("\n--", " --") if name.endswith(".sh") else text)
    return check_recipe(path, CLUSTERS[name])


def lines_of(name):
    """Return the lines of a recipe whose value may be changed, with name, sign and value."""
    found = []
    for line in RECIPES[name].splitlines():
        sign = next((sign for sign in (" = ", ": ", " ") if sign in line.strip()), None)
        if sign is None or line.count("--") > 1 or any(word in line for word in FREE):
            continue
        key, _, value = line.partition(sign if sign != " " else " ")
        if "{" not in value:
            found.append((line, key, sign, value))
    return found


LINES = [(name, *one) for name in RECIPES for one in lines_of(name)]
JUNK = st.one_of(
    st.sampled_from(["banana", "nan", "-7", "7.5", "1e99", "12 apples", "tru"]),
    st.from_regex(r"[b-df-hj-mp-z]{4,9}", fullmatch=True),
)


def test_the_recipes_as_they_are_have_a_verdict(tmp_path):
    found = {name: checked(tmp_path, name, text) for name, text in RECIPES.items()}
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(RECIPES, "ok"), found


@functools.cache
def said_of(name):
    """Return what is assumed of a recipe as it is."""
    with tempfile.TemporaryDirectory() as folder:
        return {str(note) for note in checked(Path(folder), name, RECIPES[name]).reading.assumed}


@given(st.sampled_from(LINES), JUNK)
def test_a_value_that_no_program_knows_is_never_taken_for_another(tmp_path_factory, line, junk):
    name, whole, key, sign, value = line
    if name != "a.sh" and (value.startswith('"') or " " in junk):
        junk = f'"{junk}"'
    folder = tmp_path_factory.mktemp("recipe")
    found = checked(folder, name, RECIPES[name].replace(whole, f"{key}{sign}{junk}"))
    if found.status in {"invalid", "unknown"}:
        return
    leaf = key.strip()
    notes = [*found.reading.assumed, *found.reading.left_out, *found.reading.harmless]
    named = any(note.name.endswith(leaf) for note in notes)
    said = {str(note) for note in found.reading.assumed} - said_of(name)
    assert named or said, (key, junk, found.status, found.message)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("a.yaml", "strategy: fsdp2", "strategy: 'fsdp2 '"),
        ("a.yaml", "meta-llama/Llama-3.1-8B", "'meta-llama/Llama-3.1-8B '"),
        ("n.yaml", "activation: fast-swiglu", "activation: ' fast-swiglu'"),
        ("t.toml", '"Interleaved1F1B"', '"Interleaved1F1B "'),
    ],
)
def test_blanks_around_a_value_are_named(tmp_path, name, old, new):
    found = checked(tmp_path, name, RECIPES[name].replace(old, new))
    assert found.status == "ok"
    assert any(note.name.startswith("blanks of ") for note in found.reading.assumed)


def test_a_blank_behind_a_backslash_ends_a_command_of_the_shell(tmp_path):
    text = MEGATRON.replace("\n--", " \\\n  --")
    assert checked(tmp_path, "a.sh", text).status == "ok"
    found = checked(tmp_path, "a.sh", text.replace("32 \\\n  --hidden", "32 \\ \n  --hidden"))
    assert found.status == "unknown"
    assert "a blank behind a backslash" in found.message


@pytest.mark.parametrize(("name", "status"), [("a.yaml", "ok"), ("n.yaml", "unknown")])
def test_a_key_given_twice_is_what_its_program_makes_of_it(tmp_path, name, status):
    text = RECIPES[name].replace(
        "global_batch_size: ", "global_batch_size: 7\n  global_batch_size: "
    )
    found = checked(tmp_path, name, text)
    assert found.status == status
    if status == "ok":  # AutoModel reads with PyYAML, NeMo with OmegaConf
        assert found.prediction.plan.global_batch == 64
        assert "global_batch_size a second time" in {one.name for one in found.reading.harmless}
    else:
        assert "has the key 'global_batch_size' twice" in found.message


def test_a_frozen_language_model_has_no_states_and_samples_of_any_length(tmp_path):
    beside = "  mm_cfg: {llm: {freeze: true}, vision_encoder: {freeze: true}}\n  activation:"
    text = RECIPES["n.yaml"].replace("activations_checkpoint", "unused_checkpoint")
    plain = checked(tmp_path, "n.yaml", text).prediction.memory
    found = checked(tmp_path, "n.yaml", text.replace("  activation:", beside))
    memory = found.prediction.memory
    assert memory.optimizer_bytes < 0.01 * plain.optimizer_bytes
    assert memory.weights_bytes == pytest.approx(plain.weights_bytes, rel=0.01)
    assert {"sequence length", "tower"} <= {note.name for note in found.reading.assumed}


@pytest.mark.parametrize(
    ("words", "vocab"),
    [
        ("{library: megatron, type: GPT2BPETokenizer}", 50257),
        ("{library: huggingface, type: meta-llama/Meta-Llama-3-8B}", 128256),
        ("{library: huggingface, type: mistralai/Mistral-7B-v0.1}", 32000),
    ],
)
def test_a_tokenizer_that_is_named_says_the_vocabulary(tmp_path, words, vocab):
    text = RECIPES["n.yaml"].replace("override_vocab_size: 128256", f"tokenizer: {words}")
    found = checked(tmp_path, "n.yaml", text)
    assert found.model.vocab == -(-vocab // 256) * 256  # a multiple of 128 for each tensor rank
    assert not [note for note in found.reading.assumed if note.name == "vocabulary"]


def test_samples_of_another_length_than_the_model_takes_are_named(tmp_path):
    text = RECIPES["n.yaml"].replace("data: {", "data: {seq_length: 2048, ")
    found = checked(tmp_path, "n.yaml", text)
    assert found.model.seq_len == 2048
    assert "sequence length: 2048" in found.assumed


FORGE = """model: {name: llama3, flavor: 8B}
processes: {scheduler: local, hosts: 1, procs: 8, with_gpus: true}
training: {local_batch_size: 1, seq_len: 2048}
parallelism: {data_parallel_shard_degree: -1, tensor_parallel_degree: 2}
activation_checkpoint: {mode: full}
"""


def test_torchtitans_sections_as_yaml(tmp_path):
    found = checked(tmp_path, "a.yaml", FORGE)
    assert (found.program, found.status) == ("torchtitan", "ok")
    assert (found.prediction.plan.num_gpus, found.prediction.plan.tensor) == (8, 2)


def scripted(tmp_path, before, flags, launcher="torchrun --nproc_per_node 8 --nnodes 4"):
    head, *lines = MEGATRON.splitlines()
    path = tmp_path / "b.sh"
    command = f"{launcher} {head.split()[-1]} {' '.join(lines)} {flags}"
    path.write_text(f"#!/bin/bash\n{before}\n{command}\n")
    return check_recipe(path, CLUSTERS["a.sh"])


def test_what_slurm_sets_is_known_from_its_directives(tmp_path):
    before = "#SBATCH --nodes=4\n#SBATCH --gpus-per-node=4"
    launcher = "torchrun --nproc-per-node $SLURM_GPUS_PER_NODE --nnodes $SLURM_NNODES"
    flags = "--context-parallel-size $SLURM_GPUS_ON_NODE"
    found = scripted(tmp_path, before, flags, launcher).prediction.plan
    assert (found.num_gpus, found.context) == (16, 4)


@pytest.mark.parametrize(
    ("flag", "other", "status"),
    [
        ("--load $A", "--load $B --no-load-rng", "ok"),  # what is read of neither
        ("--seq-length 4096", "--seq-length 8192", "unknown"),
    ],
)
def test_flags_of_two_branches_are_each_perhaps(tmp_path, flag, other, status):
    before = f'if [ -f x ]; then\nMORE="{flag}"\nelse\nMORE="{other}"\nfi'
    found = scripted(tmp_path, before, "${MORE}")
    assert found.status == status
    assert flag.split()[0] in {note.name for note in found.reading.harmless} or status == "unknown"


def test_a_tokenizer_in_the_folder_of_a_model_says_the_vocabulary(tmp_path):
    head, *lines = [line for line in MEGATRON.splitlines() if "vocab" not in line]
    text = " ".join([head, *lines, "--tokenizer-model /data/Meta-Llama-3-8B/tokenizer.model"])
    assert checked(tmp_path, "a.sh", text).model.vocab == 128256


@pytest.mark.parametrize(
    ("words", "products"),
    [
        ("fp8: false\n  fp8_hybrid: true", "bf16"),  # a format, which fp8 does not switch on
        ("fp8: true\n  fp8_hybrid: true", "fp8"),
        ("fp8: true\n  fp8_e4m3: false", "fp8"),
    ],
)
def test_fp8_is_the_switch_of_nemo(tmp_path, words, products):
    found = checked(tmp_path, "n.yaml", NEMO.replace("fp8: false", words))
    assert found.status == "ok"
    assert found.prediction.plan.dtype == products
