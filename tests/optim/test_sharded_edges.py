"""Workers of several ranks: what is unusual in a model, and what users get wrong."""

import copy
import functools
from itertools import pairwise

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fivefold.errors import ConfigurationError, ReplicaMismatchError
from fivefold.optim import (
    CO2,
    DelayCorrected,
    DelayedGradients,
    GapPenalty,
    LocalSGD,
    OuterSync,
    _shards,
)
from fivefold.testing import run_processes

pytestmark = pytest.mark.distributed


def mesh_of(workers, shards):
    return init_device_mesh("cpu", (workers, shards), mesh_dim_names=("replicate", "shard"))


def whole(tensor):
    value = tensor.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def linear_stack(*sizes, dtype=torch.float32):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(a, b, dtype=dtype) for a, b in pairwise(sizes)))


def train(model, sync, optimizer, rank, steps, *, width, dtype=torch.float32):
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * rank + step)
        x = torch.randn(6, width, generator=generator).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()


def test_bf16_parameters_have_float32_outer_state_and_equal_replicas():
    def work(rank):
        mesh = mesh_of(2, 2)
        model = linear_stack(5, 7, 3, dtype=torch.bfloat16)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh["shard"], mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=CO2(tau=2), process_group=mesh["replicate"])
        train(model, sync, optimizer, rank, 7, width=5, dtype=torch.bfloat16)
        sync.finalize()
        anchors = [t.dtype for t in sync._fragments[0].anchors]
        return anchors, [whole(p) for p in model.parameters()]

    results = run_processes(4, work)
    for anchors, parameters in results:
        assert anchors == [torch.float32]
        assert all(p.dtype == torch.bfloat16 for p in parameters)
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][1], strict=True))


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.linear = torch.nn.Linear(4, 5)
        self.norm = torch.nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(self.linear(x))


def test_running_statistics_are_the_mean_over_all_ranks():
    def work(rank):
        mesh = mesh_of(2, 2)
        model = Normed()
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sync = OuterSync(model, optimizer, rule=LocalSGD(tau=1), process_group=mesh["replicate"])
        before = []

        def forward_only():
            generator = torch.Generator().manual_seed(rank)
            model(torch.randn(8, 4, generator=generator)).sum().backward()
            optimizer.step()
            before.append(model.norm.running_mean.clone())
            sync.step()
            return model.norm.running_mean.clone()

        return [forward_only() for _ in range(3)], before, int(model.norm.num_batches_tracked)

    results = run_processes(4, work)
    for step in range(3):
        expected = torch.stack([before[step] for _, before, _ in results]).mean(dim=0)
        for after, _, batches in results:
            torch.testing.assert_close(after[step], expected)
            assert torch.equal(after[step], results[0][0][step])
            assert batches == 3


def evaluated_life(rank, *, shards, rule, evaluate):
    """Train two workers; evaluate before the inner step, and around saving and loading."""
    mesh = mesh_of(2, shards)
    model = linear_stack(5, 8, 3)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = OuterSync(model, optimizer, rule=rule, process_group=mesh["replicate"])

    def look():  # what a forward without a backward gathers stays in the root's place
        if evaluate:
            with torch.no_grad():
                model(torch.ones(2, 5))

    for step in range(7):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(9 * step + rank))
        model(x).square().mean().backward()
        if isinstance(rule, DelayedGradients):
            look()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
        if step == 4:
            look()
            state = copy.deepcopy(sync.state_dict())
            look()
            sync.load_state_dict(state)
            kinds = {type(tensor) for tensor in sync._fragments[0].tensors()}
            assert kinds == {type(p) for p in optimizer.param_groups[0]["params"]}
    sync.finalize()
    return [whole(p) for p in model.parameters()]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("rule", [CO2(tau=2), DelayedGradients()], ids=lambda rule: rule.name)
def test_an_evaluation_changes_nothing(rule, shards):
    def life(*, evaluate):
        work = functools.partial(evaluated_life, shards=shards, rule=rule, evaluate=evaluate)
        return run_processes(2 * shards, work)

    found, expected = life(evaluate=True), life(evaluate=False)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def zero_work(rank, *, shards, rule, wrap=True, width=6):
    mesh = mesh_of(2, shards)
    model = linear_stack(width, 8, 4)
    called = model
    if wrap:
        group = mesh["shard"].get_group()
        called = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = OuterSync(
        model, optimizer, rule=rule, process_group=mesh["replicate"], shard_group=mesh["shard"]
    )
    train(called, sync, optimizer, rank, 5, width=width)
    sync.finalize()
    sent = sum(all_reduce.payload_bytes for all_reduce in sync.all_reduces())
    elements = sum(a.numel() for a in sync._fragments[0].anchors)
    return [whole(p) for p in model.parameters()], sent, elements


def test_bytes_and_state_of_a_rank_are_one_share():
    alone = run_processes(2, lambda rank: zero_work(rank, shards=1, rule=CO2(tau=2)))
    halves = run_processes(4, lambda rank: zero_work(rank, shards=2, rule=CO2(tau=2)))
    total = 6 * 8 + 8 + 8 * 4 + 4
    assert [elements for _, _, elements in alone] == [total, total]
    for _, sent, elements in halves:  # every first dimension is even
        assert elements == total // 2
        assert sent == alone[0][1] // 2


@pytest.mark.slow
def test_blocks_of_rows_smaller_than_a_tensor(monkeypatch):
    whole_at_once = run_processes(6, lambda rank: zero_work(rank, shards=3, rule=CO2(tau=2)))
    monkeypatch.setattr(_shards, "_BUCKET_BYTES", 50)  # two rows of the first weight
    in_blocks = run_processes(6, lambda rank: zero_work(rank, shards=3, rule=CO2(tau=2)))
    for (ours, *_), (theirs, *_) in zip(in_blocks, whole_at_once, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ours, in_blocks[0][0], strict=True))


def test_scalars_convolutions_and_a_dimension_of_length_zero_are_shared():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.conv = torch.nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last)
            self.scale = torch.nn.Parameter(torch.tensor(1.5))
            self.nothing = torch.nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return self.conv(x) * self.scale + self.nothing.sum()

    def work(rank):
        mesh = mesh_of(2, 2)
        model = Odd()
        group = mesh["shard"].get_group()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(
            model,
            optimizer,
            rule=CO2(tau=2),
            process_group=mesh["replicate"],
            shard_group=group,
        )
        for step in range(5):
            generator = torch.Generator().manual_seed(rank // 2 + 10 * step)
            x = torch.randn(2, 2, 4, 4, generator=generator)
            model(x).square().mean().backward()  # ranks of a worker take the same batch
            optimizer.step()
            optimizer.zero_grad()
            sync.step()
        sync.finalize()
        return [whole(p) for p in model.parameters()]

    results = run_processes(4, work)
    assert not torch.equal(results[0][0], torch.tensor(1.5))
    for parameters in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0], strict=True))


def test_ranks_of_a_worker_that_train_apart_are_an_error():
    def work(rank):
        with pytest.raises(ReplicaMismatchError, match=r"inside one worker differ.*round 0"):
            zero_work(rank, shards=2, rule=CO2(tau=2), wrap=False)
        return True

    assert run_processes(4, work) == [True] * 4


def test_a_mesh_with_the_other_workers_in_it_is_an_error():
    def work(_):
        mesh = mesh_of(2, 2)
        model = linear_stack(4, 4)
        fully_shard(model, mesh=mesh)  # HSDP: gradients would be averaged over the workers
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigurationError, match="which process_group counts as other workers"):
            OuterSync(model, optimizer, rule=CO2(tau=2), process_group=mesh["replicate"])
        with pytest.raises(ConfigurationError, match="which process_group counts as other workers"):
            OuterSync(model, optimizer, rule=CO2(tau=2))
        plain = linear_stack(4, 4)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        with pytest.raises(ConfigurationError, match="in shard_group and also in process_group"):
            OuterSync(plain, optimizer, rule=CO2(tau=2), shard_group=mesh["shard"])
        with pytest.raises(ConfigurationError, match="one dimension"):
            OuterSync(
                plain,
                optimizer,
                rule=CO2(tau=2),
                process_group=mesh["replicate"],
                shard_group=mesh,
            )
        return True

    assert run_processes(4, work) == [True] * 4


@pytest.mark.slow
def test_hsdp_inside_one_worker():
    def work(rank):
        names = ("outer", "replicate", "shard")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        model = linear_stack(5, 7, 3)
        fully_shard(model, mesh=mesh["replicate", "shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=CO2(tau=2), process_group=mesh["outer"])
        train(model, sync, optimizer, rank, 5, width=5)
        sync.finalize()
        return [whole(p) for p in model.parameters()]

    results = run_processes(8, work)
    for parameters in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0], strict=True))


def hsdp_life(rank, *, rule, weighted):
    """Two workers of two copies on two shards each, or two plain workers that do the same."""
    model = Normed() if rule is None else linear_stack(5, 7, 3)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "replicate", "shard"))
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = OuterSync(
        model, optimizer, rule=rule or CO2(tau=2), process_group=mesh["outer"], outlier_factor=10
    )
    for step in range(7):
        x = torch.randn(
            6, 5 if rule else 4, generator=torch.Generator().manual_seed(9 * step + rank)
        )
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step(weight=1.0 + rank if weighted else None)
    sync.finalize()
    return {name: whole(value) for name, value in model.state_dict().items()}


def two_plain_workers(rank, *, rule, weighted):
    model = linear_stack(5, 7, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = OuterSync(model, optimizer, rule=rule)
    ranks = range(4 * rank, 4 * rank + 4)
    for step in range(7):
        for one in ranks:
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(9 * step + one))
            (model(x).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step(weight=sum(1.0 + one for one in ranks) if weighted else None)
    sync.finalize()
    return {name: whole(value) for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_copies_inside_a_worker_are_one_worker(weighted):
    """Tokens are counted over all ranks of a worker, and norms over each shard once."""
    rule = CO2(tau=2, staleness=GapPenalty(reference=0.05))

    plain = run_processes(2, lambda r: two_plain_workers(r, rule=rule, weighted=weighted))[0]
    for parameters in run_processes(8, lambda r: hsdp_life(r, rule=rule, weighted=weighted)):
        for name, value in parameters.items():
            torch.testing.assert_close(value, plain[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_copies_inside_a_worker_have_the_same_running_statistics():
    first, *others = run_processes(8, lambda rank: hsdp_life(rank, rule=None, weighted=False))
    for state in others:
        assert all(torch.equal(state[name], first[name]) for name in first)


def test_the_gap_needs_all_parameters_sharded():
    def work(rank):
        mesh = mesh_of(2, 2)
        model = linear_stack(4, 4, 4)
        fully_shard(model[0], mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigurationError, match=r"1\.weight is not sharded"):
            OuterSync(model, optimizer, rule=CO2(tau=2), process_group=mesh["replicate"])
        rule = DelayCorrected(tau=2, fragments=1)
        sync = OuterSync(model, optimizer, rule=rule, process_group=mesh["replicate"])
        train(model, sync, optimizer, rank // 2, 5, width=4)
        sync.finalize()
        return [whole(p) for p in model.parameters()]

    results = run_processes(4, work)
    for parameters in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0], strict=True))


def test_weights_of_a_worker_are_the_sum_over_its_ranks():
    """Worker 0 has 1 + 2 tokens, worker 1 has 3 + 6: the mean is 1/4 and 3/4 on both places."""

    def work(rank):
        mesh = mesh_of(2, 2)
        model = torch.nn.Linear(2, 4, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=LocalSGD(tau=1), process_group=mesh["replicate"])
        with torch.no_grad():
            model.weight.to_local().fill_(float(rank // 2))
        sync.step(weight=[1.0, 2.0, 3.0, 6.0][rank])
        return whole(model.weight)

    for weight in run_processes(4, work):
        torch.testing.assert_close(weight, torch.full((4, 2), 0.75))


def test_a_buffer_that_is_registered_late_is_brought_together_inside_a_worker_too():
    def work(rank):
        mesh = mesh_of(2, 2)
        model = linear_stack(4, 4)
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sync = OuterSync(model, optimizer, rule=LocalSGD(tau=1), process_group=mesh["replicate"])
        train(model, sync, optimizer, rank, 2, width=4)
        model.register_buffer("late", torch.full((3,), float(rank)))
        train(model, sync, optimizer, rank, 1, width=4)
        began = model.late.clone()
        model.late += float(rank)
        train(model, sync, optimizer, rank, 2, width=4)
        sync.finalize()
        return began, model.late.clone()

    for began, ended in run_processes(4, work):
        assert began.tolist() == [1.5] * 3  # the mean of 0, 1, 2, 3
        assert ended.tolist() == [3.0] * 3
