"""Experts shared out over real processes, against one process that has them all."""

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist

from fivefold.errors import ConfigurationError
from fivefold.moe import (
    AllToAllGroup,
    MoE,
    MoEConfig,
    Router,
    load_balancing_loss,
    route,
    router_z_loss,
)

TOKENS = (5, 0, 7, 2)  # by rank


def on_ranks(size, folder, body, *, timeout_s=30.0):
    """Run a function of (group, rank) on forked ranks; what each returned or raised, by rank."""

    def child(rank):
        from datetime import timedelta

        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), size)
        limit = timedelta(seconds=20)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        try:
            found = body(AllToAllGroup(), rank)
        except Exception as error:  # noqa: BLE001 - the parent judges it
            found = f"{type(error).__name__}: {error}"
        torch.save(found, folder / f"{rank}.pt")

    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                child(rank)
            finally:
                os._exit(0)  # a child must never return into pytest
        pids.append(pid)
    deadline_s = time.monotonic() + timeout_s
    while pids:
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        if time.monotonic() > deadline_s:
            for pid in pids:
                os.kill(pid, 9)
            pytest.fail("ranks hung")
        time.sleep(0.02)
    paths = [folder / f"{rank}.pt" for rank in range(size)]
    return [torch.load(path) if path.exists() else None for path in paths]


def layer(config, group=None):
    """A layer whose parameters depend on the configuration alone, whoever has them."""
    torch.manual_seed(3)
    whole = MoE(config).double()
    if group is None:
        return whole
    state, here = whole.state_dict(), group.experts_of(config.experts)
    shares = {
        name: tensor[here.start : here.stop] if name.startswith("experts.") else tensor
        for name, tensor in state.items()
    }
    mine = MoE(config, group).double()
    mine.load_state_dict(shares)
    return mine


def tokens_of(size):
    torch.manual_seed(4)
    return [torch.randn(n, 8, dtype=torch.float64) for n in TOKENS[:size]]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"bias": True}),
        (3, {"router": Router(top_k=6, score="sigmoid"), "shared_intermediate": 4}),
        (4, {"experts": 8, "router": Router(top_k=1, normalize=False), "activation": "relu2"}),
    ],
)
def test_outputs_gradients_loads_and_bytes_are_those_of_one_process(tmp_path, size, changes):
    config = MoEConfig(**({"hidden": 8, "intermediate": 12, "experts": 6} | changes))

    def body(group, rank):
        mine = layer(config, group)
        x = tokens_of(size)[rank].requires_grad_()
        y = mine(x)
        (y.square().sum() + mine.auxiliary_loss(balance=0.3, z=0.1)).backward()
        gradients = {name: p.grad for name, p in mine.named_parameters()}
        flights = [vars(flight) for flight in group.take_calls()]
        return y.detach(), x.grad, gradients, vars(mine.last_load), flights

    found = on_ranks(size, tmp_path, body)
    assert not [rank for rank in found if isinstance(rank, str)], found
    whole = layer(config)
    x = torch.cat(tokens_of(size)).requires_grad_()
    y = whole(x)
    loss = y.square().sum()
    for part in x.split(list(TOKENS[:size])):  # of each rank with tokens, by the load of all
        logits = part @ whole.gate.weight.T
        routing = route(logits, config.router)
        if len(part):
            loss = loss + 0.3 * load_balancing_loss(routing, load=whole.last_load.routed)
            loss = loss + 0.1 * router_z_loss(logits)
    loss.backward()
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([rank[0] for rank in found]), y.detach(), **close)
    torch.testing.assert_close(torch.cat([rank[1] for rank in found]), x.grad, **close)
    for name, parameter in whole.named_parameters():
        parts = [rank[2][name] for rank in found]
        joined = torch.cat(parts) if name.startswith("experts.") else torch.stack(parts).sum(0)
        torch.testing.assert_close(joined, parameter.grad, **close)
    share = config.experts // size
    owners = (whole.last_routing.ids_TK // share).split(list(TOKENS[:size]))
    for rank, (_, _, _, load, flights) in enumerate(found):
        assert torch.equal(load["kept"], whole.last_load.kept)
        leaving = sum(len(set(row) - {rank}) for row in owners[rank].tolist())
        arriving = sum(rank in row for o, of in enumerate(owners) for row in of if o != rank)
        payload = {flight["name"]: flight["payload_bytes"] for flight in flights}
        assert payload["tokens"] == payload["gradients of the results"] == leaving * 8 * 8
        assert payload["results"] == payload["gradients of the tokens"] == arriving * 8 * 8


@pytest.mark.distributed
def test_layers_that_differ_are_an_error_on_every_rank(tmp_path):
    def body(group, rank):
        config = MoEConfig(hidden=8, intermediate=4, experts=4 + 2 * rank)
        return layer(config, group)(tokens_of(2)[rank])

    for found in on_ranks(2, tmp_path, body):
        assert found.startswith("ConfigurationError: experts: rank ")


@pytest.mark.distributed
def test_a_peer_that_dies_is_an_error_that_says_who_waited_for_what(tmp_path):
    def body(group, rank):
        mine = layer(MoEConfig(hidden=8, intermediate=4, experts=4), group)
        mine(torch.randn(3, 8, dtype=torch.float64))
        if rank == 1:
            os._exit(0)
        return mine(torch.randn(3, 8, dtype=torch.float64))

    first, second = on_ranks(2, tmp_path, body)
    assert second is None
    assert first.startswith("CommunicationError: rank 0 of 2 in the expert group: sending")


def test_groups_that_cannot_be_are_refused():
    with pytest.raises(ConfigurationError, match="needs a process group"):
        AllToAllGroup()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = AllToAllGroup()
        layer = MoE(MoEConfig(hidden=8, intermediate=4, experts=4), group)
        assert copy.deepcopy(layer).group is group  # torch cannot copy a process group
        group.size = 3
        with pytest.raises(ConfigurationError, match="4 experts cannot be shared out equally"):
            MoE(MoEConfig(hidden=8, intermediate=4, experts=4), group)
    finally:
        dist.destroy_process_group()
