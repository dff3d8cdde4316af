"""Models that recipes name, what lies beside them, and what a recipe leaves to its program."""

import json
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.strategy import ParallelPlan, load_cluster, load_model, megatron_flags
from fivefold.strategy._recipes.megatron_model import _spread
from fivefold.strategy._recipes.models import named_model
from fivefold.strategy.recipes import check_recipe

CLUSTER = load_cluster("h100-nemo")
HERE = Path()
PUBLISHED = tomllib.loads(
    (files("fivefold.strategy._recipes") / "configs.toml").read_text(encoding="utf-8")
)
TUNE = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
    "model": {"pretrained_model_name_or_path": "Qwen/Qwen3-1.7B"},
    "distributed": {"strategy": "fsdp2", "tp_size": 1, "activation_checkpointing": True},
    "step_scheduler": {"global_batch_size": 64, "local_batch_size": 8},
    "dataset": {"path_or_dataset": "rowan/hellaswag"},
    "ci": {"nodes": 1},
}
LLAMA = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
         "vocab_size": 128256, "max_position_embeddings": 8192,
         "tie_word_embeddings": True}  # fmt: skip


def tuned(tmp_path, cluster=CLUSTER, *, given=None, reading=None, **changes):
    table = json.loads(json.dumps(TUNE))
    for section, keys in changes.items():
        table[section] = table.get(section, {}) | keys
    path = tmp_path / "tune.yaml"
    path.write_text(yaml.safe_dump(table))
    return check_recipe(path, cluster, model=given, model_reading=reading)


def notes(found, kind="assumed"):
    return {note.name: note for note in getattr(found.reading, kind)}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_models_have_as_many_parameters_as_their_publishers_count(family):
    for name, keys in PUBLISHED[family].items():
        counted = (PUBLISHED[family][keys["like"]] if "like" in keys else keys)["billions"]
        found = named_model(f"somebody/{name}", beside=HERE)
        assert found.spec.num_parameters / 1e9 == pytest.approx(counted, rel=0.0125), name


def test_a_model_of_the_folder_or_of_the_hubs_cache_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    unknown = {"pretrained_model_name_or_path": "somebody/Small-1B"}
    assert tuned(tmp_path, model=unknown).status == "unknown"
    place = tmp_path / "hub" / "models--somebody--Small-1B" / "snapshots" / "abc" / "config.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(LLAMA))
    found = tuned(tmp_path, model=unknown)
    assert found.status == "ok"
    assert found.model.num_parameters == load_model("llama3.2-1b").num_parameters
    beside = tmp_path / "weights" / "config.json"
    beside.parent.mkdir()
    beside.write_text(json.dumps(LLAMA))
    local = tuned(tmp_path, model={"pretrained_model_name_or_path": "weights"})
    assert local.model.num_parameters == found.model.num_parameters


def test_a_given_model_does_not_replace_the_one_that_a_recipe_names(tmp_path):
    found = tuned(tmp_path, given=load_model("llama3-70b"))
    assert found.model.num_layers == load_model("qwen3-1.7b").num_layers
    assert "names Qwen/Qwen3-1.7B" in notes(found)["given model"].why
    name = {"pretrained_model_name_or_path": "somebody/else"}
    other = tuned(tmp_path, given=load_model("qwen3-1.7b"), model=name)
    assert other.model.num_layers == found.model.num_layers
    assert "not known here" in notes(other)["model"].why


def script(tmp_path, flags):
    path = tmp_path / "a.sh"
    path.write_text(
        f"torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 64 "
        f"--seq-length 2048 --bf16 --use-distributed-optimizer {flags}\n"
    )
    return path


def test_a_given_model_fills_sizes_and_contradicts_none(tmp_path):
    given = load_model("llama3-8b")
    lacks = script(tmp_path, "--use-checkpoint-args")
    assert check_recipe(lacks, CLUSTER).status == "unknown"
    assert check_recipe(lacks, CLUSTER, model=given).model.num_layers == 32
    own = script(tmp_path, "--num-layers 4 --hidden-size 1024 --num-attention-heads 8")
    assert check_recipe(own, CLUSTER, model=given).model.num_layers == 4
    part = script(tmp_path, "--num-layers 4 --use-checkpoint-args")
    found = check_recipe(part, CLUSTER, model=given)
    assert found.status == "unknown"
    assert "4 in the recipe, 32 in the given model" in found.message


@pytest.mark.parametrize("folder", ["", "./", "${SCRIPT_DIR}/", '"$(dirname "$0")/'])
def test_what_a_script_sources_is_read_from_its_own_folder(tmp_path, folder):
    (tmp_path / "sizes.sh").write_text(
        "SIZES='--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --vocab-size 32000'\n"
    )
    path = script(tmp_path, "$SIZES")
    end = '"' if folder.startswith('"') else ""
    path.write_text(f"source {folder}sizes.sh{end}\n{path.read_text()}")
    found = check_recipe(path, CLUSTER)
    assert found.status == "ok", found.message
    assert found.model.num_layers == 4


def test_a_stray_quote_is_no_part_of_a_value(tmp_path):
    path = script(tmp_path, "--num-layers 4 --hidden-size 1024 --num-attention-heads 8")
    path.write_text(f'{path.read_text().strip()} --vocab-size 32000 "\n')
    assert check_recipe(path, CLUSTER).status == "ok"


def test_nemos_launcher_takes_sizes_from_the_recipe_that_trained_the_model(tmp_path):
    sizes = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8,
             "ffn_hidden_size": "${multiply:4, ${.hidden_size}}",
             "encoder_seq_length": 2048}  # fmt: skip
    trained = tmp_path / "training" / "gpt3" / "5b.yaml"
    trained.parent.mkdir(parents=True)
    trained.write_text(yaml.safe_dump({"model": sizes, "trainer": {}}))
    tune = {"run": {"model_train_name": "gpt3_5b"}, "trainer": {"devices": 8, "num_nodes": 1,
            "precision": "bf16"}, "model": {"micro_batch_size": 1, "global_batch_size": 8,
            "optim": {"name": "distributed_fused_adam"}}}  # fmt: skip
    path = tmp_path / "peft" / "squad.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(tune))
    found = check_recipe(path, CLUSTER)
    assert (found.model.num_layers, found.model.ffn) == (4, 4096)
    trained.unlink()
    assert check_recipe(path, CLUSTER).status == "unknown"


def test_a_given_model_lifts_no_other_trouble(tmp_path):
    two = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --micro-batch-size {}\n"
    path = tmp_path / "two.sh"
    path.write_text(two.format(1) + two.format(2))
    found = check_recipe(path, CLUSTER, model=load_model("llama3-8b"))
    assert found.status == "unknown"
    assert "starts 2 trainings" in found.message


@pytest.mark.parametrize(("extra", "status"), [({}, "ok"), ({"hidden_sizes_zz": 4}, "unknown")])
def test_what_is_decisive_in_a_configuration_is_so_for_the_verdict(tmp_path, extra, status):
    config = tmp_path / "m" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(LLAMA | extra))
    table = TUNE | {"model": {"pretrained_model_name_or_path": "somebody/else"}}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(table))
    line = ["plan", "--check", str(tmp_path / "t.yaml"), "--cluster", "h100-nemo", "--json"]
    (found,) = json.loads(CliRunner().invoke(app, [*line, "--model", str(config)]).stdout)
    assert found["status"] == status
    left = [note["name"] for note in found["reading"]["left_out"]]
    assert left == [f"{name} of the model" for name in extra]


def test_a_tower_is_assumed_and_may_turn_the_verdict(tmp_path):
    name = {"pretrained_model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct"}
    found = tuned(tmp_path, model=name)
    assert found.model.num_layers == 36
    assert "tower" in notes(found)
    frozen = tuned(tmp_path, model=name, freeze_config={"freeze_vision_tower": True})
    assert notes(frozen)["tower"].value == "frozen"


@pytest.mark.parametrize(
    ("data", "status"),
    [({"path_or_dataset": "rowan/hellaswag"}, "ok"), ({"path_or_dataset": "mine"}, "unknown"),
     ({"path_or_dataset": "mine", "seq_length": 512}, "ok")],
)  # fmt: skip
def test_samples_are_as_long_as_the_recipe_or_its_data_says(tmp_path, data, status):
    assert tuned(tmp_path, dataset=data).status == status


def test_packing_reads_the_tokens_of_a_micro_batch(tmp_path):
    plain = tuned(tmp_path, dataset={"seq_length": 2048})
    packed = tuned(tmp_path, packed_sequence={"packed_sequence_size": 2048})
    assert packed.prediction.memory == plain.prediction.memory


@pytest.mark.parametrize(("packs", "status"), [(False, "invalid"), (True, "ok")])
def test_packed_samples_need_no_whole_micro_batches(tmp_path, packs, status):
    tokens = "${mul:${..max_total_sequence_length}, 4}"
    policy = {"model_name": "Qwen/Qwen3-1.7B", "train_global_batch_size": 16,
              "train_micro_batch_size": 4, "max_total_sequence_length": 2048,
              "sequence_packing": {"enabled": packs, "train_mb_tokens": tokens}}  # fmt: skip
    table = {"policy": policy, "grpo": {}, "cluster": {"gpus_per_node": 8, "num_nodes": 1}}
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(table))
    assert check_recipe(path, CLUSTER).status == status


@pytest.mark.parametrize(
    ("optimizer", "bytes_"),
    [
        ({"_target_": "torch.optim.AdamW"}, 4.0),
        ({"_target_": "FusedAdam", "master_weights": True}, 12.0),
        ({"_target_": "FusedAdam", "master_weights": True, "store_param_remainders": True}, 10.0),
        ({"_target_": "flashoptim.FlashAdamW"}, 3.2),
        ({"_target_": "flashoptim.FlashAdamW", "master_weight_bits": 32}, 4.2),
    ],
)
def test_states_of_automodels_optimizers(tmp_path, optimizer, bytes_):
    found = tuned(tmp_path, optimizer=optimizer)
    usual = tuned(tmp_path).prediction.memory.optimizer_bytes
    assert found.prediction.memory.optimizer_bytes / usual == pytest.approx(bytes_ / 4.0)


def test_eager_attention_keeps_its_scores_and_a_switch_below_a_section_counts(tmp_path):
    eager = tuned(tmp_path, model={"attn_implementation": "eager"} | TUNE["model"])
    fused = tuned(tmp_path)
    assert eager.prediction.memory.total_bytes > fused.prediction.memory.total_bytes
    old = {"activation_checkpointing": False}
    new = {"activation_checkpointing": True}
    section = tuned(tmp_path, distributed=old)
    assert section.prediction.plan.recompute == "none"
    assert tuned(tmp_path, distributed={}, parallelizer=new).prediction.plan.recompute == "full"


def test_a_teacher_lies_beside_its_student(tmp_path):
    teacher = {"pretrained_model_name_or_path": "Qwen/Qwen3-32B"}
    assert tuned(tmp_path, teacher_model=teacher, kd_loss_fn={"temperature": 1.0}).status == "ok"
    small = load_cluster("h100-nemo:1")
    found = tuned(tmp_path, small, teacher_model=teacher, ci={"nodes": None})
    assert found.status == "unknown"
    assert "teacher" in {note.name for note in found.reading.decisive()}


def test_torchtitan_takes_its_own_defaults_and_not_the_models(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n'
                    "data_parallel_shard_degree = 8\n")  # fmt: skip
    found = check_recipe(path, CLUSTER)
    assert found.model.seq_len == 2048
    assert found.prediction.plan.micro_batch == 8
    assert found.prediction.plan.recompute_layers == 16  # one layer in two
    said = {"training.seq_len", "training.local_batch_size", "activation_checkpoint.mode"}
    assert said <= set(notes(found))


def test_more_gpus_are_tried_before_a_recipe_does_not_fit(tmp_path):
    path = tmp_path / "t.toml"
    text = ('[model]\nname = "llama3"\nflavor = "405B"\n[training]\nlocal_batch_size = {}\n'
            "seq_len = 8192\n[parallelism]\ntensor_parallel_degree = 8\n"
            '[activation_checkpoint]\nmode = "full"\n')  # fmt: skip
    path.write_text(text.format(1))
    found = check_recipe(path, CLUSTER)
    assert found.status == "unknown"
    assert "--cluster h100-nemo:64; it fits on 128" in found.hint
    assert check_recipe(path, load_cluster("h100-nemo:128")).status == "ok"
    assert check_recipe(path, load_cluster("h100-nemo:64")).status == "memory"
    path.write_text(text.format(64))  # activations alone are too many
    assert check_recipe(path, CLUSTER).status == "memory"


@given(
    st.integers(1, 120),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.5),
)
def test_layers_of_shares_are_as_many_and_spread(layers, attention, mlp):
    pattern = _spread(layers, attention, mlp)
    assert len(pattern) == layers
    assert pattern.count("*") <= round(layers * attention)
    parts = [len(part) for part in _spread(layers, attention, 0.0).split("*")]
    assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ("--use-torch-fsdp2", "invalid"),  # tied embeddings
        ("--use-torch-fsdp2 --untie-embeddings-and-output-weights", "ok"),
        ("--use-distributed-optimizer --deterministic-mode --cross-entropy-loss-fusion", "invalid"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", "ok"),
    ],
)
def test_rules_that_megatron_lms_own_validation_has(tmp_path, flags, status):
    path = tmp_path / "a.sh"
    path.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 64 "
        "--seq-length 2048 --bf16 --num-layers 8 --hidden-size 1024 --num-attention-heads 8 "
        f"--vocab-size 32000 {flags}\n"
    )
    assert check_recipe(path, CLUSTER).status == status


@pytest.mark.parametrize(("bytes_", "written"), [(2.0, True), (4.0, False)])
def test_gradients_of_sixteen_bits_are_written_for_megatron(bytes_, written):
    plan = ParallelPlan(global_batch=64, data=8, zero=1)
    device = load_cluster("h100-nemo" if bytes_ == 2.0 else "v100-megatron").device
    assert device.gradient_bytes == bytes_
    flags = megatron_flags(load_model("llama3-8b"), plan, device=device)
    assert ("--grad-reduce-in-bf16" in flags) is written
    assert "--grad-reduce-in-bf16" not in megatron_flags(load_model("llama3-8b"), plan)
