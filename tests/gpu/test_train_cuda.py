"""The trainer on one GPU: what it reaches, its checkpoints, and resuming on the other device."""

import dataclasses
import json
import shutil
import sysconfig
from pathlib import Path

import pytest

from fivefold.runs.ranks import close_ranks, open_ranks
from fivefold.train import TrainConfig, profile, train
from fivefold.train.config import DataConfig, ModelConfig, OptimConfig, RunConfig, SyncConfig

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for path in [path for path in files if 500 < path.stat().st_size < 9000][:24]:
        shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture
def make_config(text_folder, tmp_path):
    def make(output, *, device, precision="fp32", optimizer="adamw", moe=None, **run):
        run = {"steps": 40, "log_every_steps": 1, "validate_every_steps": 20} | run
        data = {"cache": str(tmp_path / "cache"), "sequence_length": 64}
        return TrainConfig(
            run=RunConfig(output=tmp_path / output, device=device, **run),
            data=DataConfig(path=str(text_folder), validation_fraction=0.25, **data),
            model=ModelConfig(layers=2, width=64, heads=4, **({"moe": moe} if moe else {})),
            optim=OptimConfig(
                optimizer=optimizer,
                batch_size=8,
                warmup_steps=5,
                validation_batches=4,
                precision=precision,
            ),
            sync=SyncConfig(method="none"),
        )

    return make


def losses(config):
    lines = (config.run.output / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return {e["step"]: e["loss"] for e in events if e["event"] == "train"}


def gap(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(abs(ours[step] - theirs[step]) for step in ours)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_those_of_a_cpu(device, in_child, make_config, precision, optimizer):
    here = make_config("cpu", device="cpu", optimizer=optimizer)
    there = make_config("gpu", device=device, precision=precision, optimizer=optimizer)
    result = in_child(lambda: [train(here), train(there)][1])
    assert result.steps == 40
    cpu, gpu = losses(here), losses(there)
    assert gpu[40] < gpu[1] - 0.5  # it learns
    # Rounding: 2^-24 in fp32, 2^-9 in bf16 (Muon multiplies in bf16 in both), grown over 40 steps.
    limit = 2e-3 if (precision, optimizer) == ("fp32", "adamw") else 5e-2
    assert gap(cpu, gpu) < limit


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_from_its_checkpoint(device, in_child, make_config, precision):
    whole = make_config("whole", device=device, precision=precision)
    half = make_config("half", device=device, precision=precision, checkpoint_every_steps=20)

    def work():
        train(whole)
        train(half)
        folder = half.run.output / "checkpoints"
        shutil.rmtree(folder / "step-00000040")
        train(half)

    in_child(work)
    # The same but for kernels whose sums a GPU takes in any order.
    assert gap(losses(whole), losses(half)) < (1e-3 if precision == "fp32" else 2e-2)


def test_a_run_changes_devices_at_its_checkpoints(device, in_child, make_config):
    whole = make_config("whole", device="cpu")

    def work():
        train(whole)
        last = make_config("parts", device="cpu", checkpoint_every_steps=10, keep_checkpoints=9)
        places = {10: device, 20: "cpu", 30: device, 40: "cpu"}
        for step, where in places.items():
            run = last.run.model_copy(update={"device": where})
            train(last.model_copy(update={"run": run}))
            for folder in sorted((run.output / "checkpoints").glob("step-*")):
                if int(folder.name[5:]) > step:
                    shutil.rmtree(folder)

    in_child(work)
    parts = make_config("parts", device="cpu")
    assert gap(losses(whole), losses(parts)) < 2e-3


def test_the_step_of_a_gpu_is_timed(device, in_child, make_config, monkeypatch):
    monkeypatch.setattr(profile, "_MEASURED_S", 0.5)
    config = make_config("timed", device=device)

    def work():
        ranks = open_ranks(device=device, timeout_s=60.0)
        times = profile.measure_steps(config, ranks)
        rates = profile.measure_device(ranks)
        close_ranks(ranks)
        return dataclasses.asdict(times), dataclasses.asdict(rates)

    times, rates = in_child(work)
    print(times, rates)  # noqa: T201 - shown by -s
    assert min(times["model_s"], times["optimizer_s"]) > 0
    if device == "cuda":  # any GPU of the last ten years; a wait that is missing gives far more
        assert 1e12 < rates["product_flops"] < 5e15
        assert 1e11 < rates["copy_bytes_per_s"] < 2e13
