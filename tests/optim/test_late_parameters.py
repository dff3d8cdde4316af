"""Parameters that become trainable late, and parameters whose objects or storages are replaced."""

import copy

import pytest
import torch
from torch.nn.utils import parametrizations

from fivefold.errors import ConfigurationError
from fivefold.optim import (
    CO2,
    DelayCorrected,
    DelayedGradients,
    EagerDiLoCo,
    LocalSGD,
    OuterSync,
    StreamingDiLoCo,
    _layout,
)
from fivefold.testing import run_processes, run_world

RULES = [
    CO2(tau=2),
    LocalSGD(tau=2),
    DelayCorrected(tau=2, fragments=1),
    EagerDiLoCo(tau=2),
    StreamingDiLoCo(tau=2, fragments=2),
    CO2(tau=2, bootstrap="sync"),
]


def make(transport, rule, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    ).double()
    model[1].requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    sync = OuterSync(model, optimizer, rule=rule, transport=transport, **options)
    return model, optimizer, sync


def train(model, optimizer, sync, rank, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * rank + step)
        x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()


def unfreeze(model, optimizer):
    model[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[1].parameters())})


def values(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.bootstrap}")
@pytest.mark.parametrize("unfrozen_at", [3, 4, 12])
def test_replicas_are_equal_after_parameters_joined(rule, unfrozen_at):
    def work(transport):
        model, optimizer, sync = make(transport, rule)
        train(model, optimizer, sync, transport.rank, 0, unfrozen_at)
        unfreeze(model, optimizer)
        train(model, optimizer, sync, transport.rank, unfrozen_at, 13)
        before = values(model)
        sync.finalize()
        return before, values(model)

    results = run_world(3, work)
    assert any(not torch.equal(a, b) for a, b in zip(*results[0], strict=True))
    for _, final in results:
        assert all(torch.equal(a, b) for a, b in zip(final, results[0][1], strict=True))


def test_delayed_gradients_keep_the_optimizers_state_of_a_late_parameter_equal():
    def work(transport):
        model, _, _ = make(transport, CO2(tau=2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        rule = DelayedGradients(extrapolation=1)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport, check_every_rounds=1)
        train(model, optimizer, sync, transport.rank, 0, 3)
        model[1].requires_grad_(True)
        start = model[1].weight.detach().clone()
        train(model, optimizer, sync, transport.rank, 3, 9)
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        return not torch.equal(start, model[1].weight), [*values(model), *state]

    (moved, first), (_, second) = run_world(2, work)
    assert moved
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_late_parameters_start_from_the_mean_and_then_follow_the_rule():
    """Local SGD by hand: joined at step 4, the mean then, and the mean of each later round."""

    def work(transport):
        model, optimizer, sync = make(transport, LocalSGD(tau=2))
        late = model[1].weight
        train(model, optimizer, sync, transport.rank, 0, 2)
        unfreeze(model, optimizer)
        seen = []
        for step in range(2, 8):
            train(model, optimizer, _Still(), transport.rank, step, step + 1)
            own = late.detach().clone()
            sync.step()
            seen.append((own, late.detach().clone()))
        return seen

    results = run_world(2, work)
    for step in range(6):
        mean = torch.stack([seen[step][0] for seen in results]).mean(dim=0)
        for seen in results:
            own, after = seen[step]
            torch.testing.assert_close(after, mean if step % 2 else own, rtol=0, atol=1e-14)


class _Still:
    def step(self):
        pass


def test_adoption_is_announced_by_all_ranks_or_an_error():
    def work(transport):
        model, optimizer, sync = make(transport, CO2(tau=1))
        train(model, optimizer, sync, transport.rank, 0, 2)
        if transport.rank == 1:
            unfreeze(model, optimizer)
        match = r"rank\(s\) \[1\] have other new param"
        with pytest.raises(ConfigurationError, match=match):
            train(model, optimizer, sync, transport.rank, 2, 9)
        return True

    assert run_world(2, work) == [True, True]


def test_one_round_apart_is_no_error():
    def work(transport):
        model, optimizer, sync = make(transport, CO2(tau=1))
        at = 2 + transport.rank
        train(model, optimizer, sync, transport.rank, 0, at)
        unfreeze(model, optimizer)
        train(model, optimizer, sync, transport.rank, at, 9)
        sync.finalize()
        return values(model)

    first, second = run_world(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_adopting_at_once_and_resuming():
    rule = CO2(tau=3)

    def work(transport):
        model, optimizer, sync = make(transport, rule)
        train(model, optimizer, sync, transport.rank, 0, 4)
        unfreeze(model, optimizer)
        assert sync.adopt_parameters() == ("1.weight", "1.bias")
        assert sync.adopt_parameters() == ()
        train(model, optimizer, sync, transport.rank, 4, 8)
        state = sync.sharded_state_dict()
        weights = values(model)

        again, other, resumed = make(transport, rule)
        unfreeze(again, other)
        with pytest.raises(ConfigurationError, match="fragments=2"):
            resumed.load_sharded_state_dict(state)
        resumed.adopt_parameters()
        with torch.no_grad():
            for mine, theirs in zip(again.parameters(), weights, strict=True):
                mine.copy_(theirs)
        resumed.load_sharded_state_dict(state)
        for run in ((model, optimizer, sync), (again, other, resumed)):
            train(*run, transport.rank, 8, 14)
            run[2].finalize()
        return values(model), values(again)

    for straight, resumed in run_world(2, work):
        assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_replaced_storages_and_replaced_objects_are_followed():
    def work(transport):
        model, optimizer, sync = make(transport, LocalSGD(tau=2))
        with torch.no_grad():
            model[0].weight.data = model[0].weight.data.clone()
        train(model, optimizer, sync, transport.rank, 0, 3)
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        model[1].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        train(model, optimizer, sync, transport.rank, 3, 4)
        return values(model), len(sync._fragments)

    (first, fragments), (second, _) = run_world(2, work)
    assert fragments == 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_boundary_looks_into_no_memory_that_it_knows(monkeypatch):
    """Of hundreds of parameters that alone cost more than the rest of a boundary."""
    looked = []
    memory_of = _layout.memory_of
    monkeypatch.setattr(_layout, "memory_of", lambda p: looked.append(p) or memory_of(p))

    def work(transport):
        model = torch.nn.ParameterList(torch.zeros(3) for _ in range(20))
        model.append(torch.nn.Parameter(model[0].data))  # over the memory of the first
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=LocalSGD(tau=1), transport=transport)
        sync.step()
        transport.gather_objects(None)
        looked.clear()
        transport.gather_objects(None)
        for _ in range(5):
            sync.step()
        transport.gather_objects(None)
        seen = len(looked)
        transport.gather_objects(None)
        model[20].data = torch.ones(3) + transport.rank  # it has parted from the first
        for _ in range(4):
            sync.step()
        sync.finalize()
        return seen, model[20].detach().clone()

    for seen, parted in run_world(2, work):
        assert seen <= 2 * 2 * 5  # of both ranks: one pair at each boundary
        assert parted.tolist() == [1.5] * 3


def test_replaced_running_statistics_are_followed():
    """``load_state_dict`` with ``assign=True`` replaces buffers too."""

    def work(transport):
        model = torch.nn.BatchNorm1d(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sync = OuterSync(model, optimizer, rule=LocalSGD(tau=2), transport=transport)
        for step in range(6):
            if step == 3:
                state = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
            generator = torch.Generator().manual_seed(10 * transport.rank + step)
            model(torch.randn(8, 3, generator=generator))
            sync.step()
        assert "running_var" in sync.state_dict()["fragments"]["0"]["tensors"]
        return model.running_mean, model.running_var

    first, second = run_world(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Centred(torch.nn.Module):
    """Makes a new tensor of its running mean at every step, as many do."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.5 * self.mean + x
        return (self.weight * x).sum()


@pytest.mark.parametrize("rule", [LocalSGD(tau=2), DelayCorrected(tau=2), DelayedGradients()])
def test_statistics_of_a_new_tensor_each_step_are_equal_at_the_end_and_at_the_anchor(rule):
    def work(transport):
        model = Centred()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)
        for step in range(5):
            model(torch.full((3,), 1.0 + step + transport.rank)).backward()
            optimizer.step()
            sync.step()
        with sync.global_parameters():
            at_the_anchor = model.mean.clone()
        sync.finalize()
        return at_the_anchor, model.mean

    (anchor, last), (other_anchor, other_last) = run_world(2, work)
    assert torch.equal(anchor, other_anchor)
    assert torch.equal(last, other_last)


@pytest.mark.parametrize("rule", [*RULES, DelayedGradients()], ids=lambda rule: rule.name)
def test_buffers_that_are_registered_late_are_averaged(rule):
    """A mask of pruning, and a sum that goes on: each step adds 1 on rank 0 and 2 on rank 1."""

    def work(transport):
        model, optimizer, sync = make(transport, rule)
        for step in range(13):
            if step == 3:
                mask = torch.ones(4, dtype=torch.float64)
                model[2].register_buffer("mask", mask)
                model[2].register_buffer("sum", torch.zeros(3))
                model[2].register_buffer("own", torch.ones(2), persistent=False)
            if step >= 3:
                model[2].sum += 1.0 + transport.rank
            train(model, optimizer, sync, transport.rank, step, step + 1)
        model[2].own *= 2.0 + transport.rank
        sync.finalize()
        return model[2].mask, model[2].sum, model[2].own

    for rank, (mask, total, own) in enumerate(run_world(2, work)):
        assert mask.tolist() == [1.0] * 4
        assert total.tolist() == [15.0] * 3
        assert own.tolist() == [2.0 + rank] * 2


@pytest.mark.parametrize(
    "change",
    [lambda model: model.pop(0), lambda model: parametrizations.weight_norm(model[2])],
    ids=["module removed", "parametrized"],
)
def test_a_state_has_parameters_that_left_the_model(change):
    def work(transport):
        model, optimizer, sync = make(transport, CO2(tau=2))
        train(model, optimizer, sync, transport.rank, 0, 3)
        before = [entries["anchor"].clone() for entries in tensors_of(sync).values()]
        change(model)
        state = copy.deepcopy(sync.state_dict())
        for entries in tensors_of(sync).values():
            entries["anchor"].zero_()
        sync.load_state_dict(state)
        return before, [entries["anchor"].clone() for entries in tensors_of(sync).values()]

    for before, after in run_world(2, work):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def tensors_of(sync):
    return sync.state_dict()["fragments"]["0"]["tensors"]


@pytest.mark.distributed
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_real_processes_adopt(codec):
    def work(rank):
        model, optimizer, sync = make(None, CO2(tau=2), codec="fp32")
        model = model.float() if codec == "int8" else model
        if codec == "int8":
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
            sync = OuterSync(model, optimizer, rule=CO2(tau=2), codec=codec)
        for step in range(11):
            if step == 3:
                unfreeze(model, optimizer)
            generator = torch.Generator().manual_seed(100 * rank + step)
            x = torch.randn(4, 3, generator=generator).to(model[0].weight.dtype)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
        sync.finalize()
        return values(model)

    first, second = run_processes(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
