"""Experts that are one rank's alone: what wraps, moves or saves a model leaves them to it."""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import FivefoldError
from fivefold.moe import AllToAllGroup, MoE, MoEConfig, prepare_experts
from fivefold.optim import LocalSGD, OuterSync
from fivefold.testing import run_processes

pytestmark = pytest.mark.distributed

CONFIG = MoEConfig(hidden=4, intermediate=6, experts=4, bias=True)
STEPS = 3


class Model(torch.nn.Module):
    """A layer of experts behind a dense one."""

    def __init__(self, group=None, config=CONFIG):
        super().__init__()
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(4, 4)
        self.experts = MoE(config, group)

    def forward(self, x):
        return x + self.experts(self.dense(x))


def data(ranks):
    torch.manual_seed(1)
    return torch.randn(STEPS, ranks, 5, 4)


def train(model, wrapped, x_of_steps):
    """Return the model after some steps of SGD on the mean of squares."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x in x_of_steps:
        (wrapped(x) - x.sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def alone(ranks):
    """What one process with all tokens and all experts comes to."""
    model = Model()
    with torch.no_grad():
        for bias in (model.experts.experts.b13, model.experts.experts.b2):
            bias.fill_(0.0)
    return train(model, model, data(ranks).flatten(1, 2)).state_dict()


def shared_out(placement):
    whole = placement.whole_state_dict()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in whole.items()}


def by_ddp(model, _placement):
    return DistributedDataParallel(model)


def by_fsdp(model, placement):
    return fully_shard(model, ignored_params=placement.parameters)


def trained_by(wrap, ranks):
    model = Model(AllToAllGroup())
    placement = prepare_experts(model)
    train(model, wrap(model, placement), data(ranks)[:, dist.get_rank()])
    return shared_out(placement)


def refused(body):
    try:
        body()
    except FivefoldError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def forward(wrap):
    def body():
        layer = MoE(CONFIG, AllToAllGroup())
        x = torch.randn(5, 4)
        layer(x)  # right so far
        wrapped = wrap(layer) or layer
        wrapped(x)

    return body


def broadcast(layer):
    for parameter in layer.parameters():
        dist.broadcast(parameter.data, 0)


def broadcast_state(layer, *, plain):
    told = [layer.state_dict()]
    dist.broadcast_object_list(told, 0)
    layer.load_state_dict(dict(told[0]) if plain else told[0])
    return layer if plain else torch.nn.Identity()  # rank 0 got its own back: it would wait


def outer(layer):
    OuterSync(layer, torch.optim.SGD(layer.parameters(), lr=0.0), rule=LocalSGD(tau=1))


REFUSED = {
    "DistributedDataParallel": (
        DistributedDataParallel,
        "ConfigurationError: DistributedDataParallel takes experts.w13 for a replica",
    ),
    "DistributedDataParallel from other weights": (
        lambda layer: DistributedDataParallel(layer, init_sync=False),
        "ConfigurationError: DistributedDataParallel takes experts.w13 for a replica",
    ),
    "fully_shard": (fully_shard, "ReplicaMismatchError: ranks 0 and 1 of the expert group have"),
    "OuterSync": (outer, "experts 0 to 1 of 4' where rank"),
    "a broadcast of parameters": (broadcast, "have the same bits in experts.w13"),
    "a broadcast state": (
        lambda layer: broadcast_state(layer, plain=False),
        "experts.w13 of this state are experts 0 to 1 of 4; this rank has 2 to 3 of 4",
    ),
    "a broadcast state of tensors alone": (
        lambda layer: broadcast_state(layer, plain=True),
        "have the same bits in experts.w13",
    ),
    "preparing twice": (
        lambda layer: [prepare_experts(layer) for _ in range(2)],
        "prepared already",
    ),
    "nothing to prepare": (lambda _: prepare_experts(MoE(CONFIG)), "no layer of the model"),
}


def allowed():
    """Copies of one dense layer, and a group that was told of it, are no mistake."""
    x, config = torch.randn(5, 4), MoEConfig(hidden=4, intermediate=6, experts=2)
    upcycled = MoE(CONFIG, AllToAllGroup())
    told = MoE(config, AllToAllGroup(check_experts=False))
    for layer in (upcycled, told):
        with torch.no_grad():
            for parameter in layer.experts.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter[0].numel()).view_as(parameter[0]))
        layer(x)
    return torch.equal(upcycled.experts.w2[0], upcycled.experts.w2[1])


def waits():
    """Return the exchange's reads of a device in a second forward, and its collectives' names."""
    group = AllToAllGroup()
    layer, readers = MoE(CONFIG, group), []  # its biases are zero on all ranks
    x, read = torch.randn(5, 4), torch.Tensor.tolist

    def counted(tensor):
        readers.append(sys._getframe(1).f_globals["__name__"])
        return read(tensor)

    layer(x)
    group.take_calls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", counted)
        layer(x)
    reads = [name for name in readers if name.startswith("fivefold.moe.parallel")]
    return len(reads), [call.name for call in group.take_calls()]


def two_ranks(_rank):
    found = {wrap.__name__: trained_by(wrap, 2) for wrap in (by_ddp, by_fsdp)}
    found["refused"] = {n: refused(forward(wrap)) for n, (wrap, _) in REFUSED.items()}
    found["allowed"] = allowed()
    found["waits"] = waits()
    layer, whole = MoE(CONFIG, AllToAllGroup()), MoE(CONFIG)
    layer.load_state_dict(whole.state_dict())
    found["whole"] = prepare_experts(layer).whole_state_dict(), whole.state_dict()
    prepare_experts(copy.deepcopy(layer))  # a copy is prepared by itself
    return found


@pytest.fixture(scope="module")
def pair():
    return run_processes(2, two_ranks)


@pytest.mark.parametrize("wrap", ["by_ddp", "by_fsdp"])
def test_prepared_ranks_train_as_one_process_does(pair, wrap):
    wanted = alone(2)
    for found in pair:
        assert found[wrap].keys() == wanted.keys()
        for name, tensor in found[wrap].items():
            torch.testing.assert_close(tensor, wanted[name], msg=name)


@pytest.mark.parametrize("what", REFUSED)
def test_what_takes_experts_for_replicas_is_refused_by_name(pair, what):
    said = [found["refused"][what] for found in pair]
    assert any(REFUSED[what][1] in text for text in said)
    if what != "a broadcast state":  # rank 0 got its own back
        assert "nothing" not in said


def test_experts_may_be_equal_on_purpose(pair):
    assert all(found["allowed"] for found in pair)


def test_a_forward_reads_the_counts_once_and_compares_harmless_experts_once(pair):
    for found in pair:
        assert found["waits"] == (1, ["row counts", "tokens", "results"])


def test_a_whole_state_is_cut_and_put_together(pair):
    for found in pair:
        back, whole = found["whole"]
        assert all(torch.equal(back[name], whole[name]) for name in whole)


def outer_steps(rank):
    """Two workers of two ranks, each with data of its own: DDP inside, outer steps between them."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    model = Model(AllToAllGroup(mine))
    placement = prepare_experts(model, process_group=mine)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sync = OuterSync(model, optimizer, rule=LocalSGD(tau=2), process_group=placement.workers)
    wrapped = DistributedDataParallel(model, process_group=mine)
    for x in data(4)[:2, rank]:
        (wrapped(x) - x.sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
    sync.finalize()
    return before, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_workers_have_the_same_experts_after_a_round():
    found = run_processes(4, outer_steps)
    for (before, one), (_, other) in ((found[0], found[2]), (found[1], found[3])):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name
            assert not torch.equal(tensor, before[name]), name  # they trained


def replicas(rank):
    """Two groups of experts whose four ranks step together."""
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicated = Model(AllToAllGroup(mine))
    placement = prepare_experts(replicated)
    train(replicated, DistributedDataParallel(replicated), data(4)[:, rank])
    return shared_out(placement)


@pytest.mark.nightly
def test_replicas_of_experts_train_as_one_process_does():
    wanted = alone(4)
    for found in run_processes(4, replicas):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], msg=name)
