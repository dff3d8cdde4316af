"""The table of outer rules, and worlds of ranks for them: lost, late and slow all-reduces."""

import threading
import zlib

import torch

from fivefold import optim
from fivefold.optim.codecs import named_codec
from fivefold.testing import run_world

SGD_NESTEROV = {"lr": 0.5, "momentum": 0.6, "nesterov": True}
RULES = {
    "co2": optim.CO2(tau=3),
    "co2-sync-start": optim.CO2(tau=2, bootstrap="sync", staleness="gap-rms"),
    "co2-gap-param": optim.CO2(tau=2, staleness="gap-param", clip=0.02),
    "co2-lr-units": optim.CO2(tau=2, units="lr", staleness=optim.GapPenalty(reference=0.1)),
    "co2-auto": optim.CO2(
        tau=optim.AutoTau(initial=3, window=64)
    ),  # decides nothing in so few rounds
    "co2-parts": optim.CO2(tau=4, fragments=2),
    "co2-short": optim.CO2(tau=3, delay_steps=1, staleness="gap-param", clip=0.02),
    "slowmo": optim.SlowMo(tau=3),
    "local-sgd": optim.LocalSGD(tau=2),
    "diloco": optim.DiLoCo(tau=2, outer_momentum=0.5),
    "delay-corrected": optim.DelayCorrected(tau=3, fragments=1),
    "delayed-gradients": optim.DelayedGradients(),
    "delayed-gradients-ahead": optim.DelayedGradients(
        max_norm=0.5, extrapolation=1.0, ramp_steps=3
    ),
    "delay-corrected-parts": optim.DelayCorrected(tau=4, fragments=2),
    "delay-corrected-ends": optim.DelayCorrected(
        tau=4, fragments=2, synchronous_start=3, synchronous_end=2, total_steps=12
    ),
    "overlap": optim.OverlapLocalSGD(tau=2, outer_momentum=0.3),
    "eager": optim.EagerDiLoCo(tau=2),
    "streaming": optim.StreamingDiLoCo(tau=4, fragments=2, outer_lr=0.5, outer_momentum=0.4),
    "streaming-delay": optim.StreamingDiLoCo(
        tau=4, fragments=3, delay_steps=1, outer_lr=0.5, outer_momentum=0.2
    ),
    "adamw": optim.OuterOptimizer(tau=2, optimizer=torch.optim.AdamW, options={"lr": 0.01}),
    "adamw-hidden": optim.OuterOptimizer(
        tau=2, optimizer=torch.optim.AdamW, options={"lr": 0.01}, hidden=True
    ),
    "sgd-hidden": optim.OuterOptimizer(
        tau=2, optimizer=torch.optim.SGD, options=SGD_NESTEROV, hidden=True
    ),
}
# A rule without a row of its own is here with its defaults.
for _key, _kind in optim.outer_rules().items():
    if not any(isinstance(rule, _kind) for rule in RULES.values()):
        _given = {name: value for name, value in _kind.settings({}).items() if value is not None}
        RULES[_key] = _kind.from_settings({**_given, "tau": 2})
# Whose payload is the gradient, so that what is done to the parameters alone is not sent.
OF_GRADIENTS = {name for name, rule in RULES.items() if rule.sends_gradients}
WITH_ENDS = {name for name, rule in RULES.items() if rule.synchronous_start}
WITHOUT_LOSSES = {name for name, rule in RULES.items() if not rule.bears_losses}
SURVIVES_LOSSES = {name: rule for name, rule in RULES.items() if name not in WITHOUT_LOSSES}
WAITS = {name: rule for name, rule in SURVIVES_LOSSES.items() if not rule.delayed}
OF_THEIR_OWN = {name for name, rule in RULES.items() if rule.merge == "own"}  # to no reference
SEEDING = threading.Lock()  # ranks are threads, and torch has one global generator


class Net(torch.nn.Module):
    """Two layers with a tied and a frozen parameter and BatchNorm's buffers."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = torch.nn.Linear(4, 6, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(6, dtype=dtype)
        self.last = torch.nn.Linear(6, 2, bias=False, dtype=dtype)
        self.tied = self.last.weight
        self.frozen = torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    def forward(self, inputs):
        return self.last(torch.tanh(self.norm(self.first(inputs)))) * self.frozen


class Worker:
    """One rank: model, inner optimizer and engine, and data that is a function of the step."""

    def __init__(self, transport, rule, *, seed=0, dtype=torch.float32, data=None, **settings):
        with SEEDING:
            torch.manual_seed(seed)
            self.model = Net(dtype)
        self.data = data if data is not None else (0 if transport is None else transport.rank)
        self.dtype = dtype
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.01
        )
        self.sync = optim.OuterSync(
            self.model, self.optimizer, rule=rule, transport=transport, **settings
        )

    def local_step(self, step):
        generator = torch.Generator().manual_seed(1000 * self.data + step)
        inputs = torch.randn(8, 4, generator=generator).to(self.dtype)
        loss = (self.model(inputs) - inputs[:, :2].sin()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def train(self, steps, *, weight=None):
        losses = []
        for step in steps:
            losses.append(self.local_step(step))
            self.sync.step(weight)
        return losses

    def flat(self):
        return torch.cat(
            [t.detach().reshape(-1).double() for t in self.model.state_dict().values()]
        )

    def anchors(self):
        return torch.cat([a.clone() for f in self.sync._fragments for a in f.anchors])

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sync": self.sync.state_dict(),
        }

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sync.load_state_dict(state["sync"])


class Counter(torch.nn.Module):
    """Every local step moves a coordinate of its own, so that the end names all that arrived."""

    def __init__(self, steps):
        super().__init__()
        self.p = torch.nn.Parameter(torch.zeros(steps, dtype=torch.float64))
        self.q = torch.nn.Parameter(torch.zeros(steps, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def work(self, step, amount):
        with torch.no_grad():
            self.p[step] += amount
            self.q[step] -= amount
            self.seen += amount
            self.count += 1


class Wrapped:
    """A transport around another."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Tapped(Wrapped):
    """Adds up the mean payload of every all-reduce that arrived: what reached the outer steps."""

    def __init__(self, inner):
        super().__init__(inner)
        self.arrived = {}

    def launch(self, payloads, *, metadata, fragment, what):
        all_reduce = self.inner.launch(payloads, metadata=metadata, fragment=fragment, what=what)
        plain_wait = all_reduce.wait

        def wait():
            arrived = plain_wait()
            weight = float(metadata[: self.inner.world_size].sum()) if arrived else 0.0
            if weight:
                for index, payload in enumerate(payloads):
                    key = (fragment, index)
                    self.arrived[key] = self.arrived.get(key, 0.0) + payload / weight
            return arrived

        all_reduce.wait = wait
        return all_reduce


class Lossy(Wrapped):
    """Loses all-reduces at random, alike on all ranks, and leaves garbage in their tensors."""

    may_lose = True

    def __init__(self, inner, *, share=0.4, seed=0):
        super().__init__(inner)
        self.share, self.seed = share, seed
        self.attempts = {}
        self.lost = 0

    def load_state_dict(self, state):
        self.attempts.clear()  # the run goes back, and so do its losses
        self.inner.load_state_dict(state)

    def launch(self, payloads, *, metadata, fragment, what):
        all_reduce = self.inner.launch(payloads, metadata=metadata, fragment=fragment, what=what)
        attempt = self.attempts[what] = self.attempts.get(what, 0) + 1
        draw = zlib.crc32(f"{self.seed} {what} {attempt}".encode()) / 2**32
        plain_wait = all_reduce.wait

        def wait():
            plain_wait()
            if draw >= self.share:
                return True
            self.lost += 1
            for tensor in (*payloads, metadata):
                tensor.fill_(float("nan"))
            return False

        all_reduce.wait = wait
        return all_reduce


class Rounded(Wrapped):
    """Sends what is not exact through a codec, with error feedback, as a compressed sum does."""

    def __init__(self, inner, codec):
        super().__init__(inner)
        self.codec = named_codec(codec)
        self.residuals, self.num_exact = {}, {}

    def prepare(self, payloads, *, fragment, num_exact=0):
        self.num_exact[fragment] = num_exact
        for index, payload in enumerate(payloads[: len(payloads) - num_exact]):
            self.residuals[fragment, index] = torch.zeros_like(payload)

    def launch(self, payloads, *, metadata, fragment, what):
        for index, payload in enumerate(payloads[: len(payloads) - self.num_exact[fragment]]):
            wire = torch.empty(self.codec.encoded_bytes(payload.numel()), dtype=torch.uint8)
            residual = self.residuals[fragment, index]
            self.codec.encode_with_feedback_(residual, wire, values=payload)
            self.codec.decode_(wire, payload)
        return self.inner.launch(payloads, metadata=metadata, fragment=fragment, what=what)


class Clock:
    """Virtual seconds, each rank its own: steps and all-reduces last as long as the test says."""

    def __init__(self):
        self._local = threading.local()

    def perf_counter(self):
        return getattr(self._local, "now_s", 0.0)

    def advance(self, seconds):
        self._local.now_s = self.perf_counter() + seconds

    def until(self, moment_s):
        self._local.now_s = max(self.perf_counter(), moment_s)


class Timed(Wrapped):
    """All-reduces that end ``all_reduce_s(number)`` after the last launch, on a virtual clock."""

    def __init__(self, inner, clock, all_reduce_s):
        super().__init__(inner)
        self.clock, self.all_reduce_s = clock, all_reduce_s
        self.all_reduces = 0

    def launch(self, payloads, *, metadata, fragment, what):
        inner = self.inner.launch(payloads, metadata=metadata, fragment=fragment, what=what)
        self.all_reduces += 1
        return TimedAllReduce(self, inner, self.all_reduce_s(self.all_reduces - 1))


class TimedAllReduce:
    def __init__(self, transport, inner, all_reduce_s):
        self.transport, self.inner, self.all_reduce_s = transport, inner, all_reduce_s
        self.launched_at_s = transport.clock.perf_counter()
        self.completed_at_s = None
        self.sent_bytes = inner.sent_bytes

    def wait(self):
        arrived = self.inner.wait()
        launches = self.transport.inner.gather_objects(self.launched_at_s)
        self.completed_at_s = max(launches) + self.all_reduce_s
        self.transport.clock.until(self.completed_at_s)
        return arrived


def all_equal(values):
    return all(torch.equal(values[0], other) for other in values[1:])


def trained(rule, steps, *, world_size=2, wrap=lambda t: t, launch_delay_s=None, **settings):
    """Final parameters and buffers of every rank."""

    def work(transport):
        worker = Worker(wrap(transport), rule, **settings)
        worker.train(range(steps))
        worker.sync.finalize()
        return worker.flat()

    return run_world(world_size, work, launch_delay_s=launch_delay_s)
