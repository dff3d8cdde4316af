"""Optimizers that hold weights of their own are refused by name; those of moments are not."""

import functools

import pytest
import torch

from fivefold.errors import ConfigurationError
from fivefold.optim import CO2, LocalSGD, MuonAdamW, OuterSync
from fivefold.testing import run_world
from helpers.outer_world import Wrapped


class TwoSequences(torch.optim.Optimizer):
    """Steps from weights of its own, z, and leaves a mean of z and x in the parameters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                z = self.state[p].setdefault("fast", p.detach().clone())
                z.sub_(group["lr"] * p.grad)
                p.lerp_(z, 0.5)


class SlowEverySecond(torch.optim.SGD):
    """Copies the weights at its second step."""

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].setdefault("count", torch.zeros(()))
                count += 1
                if count == 2:
                    self.state[p]["slow"] = p.detach().clone()


class Prodigy(torch.optim.SGD):
    """Named as one that is known."""


class Wrapping(torch.optim.Optimizer):
    """Has the inner optimizer's groups, and a state of its own."""

    def __init__(self, optimizer, own_state):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.defaults, self.state = {}, own_state


class Lookahead(Wrapping):
    """Named as one that is known."""


class WithMore(torch.optim.SGD):
    """Keeps numbers of the whole beside the parameters' states."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, momentum=0.9)
        self.state["global_step"] = 1
        self.state["global"] = {"t": torch.ones(2)}


class Sharp(torch.optim.SGD):
    """Keeps where it was before it climbed, as sharpness-aware minimisation does."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.detach().clone()
        super().step()


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def train(transport, model, optimizer, *, steps=4):
    sync = OuterSync(model, optimizer, rule=LocalSGD(tau=1), transport=transport)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * transport.rank + step)
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
            each.zero_grad()
        sync.step()
    sync.finalize()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def masters(model):
    return torch.optim.AdamW([p.detach().clone().requires_grad_() for p in model.parameters()])


def with_foreign(model):
    centre = torch.nn.Parameter(torch.zeros(7, 3))
    return torch.optim.SGD([*model.parameters(), centre], lr=0.1)


def wrapped_and_stepped(model):
    inner = torch.optim.ASGD(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    inner.step()
    return Wrapping(inner, inner.state)


class Masters(torch.optim.Optimizer):
    """Steps weights of more bits and writes them into the parameters, wherever it keeps them."""

    def __init__(self, parameters, where):
        super().__init__(parameters, {"lr": 0.1})
        held = self.param_groups[0]["params"]
        weights = [p.detach().clone() for p in held]
        if where == "attribute":
            self.weights = weights
        elif where == "group":
            self.param_groups[0]["weights"] = {"all": weights}
        elif where == "optimizer within":
            self.inner = Masters(held, "attribute")
            weights = self.inner.weights
        elif where == "state":
            for p, weight in zip(held, weights, strict=True):
                self.state[p]["weights"] = [weight]
        else:
            flat = torch.cat([w.reshape(-1) for w in weights])
            self.state["flat"]["weights"] = flat
            parts = torch.split(flat, [w.numel() for w in weights])
            weights = [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]
        self.pairs = lambda: zip(held, weights, strict=True)

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        for p, weight in self.pairs():
            weight.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            p.copy_(weight)


MASTERS = {
    "attribute": "the attribute 'weights' of Masters is a copy",
    "group": "the entry 'weights' of Masters is a copy",
    "optimizer within": "the attribute 'inner' of Masters is a copy",
    "state": "the entry 'weights' of Masters is a copy",
    "flat": "the entry 'weights' of Masters is a copy",
}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (masters, r"0\.weight, 0\.bias, 2\.weight and 1 more .* are in no optimizer"),
        (lambda m: torch.optim.SGD(m[0].parameters()), r"2\.weight, 2\.bias .* no optimizer"),
        (with_foreign, r"1 parameters that the model has not: \(7, 3\)"),
        (lambda m: torch.optim.ASGD(m.parameters()), "ASGD holds an average of the weights"),
        (wrapped_and_stepped, "ASGD holds an average of the weights"),
        (
            lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=0.1), {}),
            "Lookahead holds slow weights",
        ),
        (
            lambda m: Wrapping(
                torch.optim.SGD(m.parameters(), lr=0.1),
                {p: {"mine": p.detach().clone()} for p in m.parameters()},
            ),
            "'mine' of Wrapping is a copy",
        ),
        (lambda m: Prodigy(m.parameters()), "Prodigy holds the weights of the start"),
        (lambda m: TwoSequences(m.parameters()), "'fast' of TwoSequences is a copy of the weights"),
        (lambda m: SlowEverySecond(m.parameters(), lr=0.1), "'slow' of SlowEverySecond is a copy"),
        *((lambda m, w=w: Masters(m.parameters(), where=w), told) for w, told in MASTERS.items()),
    ],
)
def test_what_would_stay_different_on_every_rank_is_refused(make, message):
    def work(transport):
        model = net()
        train(transport, model, make(model))

    with pytest.raises(ConfigurationError, match=message):
        run_world(2, work)


MOMENTS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "several": lambda p: [torch.optim.SGD([each], lr=0.1) for each in p],
    "states beside": WithMore,
    "sharp": lambda p: Sharp(p, lr=0.01),
    "muon": lambda p: MuonAdamW(list(p), lr=0.01),
} | {
    kind.__name__: functools.partial(kind, lr=0.01)
    for kind in (
        *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam),
        *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
    )
}


@pytest.mark.parametrize("make", MOMENTS.values(), ids=MOMENTS)
def test_optimizers_of_moments_are_taken(make):
    def work(transport):
        model = net()
        return train(transport, model, make(model.parameters()))

    first, second = run_world(2, work)
    assert torch.equal(first, second)


def test_a_momentum_that_equals_the_weights_is_a_momentum():
    """The gradient of half a square is the weight itself."""

    def work(transport):
        model = torch.nn.ParameterList([torch.ones(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        sync = OuterSync(model, optimizer, rule=CO2(tau=2), transport=transport)
        for _ in range(6):
            (model[0].square().sum() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()

    run_world(2, work)


def test_states_that_are_not_known_keep_their_values_where_a_payload_is_left_out():
    """Nobody knows where they began: a table of values that is all zeros steps no more."""

    def work(transport):
        model = torch.nn.ParameterList([torch.ones(3)])
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
        entries = optimizer.state[model[0]]
        entries["table"] = torch.tensor([2.0, float("nan"), 3.0])
        optimizer.state["all"] = {"number": torch.ones(1)}
        sync = OuterSync(model, optimizer, rule=LocalSGD(tau=1), transport=transport)
        model[0].grad = torch.full((3,), float("nan") if transport.rank else 1.0)
        optimizer.step()
        sync.step()
        return entries["table"], entries["sum"]

    table, total = run_world(2, work)[1]
    assert table.tolist() == [2.0, 0.0, 3.0]
    assert total.tolist() == [0.5] * 3


class MayLose(Wrapped):
    """A transport whose workers come and go: some are in the middle where others begin."""

    may_lose = True


@pytest.mark.parametrize("own", [{"lr": 0.01}, {"momentum": 0.5}, {"weight_decay": 0.5}], ids=str)
def test_what_a_schedule_moves_may_differ_where_workers_come_and_go(own):
    def work(transport):
        model = net()
        settings = {"lr": 0.1, "momentum": 0.9} | (own if transport.rank else {})
        optimizer = torch.optim.SGD(model.parameters(), **settings)
        OuterSync(model, optimizer, rule=LocalSGD(tau=2), transport=transport)

    with pytest.raises(ConfigurationError, match="another optimizer"):
        run_world(2, work)
    if "weight_decay" in own:  # which no schedule moves
        with pytest.raises(ConfigurationError, match="another optimizer"):
            run_world(2, lambda t: work(MayLose(t)))
    else:
        run_world(2, lambda t: work(MayLose(t)))
