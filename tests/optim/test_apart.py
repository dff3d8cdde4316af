"""What communicates beside the engine is found; what each rank keeps for itself is left alone."""

import contextlib
import gc
import logging
import threading
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import ConfigurationError
from fivefold.optim import CO2, DelayCorrected, LocalSGD, OuterSync
from fivefold.testing import run_processes, run_world

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts its own functions there
    from torch.distributed.optim import ZeroRedundancyOptimizer

SEEDING = threading.Lock()


class Net(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        with SEEDING:
            torch.manual_seed(seed)
            self.body = torch.nn.Linear(4, 4)
            self.own = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("queue", torch.zeros(8, 4, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.teacher = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def forward(self, inputs):
        return self.body(inputs) + self.own(inputs) * self.scale


def train(model, sync, optimizers, rank, steps, *, after=None):
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * rank + step)
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if after is not None:
            after(model, 10 * rank + step)
        sync.step()
    sync.finalize()


class SharedOut(torch.optim.SGD):
    """All ranks take the same step, as a Muon does that shares its matrices out."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1)


@pytest.mark.parametrize("rule", [LocalSGD(tau=2), DelayCorrected(tau=2, fragments=2)])
@pytest.mark.parametrize("shared", [("body", "own"), ("own",), ()])
def test_an_optimizer_that_shares_its_work_out_is_noticed(shared, rule, caplog):
    def work(transport):
        model = Net()
        optimizers = [
            (SharedOut if name in shared else torch.optim.SGD)(part.parameters(), lr=0.1)
            for name, part in (("body", model.body), ("own", model.own))
        ]
        sync = OuterSync(model, optimizers, rule=rule, transport=transport)
        train(model, sync, optimizers, transport.rank, 4)

    with caplog.at_level(logging.WARNING, logger="fivefold.optim"):
        run_world(2, work)
    assert ("the same pseudo-gradient" in caplog.text) is bool(shared)
    partly = len(shared) == 1 and rule.num_fragments == 1
    assert ("for some of the optimizers' groups" in caplog.text) is partly


def test_what_communicates_with_other_workers_is_refused_by_name():
    def work(_rank):
        model = Net()
        model.body = DistributedDataParallel(model.body)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            ConfigurationError, match=r"body is wrapped in DistributedDataPar.*0, 1"
        ):
            OuterSync(model, optimizer, rule=LocalSGD(tau=2))
        plain = Net()
        zero = ZeroRedundancyOptimizer(
            [p for p in plain.parameters() if p.requires_grad], torch.optim.SGD, lr=0.1
        )
        with pytest.raises(ConfigurationError, match="ZeroRedundancyOptimizer sends its part"):
            OuterSync(plain, zero, rule=LocalSGD(tau=2))
        summed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SyncBatchNorm(4))
        with pytest.raises(ConfigurationError, match=r"1 is a SyncBatchNorm.*over ranks \[0, 1\]"):
            OuterSync(summed, torch.optim.SGD(summed.parameters(), lr=0.1), rule=LocalSGD(tau=2))
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        summed[1] = torch.nn.SyncBatchNorm(4, process_group=alone)
        OuterSync(
            summed, torch.optim.SGD(summed.parameters(), lr=0.1), rule=LocalSGD(tau=2)
        ).close()
        inside = Net()
        inside.body = DistributedDataParallel(inside.body, process_group=alone)
        OuterSync(
            inside, torch.optim.SGD(inside.parameters(), lr=0.1), rule=LocalSGD(tau=2)
        ).close()
        return True

    assert run_processes(2, work) == [True, True]


@pytest.mark.parametrize("rule", [CO2(tau=2), DelayCorrected(tau=2, fragments=2)])
@pytest.mark.parametrize("how", ["argument", "list of DDP"])
def test_what_is_ignored_stays_each_ranks_own(rule, how):
    names = ["own.weight", "scale", "queue", "teacher"]

    def work(transport):
        model = Net(seed=transport.rank)
        for tensor in (model.scale, model.queue, model.teacher.data):
            tensor.fill_(1 + transport.rank)
        start = model.own.weight.detach().clone()
        if how == "list of DDP":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ignore = names if how == "argument" else []
        sync = OuterSync(model, optimizer, rule=rule, transport=transport, ignore=ignore)
        train(model, sync, [optimizer], transport.rank, 7)
        assert torch.equal(model.own.weight, start)
        kept = [float(t.float().mean()) for t in (model.scale, model.queue, model.teacher)]
        assert kept == [1.0 + transport.rank] * 3
        return model.body.weight.detach()

    first, second = run_world(2, work)
    assert torch.equal(first, second)


@pytest.mark.parametrize("names", [["0.weight"], ["_orig_mod.0.weight"]])
@pytest.mark.parametrize("how", ["argument", "list of DDP"])
def test_names_mean_the_same_in_a_compiled_model(names, how):
    def work(transport):
        with SEEDING:
            torch.manual_seed(transport.rank)
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        start = model[0].weight.detach().clone()
        if how == "list of DDP":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        sync = OuterSync(
            torch.compile(model, backend="eager"),
            torch.optim.SGD(model.parameters(), lr=0.1),
            rule=LocalSGD(tau=1),
            transport=transport,
            ignore=names if how == "argument" else [],
        )
        assert torch.equal(model[0].weight, start)
        sync.close()
        return model[1].weight.detach()

    first, second = run_world(2, work)
    assert torch.equal(first, second)


def test_ignoring_is_forgotten_with_the_engine():
    def work(transport):
        model = Net(seed=transport.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rule, ignore in ((None, ["own.weight"]), (LocalSGD(tau=1), [])):
            with contextlib.suppress(ConfigurationError):
                OuterSync(model, optimizer, rule=rule, transport=transport, ignore=ignore)
        return model.own.weight.detach()

    first, second = run_world(2, work)
    assert torch.equal(first, second)


class Shared(torch.nn.Linear):
    rank_share = "experts 0 to 1 of 4"


def test_experts_in_the_list_of_ddp_are_brought_together():
    def work(transport):
        model = torch.nn.Sequential(Shared(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False))
        names = ["0.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        sync = OuterSync(model, optimizer, rule=LocalSGD(tau=1), transport=transport)
        before = model[0].weight.detach().clone()
        model[0].weight.grad = torch.full((1, 2), 1.0 + transport.rank)
        optimizer.step()
        sync.step()
        return model[0].weight.detach() - before

    for moved in run_world(2, work):
        torch.testing.assert_close(moved, torch.full((1, 2), -0.75))


def test_states_are_averaged_where_only_a_buffer_is_ignored():
    def work(transport):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        OuterSync(
            model,
            optimizer,
            rule=LocalSGD(tau=1),
            transport=transport,
            ignore=["queue"],
            average_states={"exp_avg": 1},
        )
        return True

    assert run_world(2, work) == [True, True]


def test_ignoring_what_is_not_there_is_refused():
    def work(transport):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        OuterSync(model, optimizer, rule=CO2(tau=1), transport=transport, ignore=["ovn.weight"])

    with pytest.raises(ConfigurationError, match=r"'ovn\.weight', which the model has not"):
        run_world(2, work)


def follow(model, number):
    model.teacher.data.lerp_(model.body.weight.detach(), 0.5)
    model.seen += number


def enqueue(model, number):
    model.queue[number % 8] = number


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (follow, "moved on this rank: teacher"),
        (enqueue, "moved on this rank: queue"),
        (lambda model, number: model.seen.add_(number), None),
    ],
)
def test_fixed_tensors_that_training_moves_are_told_once(after, told, caplog):
    def work(transport):
        model = Net()
        optimizer = torch.optim.SGD([*model.body.parameters(), *model.own.parameters()], lr=0.1)
        sync = OuterSync(
            model, optimizer, rule=LocalSGD(tau=2), transport=transport, check_every_rounds=2
        )
        train(model, sync, [optimizer], transport.rank, 12, after=after)

    with caplog.at_level(logging.WARNING, logger="fivefold.optim"):
        run_world(2, work)
    found = [r.message for r in caplog.records if "moves tensors" in r.message]
    assert len(found) == (2 if told else 0)  # once on each rank
    assert all(told in message for message in found)


def unfreeze(model, number):
    model.teacher.requires_grad_(number % 10 >= 2)
    model.teacher.data += 0.1 * number  # of each rank its own amount


def test_what_begins_to_train_is_not_told(caplog):
    def work(transport):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(
            model, optimizer, rule=LocalSGD(tau=2), transport=transport, check_every_rounds=2
        )
        train(model, sync, [optimizer], transport.rank, 12, after=unfreeze)
        return model.teacher.detach().clone()

    with caplog.at_level(logging.WARNING, logger="fivefold.optim"):
        first, second = run_world(2, work)
    assert torch.equal(first, second)
    assert "moves tensors" not in caplog.text


def test_a_frozen_base_that_a_loader_replaces_is_let_go():
    def work(transport):
        model = Net()
        old = weakref.ref(model.teacher)
        trained = [*model.body.parameters(), *model.own.parameters()]
        OuterSync(
            model,
            torch.optim.SGD(trained, lr=0.1),
            rule=LocalSGD(tau=2),
            transport=transport,
        )
        copied = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(copied, assign=True)
        gc.collect()
        return old() is None

    assert run_world(2, work) == [True, True]
