"""On a GPU the host waits where it must: what is read or copied is counted, without a GPU."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fivefold.train import _step
from fivefold.train._mixture import Mixtures
from fivefold.train.config import MixtureConfig, TrainConfig


@pytest.fixture
def reads(monkeypatch):
    """Count how often a tensor's value is read: on a GPU each time the host waits."""
    found = []
    for name in ("__float__", "__int__", "__bool__", "item", "tolist", "cpu"):
        plain = getattr(torch.Tensor, name)

        def counted(self, *args, _plain=plain, _name=name, **options):
            found.append(_name)
            return _plain(self, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return found


def config_of(**optim):
    tables = {"data": {"sequence_length": 4}, "model": {"layers": 1, "width": 8, "heads": 2}}
    return TrainConfig.model_validate(tables | {"optim": {"batch_size": 2, **optim}})


class Model(torch.nn.Module):
    """The loss of a batch is the mean of its targets."""

    def loss(self, inputs, targets):
        assert inputs.shape == targets.shape
        return targets.float().mean()


def test_a_validation_reads_the_device_once(reads):
    corpus = SimpleNamespace(validation=np.arange(49, dtype=np.uint16), validation_bytes=49)
    ranks = SimpleNamespace(
        rank=0, world_size=1, device=torch.device("cpu"), sum=lambda values, **_: values
    )
    found = _step.evaluate(
        Model(), corpus, config=config_of(validation_batches=6), ranks=ranks,
        autocast=contextlib.nullcontext(),
    )  # fmt: skip
    assert reads == ["__float__"]
    assert found.loss == pytest.approx(np.arange(1, 49).mean(), rel=1e-12)  # all windows


def test_a_batch_goes_to_a_gpu_from_pinned_memory_behind_the_hosts_back(monkeypatch, reads):
    calls = []

    def pinned(self):
        calls.append("pinned")
        return self

    def sent(self, *args, **options):
        calls.append((*map(str, args), options))
        return self

    runner = _step.StepRunner(
        config_of(precision="fp32"),
        SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu")),
        parts=None,
        tokens=np.arange(100, dtype=np.uint16),
    )
    expected = runner._batch(0)
    runner._ranks.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", sent)
    found = runner._batch(0)
    assert calls == 2 * ["pinned", ("cuda:0", {"non_blocking": True})]
    assert not reads
    monkeypatch.undo()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_loads_of_experts_stay_on_the_device_until_somebody_asks(reads):
    layers = {1: SimpleNamespace(last_load=None), 3: SimpleNamespace(last_load=None)}
    mixtures = Mixtures(MixtureConfig(experts=2, top_k=1, normalize=False), layers)
    for step in range(1, 4):
        for block, layer in layers.items():
            load = torch.tensor([step, block])
            layer.last_load = SimpleNamespace(routed=load, kept=load - 1)
        mixtures.observe()
        mixtures.end_step(list)
    assert not reads
    told = mixtures.take_interval()
    assert (told["load"], told["dropped"]) == ([[6, 3], [6, 9]], [6, 6])
    assert reads == ["cpu", "tolist"]
    assert mixtures.take_interval()["load"] == [[0, 0], [0, 0]]
    assert mixtures.record()["load"] == [[6, 3], [6, 9]]
    state = mixtures.state_dict()
    mixtures.observe()
    mixtures.load_state_dict(state)  # what was counted since is forgotten
    assert mixtures.record()["load"] == [[6, 3], [6, 9]]
