"""Experts that are shared out one-sided: when, with what memory, and the numbers of a real run."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fivefold.errors import CommunicationError, ConfigurationError, UnsupportedError
from fivefold.moe import OneSidedConfig
from fivefold.runs import ranks
from fivefold.testing import free_port
from fivefold.train import _expert_ranks, config_to_toml, load_config, train
from fivefold.train._expert_ranks import OneSided, exchange_sizes, is_one_sided, open_exchange
from fivefold.train.config import MixtureConfig

CUDA = torch.device("cuda", 0)


@pytest.fixture
def shared_config(make_config):
    """Four experts over two ranks, eight tokens a rank."""

    def make(method="ddp", *, batch_size=2, output="run", moe=None, **run):
        config = make_config(method, output=output, **{"validate_every_steps": 0} | run)
        table = MixtureConfig(**{"experts": 4, "expert_parallel": 2} | (moe or {}))
        optim = {"batch_size": batch_size, "validation_batches": 4 // batch_size, "warmup_steps": 1}
        return config.model_copy(
            update={
                "model": config.model.model_copy(update={"moe": table}),
                "optim": config.optim.model_copy(update=optim),
                "data": config.data.model_copy(update={"sequence_length": 4}),
            }
        )

    return make


class Ranks(ranks.Ranks):
    """Two ranks, of which the other answers what a test wants."""

    def __init__(self, device, *answers):
        super().__init__(rank=1, world_size=2, device=device, timeout_s=30.0)
        self.answers = answers

    def gather(self, value, *, what):
        assert "exchange needs" in what
        return [value, *self.answers] if self.answers else [value, value]


@pytest.fixture
def able_gpus(monkeypatch):
    monkeypatch.setattr(_expert_ranks, "backends", lambda _device: {"fused": None})
    monkeypatch.setattr(_expert_ranks.TorchSymmetricHeap, "missing", lambda _device: None)


@pytest.mark.usefixtures("able_gpus")
def test_gpus_that_can_exchange_one_sided_and_cpus_by_messages(shared_config):
    assert is_one_sided(shared_config(), Ranks(CUDA))
    assert not is_one_sided(shared_config(), Ranks(torch.device("cpu")))
    assert not is_one_sided(shared_config(moe={"exchange": "all_to_all"}), Ranks(CUDA))


@pytest.mark.usefixtures("able_gpus")
@pytest.mark.parametrize(
    ("moe", "answer", "reason"),
    [
        ({"capacity_factor": 1.5}, None, "rank 0: with model.moe.capacity_factor"),
        ({"recompute": False}, None, "rank 0: it keeps nothing for the backward"),
        ({}, ("elsewhere", None), "ranks 0 to 1 are on several hosts"),
        ({}, (socket.gethostname(), "no NVLink"), "rank 1: no NVLink"),
    ],
)
def test_gpus_that_cannot_say_why(shared_config, caplog, moe, answer, reason):
    world = Ranks(CUDA, *([] if answer is None else [answer]))
    with caplog.at_level("INFO"):
        assert not is_one_sided(shared_config(moe=moe), world)
    assert f"exchange by all-to-all: {reason}" in caplog.text
    if not moe:
        with pytest.raises(UnsupportedError, match=f'"one_sided" cannot work here: {reason}'):
            is_one_sided(shared_config(moe={"exchange": "one_sided"}), world)


def test_the_memory_of_gpus_is_symmetric_memory_of_the_expert_group(shared_config, monkeypatch):
    made = []
    monkeypatch.setattr(
        _expert_ranks, "TorchSymmetricHeap", lambda **options: made.append(options) or "heap"
    )
    monkeypatch.setattr(
        _expert_ranks,
        "OneSidedGroup",
        lambda config, heap, **options: SimpleNamespace(config=config, heap=heap, **options),
    )
    config = shared_config(moe={"top_k": 3, "exchange_room": 1.2, "expert_width": 48})
    found = open_exchange(config, Ranks(CUDA), "group").exchange
    wanted = OneSidedConfig(
        ranks=2, experts=4, hidden=16, intermediate=48, top_k=3, max_tokens=8,
        max_rows=29, dtype=torch.float32, training=True,
    )  # fmt: skip
    assert (found.config, found.heap, found.timeout_s) == (wanted, "heap", 30.0)
    assert made == [{"nbytes": wanted.heap_bytes(), "device": CUDA, "group": "group"}]
    low = config.model_copy(update={"optim": config.optim.model_copy(update={"precision": "bf16"})})
    assert exchange_sizes(low, torch.device("cpu")).dtype == torch.bfloat16


def test_what_others_got_is_counted_once_and_errors_of_kernels_come_out():
    counted = {
        "sent_bytes": [[100, 7]],
        "returned_bytes": [[50, 9]],
        "sent_signals": [[2, 1]],
        "returned_signals": [[1, 1]],
    }
    problems = []

    def check():
        if problems:
            raise problems[0]

    exchange = SimpleNamespace(
        config=SimpleNamespace(ranks=2), check=check, statistics=lambda: counted
    )
    one_sided = OneSided(exchange, Ranks(CUDA))
    call = one_sided.take_call()
    assert (call.payload_bytes, call.sent_bytes) == (150, 150 + 8 * 3)
    counted["sent_bytes"] = [[101, 7]]
    call = one_sided.take_call()
    assert (call.payload_bytes, call.sent_bytes) == (1, 1)
    problems.append(CommunicationError("rank 1 waited 30 s for rows"))
    with pytest.raises(CommunicationError, match="rank 1 waited"):
        one_sided.take_call()


def test_a_cpu_without_the_kernels_says_so(shared_config, monkeypatch):
    monkeypatch.setattr(_expert_ranks, "backends", lambda _device: {"fused": "no interpreter"})
    config, world = shared_config(moe={"exchange": "one_sided"}), Ranks(torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="cannot work here: rank 0: no interpreter"):
        is_one_sided(config, world)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["exchange='one_sided'", "capacity_factor=1.0"], "does not go with"),
        (["exchange='one_sided'", "recompute=false"], "keeps nothing for the backward"),
        (["exchange='nccl'"], "model.moe.exchange"),
        (["exchange_room=0.5"], "exchange_room is 0.5, less than the even load"),
    ],
)
def test_tables_that_do_not_fit(tmp_path, overrides, message):
    path = tmp_path / "train.toml"
    path.write_text("[model.moe]\n")
    with pytest.raises(ConfigurationError, match=message):
        load_config(path, [f"model.moe.{override}" for override in overrides])


def run_interpreted(config, folder):
    """Two ranks of their own, since triton looks at the environment when kernels are loaded."""
    file = folder / f"{config.run.output.name}.toml"
    file.write_text(config_to_toml(config))
    port = free_port()
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
    place |= {"TRITON_INTERPRET": 1}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "fivefold.train._worker", str(file)],
            env=os.environ | {name: str(value) for name, value in (place | {"RANK": rank}).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [(p.communicate(timeout=240)[0], p.returncode) for p in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.nightly
@pytest.mark.distributed
def test_one_sided_training_is_that_of_one_process(shared_config, tmp_path):
    pytest.importorskip("triton")
    alone = shared_config("none", batch_size=4, output="alone", steps=3, moe={"expert_parallel": 1})
    train(alone)
    spread = shared_config(output="spread", steps=3, timeout_s=120.0, moe={"exchange": "one_sided"})
    done = run_interpreted(spread, tmp_path)
    assert [code for _, code in done] == [0, 0], done
    results = [
        json.loads((config.run.output / "result.json").read_text()) for config in (alone, spread)
    ]
    curves = []
    for config in (alone, spread):
        lines = map(json.loads, (config.run.output / "metrics.jsonl").read_text().splitlines())
        curves.append([line["loss"] for line in lines if line["event"] in {"train", "validation"}])
    assert len(curves[0]) == 2
    assert curves[1][-1] == pytest.approx(curves[0][-1], rel=2e-5)
    assert results[0]["moe"]["load"] == results[1]["moe"]["load"]
    assert [result["moe"]["exchange"] for result in results] == ["none", "one_sided"]
    # Of rank 0. A row of 16 float32 out, again beside its gradient and with its weight; the other
    # rank's rows back, and again as gradients, each with that of a weight.
    payload = results[1]["moe"]["payload_bytes"]
    assert any((payload - out * (64 + 128 + 4)) % (64 + 64 + 4) == 0 for out in range(1, 48))
    assert results[1]["moe"]["sent_bytes"] > payload > 0
