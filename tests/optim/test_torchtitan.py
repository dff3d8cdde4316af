"""torchtitan's debug model with outer updates between replicas, on processors and gloo."""

import copy
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fivefold.errors import UnsupportedError
from fivefold.optim import CO2, _torchtitan
from fivefold.optim.integrations import torchtitan_outer_sync
from fivefold.strategy import ModelSpec, ParallelPlan, torchtitan_config
from helpers import torchtitan_on_cpu

HELPERS = Path(torchtitan_on_cpu.__file__).parent


def test_without_torchtitan_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    with pytest.raises(UnsupportedError, match=r"fivefold\[torchtitan\]"):
        torchtitan_outer_sync(object(), CO2(tau=2))


def test_what_replaces_a_loader_is_still_shared_out():
    """As torchtitan's overrides do: they set what traverse() names as parent and field."""
    loader = Loader("read")
    workers = types.SimpleNamespace(size=lambda: 3, get_local_rank=lambda: 2)
    shared = _torchtitan._SharedData(loader, types.SimpleNamespace(workers=workers))
    ((_, found, parent, field),) = shared.traverse(Loader)
    assert found is loader
    setattr(parent, field, Loader("replaced"))
    assert shared.name == "replaced"
    assert shared.build(dp_world_size=2, dp_rank=1, seq_len=8) == ("replaced", 6, 5, 8)
    assert copy.copy(shared).name == "replaced"


class Loader:
    def __init__(self, name):
        self.name = name

    def traverse(self, _):
        yield "", self, None, None

    def build(self, *, dp_world_size, dp_rank, seq_len):
        return self.name, dp_world_size, dp_rank, seq_len


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tokenizer of 2,000 tokens and a data set, of this repository's own pages."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("assets")
    pages = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))[:25]
    level = tokenizers.pre_tokenizers.ByteLevel
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer, model.decoder = level(), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    model.train([str(page) for page in pages], trainer)
    model.save(str(folder / "tokenizer.json"))
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    (folder / "text").mkdir()
    with (folder / "text" / "data.json").open("w") as lines:
        for page in pages:
            for part in page.read_text().split("\n\n"):
                lines.write(json.dumps({"text": part}) + "\n")
    return folder


@pytest.fixture
def run(assets, tmp_path, monkeypatch):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed (fivefold[torchtitan])")

    def play(
        *flags, ranks=2, config="outer", module="helpers.torchtitan_on_cpu", into="out", **env
    ):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTHONPATH", f"{HELPERS.parent}:{tmp_path}", prepend=":")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(HELPERS / "torchtitan_on_cpu.py")),
            *("--module", module, "--config", config, "--hf_assets_path", str(assets)),
            *("--dataloader.dataset_path", str(assets / "text")),
            *("--dump_folder", str(tmp_path / into), "--debug.seed", "7", *flags),
        ]
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )

    return play


def weights(folder, step):
    """The model of one of its checkpoints."""
    checkpoint = folder / "checkpoint" / f"step-{step}"
    dcp_to_torch_save(checkpoint, folder / "whole.pt")
    state = torch.load(folder / "whole.pt", weights_only=False)
    return {
        name: v for name, v in state.items() if name.startswith(("layers", "tok", "lm", "norm"))
    }


def require_equal(one, other, **tolerance):
    assert one.keys() == other.keys()
    assert len(one) > 20
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name
        )


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ()),
        (4, ("--parallelism.data_parallel_shard_degree", "2")),
        (4, ("--parallelism.tensor_parallel_degree", "2")),
    ],
)
def test_a_mean_after_every_step_is_its_own_hsdp(run, tmp_path, ranks, flags):
    flags = (*flags, "--training.steps", "4")
    for config in ("base", "outer"):
        result = run(
            *flags,
            ranks=ranks,
            config=config,
            into=config,
            RULE="LocalSGD(tau=1)",
            OPTIMIZER="plain",
        )
        assert result.returncode == 0, result.stdout[-3000:]
    both = [weights(tmp_path / config, 4) for config in ("base", "outer")]
    require_equal(*both, rtol=1e-4, atol=2e-6)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize("rule", ["CO2(tau=3)", "DelayCorrected(tau=4, fragments=2)"])
def test_a_run_that_was_interrupted_goes_on_bit_for_bit(run, tmp_path, rule):
    last = ("--training.steps", "8", "--checkpoint.no-last-save-model-only")
    shards = ("--parallelism.data_parallel_shard_degree", "2")
    often = ("--checkpoint.interval", "5", *shards)
    whole = run(*last, *often, ranks=4, into="whole", RULE=rule)
    assert whole.returncode == 0, whole.stdout[-3000:]
    saved = tmp_path / "whole" / "checkpoint" / "step-5"
    # The same run, which ended after step 5, and its second start.
    (tmp_path / "parts" / "checkpoint").mkdir(parents=True)
    (tmp_path / "parts" / "checkpoint" / "step-5").symlink_to(saved)
    parts = run(*last, *often, ranks=4, into="parts", RULE=rule)
    assert parts.returncode == 0, parts.stdout[-3000:]
    assert "Training starts at step 6" in parts.stdout
    require_equal(weights(tmp_path / "whole", 8), weights(tmp_path / "parts", 8))
    # Another number of ranks is told what it may do, and may do it.
    (tmp_path / "fewer" / "checkpoint").mkdir(parents=True)
    (tmp_path / "fewer" / "checkpoint" / "step-5").symlink_to(saved)
    fewer = run(*last, ranks=2, into="fewer", RULE=rule)
    assert fewer.returncode != 0
    assert "this checkpoint has no outer_sync state of rank" in fewer.stdout
    excluded = ("--checkpoint.exclude_from_loading", "outer_sync,dataloader")
    fewer = run(*last, *excluded, ranks=2, into="fewer", RULE=rule)
    assert fewer.returncode == 0, fewer.stdout[-3000:]
    assert "Training starts at step 6" in fewer.stdout


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_plan_that_is_written_for_it_runs(run, tmp_path):
    model = ModelSpec(
        name="debug", num_layers=6, hidden=256, num_heads=16, seq_len=64, vocab=2048, gated=True
    )
    plan = ParallelPlan(global_batch=8, data=2, micro_batch=2, tau=4)
    source = torchtitan_config(model, plan, base="llama3.llama3_debugmodel")
    (tmp_path / "planned_run.py").write_text(source)
    flags = ("--training.steps", "5", "--training.disable_cuda_graphs", "--checkpoint.enable")
    result = run(*flags, config="planned", module="planned_run")
    assert result.returncode == 0, result.stdout[-3000:]
    assert "gradient accumulation steps 2," in result.stdout
    assert (tmp_path / "out" / "checkpoint" / "step-5").is_dir()
