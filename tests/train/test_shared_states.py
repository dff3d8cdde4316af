"""Workers of several ranks that share a model's states, and local updates between them."""

import shutil

import pytest
import torch

from fivefold.errors import ConfigurationError
from fivefold.testing import run_processes
from fivefold.train import TrainConfig, train
from fivefold.train._loop import require_settings
from fivefold.train.config import (
    DataConfig,
    MixtureConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SyncConfig,
)


def config(folder, *, sync, batch=2, steps=4, **optim):
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(8):
        (texts / f"{number}.txt").write_text(f"to be or not to be, {number}\n" * 60)
    return TrainConfig(
        run=RunConfig(output=folder / "run", steps=steps, device="cpu", checkpoint_every_steps=2,
                      validate_every_steps=0),
        data=DataConfig(path=str(texts), cache=str(folder / "cache"), sequence_length=16),
        model=ModelConfig(layers=2, width=16, heads=2),
        optim=OptimConfig(batch_size=batch, warmup_steps=0, validation_batches=3, precision="fp32",
                          **optim),
        sync=sync,
    )  # fmt: skip


def result_of(wanted):
    torch.set_num_threads(1)
    found = train(wanted)
    return found.bits_per_byte, found.parameters_sha256, found.communication["sent_bytes"]


@pytest.mark.alone
def test_shared_states_train_resume_and_send_a_share(tmp_path):
    sync = SyncConfig(method="local_sgd", tau=2, shard=2)
    wanted = config(tmp_path, sync=sync, accumulation=2)
    first = run_processes(4, lambda _: result_of(wanted))
    assert len({bits for bits, *_ in first}) == 1
    # Neighbours hold different shards of one model; ranks of the same place hold the same.
    digests = [digest for _, digest, _ in first]
    assert digests[0] == digests[2] != digests[1] == digests[3]
    # Half of the model each, between two workers: 2 (n - 1) / n of it per round, two rounds.
    whole = 4 * 2 * (257 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 48 + 2 * 16) + 16)
    assert sum(sent for *_, sent in first[:2]) == pytest.approx(whole, rel=0.05)
    # Killed after step 2: the same parameters bit for bit.
    for left in (tmp_path / "run" / "checkpoints").glob("step-*4"):
        shutil.rmtree(left)
    (tmp_path / "run" / "result.json").unlink()
    again = run_processes(4, lambda _: result_of(wanted))
    assert [digest for _, digest, _ in again] == digests


@pytest.mark.alone
def test_a_worker_of_two_ranks_is_one_rank_of_twice_the_batch(tmp_path):
    """Same data in sum, same model: the loss after a few steps is that of whole replicas."""
    texts = config(tmp_path, sync=SyncConfig(method="none")).data
    assert texts.sequence_length == 16
    sync = {"method": "local_sgd", "tau": 1}
    shared = config(tmp_path, sync=SyncConfig(**sync, shard=2), steps=3, grad_clip=float("inf"))
    bits = run_processes(4, lambda _: result_of(shared))[0][0]
    shutil.rmtree(tmp_path / "run")
    whole = config(tmp_path, sync=SyncConfig(method="ddp"), steps=3, grad_clip=float("inf"))
    plain = run_processes(4, lambda _: result_of(whole))[0][0]
    assert bits == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize(
    ("shard", "world_size", "words"), [(3, 4, "does not divide"), (4, 4, "two workers")]
)
def test_shards_that_make_no_workers_are_refused(shard, world_size, words):
    wanted = TrainConfig(sync=SyncConfig(method="co2", shard=shard))
    with pytest.raises(ConfigurationError, match=words):
        require_settings(wanted, world_size=world_size)


def test_a_mixture_takes_no_shard():
    with pytest.raises(ValueError, match="is for dense models"):
        TrainConfig(
            model=ModelConfig(moe=MixtureConfig(experts=2)), sync=SyncConfig(method="co2", shard=2)
        )


def test_methods_of_every_step_take_no_shard():
    with pytest.raises(ValueError, match="not a setting of"):
        SyncConfig(method="ddp", shard=2)
