"""A plan written for other programs: torchtitan's names, the trainer's own reader."""

import sys
import types

import pytest
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.strategy import ModelSpec, ParallelPlan, load_model, torchtitan_config, trainer_config
from fivefold.strategy.parts import MixtureOfExperts
from fivefold.strategy.plan import degrees_of, overlap_of, settings_of
from fivefold.train import load_config

# Fields of torchtitan/config/configs.py in both, and what 0.3.0 and main (b5bcd76, 2026-08-21)
# call what they count differently.
FIELDS = {
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "fsdp_reshard_after_forward",
    "enable_fsdp_symm_mem",
    "tensor_parallel_degree",
    "enable_sequence_parallel",
    "spmd_backend",
    "pipeline_parallel_degree",
    "module_fqns_per_model_part",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "context_parallel_degree",
    "context_parallel_load_balancer",
    "context_parallel_ptrr_mask_key",
    "expert_parallel_degree",
}
TRAINING = {
    "max_norm",
    "steps",
    "enable_cpu_offload",
    "disable_cuda_graphs",
    "dtype",
    "mixed_precision_param",
    "mixed_precision_reduce",
    "gc_freq",
    "gc_debug",
}
RELEASES = {
    "0.3.0": (
        {"pipeline_parallel_microbatch_size"},
        {"local_batch_size", "global_batch_size", "seq_len"},
    ),
    "main": (
        {"num_pp_microbatches"},
        {
            "num_tokens_per_microbatch_per_dp_rank",
            "num_tokens_per_train_step",
            "max_context_length",
        },
    ),
}


# What torch.distributed.pipelining's get_schedule_class knows, with one or two stages of a rank.
SCHEDULES = {"1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"}


def closed(names):
    """A class whose objects have only the attributes that torchtitan's class has."""

    class Closed(types.SimpleNamespace):
        def __setattr__(self, name, value):
            assert name in names, name
            super().__setattr__(name, value)

    return Closed


def planned(monkeypatch, source, room="llama3", release="main"):
    """What the module's function returns, with stand-ins of torchtitan's own modules."""
    checkpointing = types.SimpleNamespace(
        FullAC=types.SimpleNamespace(Config=lambda: "full"),
        SelectiveAC=types.SimpleNamespace(Config=lambda: "selective"),
    )

    def base():
        training = closed(TRAINING | counted)(**dict.fromkeys(counted))
        compiled = closed({"enable", "enable_async_tensor_parallel"})()
        return types.SimpleNamespace(training=training, compile=compiled)

    pipelined, counted = RELEASES[release]
    registry = types.ModuleType("config_registry")
    registry.__getattr__ = lambda _name: base
    modules = {
        "torchtitan.config": types.SimpleNamespace(ParallelismConfig=closed(FIELDS | pipelined)),
        "torchtitan.distributed.activation_checkpoint": checkpointing,
        f"torchtitan.models.{room}.config_registry": registry,
        "torchtitan.trainer": types.SimpleNamespace(Trainer=types.SimpleNamespace(Config=object)),
    }
    parents = (
        "torchtitan",
        "torchtitan.distributed",
        "torchtitan.models",
        f"torchtitan.models.{room}",
    )
    for name in parents:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    found = {}
    exec(compile(source, "planned", "exec"), found)  # noqa: S102 - what the test is about
    return found["planned"]()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(global_batch=64, data=64),
        ParallelPlan(global_batch=64, data=8, tensor=8, zero=3, sequence_parallel=True),
        ParallelPlan(global_batch=64, data=8, context=2, zero=3, shard=4, recompute="full"),
        ParallelPlan(
            global_batch=64, data=2, tensor=2, pipeline=4, virtual=2, schedule="interleaved"
        ),
        ParallelPlan(global_batch=64, data=4, pipeline=4, recompute="selective", micro_batch=2),
        ParallelPlan(global_batch=64, data=4, zero=2, offload_weights=True, offload_optimizer=True),
    ],
)
def test_a_torchtitan_module_says_what_the_plan_says(monkeypatch, plan, release):
    model = load_model("llama3-70b")
    config = planned(monkeypatch, torchtitan_config(model, plan), release=release)
    degrees = vars(config.parallelism)
    product = 1
    for name in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel",
                 "pipeline_parallel", "context_parallel"):  # fmt: skip
        product *= degrees[f"{name}_degree"]
    assert product == plan.num_gpus
    assert degrees["data_parallel_shard_degree"] == (
        plan.shards // plan.context if plan.zero else 1
    )
    reshards = "always" if plan.zero == 3 else "never"
    assert degrees["fsdp_reshard_after_forward"] == reshards
    replicas = plan.num_gpus // (plan.tensor * plan.pipeline * plan.context)
    # torchtitan accumulates gradients until a step's tokens, or sequences, are there.
    training = config.training
    if release == "main":
        micro = degrees.get("num_pp_microbatches", 1)
        tokens = training.num_tokens_per_microbatch_per_dp_rank * micro * replicas
        assert training.num_tokens_per_train_step % tokens == 0
        assert training.num_tokens_per_train_step == plan.global_batch * training.max_context_length
    else:
        assert training.global_batch_size == plan.global_batch
        assert training.global_batch_size % (training.local_batch_size * replicas) == 0
        micro = degrees.get("pipeline_parallel_microbatch_size", training.local_batch_size)
        assert training.local_batch_size % micro == 0
        assert micro == plan.micro_batch
    expected = {"none": None, "full": "full", "selective": "selective"}[plan.recompute]
    assert config.activation_checkpoint == expected
    if plan.pipeline > 1:
        assert degrees["pipeline_parallel_schedule"] in SCHEDULES
        stages = -(-model.num_layers // degrees["pipeline_parallel_layers_per_stage"])
        assert stages == plan.pipeline * plan.virtual
    assert getattr(config.training, "enable_cpu_offload", False) == plan.offload_weights


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero": 1}, "ZeRO-1"),
        ({"tau": 4, "pipeline": 2}, "tau"),
        ({"offload_activations": True}, "activations"),
        ({"offload_optimizer": True, "zero": 3}, "together"),
        ({"pipeline": 2, "schedule": "zb_1p"}, "zb_1p"),
        ({"dtype": "fp8"}, "fp8"),
        ({"expert": 4}, "experts"),
    ],
)
def test_what_torchtitan_cannot_do_is_refused(changes, words):
    plan = ParallelPlan(**{"global_batch": 64, "data": 8} | changes)
    with pytest.raises(UnsupportedError, match=words):
        torchtitan_config(load_model("llama3-8b"), plan)


def test_local_updates_get_their_rule():
    plan = ParallelPlan(global_batch=64, data=8, zero=3, shard=4, tau=4)
    source = torchtitan_config(load_model("llama3-8b"), plan)
    compile(source, "planned", "exec")
    assert "data_parallel_replicate_degree=2,\n        data_parallel_shard_degree=4," in source
    assert source.endswith("return torchtitan_outer_sync(config, DelayCorrected(tau=4))\n")


def test_models_are_found_by_their_sizes_or_named(monkeypatch):
    plan = ParallelPlan(global_batch=8, data=8)
    assert "import llama3_8b" in torchtitan_config(load_model("llama3-8b"), plan)
    assert "deepseek_v3_671b" in torchtitan_config(load_model("deepseek-v3"), plan)
    with pytest.raises(UnsupportedError, match="llama2-7b"):  # another vocabulary
        torchtitan_config(load_model("llama2-7b"), plan)
    odd = ModelSpec(name='a"""b', num_layers=2, hidden=8, num_heads=2, seq_len=4, vocab=9)
    source = torchtitan_config(odd, plan, base="mine.tiny")
    assert planned(monkeypatch, source, room="mine").training.max_context_length == 4
    with pytest.raises(ConfigurationError, match="package and a function"):
        torchtitan_config(odd, plan, base="import os")


TINY = ModelSpec(name="tiny", num_layers=2, hidden=32, num_heads=4, seq_len=64, vocab=256)


@pytest.mark.parametrize(
    ("plan", "method", "tau"),
    [
        (ParallelPlan(global_batch=16, data=4, micro_batch=2), "ddp", None),
        (ParallelPlan(global_batch=16, data=4, tau=8), "delay_corrected", 8),
        (ParallelPlan(global_batch=16), "none", None),
    ],
)
def test_the_trainer_reads_its_configuration(tmp_path, plan, method, tau):
    file = tmp_path / "train.toml"
    file.write_text(trainer_config(TINY, plan))
    config = load_config(file, ["run.steps=30"])
    assert (config.sync.method, config.sync.tau) == (method, tau)
    assert (config.model.layers, config.model.width, config.model.heads) == (2, 32, 4)
    assert config.optim.batch_size * config.optim.accumulation * plan.data == plan.global_batch
    assert config.data.sequence_length == 64


def test_experts_become_the_trainers_mixture(tmp_path):
    experts = MixtureOfExperts(num_experts=8, top_k=2, expert_ffn=48)
    model = ModelSpec(
        name="moe", num_layers=2, hidden=32, num_heads=4, seq_len=64, vocab=256, experts=experts
    )
    file = tmp_path / "train.toml"
    file.write_text(trainer_config(model, ParallelPlan(global_batch=8, data=4, expert=2)))
    moe = load_config(file).model.moe
    assert (moe.experts, moe.top_k, moe.expert_width, moe.expert_parallel) == (8, 2, 48, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"tensor": 2}, "tensor"), ({"zero": 1}, "ZeRO-1"), ({"recompute": "full"}, "recomputation")],
)
def test_what_the_trainer_cannot_do_is_refused(changes, words):
    with pytest.raises(UnsupportedError, match=words):
        trainer_config(TINY, ParallelPlan(**{"global_batch": 8, "data": 2} | changes))


def test_the_command_writes_every_form_and_a_page(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(
        'model = "llama3-8b"\ngpus = 16\nglobal_batch = 32\n'
        "[plan]\nglobal_batch = 32\ndata = 2\ntensor = 8\nzero = 3\nsequence_parallel = true\n"
    )
    out, page = tmp_path / "out", tmp_path / "page.html"
    arguments = ["plan", str(job), "--cluster", "h100-nemo", "--write", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--report", str(page)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == {
        "plan.toml", "mesh.json", "torchtitan_planned.py"
    }  # fmt: skip
    assert "not written: megatron_flags.txt" in result.stderr
    assert "Where the time of an iteration goes" in page.read_text()
    job.write_text(job.read_text().replace("zero = 3", "zero = 1"))
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not (out / "torchtitan_planned.py").exists()  # of the plan before
    (tmp_path / "file").write_text("")
    arguments[-1] = str(tmp_path / "file" / "below")
    assert "cannot be written" in str(CliRunner().invoke(app, arguments).exception)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({}, ("b1", "plain", "nothing")),
        ({"data": 2, "zero": 1}, ("d2 b1", "ZeRO-1", "nothing")),
        (
            {"data": 4, "zero": 3, "shard": 2, "data_overlap": True, "micro_batch": 2},
            ("d4 b2", "ZeRO-3 over 2", "gradients"),
        ),
        (
            {"context": 2, "tau": 2, "optimizer": "muon"},
            ("c2 b1", "tau 2, Muon", "outer updates"),
        ),
        (
            {"tensor": 2, "tensor_overlap": "ring", "sequence_parallel": True, "recompute": "full"},
            ("t2 b1", "sequence parallel, recompute full", "tensor"),
        ),
        ({"pipeline": 2, "pipeline_overlap": True}, ("p2 b1", "1f1b", "nothing")),
        (
            {"pipeline": 2, "virtual": 2, "schedule": "interleaved", "pipeline_overlap": True},
            ("p2 b1", "interleaved x2", "stages"),
        ),
        (
            {"data": 2, "expert": 2, "pipeline": 2, "schedule": "dualpipe"},
            ("d2 p2 e2 b1", "dualpipe", "experts"),
        ),
        ({"offload_weights": True}, ("b1", "offload weights", "nothing")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_table_says_in_words_what_a_plan_does(plan, words):
    plan = ParallelPlan(global_batch=16, **plan)
    assert (degrees_of(plan), settings_of(plan), overlap_of(plan)) == words
