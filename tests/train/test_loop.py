import json
import math
import shutil

import numpy as np
import pytest
import torch

from fivefold.errors import ConfigurationError
from fivefold.report import build_report
from fivefold.testing import run_processes
from fivefold.train import load_config, train
from fivefold.train._corpus import load_corpus, load_tokenizer
from fivefold.train._model import Transformer
from fivefold.train._step import cosine_with_warmup
from fivefold.train.sampler import ShardedSampler, gather_batch

METHODS = ["none", "ddp", "local_sgd", "slowmo", "diloco", "co2", "delay_corrected"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_of_the_data_is_read_is_said_everywhere(make_config, text_folder, tmp_path, caplog):
    folder = tmp_path / "text"
    shutil.copytree(text_folder, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    (folder / "rows.parquet").write_bytes(b"PAR1" + bytes(size // 4 - 8) + b"PAR1")
    config = make_config("none", steps=2)
    data = config.data.model_copy(update={"path": str(folder)})
    config = config.model_copy(update={"data": data, "optim": config.optim.model_copy(update={
        "warmup_steps": 0})})  # fmt: skip
    train(config)
    said = "left out rows.parquet"
    assert said in caplog.text
    assert "20.0% of the bytes in data.path are not read" in caplog.text
    account = json.loads((config.run.output / "manifest.json").read_text())["data"]
    assert said in account["said"]
    assert account["disk_bytes"] == size + size // 4
    first = lines(config.run.output / "metrics.jsonl")[0]
    assert (first["event"], first["read_bytes"]) == ("data", size)
    assert said in " ".join(build_report([config.run.output]).caveats)


def large_batch_reference(config, world_size):
    """DDP by hand in one process: gradients of all ranks' batches averaged, AdamW written out."""
    torch.set_num_threads(1)
    corpus = load_corpus(config.data, load_tokenizer("bytes"))
    length, optim = config.data.sequence_length, config.optim
    vocab = load_tokenizer("bytes").vocab_size
    model = Transformer(config.model, vocab_size=vocab, sequence_length=length, seed=0)
    first = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    losses = []
    for step in range(config.run.steps):
        micro = []
        for rank in range(world_size):
            sampler = ShardedSampler(
                len(corpus.train),
                sequence_length=length,
                batch_size=optim.batch_size,
                rank=rank,
                world_size=world_size,
                seed=config.run.seed,
            )
            for part in range(optim.accumulation):
                starts = sampler.batch_starts(step * optim.accumulation + part)
                micro.append(model.loss(*gather_batch(corpus.train, starts, length)))
        losses.append(sum(micro[: optim.accumulation]).item() / optim.accumulation)
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(sum(micro) / len(micro), parameters)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        scale = min(1.0, optim.grad_clip / (norm + 1e-6))
        lr = cosine_with_warmup(
            step,
            lr=optim.lr,
            warmup_steps=optim.warmup_steps,
            steps=config.run.steps,
            min_lr_fraction=optim.min_lr_fraction,
        )
        beta1, beta2 = optim.betas
        with torch.no_grad():
            for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
                decay = optim.weight_decay if parameter.dim() >= 2 else 0.0
                parameter.mul_(1 - lr * decay)
                first[name].lerp_(gradient * scale, 1 - beta1)
                second[name].lerp_((gradient * scale).square(), 1 - beta2)
                mean = first[name] / (1 - beta1 ** (step + 1))
                spread = (second[name] / (1 - beta2 ** (step + 1))).sqrt()
                parameter.sub_(lr * mean / (spread + 1e-8))
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.distributed
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ddp_run_equals_large_batch_training_by_hand(make_config, run_ranks, accumulation):
    config = make_config("ddp", steps=6, log_every_steps=1)
    config = config.model_copy(
        update={"optim": config.optim.model_copy(update={"accumulation": accumulation})}
    )
    run_ranks(config)
    # In a child, so that this process never starts autograd's threads before it forks.
    ((losses, expected),) = run_processes(1, lambda _rank: large_batch_reference(config, 2))
    events = lines(config.run.output / "metrics.jsonl")
    logged = [line["loss"] for line in events if line["event"] == "train"]
    np.testing.assert_allclose(logged, losses, atol=2e-6)
    from fivefold.runs.checkpoints import read_checkpoint

    for rank in range(2):
        path = config.run.output / "checkpoints" / "step-00000006"
        model = read_checkpoint(path, rank=rank)["model"]
        found = torch.cat([value.flatten() for value in model.values()])
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("method", METHODS)
def test_seconds_by_category_sum_to_the_wall_time(make_config, run_ranks, method):
    config = make_config(method, checkpoint_every_steps=6)
    run_ranks(config)
    result = json.loads((config.run.output / "result.json").read_text())
    seconds = result["seconds"]
    assert math.isclose(sum(seconds.values()), result["wall_s"], rel_tol=1e-9)
    assert all(value >= 0 for value in seconds.values()), seconds
    waited_s = sum(result["waits"].values())
    assert math.isclose(waited_s, seconds["exposed_communication"], rel_tol=1e-9, abs_tol=1e-9)
    # Everything that matters is named; "other" is the loop itself.
    assert seconds["other"] < 0.1 * result["wall_s"]
    assert seconds["compute"] > 0
    assert seconds["data"] > 0
    assert seconds["checkpoint"] > 0
    assert seconds["validation"] > 0
    # Waits for what makes replicas equal at the end are told from those of the steps.
    assert ("last all-reduce" in result["waits"]) == (method not in {"none", "ddp"})
    communicates = method != "none"
    assert (result["communication"]["collectives"] > 0) == communicates
    assert (result["communication"]["payload_bytes"] > 0) == communicates


@pytest.mark.distributed
@pytest.mark.parametrize("method", ["ddp", "co2"])
def test_events_lanes_and_files(make_config, run_ranks, method):
    config = make_config(method, checkpoint_every_steps=6)
    run_ranks(config)
    root = config.run.output
    events = lines(root / "metrics.jsonl")
    steps = {
        kind: [line["step"] for line in events if line["event"] == kind]
        for kind in ("train", "validation", "checkpoint", "end")
    }
    assert steps == {
        "train": [3, 6, 9, 12, 15, 18],
        "validation": [7, 14, 18],
        "checkpoint": [6, 12, 18],
        "end": [18],
    }
    assert events[-1]["reason"] == "finished"
    assert events[-1]["tokens"] == 18 * 2 * 2 * 16
    # The resolved configuration can be run again.
    assert load_config(root / "config.toml") == config
    manifest = json.loads((root / "manifest.json").read_text())
    assert (manifest["method"], manifest["world_size"], manifest["lab"]) == (method, 2, None)
    for rank in range(2):
        spans = lines(root / "ranks" / f"rank{rank}.jsonl")
        assert spans[0]["event"] == "clock"
        assert spans[-1]["event"] == "rank_end"
        lanes = {line["lane"] for line in spans if line["event"] == "span"}
        assert {"compute", "data", "in_flight", "wait", "checkpoint", "validation"} <= lanes
        assert all(s["end_s"] >= s["start_s"] for s in spans if s["event"] == "span")
        compute = [s for s in spans if s.get("lane") == "compute"]
        assert {s["name"] for s in compute} == {f"step {n}" for n in range(1, 19)}


@pytest.mark.distributed
def test_payload_and_collectives_are_what_the_methods_send(make_config, run_ranks):
    communication = {}
    for method in ("ddp", "co2"):
        config = make_config(method, output=method, steps=16)
        run_ranks(config)
        result = json.loads((config.run.output / "result.json").read_text())
        manifest = json.loads((config.run.output / "manifest.json").read_text())
        communication[method] = result["communication"]
    model_bytes = 4 * manifest["num_parameters"]
    # DDP sends every gradient at every step, CO2 every pseudo-gradient once per 4 steps.
    assert communication["ddp"]["payload_bytes"] == 16 * model_bytes
    assert communication["co2"]["payload_bytes"] == 4 * model_bytes
    assert communication["co2"]["collectives"] == 4


@pytest.mark.parametrize("method", ["ddp", "local_sgd", "slowmo", "co2"])
def test_one_rank_has_nothing_to_synchronise_with(make_config, method, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigurationError, match=r"at least two ranks; got world_size=1") as caught:
        train(make_config(method))
    assert "--nproc 2" in caught.value.hint
    assert '"none"' in caught.value.hint


@pytest.mark.distributed
def test_one_rank_trains_alone_without_communication(make_config, start_ranks):
    config = make_config("none")
    world = start_ranks(config, world_size=1)
    assert world.wait() == {0: 0}, world.logs()
    first, *_, last = [
        line["loss"]
        for line in lines(config.run.output / "metrics.jsonl")
        if line["event"] == "train"
    ]
    assert last < first


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_bad_data_folder_is_a_clear_error_on_every_rank(make_config, start_ranks, tmp_path, kind):
    folder = tmp_path / "nothing here"
    if kind == "empty":
        folder.mkdir()
    config = make_config("ddp")
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"path": str(folder)})}
    )
    world = start_ranks(config)
    assert world.wait() == {0: 1, 1: 1}
    for rank in range(2):
        error = world.error(rank)
        assert error["kind"] == "DataError"
        assert "nothing here" in error["message"]
    assert not (config.run.output / "metrics.jsonl").exists()
