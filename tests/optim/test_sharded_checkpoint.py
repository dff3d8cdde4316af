"""The outer state through torch.distributed.checkpoint: same layout, other shards or workers."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fivefold.errors import ConfigurationError
from fivefold.optim import (
    CO2,
    DelayCorrected,
    EagerDiLoCo,
    GapPenalty,
    LocalSGD,
    OuterOptimizer,
    OuterSync,
    StreamingDiLoCo,
)
from fivefold.testing import run_processes, run_world
from helpers.night import by_night

pytestmark = pytest.mark.distributed

RULES = {
    "co2": CO2(tau=3),
    "co2-parts": CO2(tau=4, fragments=2),
    "delay-corrected": DelayCorrected(tau=3, fragments=1),
    "eager": EagerDiLoCo(tau=3),
    "streaming": StreamingDiLoCo(tau=4, fragments=2, outer_momentum=0.4),
    "adam": OuterOptimizer(tau=3, optimizer=torch.optim.Adam, options={"lr": 0.01}, hidden=True),
}
KINDS, CODECS = ("fsdp2", "zero"), ("fp32", "int8")
LAYOUTS = [("fsdp2", 2, "plain", 1), ("fsdp2", 2, "zero", 3), ("zero", 2, "fsdp2", 3)]
SAVED_AT, STEPS = 8, 13  # in the middle of a round, with an all-reduce in the air


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(5, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.last = torch.nn.Linear(7, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class World:
    """One rank's model, optimizer and engine; a worker's ranks take the same batches."""

    def __init__(self, rule, *, workers, shards, kind, codec="fp32"):
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (workers, shards), mesh_dim_names=names)
        self.worker = mesh["replicate"].get_local_rank()
        self.model = Net()
        if kind == "fsdp2":
            fully_shard(self.model.first, mesh=mesh["shard"])
            fully_shard(self.model, mesh=mesh["shard"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sync = OuterSync(
            self.model,
            self.optimizer,
            rule=rule,
            process_group=mesh["replicate"],
            shard_group=mesh["shard"] if kind == "zero" else None,
            codec=codec,
        )

    def train(self, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * self.worker + step)
            self.model(torch.randn(4, 5, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.sync.step()

    def state(self):
        # Between boundaries the workers' parameters differ: one entry for each worker.
        return {
            f"model-{self.worker}": self.model.state_dict(),
            "outer": self.sync.sharded_state_dict(),
        }

    def save(self, path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own about its storage classes
            dcp.save(self.state(), checkpoint_id=path)

    def load(self, path, *, partial=False):
        state = self.state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planner = DefaultLoadPlanner(allow_partial_load=partial)
            dcp.load(state, checkpoint_id=path, planner=planner)
        self.model.load_state_dict(state[f"model-{self.worker}"])
        self.sync.load_sharded_state_dict(state["outer"])

    def parameters(self):
        return {name: whole(value) for name, value in self.model.state_dict().items()}

    def shared(self):
        tensors = self.sync.sharded_state_dict()["shared"]["tensors"]
        return {
            f"{name}.{key}": whole(value)
            for name, entries in tensors.items()
            for key, value in entries.items()
        }


def whole(value):
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "codec"),
    by_night([(k, c) for k in KINDS for c in CODECS], [("fsdp2", "fp32"), ("zero", "int8")]),
)
def test_resume_in_the_middle_of_an_all_reduce_is_bit_exact(tmp_path, kind, codec):
    def work(_):
        outcome = {}
        for name, rule in RULES.items():
            layout = {"workers": 2, "shards": 2, "kind": kind, "codec": codec}
            straight = World(rule, **layout)
            straight.train(0, SAVED_AT)
            straight.save(tmp_path / name)
            straight.train(SAVED_AT, STEPS)
            resumed = World(rule, **layout)
            resumed.train(0, 2)  # whatever it did before is gone
            resumed.load(tmp_path / name)
            resumed.train(SAVED_AT, STEPS)
            equal = same(straight.parameters(), resumed.parameters())
            straight.sync.finalize()
            resumed.sync.finalize()
            steps = resumed.sync.statistics().steps
            final = same(straight.parameters(), resumed.parameters())
            outcome[name] = (equal, final, steps)
        return outcome

    for outcome in run_processes(4, work, timeout_s=240.0):
        assert outcome == dict.fromkeys(RULES, (True, True, STEPS))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "shards", "kind_after", "shards_after"),
    by_night(LAYOUTS, LAYOUTS[2:]),
)
def test_another_number_of_shard_ranks(tmp_path, kind, shards, kind_after, shards_after):
    def before(_):
        outcome = {}
        for name, rule in RULES.items():
            world = World(rule, workers=2, shards=shards, kind=kind)
            world.train(0, SAVED_AT)
            world.save(tmp_path / name)
            shared, parameters = world.shared(), world.parameters()
            world.train(SAVED_AT, STEPS)
            world.sync.finalize()
            outcome[name] = shared, parameters, world.parameters()
        return outcome

    def after(_):
        outcome = {}
        for name, rule in RULES.items():
            world = World(rule, workers=2, shards=shards_after, kind=kind_after)
            world.load(tmp_path / name, partial=True)
            shared, parameters = world.shared(), world.parameters()
            world.train(SAVED_AT, STEPS)
            world.sync.finalize()
            outcome[name] = shared, parameters, world.parameters()
        return outcome

    saved = run_processes(2 * shards, before, timeout_s=240.0)
    loaded = run_processes(2 * shards_after, after, timeout_s=240.0)
    for name in RULES:
        for rank, outcome in enumerate(loaded):
            shared, parameters, final = outcome[name]
            theirs = saved[rank // shards_after * shards][name]
            assert any(key.endswith(".payload") for key in shared)
            assert same(shared, theirs[0]), name
            assert same(parameters, theirs[1]), name
            for key, value in final.items():
                torch.testing.assert_close(value, theirs[2][key], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_another_number_of_workers_goes_on_from_the_anchor(tmp_path, before, after):
    """Sharded by two; the all-reduce in the air is merged at the next boundary."""
    rule = CO2(tau=3, outer_lr=0.5, outer_momentum=0.0, staleness="none", clip=None)

    def first(_):
        world = World(rule, workers=before, shards=2, kind="fsdp2")
        world.train(0, SAVED_AT)
        world.save(tmp_path / "saved")
        return world.shared()

    def second(_):
        world = World(rule, workers=after, shards=2, kind="fsdp2")
        world.load(tmp_path / "saved", partial=True)
        start = world.parameters()
        world.sync.step()  # the ninth step; the workers have done nothing since the anchor
        return start, world.parameters()

    shared = run_processes(2 * before, first)[0]
    for start, merged in run_processes(2 * after, second):
        for name in ("first.weight", "last.bias", "norm.bias"):
            assert torch.equal(start[name], shared[f"{name}.anchor"])
            mean = shared[f"{name}.payload"] / before
            torch.testing.assert_close(merged[name], start[name] - 0.5 * mean)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_plain_state_on_another_number_of_workers(before, after):
    rule = CO2(tau=2, outer_lr=0.5, outer_momentum=0.3, staleness="none", clip=None)

    def trained(transport, steps, state=None):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)
        if state is not None:
            sync.load_state_dict(state)
        start = model.weight.detach().clone()
        for step in range(steps):
            generator = torch.Generator().manual_seed(10 * transport.rank + step)
            model(torch.randn(4, 3, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
        saved = sync.state_dict()
        sync.finalize()
        return start, saved, model.weight.detach().clone(), sync

    def snapshot(transport):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport)
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * transport.rank + step)
            model(torch.randn(4, 3, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
        state = sync.state_dict()
        return copy.deepcopy(state)

    state = run_world(before, snapshot)[0]
    saved = state["fragments"]["0"]["tensors"]["weight"]
    for start, _, final, _ in run_world(after, lambda t: trained(t, 0, state)):
        assert torch.equal(start, saved["anchor"])
        # finalize() merges the all-reduce, then an empty partial round: its momentum goes on alone.
        momentum = 0.3 * saved["momentum"] + saved["payload"] / before
        moved = saved["anchor"] - 0.5 * momentum
        moved = moved - 0.5 * 0.3 * momentum
        torch.testing.assert_close(final, moved)


def test_a_state_of_another_rule_is_refused():
    def work(transport):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=CO2(tau=2), transport=transport)
        other = OuterSync(model, optimizer, rule=LocalSGD(tau=2), transport=transport)
        with pytest.raises(ConfigurationError, match="the saved outer state has rule='CO2'"):
            other.load_sharded_state_dict(sync.sharded_state_dict())
        return True

    assert run_world(2, work) == [True, True]


def test_numbers_that_are_equal_are_the_same_setting():
    penalty = {"norm": "l2", "decay": 0.9}
    rules = [
        CO2(tau=2, outer_lr=1, clip=2, staleness=GapPenalty(reference=1, **penalty)),
        CO2(tau=2, outer_lr=1.0, clip=2.0, staleness=GapPenalty(reference=1.0, **penalty)),
    ]

    def work(transport):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ours, theirs = rules[transport.rank], rules[1 - transport.rank]
        sync = OuterSync(model, optimizer, rule=ours, transport=transport)
        OuterSync(model, optimizer, rule=theirs, transport=transport).load_state_dict(
            sync.state_dict()
        )
        return True

    assert run_world(2, work) == [True, True]
