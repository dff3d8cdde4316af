"""Averaging of momenta and second moments, against AdamW and the averages written out."""

import copy
import math
import threading

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

from fivefold.errors import ConfigurationError
from fivefold.optim import CO2, DelayCorrected, LocalSGD, MuonAdamW, OuterSync
from fivefold.testing import run_processes, run_world

SEEDING = threading.Lock()  # ranks are threads, and torch has one global generator
LR, BETA1, BETA2, EPSILON = 0.05, 0.8, 0.9, 1e-8
SIZE, WORKERS = 7, 3


def gradient(x, worker, step):
    """Of a function whose minimum differs between workers, with noise of the step."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    noise = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return x - worker + 0.3 * noise


def start():
    return torch.linspace(-1, 1, SIZE, dtype=torch.float64)


class Oracle:
    """AdamW on every worker, and means of what was sent, arriving ``delay`` steps later."""

    def __init__(self, *, tau, delay, periods):
        self.tau, self.delay, self.periods = tau, delay, periods
        self.x = [start() for _ in range(WORKERS)]
        self.m = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(WORKERS)]
        self.v = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(WORKERS)]
        self.sent = {}
        self.steps = 0

    def step(self):
        self.steps += 1
        t = self.steps
        for w in range(WORKERS):
            g = gradient(self.x[w], w, t - 1)
            self.m[w] = BETA1 * self.m[w] + (1 - BETA1) * g
            self.v[w] = BETA2 * self.v[w] + (1 - BETA2) * g * g
            m, v = self.m[w] / (1 - BETA1**t), self.v[w] / (1 - BETA2**t)
            self.x[w] = self.x[w] - LR * m / (v.sqrt() + EPSILON)
        rounds = {"x": 1, "m": self.periods["exp_avg"], "v": self.periods["exp_avg_sq"]}
        decays = {"x": 1.0, "m": BETA1, "v": BETA2}
        for name, period in rounds.items():
            values = getattr(self, name)
            if t - self.sent.get(name, (None, None))[0] == self.delay if name in self.sent else 0:
                _, sent = self.sent.pop(name)
                mean = sum(sent) / WORKERS
                for w in range(WORKERS):
                    values[w] = values[w] + decays[name] ** self.delay * (mean - sent[w])
            if t % (self.tau * period) == 0:
                self.sent[name] = (t, [value.clone() for value in values])
                if self.delay == 0:
                    mean = sum(self.sent.pop(name)[1]) / WORKERS
                    values[:] = [mean.clone() for _ in range(WORKERS)]


def train(transport, rule, periods, steps, *, saved=None):
    x = torch.nn.Parameter(start())
    holder = torch.nn.ParameterList([x])
    optimizer = torch.optim.AdamW([x], lr=LR, betas=(BETA1, BETA2), eps=EPSILON, weight_decay=0.0)
    sync = OuterSync(holder, optimizer, rule=rule, transport=transport, average_states=periods)
    if saved is not None:
        holder.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sync.load_state_dict(saved["sync"])
    trace = []
    for step in range(*steps):
        x.grad = gradient(x.detach(), transport.rank, step)
        optimizer.step()
        sync.step()
        state = optimizer.state[x]
        trace.append([t.detach().clone() for t in (x, state["exp_avg"], state["exp_avg_sq"])])
    state = {"model": holder, "optimizer": optimizer, "sync": sync}
    return trace, copy.deepcopy({key: part.state_dict() for key, part in state.items()})


@pytest.mark.parametrize(
    ("rule", "delay"),
    [
        (LocalSGD(tau=2), 0),
        (DelayCorrected(tau=2, fragments=1), 2),
        (DelayCorrected(tau=4, fragments=1, delay_steps=1), 1),
    ],
    ids=["waits", "a round late", "a step late"],
)
def test_states_are_those_of_the_equations(rule, delay):
    periods = {"exp_avg": 1, "exp_avg_sq": 3}
    traces = run_world(WORKERS, lambda transport: train(transport, rule, periods, (0, 40))[0])
    oracle = Oracle(tau=rule.tau, delay=delay, periods=periods)
    for step in range(40):
        oracle.step()
        for rank in range(WORKERS):
            for ours, theirs in zip(
                traces[rank][step], (oracle.x[rank], oracle.m[rank], oracle.v[rank]), strict=True
            ):
                assert torch.allclose(ours, theirs, rtol=0, atol=1e-12), f"step {step}"


@pytest.mark.parametrize("bad_step", [None, 5], ids=["", "after infinity"])
@pytest.mark.parametrize("periods", [{"exp_avg": 1, "exp_avg_sq": 9}, {"exp_avg": 1}])
def test_rows_that_only_another_worker_has_seen_move_by_no_more_than_theirs(periods, bad_step):
    def work(transport):
        rows = torch.nn.Parameter(torch.zeros(WORKERS, SIZE))
        optimizer = torch.optim.AdamW([rows], lr=LR)
        sync = OuterSync(
            torch.nn.ParameterList([rows]),
            optimizer,
            rule=LocalSGD(tau=2),
            transport=transport,
            average_states=periods,
        )
        for step in range(12):
            rows.grad = torch.zeros_like(rows)
            rows.grad[transport.rank] = math.inf if bad_step == step and transport.rank else 1.0
            optimizer.step()
            sync.step()
        return rows.detach().abs().max()

    assert max(run_world(WORKERS, work)) < 12 * 10 * LR


def test_a_late_average_is_what_an_instant_one_would_have_become():
    """With gradients that do not depend on the parameters the delay changes nothing, later."""
    zero = torch.zeros(SIZE, dtype=torch.float64)

    def moments(transport, rule):
        x = torch.nn.Parameter(zero.clone())
        optimizer = torch.optim.AdamW([x], lr=LR, betas=(BETA1, BETA2))
        periods = {"exp_avg": 1, "exp_avg_sq": 2}
        sync = OuterSync(
            torch.nn.ParameterList([x]),
            optimizer,
            rule=rule,
            transport=transport,
            average_states=periods,
        )
        for step in range(19):  # the last means were sent at step 16 and arrived at step 17
            x.grad = gradient(zero, transport.rank, step)
            optimizer.step()
            sync.step()
        return [optimizer.state[x][name].clone() for name in sorted(periods)]

    late = DelayCorrected(tau=4, fragments=1, delay_steps=1)
    for waits, delayed in zip(
        *(
            run_world(WORKERS, lambda t, rule=rule: moments(t, rule))
            for rule in (LocalSGD(tau=4), late)
        ),
        strict=True,
    ):
        for ours, theirs in zip(waits, delayed, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rule", [CO2(tau=2), LocalSGD(tau=3)], ids=lambda rule: rule.name)
def test_resume_goes_on_bit_for_bit_at_any_step(rule):
    periods = {"exp_avg": 2, "exp_avg_sq": 3}
    whole = run_world(WORKERS, lambda t: train(t, rule, periods, (0, 30))[0])
    for cut in (1, 7, 13):
        first = run_world(WORKERS, lambda t, cut=cut: train(t, rule, periods, (0, cut))[1])
        rest = run_world(
            WORKERS,
            lambda t, cut=cut, first=first: train(t, rule, periods, (cut, 30), saved=first[t.rank])[
                0
            ],
        )
        for rank in range(WORKERS):
            assert len(rest[rank]) == 30 - cut
            for ours, theirs in zip(rest[rank], whole[rank][cut:], strict=True):
                assert all(map(torch.equal, ours, theirs))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        with SEEDING:
            torch.manual_seed(2)
            self.first = torch.nn.Linear(5, 7)
            self.last = torch.nn.Linear(7, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def net_steps(model, optimizer, sync, steps, rank):
    for step in range(*steps):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * rank + step))
        (model(x) - x[:, :3].sin() * (1 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()


PERIODS = {"exp_avg": 1, "exp_avg_sq": 2, "momentum_buffer": 2}


@pytest.mark.distributed
@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_lossy_codecs_leave_second_moments_usable(codec):
    def work(rank):
        model = Net()
        optimizer = MuonAdamW.for_model(model, lr=0.02)
        sync = OuterSync(
            model,
            optimizer,
            rule=DelayCorrected(tau=2, fragments=1),
            codec=codec,
            average_states=PERIODS,
        )
        net_steps(model, optimizer, sync, (0, 41), rank)
        sync.finalize()
        states = {
            f"{number}.{name}": value.clone()
            for number, entries in optimizer.state_dict()["state"].items()
            for name, value in entries.items()
            if name in PERIODS
        }
        parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        return states, parameters, sync.statistics()

    (states, parameters, statistics), (others, theirs, _) = run_processes(2, work)
    assert torch.equal(parameters, theirs)
    assert bool(parameters.isfinite().all())
    assert float(parameters.abs().max()) < 10
    assert len(states) == 6  # two momentum buffers, two pairs of moments of the biases
    if codec == "fp32":
        assert all(torch.equal(value, others[name]) for name, value in states.items())
    assert all(bool((v > 0).all()) for name, v in states.items() if name.endswith("_sq"))
    assert statistics.payload_bytes > 0


@pytest.mark.slow
@pytest.mark.distributed
def test_sharded_states_go_on_through_a_sharded_checkpoint():
    def build():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = Net()
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        sync = OuterSync(
            model,
            optimizer,
            rule=DelayCorrected(tau=2, fragments=1),
            process_group=mesh["replicate"],
            average_states={"exp_avg": 1, "exp_avg_sq": 2},
        )
        return model, optimizer, sync

    def flat(model):
        return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])

    def work(rank):
        model, optimizer, sync = build()
        net_steps(model, optimizer, sync, (0, 7), rank // 2)
        parts = [model.state_dict(), optimizer.state_dict(), sync.sharded_state_dict()]
        names = list(parts[2]["shared"]["tensors"])
        saved = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, parts)
        net_steps(model, optimizer, sync, (7, 12), rank // 2)
        again, its, its_sync = build()
        again.load_state_dict(saved[0])
        its.load_state_dict(saved[1])
        its_sync.load_sharded_state_dict(saved[2])
        net_steps(again, its, its_sync, (7, 12), rank // 2)
        return names, flat(model), flat(again)

    def whole(transport):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        sync = OuterSync(
            model,
            optimizer,
            rule=DelayCorrected(tau=2, fragments=1),
            transport=transport,
            average_states={"exp_avg": 1, "exp_avg_sq": 2},
        )
        net_steps(model, optimizer, sync, (0, 12), transport.rank)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    expected = run_world(2, whole)
    for rank, (names, ours, again) in enumerate(run_processes(4, work, timeout_s=120.0)):
        assert "first.weight.exp_avg_sq" in names
        assert torch.equal(ours, again)
        assert torch.allclose(ours, expected[rank // 2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("periods", "message"),
    [
        ({"exp_avg": 0}, "whole number from 1"),
        ({"exp_average": 1}, "exp_average"),
        ({"square_avg": 1}, "no optimizer has"),
    ],
)
def test_states_that_cannot_be_averaged(periods, message):
    def work(transport):
        with pytest.raises(ConfigurationError, match=message) as caught:
            train(transport, LocalSGD(tau=2), periods, (0, 2))
        assert "exp_avg_sq" in caught.value.hint or "rounds" in caught.value.hint

    run_world(2, work)


def test_what_has_no_rounds_of_a_known_length_is_refused():
    def work(transport):
        with pytest.raises(ConfigurationError, match='tau="auto"'):
            train(transport, CO2(tau="auto"), {"exp_avg": 1}, (0, 2))

    run_world(2, work)


def test_a_state_of_other_averages_is_refused():
    def work(transport):
        saved = train(transport, LocalSGD(tau=2), {"exp_avg": 1}, (0, 3))[1]
        with pytest.raises(ConfigurationError, match="average_states"):
            train(transport, LocalSGD(tau=2), None, (3, 5), saved=saved)

    run_world(2, work)
