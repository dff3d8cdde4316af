"""Muon and AdamW as one optimizer, and engines with several optimizers."""

import copy
import math
import threading

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fivefold.errors import ConfigurationError
from fivefold.optim import CO2, DelayCorrected, LocalSGD, MuonAdamW, OuterSync
from fivefold.testing import run_processes, run_world

SEEDING = threading.Lock()  # ranks are threads, and torch has one global generator


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        with SEEDING:
            torch.manual_seed(5)
            self.embedding = nn.Embedding(11, 6)
            self.wide = nn.Linear(6, 13)
            self.narrow = nn.Linear(13, 6, bias=False)
            self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens):
        return self.head(self.narrow(torch.tanh(self.wide(self.embedding(tokens)))))


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    tokens = torch.randint(11, (4, 5), generator=generator)
    return nn.functional.cross_entropy(model(tokens.flatten()), tokens.roll(1).flatten())


def local_steps(model, optimizers, steps, *, rank=0, sync=None):
    for step in steps:
        loss_of(model, rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if sync is not None:
            sync.step()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def apart(model, lr=0.02):
    """What the one optimizer does, as two of torch's own."""
    matrices = [model.wide.weight, model.narrow.weight]
    rest = [model.embedding.weight, model.wide.bias, model.head.weight]
    return [
        torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
    ]


def test_one_optimizer_equals_the_two_apart():
    one, two = Net(), Net()
    optimizer = MuonAdamW.for_model(one, lr=0.02)
    local_steps(one, [optimizer], range(5))
    local_steps(two, apart(two), range(5))
    assert torch.equal(flat(one), flat(two))
    names = {p: name for name, p in one.named_parameters()}
    groups = {g["algorithm"]: [names[p] for p in g["params"]] for g in optimizer.param_groups}
    assert groups == {
        "muon": ["wide.weight", "narrow.weight"],
        "adamw": ["embedding.weight", "wide.bias", "head.weight"],
    }


def test_a_step_is_the_equation_of_the_documentation():
    weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    expected = weight.detach().double()
    optimizer = MuonAdamW([weight], lr=0.1, weight_decay=0.5)
    momentum = torch.zeros(6, 4, dtype=torch.float64)
    for step in range(3):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 + step))
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        x = 0.05 * gradient.double() + 0.95 * momentum
        x = x / x.norm()
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(6) * x
    # Newton-Schulz runs in bfloat16.
    assert float((weight.detach() - expected).norm() / expected.norm()) < 0.01


def test_state_copies_schedules_and_tied_weights():
    model = Net()
    model.head.weight = model.embedding.weight
    optimizer = MuonAdamW.for_model(model, lr=0.02, momentum=0.8, adamw=[model.narrow.weight])
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 3]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    local_steps(model, [optimizer], range(3))
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.01]
    other = Net()
    other.head.weight = other.embedding.weight
    other.load_state_dict(model.state_dict())
    loaded = MuonAdamW.for_model(other, adamw=[other.narrow.weight])
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    both, of_both = copy.deepcopy((model, optimizer))
    for one, its in ((model, optimizer), (other, loaded), (both, of_both)):
        local_steps(one, [its], range(3, 6))
    assert torch.equal(flat(model), flat(other))
    assert torch.equal(flat(model), flat(both))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"params": [nn.Parameter(torch.ones(3))], "algorithm": "muon"}], "two-dimensional"),
        ([{"params": [nn.Parameter(torch.ones(3))], "algorithm": "sgd"}], "algorithm"),
    ],
)
def test_groups_that_cannot_be(groups, message):
    with pytest.raises(ConfigurationError, match=message):
        MuonAdamW(groups)


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"lr": "x"}, {"weight_decay": float("nan")}, {"momentum": 1.0}]
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        MuonAdamW.for_model(nn.Linear(2, 2), **wrong)


@pytest.mark.parametrize(
    "rule",
    [LocalSGD(tau=3), DelayCorrected(tau=3, fragments=1), CO2(tau=3)],
    ids=lambda rule: rule.name,
)
def test_several_optimizers_equal_the_one(rule):
    def work(transport, *, together):
        model = Net()
        optimizers = [MuonAdamW.for_model(model, lr=0.02)] if together else apart(model)
        given = optimizers[0] if together else optimizers
        sync = OuterSync(model, given, rule=rule, transport=transport)
        local_steps(model, optimizers, range(8), rank=transport.rank, sync=sync)
        sync.finalize()
        return flat(model)

    one = run_world(2, lambda transport: work(transport, together=True))
    several = run_world(2, lambda transport: work(transport, together=False))
    assert torch.equal(one[0], one[1])
    assert torch.equal(one[0], several[0])


def test_a_rank_that_is_not_finite_clears_every_optimizer():
    def work(transport):
        model = Net()
        optimizers = apart(model)
        sync = OuterSync(model, optimizers, rule=LocalSGD(tau=2), transport=transport)
        local_steps(model, optimizers, range(3), rank=transport.rank, sync=sync)
        if transport.rank == 1:
            for p in model.parameters():
                p.grad = torch.full_like(p, float("nan"))
            for optimizer in optimizers:
                optimizer.step()
        sync.step()
        states = [e for optimizer in optimizers for e in optimizer.state.values()]
        return all(bool(v.isfinite().all()) for e in states for v in e.values())

    assert run_world(2, work) == [True, True]


def test_an_engine_refuses_what_is_no_optimizer():
    for odd in ([], [torch.nn.Linear(1, 1)]):
        with pytest.raises(ConfigurationError, match="optimizer"):
            OuterSync(Net(), odd, rule=LocalSGD(tau=2))


def sharded_run(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    fully_shard(model.wide, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = MuonAdamW.for_model(model, lr=0.02)
    sync = OuterSync(
        model, optimizer, rule=DelayCorrected(tau=3, fragments=1), process_group=mesh["replicate"]
    )
    local_steps(model, [optimizer], range(8), rank=rank // 2, sync=sync)
    sync.finalize()
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.distributed
def test_sharded_models_train_as_whole_ones():
    def whole(transport):
        model = Net()
        optimizer = MuonAdamW.for_model(model, lr=0.02)
        sync = OuterSync(
            model, optimizer, rule=DelayCorrected(tau=3, fragments=1), transport=transport
        )
        local_steps(model, [optimizer], range(8), rank=transport.rank, sync=sync)
        sync.finalize()
        return flat(model)

    expected = run_world(2, whole)[0]
    found = run_processes(4, sharded_run, timeout_s=120.0)
    for values in found:
        assert torch.equal(values, found[0])
    # Newton-Schulz rounds to bfloat16, and a sharded product sums in another order.
    assert float((found[0] - expected).norm() / expected.norm()) < 2e-3
    start = flat(Net())
    assert float((expected - start).norm() / expected.norm()) > 0.05
