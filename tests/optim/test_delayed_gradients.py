"""Delayed gradients equal plain torch on the mean gradient of the step before."""

import copy
import functools
import gc

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fivefold.errors import ConfigurationError, ReplicaMismatchError
from fivefold.optim import DelayedGradients, OuterSync
from fivefold.testing import run_processes, run_world

STEPS = 30
SIZES = [(3, 4), (5,), (2, 2, 2), (1,)]


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return torch.nn.ParameterList(
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in SIZES
    )


def gradient(rank, step, p, number):
    """Of a quadratic that differs by worker; any order of calls gives the same noise."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return (0.3 * (number + 1) * (p.detach() - rank) + 0.2 * noise).to(p.dtype)


def optimizer_of(name, model):
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def engine_run(transport, rule, *, inner, weights=None, steps=STEPS, skipped=(), rank=None):
    """Parameters after each step and after the drain."""
    rank = transport.rank if rank is None else rank
    model = parameters()
    optimizer = optimizer_of(inner, model)
    sync = OuterSync(model, optimizer, rule=rule, transport=transport, check_every_rounds=1)
    seen = []
    for step in range(steps):
        for number, p in enumerate(model):
            p.grad = gradient(rank, step, p, number)
        if (rank, step) not in skipped:
            optimizer.step()
        optimizer.zero_grad()
        sync.step(None if weights is None else weights[rank])
        seen.append(torch.cat([p.detach().clone().reshape(-1) for p in model]))
    sync.finalize()
    seen.append(torch.cat([p.detach().clone().reshape(-1) for p in model]))
    return seen


def reference_run(world_size, rule, *, inner, weights=None, steps=STEPS, skipped=()):
    """Line by line, one model: step t uses the weighted mean of the gradients of step t - 1."""
    weights = weights or [1.0] * world_size
    model = parameters()
    optimizer = optimizer_of(inner, model)
    before = None
    last = [torch.zeros_like(p) for p in model]
    seen = []
    for step in range(steps + 1):  # the last one is the drain
        counting = [r for r in range(world_size) if (r, step) not in skipped and step < steps]
        fresh = [
            [gradient(rank, step, p, number) for number, p in enumerate(model)]
            for rank in range(world_size)
        ]
        if before is not None:
            for p, mean in zip(model, before, strict=True):
                p.grad = mean
            if rule.max_norm is not None:
                total = sum(float(p.grad.square().sum()) for p in model) ** 0.5
                for p in model:
                    p.grad = p.grad * min(1.0, rule.max_norm / (total + 1e-6))
            old = [p.detach().clone() for p in model]
            optimizer.step()
            share = rule.extrapolation * min(1.0, min(step, steps - 1) / rule.ramp_steps)
            for index, (p, was) in enumerate(zip(model, old, strict=True)):
                update = p.detach() - was
                p.data += share * (update - last[index])
                last[index] = update
        total_weight = sum(weights[rank] for rank in counting)
        before = [
            sum(weights[rank] * fresh[rank][number] for rank in counting) / total_weight
            for number in range(len(SIZES))
            if counting
        ]
        seen.append(torch.cat([p.detach().clone().reshape(-1) for p in model]))
    return seen


RULES = {
    "plain": DelayedGradients(),
    "clipped": DelayedGradients(max_norm=0.5),
    "extrapolated": DelayedGradients(extrapolation=1.0, ramp_steps=7),
    "both": DelayedGradients(max_norm=2.0, extrapolation=0.5),
}


@pytest.mark.parametrize("inner", ["momentum", "adamw"])
@pytest.mark.parametrize("name", RULES)
def test_equals_the_reference_at_every_step(name, inner):
    for world_size, weights in ((2, None), (3, [1.0, 4.0, 2.0])):
        expected = reference_run(world_size, RULES[name], inner=inner, weights=weights)
        found = run_world(
            world_size,
            lambda t, weights=weights: engine_run(t, RULES[name], inner=inner, weights=weights),
        )
        for seen in found:
            for ours, theirs in zip(seen, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_a_skipped_step_counts_nothing_and_applies_what_arrived():
    """As a gradient scaler leaves ``optimizer.step()`` out on one rank."""
    rule, skipped = DelayedGradients(), {(1, 4), (0, 9), (1, 10)}
    expected = reference_run(2, rule, inner="adamw", skipped=skipped)
    for seen in run_world(2, lambda t: engine_run(t, rule, inner="adamw", skipped=skipped)):
        for ours, theirs in zip(seen, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_training_goes_on_after_a_drain():
    rule = DelayedGradients(extrapolation=1.0, ramp_steps=1)

    def work(transport):
        model = parameters()
        optimizer = optimizer_of("momentum", model)
        sync = OuterSync(model, optimizer, rule=rule, transport=transport, check_every_rounds=1)
        before = None
        for step in range(9):
            for number, p in enumerate(model):
                p.grad = gradient(transport.rank, step, p, number)
            optimizer.step()
            sync.step()
            if step == 5:  # nothing is in flight after a drain, so this step changes nothing
                assert all(torch.equal(a, b) for a, b in zip(before, model, strict=True))
            if step == 4:
                sync.finalize()
                before = [p.detach().clone() for p in model]
        return torch.cat([p.detach().reshape(-1) for p in model])

    found = run_world(2, work)
    assert torch.equal(found[0], found[1])


def test_a_closure_computes_its_gradient_before_the_swap():
    def work(transport, closed):
        model = parameters()
        optimizer = optimizer_of("adamw", model)
        sync = OuterSync(model, optimizer, rule=DelayedGradients(), transport=transport)
        for step in range(6):

            def closure(step=step):
                for number, p in enumerate(model):
                    p.grad = gradient(transport.rank, step, p, number)
                return 1.5

            if closed:
                assert optimizer.step(closure) == 1.5
            else:
                closure()
                optimizer.step()
            sync.step()
        sync.finalize()
        return torch.cat([p.detach().reshape(-1) for p in model])

    plain = run_world(2, lambda t: work(t, closed=False))
    closed = run_world(2, lambda t: work(t, closed=True))
    assert torch.equal(plain[0], closed[0])
    assert torch.equal(plain[0], plain[1])


def test_a_rank_whose_parameters_are_damaged_is_named():
    def work(transport):
        model = parameters()
        optimizer = optimizer_of("sgd", model)
        sync = OuterSync(
            model, optimizer, rule=DelayedGradients(), transport=transport, check_every_rounds=2
        )
        for step in range(12):
            for p in model:
                p.grad = p.detach().clone()
            if (transport.rank, step) == (1, 5):
                optimizer.state[model[1]]["momentum_buffer"].fill_(float("nan"))
            optimizer.step()
            sync.step()

    told = r"rank\(s\) 1 differ from rank 0, in 1; likely, in this order: the optimizers step diff"
    with pytest.raises(ReplicaMismatchError, match=told):
        run_world(2, work)


@pytest.mark.parametrize("when", ["forward", "after the step"])
def test_a_rank_whose_buffers_are_damaged_is_left_out(when, caplog):
    """Whether it is before the optimizer's step, where gradients are looked at, or behind it."""

    def work(transport):
        model = torch.nn.Module()
        model.register_parameter("p", torch.nn.Parameter(torch.ones(3)))
        model.register_buffer("mean", torch.ones(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=DelayedGradients(), transport=transport)
        for step in range(6):
            damaged = (transport.rank, step) == (1, 3)
            model.p.grad = torch.ones(3)
            model.mean.add_(1.0)
            if damaged and when == "forward":
                model.mean.fill_(float("nan"))
            optimizer.step()
            if damaged and when != "forward":
                model.mean.fill_(float("nan"))
            sync.step()
        sync.finalize()
        return model.p.detach(), model.mean

    (p, mean), (other_p, other_mean) = run_world(2, work)
    assert caplog.text.count("not-a-number or infinity in round 3: rank 1 in mean; the round") == 2
    assert torch.equal(p, other_p)
    assert torch.equal(mean, other_mean)
    assert p.isfinite().all()
    assert mean.isfinite().all()


def test_misuse_is_refused():
    def work(transport):
        model = parameters()
        optimizer = optimizer_of("adamw", model)
        sync = OuterSync(model, optimizer, rule=DelayedGradients(), transport=transport)
        optimizer.step()
        with pytest.raises(ConfigurationError, match="gradient of this step has not been sent"):
            sync.state_dict()
        with pytest.raises(ConfigurationError, match="called twice without"):
            optimizer.step()
        lbfgs = torch.optim.LBFGS(model.parameters())
        with pytest.raises(ConfigurationError, match="LBFGS"):
            OuterSync(model, lbfgs, rule=DelayedGradients(), transport=transport)
        return True

    assert run_world(2, work) == [True, True]


def test_an_optimizer_outlives_its_engine():
    def work(transport):
        model = parameters()
        optimizer = optimizer_of("momentum", model)
        OuterSync(model, optimizer, rule=DelayedGradients(), transport=transport)
        return model, optimizer

    (model, optimizer), _ = run_world(2, work)
    gc.collect()
    before = copy.deepcopy(model)
    for p in model:
        p.grad = torch.ones_like(p)
    optimizer.step()  # plain again, and no wait for anybody
    for was, now in zip(before, model, strict=True):
        torch.testing.assert_close(now, was - 0.05)


def test_loaders_may_make_the_optimizers_state_before_the_first_step():
    """As torch.distributed.checkpoint does: a step with gradients and learning rate of 0."""

    def work(transport):
        model = parameters()
        optimizer = optimizer_of("adamw", model)
        sync = OuterSync(model, optimizer, rule=DelayedGradients(), transport=transport)
        get_optimizer_state_dict(model, optimizer)
        assert len(optimizer.state) == len(SIZES)
        return sync.state_dict()["fragments"]["0"]["schedule"]["round"]

    assert run_world(2, work) == [0, 0]


@pytest.mark.slow
@pytest.mark.distributed
def test_sharded_workers_equal_plain_ones():
    """Two workers of two ranks (FSDP2) and the same as plain replicas, over gloo."""
    rule = DelayedGradients(max_norm=0.5, extrapolation=1.0, ramp_steps=3)

    def train(model, optimizer, sync, worker):
        for step in range(8):
            generator = torch.Generator().manual_seed(100 * worker + step)
            inputs = torch.randn(6, 4, generator=generator)
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
            sync.step()
        sync.finalize()

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))

    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        sharded, plain, split = make(), make(), make()
        fully_shard(sharded, mesh=mesh["shard"])
        found = []
        for model, settings in (
            (sharded, {"process_group": mesh["replicate"]}),
            (plain, {"process_group": mesh["replicate"]}),
            (split, {"process_group": mesh["replicate"], "shard_group": mesh["shard"]}),
        ):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            sync = OuterSync(model, optimizer, rule=rule, **settings)
            train(model, optimizer, sync, rank // 2)
            full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
            found.append(torch.cat([p.detach().reshape(-1) for p in full]))
        return found

    results = run_processes(4, work, timeout_s=100.0)
    for sharded, plain, split in results:
        torch.testing.assert_close(sharded, plain, rtol=0, atol=1e-6)
        torch.testing.assert_close(split, plain, rtol=0, atol=1e-6)
        assert torch.equal(plain, results[0][1])


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_lets_no_rank_skip_the_step_of_all(fused):
    """A fused optimizer would skip by itself where this rank's own gradient is not finite."""

    def work(transport):
        model = parameters()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        sync = OuterSync(
            model, optimizer, rule=DelayedGradients(), transport=transport, check_every_rounds=1
        )
        for step in range(12):
            for p in model:
                p.grad = scaler.scale(torch.full_like(p, 1.0 + transport.rank + step))
            if (transport.rank, step) == (1, 5):
                model[0].grad.fill_(torch.inf)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            sync.step()
        sync.finalize()
        return torch.cat([p.detach().reshape(-1) for p in model])

    first, second = run_world(2, work)
    assert torch.equal(first, second)
    assert first.isfinite().all()
    # Twelve gradients of one sign, each step of AdamW is about its learning rate of 0.1.
    start = torch.cat([p.detach().reshape(-1) for p in parameters()])
    torch.testing.assert_close(start - first, torch.full_like(first, 1.2), rtol=0.1, atol=0.05)


class TwoEvaluations(torch.optim.Optimizer):
    """Looks at the loss twice a step, as sharpness-aware optimizers do."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure):
        closure()
        return closure()


def in_backward(model, _):
    (model[0].sum() * 1.0).backward()


class Rising(torch.optim.SGD):
    """Does something and takes its base's step, as most optimizers of other people do."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_that_calls_its_base_takes_the_same_steps():
    torch.optim.SGD([torch.ones(1)], lr=0.1)  # torch now calls hooks for the base too

    def work(transport, kind):
        model = parameters()
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.5)
        sync = OuterSync(model, optimizer, rule=DelayedGradients(), transport=transport)
        for step in range(5):
            for number, p in enumerate(model):
                p.grad = gradient(transport.rank, step, p, number)
            optimizer.step()
            sync.step()
        sync.finalize()
        return torch.cat([p.detach().reshape(-1) for p in model])

    plain, rising = (run_world(2, lambda t, k=k: work(t, k)) for k in (torch.optim.SGD, Rising))
    assert all(torch.equal(found, plain[0]) for found in [*plain, *rising])


def test_an_optimizer_that_takes_the_place_of_the_given_one_is_refused():
    def work(transport):
        model = parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=DelayedGradients(), transport=transport)
        for number in range(4):
            model[0].grad = torch.full_like(model[0], 1.0 + transport.rank)
            if number < 3:
                optimizer.step()
                sync.step()
        torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1).step()  # of something else
        with pytest.raises(ConfigurationError, match="Adam was not given to OuterSync"):
            torch.optim.Adam(model.parameters(), lr=0.1).step()
        sync.close()
        torch.optim.Adam(model.parameters(), lr=0.1).step()
        return True

    assert run_world(2, work) == [True, True]


def test_a_step_that_raised_is_no_step_of_a_base_class():
    def work(transport):
        model = parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=DelayedGradients(), transport=transport)

        def closure(number):
            for p in model:
                p.grad = torch.full_like(p, 1.0 + transport.rank)
            if number == 3:
                raise EOFError

        for number in range(3):
            optimizer.step(functools.partial(closure, number))
            sync.step()
        with pytest.raises(EOFError):
            optimizer.step(functools.partial(closure, 3))
        with pytest.raises(ConfigurationError, match="called twice"):
            optimizer.step(functools.partial(closure, 4))
        return True

    assert run_world(2, work) == [True, True]


class Around(torch.optim.Optimizer):
    """Steps the optimizer that was given, and has its parameters too."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


def test_a_new_engine_and_an_optimizer_around_the_given_one_are_no_strangers():
    def work(transport, *, around):
        model = parameters()
        engines = []  # none is collected
        for kind in (torch.optim.SGD, torch.optim.Adam):
            given = kind(model.parameters(), lr=0.1)
            stepped = Around(given) if around else given
            sync = OuterSync(model, given, rule=DelayedGradients(), transport=transport)
            engines.append(sync)
            for _ in range(3):
                for p in model:
                    p.grad = torch.full_like(p, 1.0 + transport.rank)
                stepped.step()
                sync.step()
            sync.finalize()
        return torch.cat([p.detach().reshape(-1) for p in model])

    found = [run_world(2, lambda t, a=around: work(t, around=a)) for around in (False, True)]
    assert all(torch.equal(found[0][0], each) for both in found for each in both)


def test_optimizers_that_step_where_the_mean_is_not_there_are_refused():
    def refused(transport, step, message, kind=torch.optim.SGD, hook=None):
        model = parameters()
        optimizer = kind(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=DelayedGradients(), transport=transport)
        if hook is not None:
            model[0].register_post_accumulate_grad_hook(lambda _: hook(optimizer))

        def once():
            step(model, optimizer)
            sync.step()

        with pytest.raises(ConfigurationError, match=message):
            once()

    def work(transport):
        refused(
            transport,
            lambda _, optimizer: optimizer.step(closure=lambda: None),
            "TwoEvaluations evaluates its closure more than once",
            kind=TwoEvaluations,
        )
        refused(
            transport,
            in_backward,
            "steps within the backward",
            hook=lambda optimizer: optimizer.step(),
        )
        refused(
            transport,
            lambda model, _: model[0].data.add_(1.0),
            "moved, but none of the optimizers took a step",
        )
        return True

    assert run_world(2, work) == [True, True]


class Pair(torch.nn.Module):
    """Two parts, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(3))
        self.second = torch.nn.Parameter(torch.ones(3))


def alternating(model, first, second, rank):
    (model.first.sum() * (1.0 + rank)).backward()
    first.step()
    first.zero_grad()
    (model.second.sum() * (1.0 + rank)).backward()
    second.step()
    second.zero_grad()


def clipping_between(model, first, second, rank):
    ((model.first.sum() + model.second.sum()) * (1.0 + rank)).backward()
    first.step()
    torch.nn.utils.clip_grad_norm_([model.second], 0.1)
    second.step()


def closures(model, first, second, rank):
    def closure():
        first.zero_grad()
        second.zero_grad()
        loss = (model.first.sum() + model.second.sum()) * (1.0 + rank)
        loss.backward()
        return loss

    first.step(closure)
    second.step(closure)


@pytest.mark.parametrize("loop", [alternating, clipping_between, closures])
def test_an_optimizer_that_would_step_with_its_own_gradient_is_refused(loop):
    def work(transport):
        model = Pair()
        first = torch.optim.SGD([model.first], lr=0.1)
        second = torch.optim.SGD([model.second], lr=0.1)
        sync = OuterSync(model, [first, second], rule=DelayedGradients(), transport=transport)

        def steps():
            for _ in range(2):
                loop(model, first, second, transport.rank)
                sync.step()

        with pytest.raises(ConfigurationError, match="gradients of SGD have changed since"):
            steps()
        return True

    assert run_world(2, work) == [True, True]


def test_several_optimizers_take_the_mean_whatever_way_they_are_called():
    def work(transport):
        model = Pair()
        optimizers = [torch.optim.SGD([p], lr=0.5) for p in model.parameters()]
        sync = OuterSync(model, optimizers, rule=DelayedGradients(), transport=transport)
        for step in range(4):
            ((model.first.sum() + model.second.sum()) * (1.0 + transport.rank)).backward()
            optimizers[0].step()
            optimizers[0].zero_grad(set_to_none=step % 2 == 0)
            optimizers[1].step(lambda: None)  # as Lightning's manual optimization calls it
            optimizers[1].zero_grad()
            sync.step()
        sync.finalize()
        return torch.cat([model.first.detach(), model.second.detach()])

    for found in run_world(2, work):
        torch.testing.assert_close(found, torch.full((6,), 1.0 - 4 * 0.5 * 1.5))


def test_a_loop_may_clamp_its_weights_and_skip_a_step():
    """As of a critic's weights; a step whose batch was empty is left out on one rank alone."""

    def work(transport):
        model = parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = OuterSync(
            model, optimizer, rule=DelayedGradients(), transport=transport, check_every_rounds=1
        )
        for step in range(12):
            for number, p in enumerate(model):
                p.grad = gradient(transport.rank, step, p, number)
            if (transport.rank, step) != (1, 5):
                optimizer.step()
            optimizer.zero_grad()
            sync.step()
            for p in model:
                p.data.clamp_(-0.3, 0.3)
        sync.finalize()
        return torch.cat([p.detach().reshape(-1) for p in model])

    first, second = run_world(2, work)
    assert torch.equal(first, second)


def test_replicas_that_part_in_a_short_run_are_told_at_its_end():
    """A schedule by each rank's own loss, in fewer steps than there are between two checks."""

    def work(transport):
        model = parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = OuterSync(model, optimizer, rule=DelayedGradients(), transport=transport)
        for step in range(5):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step * transport.rank)
            for number, p in enumerate(model):
                p.grad = gradient(transport.rank, step, p, number)
            optimizer.step()
            sync.step()
        with pytest.raises(ReplicaMismatchError, match=r"rank\(s\) 1 .*another learning rate"):
            sync.finalize()
        return True

    assert run_world(2, work) == [True, True]
