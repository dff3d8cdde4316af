"""Registries of torchtitan: each function is the recipe that it says, and nothing of it is run."""

import pytest

from fivefold.strategy import ParallelPlan, load_cluster, load_model, torchtitan_config
from fivefold.strategy.recipes import check_recipe, check_recipes

CLUSTER = load_cluster("h100-80gb-torchtitan:16")
REGISTRY = """
from torchtitan.trainer import Trainer
from . import model_registry

raise SystemExit("a module that is run")


def llama3_8b() -> Trainer.Config:
    \"\"\"A recipe.\"\"\"
    model_spec = model_registry("8B")
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192, steps=10,
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )


def changed() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism = ParallelismConfig(data_parallel_replicate_degree=2)
    config.training.max_context_length = 4096
    CHANGE
    return config


def helper(config: Trainer.Config) -> None:
    config.training.steps = 1
"""
TOML = """[model]
name = "llama3"
flavor = "8B"
[training]
num_tokens_per_microbatch_per_dp_rank = 16384
max_context_length = LENGTH
[parallelism]
SPLIT
[activation_checkpoint]
mode = "MODE"
"""


def checked(tmp_path, change="pass"):
    folder = tmp_path / "llama3"
    folder.mkdir(exist_ok=True)
    path = folder / "config_registry.py"
    path.write_text(REGISTRY.replace("CHANGE", change))
    return {one.message.partition(":")[0]: one for one in check_recipes(path, CLUSTER)}


def as_toml(tmp_path, split, *, length=8192, mode="full"):
    path = tmp_path / "a.toml"
    text = TOML.replace("SPLIT", split).replace("LENGTH", str(length)).replace("MODE", mode)
    path.write_text(text)
    return check_recipe(path, CLUSTER)


@pytest.mark.parametrize(
    ("name", "split", "length"),
    [
        ("llama3_8b", "tensor_parallel_degree = 2", 8192),
        ("changed", "data_parallel_replicate_degree = 2", 4096),
    ],
)
def test_a_function_of_a_registry_is_the_recipe_of_its_words(tmp_path, name, split, length):
    found = checked(tmp_path, "del spare")
    assert set(found) == {"llama3_8b", "changed"}
    same = as_toml(tmp_path, split, length=length).prediction
    assert found[name].prediction.plan == same.plan
    assert found[name].prediction.memory == same.memory


def test_each_function_has_its_own_account_and_line(tmp_path):
    found = checked(tmp_path)
    lines = REGISTRY.splitlines()
    assert {lines[one.line - 1].split("(")[0] for one in found.values()} == {
        "def llama3_8b", "def changed"
    }  # fmt: skip
    read = {note.name for note in found["llama3_8b"].reading.read}
    assert {"model.flavor", "parallelism.tensor_parallel_degree"} <= read
    assert "loss.loss_fn" in {note.name for note in found["llama3_8b"].reading.left_out}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("if LARGE:\n        config.training.max_context_length = 65536", "python.line"),
        ("shrink(config)", "python.line"),
        (
            "config.model_spec = model_registry('8B', converters=[LoRAConverter.Config(rank=8)])",
            "model.converters",
        ),
        ("config.loss = DPOLoss.Config()", "loss"),
        ("config.parallelism.new_axis_degree = 2", "parallelism.new_axis_degree"),
    ],
    ids=["branch", "call", "converter", "class", "key"],
)
def test_what_is_not_literal_is_named_and_leaves_it_unknown(tmp_path, change, name):
    reading = checked(tmp_path, change)["changed"].reading
    assert any(note.name.startswith(name) for note in reading.left_out)


@pytest.mark.parametrize(
    "change",
    [
        "config.training.max_context_length = length_of(config)",
        "config.model_spec = model_registry(SIZE)",
        "config.parallelism.tensor_parallel_degree = 2 if WIDE else 4",
    ],
    ids=["length", "model", "degree"],
)
def test_a_computed_size_is_not_guessed(tmp_path, change):
    assert checked(tmp_path, change)["changed"].status == "unknown"


@pytest.mark.parametrize(
    ("change", "recompute"),
    [
        ("config.activation_checkpoint = None", "none"),
        ("config.activation_checkpoint = SelectiveAC.Config()", "selective"),
        ("pass", "full"),
    ],
)
def test_what_is_recomputed_may_be_replaced(tmp_path, change, recompute):
    found = checked(tmp_path, change)["changed"]
    assert found.prediction.plan.recompute == recompute


def test_one_value_for_two_names_is_named_and_an_annotated_name_is_read(tmp_path):
    text = REGISTRY.replace("    config = llama3_8b()", "    config: Trainer.Config = llama3_8b()")
    text = text.replace('model_registry("8B")', 'model_registry(flavor="8B")')
    twice = "config.training.local_batch_size = config.training.global_batch_size = 64"
    folder = tmp_path / "llama3"
    folder.mkdir()
    path = folder / "config_registry.py"
    path.write_text(text.replace("CHANGE", twice))
    found = {one.message.partition(":")[0]: one for one in check_recipes(path, CLUSTER)}
    assert found["llama3_8b"].status == "ok"
    assert found["changed"].status == "unknown"
    assert any("python.line" in note.name for note in found["changed"].reading.decisive())


def test_a_registry_that_cannot_be_parsed_is_unknown_and_does_not_end_the_others(tmp_path):
    checked(tmp_path)
    for name, text in {"cut": "def f() -> Trainer.Config:\n  (", "deep": "1+" * 9000 + "1"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config_registry.py").write_text(text)
    found = list(check_recipes(tmp_path, CLUSTER))
    assert [one.path.parent.name for one in found] == ["cut", "llama3", "llama3"]
    assert found[0].status == "unknown"


def test_what_is_planned_for_torchtitan_is_read_back(tmp_path):
    model = load_model("llama3-8b")
    for number, plan in enumerate(
        (
            ParallelPlan(global_batch=32, data=16, zero=3, data_overlap=True),
            ParallelPlan(global_batch=32, data=4, pipeline=4, zero=0, data_overlap=True,
                         recompute="full"),
        )
    ):  # fmt: skip
        path = tmp_path / f"planned{number}.py"
        path.write_text(torchtitan_config(model, plan))
        found = check_recipe(path, CLUSTER)
        assert found.status == "ok", found.message
        assert found.prediction.plan == plan


def test_a_file_that_is_no_python_is_passed_over(tmp_path):
    with pytest.raises(Exception, match="holds no recipe"):
        checked(tmp_path, "def (")
