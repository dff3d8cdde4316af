"""Tensors that are not one dense trainable parameter each: frozen meanwhile, shared, odd types."""

import copy

import pytest
import torch
import torch.distributed as dist

from fivefold.errors import ConfigurationError
from fivefold.optim import (
    CO2,
    DelayCorrected,
    DelayedGradients,
    LocalSGD,
    OuterSync,
    _flat,
)
from fivefold.optim.transport import broadcast_bytes
from fivefold.testing import run_processes, run_world
from helpers.outer_world import RULES, SEEDING, Rounded, Worker

pytestmark = pytest.mark.filterwarnings("ignore::fivefold.optim.StabilityWarning")


# -- frozen during training -----------------------------------------------------------------------


def frozen_values(worker):
    with worker.sync.global_parameters():
        anchor = worker.model.first.weight.detach().clone()
    return torch.stack([worker.model.first.weight.detach().clone(), anchor])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in RULES if name != "delay-corrected-ends"])
def test_what_is_frozen_while_training_stops(name, dtype):
    tau = RULES[name].first_tau

    def work(transport):
        worker = Worker(Rounded(transport, "int8"), RULES[name], dtype=dtype, check_every_rounds=1)
        worker.train(range(2 * tau + 1))
        worker.model.first.requires_grad_(False)
        # What was on its way is brought in: the open round, and the delay of its message.
        worker.train(range(2 * tau + 1, 5 * tau + 3))
        stopped = frozen_values(worker)
        assert torch.equal(stopped[0], stopped[1].to(dtype))
        for step in range(5 * tau + 3, 8 * tau + 3):
            worker.train([step])
            assert torch.equal(frozen_values(worker), stopped), f"it moved at step {step}"
        last = worker.model.last.weight.detach().clone()
        worker.sync.finalize()
        assert not torch.equal(worker.model.last.weight, last) or not RULES[name].delayed
        return worker.model.first.weight.detach(), stopped[0]

    (first, stopped), (second, _) = run_world(2, work)
    assert torch.equal(first, second)
    assert torch.equal(first, stopped)


def test_the_last_work_before_it_is_frozen_arrives():
    """Ranks add 1 and 3 at each of five steps, freeze it within the second round of four."""

    def work(transport, rule):
        model = torch.nn.ParameterList([torch.zeros(2), torch.zeros(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)
        for step in range(24):
            model[0].requires_grad_(step < 5)
            model[0].data += (1.0 + 2 * transport.rank) * (step < 5)
            sync.step()
        return model[0].tolist()

    for rule in (LocalSGD(tau=4), DelayCorrected(tau=4, fragments=2), CO2(tau=4, outer_lr=1.0,
                 outer_momentum=0.0, staleness="none", clip=None)):  # fmt: skip
        for found in run_world(2, lambda t, rule=rule: work(t, rule)):
            assert found == [10.0, 10.0]


@pytest.mark.parametrize("rule", [LocalSGD(tau=2), DelayedGradients()], ids=lambda r: r.name)
def test_what_is_unfrozen_again_trains_on(rule):
    def work(transport):
        worker = Worker(transport, rule)
        for step in range(30):
            worker.model.first.requires_grad_(not 8 <= step < 16)
            if step == 16:
                before = worker.model.first.weight.detach().clone()
            worker.train([step])
        worker.sync.finalize()
        assert not torch.equal(worker.model.first.weight, before)
        return worker.flat()

    first, second = run_world(2, work)
    assert torch.equal(first, second)


@pytest.mark.parametrize("frozen_first", [False, True])
def test_other_trainable_parameters_at_resume_are_refused(frozen_first):
    def work(transport):
        def make(*, frozen):
            model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
            model[0].requires_grad_(not frozen)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            rule = DelayCorrected(tau=2, fragments=1)
            return OuterSync(model, optimizer, rule=rule, transport=transport)

        state = copy.deepcopy(make(frozen=frozen_first).state_dict())
        make(frozen=not frozen_first).load_state_dict(state)

    with pytest.raises(ConfigurationError, match=r"the saved outer state has .*0\.(weight|bias)"):
        run_world(2, work)


# -- shared memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        LocalSGD(tau=2),
        CO2(tau=2, outer_lr=0.9, outer_momentum=0.0, staleness="none"),
        DelayCorrected(tau=2, fragments=2),
    ],
    ids=lambda rule: rule.name,
)
def test_two_parameters_over_one_memory_are_one(rule, monkeypatch):
    monkeypatch.setattr(_flat, "_SMALL_ELEMENTS", 0)  # small ones would go over a stage

    def work(transport, *, shared):
        with SEEDING:
            torch.manual_seed(0)
            model = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(3)])
        if shared:
            model[2].weight.data = model[0].weight.data
        else:
            model[2].weight = model[0].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)
        for step in range(9):
            x = torch.randn(
                8, 4, generator=torch.Generator().manual_seed(9 * transport.rank + step)
            )
            loss = (model[2](torch.tanh(model[1](torch.tanh(model[0](x))))) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
        sync.finalize()
        return torch.cat([layer.weight.detach().reshape(-1) for layer in model])

    one = run_world(2, lambda t: work(t, shared=False))
    two = run_world(2, lambda t: work(t, shared=True))
    torch.testing.assert_close(two[0], one[0], rtol=0, atol=1e-6)
    assert torch.equal(two[0], two[1])


@pytest.mark.parametrize("rule", [LocalSGD(tau=4), DelayCorrected(tau=4), LocalSGD(tau=1)])
def test_what_is_switched_off_only_while_another_part_steps_is_trained(rule):
    """A discriminator that does not require gradients after the generator's step."""

    def work(transport, toggles):
        model = torch.nn.ParameterDict({k: torch.nn.Parameter(torch.zeros(2)) for k in "gd"})
        optimizers = {k: torch.optim.SGD([model[k]], lr=0.125) for k in "gd"}
        sync = OuterSync(model, [*optimizers.values()], rule=rule, transport=transport)
        for _ in range(16):
            for name in "dg":
                model["d"].requires_grad_(name == "d" or not toggles)
                (model[name].sum() * (1 + transport.rank)).backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
            sync.step()
        sync.finalize()
        return torch.stack([model["g"].detach(), model["d"].detach()])

    for toggles in (False, True):
        for found in run_world(2, lambda t, toggles=toggles: work(t, toggles)):
            torch.testing.assert_close(found, torch.full((2, 2), -0.125 * 1.5 * 16))


# -- data types and layouts -----------------------------------------------------------------------


def odd_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-100, 100, (5, 3), generator=generator)
    kinds = (
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float64, torch.complex64),
        *(
            torch.int8,
            torch.uint8,
            torch.int16,
            torch.uint16,
            torch.uint32,
            torch.int64,
            torch.bool,
        ),
    )
    return [
        *(numbers.to(torch.float32).to(kind) for kind in kinds),
        numbers.t(),
        numbers.float().t()[1:],
        numbers[0, 0].clone(),
        numbers[:1].clone().expand(4, 3),
        numbers[:0],
    ]


def test_fixed_tensors_are_sent_by_their_bytes():
    def work(rank):
        ours = odd_tensors(rank)
        for tensor in ours:
            broadcast_bytes(tensor, source=0, group=dist.group.WORLD)
        return all(
            torch.equal(a.reshape(-1).contiguous().view(torch.uint8),
                        b.reshape(-1).contiguous().view(torch.uint8))
            for a, b in zip(ours, odd_tensors(0), strict=True)
        )  # fmt: skip

    assert run_processes(2, work) == [True, True]


def sparse_buffer(model):
    model.register_buffer("graph", torch.eye(3).to_sparse())


def lazy(model):
    model.more = torch.nn.LazyLinear(2)


def expanded(model):
    model.more = torch.nn.Parameter(torch.ones(1, 4).expand(3, 4))


def overlapping(model):
    whole = torch.zeros(6)
    model.left, model.right = (torch.nn.Parameter(whole[i : i + 4]) for i in (0, 2))


def transposed(model):
    model.left = torch.nn.Parameter(torch.ones(3, 4))
    model.right = torch.nn.Parameter(model.left.data.t())


def test_columns_of_one_matrix_have_nothing_in_common():
    def work(transport):
        whole, model = torch.zeros(3, 2), torch.nn.Module()
        model.left, model.right = (torch.nn.Parameter(whole[:, i]) for i in (0, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        OuterSync(model, optimizer, rule=LocalSGD(tau=2), transport=transport)
        return whole.tolist()

    assert run_world(2, work) == [[[0.0, 0.0]] * 3] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (transposed, "left and right have some elements in common"),
        (
            lambda m: setattr(m, "more", torch.nn.Linear(2, 2, device="meta")),
            "more.weight is on the meta",
        ),
        (sparse_buffer, "graph is torch.sparse_coo torch.float32 and cannot be sent"),
        (lazy, "more.weight has no shape yet"),
        (expanded, r"shape \(3, 4\) that is to be averaged repeats its elements"),
        (overlapping, "left and right have some elements in common"),
        (
            lambda m: setattr(m, "more", torch.nn.Parameter(torch.ones(3).to(torch.float8_e5m2))),
            "must be dense real tensors; got Tensor of torch.float8_e5m2",
        ),
    ],
)
def test_tensors_that_cannot_be_sent_are_refused_by_name(change, message):
    def work(transport):
        model = torch.nn.Linear(4, 2)
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        OuterSync(model, optimizer, rule=LocalSGD(tau=2), transport=transport)

    with pytest.raises(ConfigurationError, match=message):
        run_world(2, work)
