"""Loops as people have them, in two real processes, each beside its answer by DDP or by hand.

With ``LocalSGD(tau=1)`` and SGD the mean of the models is the step with the mean gradient, so what
comes out is what DDP gives. Trainer, Accelerate and Lightning are in ``test_integrations``, sharded
workers in ``test_sharded``.
"""

import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from fivefold.errors import ConfigurationError
from fivefold.optim import DelayCorrected, LocalSGD, OuterSync
from fivefold.testing import run_processes
from helpers.night import by_night

pytestmark = pytest.mark.distributed
WIDTH, CONTEXT, VOCABULARY, HEADS = 16, 12, 24, 2


def mean_over_ranks(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


def flat(model):
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


# -- a language model with accumulation, autocast, compile and resume -----------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        parts = self.mix(self.norms[0](x)).split(WIDTH, dim=2)
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        heads = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def text(rank, step, micro):
    """Lines that count on, in steps that differ by line."""
    generator = torch.Generator().manual_seed(10000 * rank + 10 * step + micro)
    first = torch.randint(VOCABULARY, (8, 1), generator=generator)
    stride = torch.randint(1, 4, (8, 1), generator=generator)
    line = (first + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
    return line[:, :-1], line[:, 1:]


class Run:
    """Model, optimizer and engine; ``rule`` None for DDP."""

    def __init__(self, rule, *, fused, codec):
        torch.manual_seed(0)
        self.bare = Language()
        if fused:
            self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=6e-3, fused=True)
        else:
            self.optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.1, momentum=0.9)
        self.model = torch.compile(self.bare, backend="aot_eager")
        self.sync = None
        if rule is None:
            self.model = DistributedDataParallel(self.model)
        else:
            self.sync = OuterSync(self.model, self.optimizer, rule=rule, codec=codec)

    def step(self, number, *, clip):
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * (
                0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * number / 60))
            )
        for micro in range(3):
            if self.sync is None:
                self.model.require_backward_grad_sync = micro == 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = self.model(*text(dist.get_rank(), number, micro)) / 3
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(self.bare.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.sync is not None:
            self.sync.step()
        return 3 * float(loss.detach())


def language_loop(rule, *, steps, resume_at=None, fused=False, codec="fp32", clip=0.0):
    run = Run(rule, fused=fused, codec=codec)
    losses = []
    for number in range(steps):
        if number == resume_at:
            file = io.BytesIO()
            parts = run.bare.state_dict(), run.optimizer.state_dict(), run.sync.state_dict()
            torch.save({"model": parts[0], "optimizer": parts[1], "sync": parts[2]}, file)
            run.sync.close()
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            run = Run(rule, fused=fused, codec=codec)
            run.bare.load_state_dict(saved["model"])
            run.optimizer.load_state_dict(saved["optimizer"])
            run.sync.load_state_dict(saved["sync"])
        losses.append(run.step(number, clip=clip))
    if run.sync is not None:
        run.sync.finalize()
        run.sync.close()
    return flat(run.bare), losses


@pytest.mark.nightly
def test_a_language_model_with_accumulation_autocast_and_compile():
    def work(_rank):
        ours, _ = language_loop(LocalSGD(tau=1), steps=12)
        ddp, _ = language_loop(None, steps=12)
        hidden = DelayCorrected(tau=4)
        settings = {"steps": 60, "fused": True, "codec": "int8", "clip": 1.0}
        whole, losses = language_loop(hidden, **settings)
        resumed, _ = language_loop(hidden, resume_at=29, **settings)
        return ours, ddp, whole, resumed, losses

    results = run_processes(2, work, timeout_s=240.0)
    for ours, ddp, whole, resumed, losses in results:
        torch.testing.assert_close(ours, ddp, rtol=0, atol=2e-3)
        assert torch.equal(whole, resumed)
        assert torch.equal(whole, results[0][2])
        assert losses[-1] < 0.7 * losses[0]


# -- running statistics ---------------------------------------------------------------------------


def pictures(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    kinds = torch.randint(4, (16,), generator=generator)
    noise = torch.randn(16, 2, 6, 6, generator=generator)
    return noise + (kinds - 1.5).view(-1, 1, 1, 1) * (1.0 + rank), kinds


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )


def normalised_loop(rank, rule, *, codec="fp32", steps=40):
    """Train; without a rule gradients and running statistics are averaged by hand."""
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sync = None if rule is None else OuterSync(model, optimizer, rule=rule, codec=codec)
    for step in range(steps):
        inputs, kinds = pictures(rank, step)
        optimizer.zero_grad()
        cross_entropy(model(inputs), kinds).backward()
        if sync is None:
            mean_over_ranks([p.grad for p in model.parameters()])
            mean_over_ranks([model[1].running_mean, model[1].running_var])
        optimizer.step()
        if sync is not None:
            sync.step()
    if sync is not None:
        sync.finalize()
        sync.close()
    model.eval()
    with torch.no_grad():
        losses = [cross_entropy(model(x), k) for x, k in (pictures(r, 999) for r in range(2))]
    return flat(model), model[1].running_mean, model[1].running_var, sum(map(float, losses)) / 2


def test_a_net_with_running_statistics():
    def work(rank):
        by_hand = normalised_loop(rank, None)
        ours = normalised_loop(rank, LocalSGD(tau=1))
        hidden = normalised_loop(rank, DelayCorrected(tau=4), codec="int4")
        return by_hand, ours, hidden

    for by_hand, ours, hidden in run_processes(2, work, timeout_s=120.0):
        for mine, expected in zip(ours[:3], by_hand[:3], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)
        assert hidden[2].min() > 0
        assert hidden[3] < by_hand[3] + 0.1


# -- adapters over a frozen base in float8 --------------------------------------------------------


class Adapted(nn.Module):
    """A frozen matrix of 8 bits, and the two small ones that are trained."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        base = torch.randn(12, 12, generator=generator).to(torch.float8_e4m3fn)
        self.base = nn.Parameter(base, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(12, generator=generator), requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, 12, generator=generator))
        self.up = nn.Parameter(torch.zeros(12, 2))

    def forward(self, x):
        wide = linear(x, self.base.float()) * self.scale
        return wide + linear(linear(x, self.down), self.up)


def adapter_loop(rank, rule):
    # As it is where each rank reads the base by itself: only rank 0's counts.
    model = Adapted(seed=0 if rule is None else 5 * rank)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    sync = None if rule is None else OuterSync(model, optimizer, rule=rule)
    for step in range(20):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        (model(x) - x.flip(1)).square().mean().backward()
        if sync is None:
            mean_over_ranks([model.down.grad, model.up.grad])
        optimizer.step()
        if sync is not None:
            sync.step()
    if sync is not None:
        sync.finalize()
        sync.close()
    return model.base.detach().view(torch.uint8), torch.cat([flat(model), model.scale.detach()])


def test_adapters_over_a_base_of_eight_bits():
    def work(rank):
        return adapter_loop(rank, None), adapter_loop(rank, LocalSGD(tau=1))

    for by_hand, ours in run_processes(2, work, timeout_s=60.0):
        assert torch.equal(by_hand[0], ours[0])
        torch.testing.assert_close(ours[1], by_hand[1], rtol=1e-4, atol=1e-5)


# -- optimizers that communicate, or hold weights -------------------------------------------------


class SharedOut(torch.optim.Optimizer):
    """Each matrix is made orthogonal by one rank, which sends the update to the others."""

    def __init__(self, parameters, lr=0.02):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                update = torch.zeros_like(p)
                if number % dist.get_world_size() == dist.get_rank():
                    left, _, right = torch.linalg.svd(p.grad, full_matrices=False)
                    update = left @ right
                dist.broadcast(update, number % dist.get_world_size())
                p.sub_(update, alpha=group["lr"])


class Averaging(torch.optim.SGD):
    """Averages its own gradients, in a group of its own, in every third step."""

    calls, group = 0, None

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        if self.calls % 3 == 0:
            for p in self.param_groups[0]["params"]:
                dist.all_reduce(p.grad, group=self.group)
        return super().step(closure)


@pytest.mark.parametrize("kind", by_night([SharedOut, Averaging], [Averaging]))
def test_an_optimizer_that_communicates_is_refused_by_name_where_it_does(kind):
    def work(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 6))
        matrices = [model[0].weight, model[2].weight]
        torch.optim.SGD(matrices, lr=0.01)  # so that torch's hooks are called by the base too
        optimizer = kind(matrices, lr=0.01)
        if kind is Averaging:
            optimizer.group = dist.new_group([0, 1])
        rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.01)
        sync = OuterSync(model, [optimizer, rest], rule=LocalSGD(tau=4), timeout_s=20.0)

        def train():
            for step in range(8):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(9 * rank + step))
                model(x).square().mean().backward()
                dist.all_reduce(torch.ones(1))  # a loop may: for its log
                optimizer.step()
                rest.step()
                sync.step()

        with pytest.raises(
            ConfigurationError, match=rf"{kind.__name__} communicates .*ranks \[0, 1\]"
        ):
            train()
        dist.barrier()  # a rank that ends would close the other's connections
        return rank

    assert run_processes(2, work, timeout_s=60.0) == [0, 1]
