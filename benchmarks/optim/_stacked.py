"""All workers of one run as one batched model, with the real engine on each of them.

``quality`` trains each worker in a thread of its own; at 70,000 parameters that is a hundred small
operations after one another per worker and step. Here forward, backward, clipping and the inner
optimizer work on parameters stacked along a first dimension, and each worker's module holds views
of its part, on which its own ``OuterSync`` acts: rules, fragments, delays and codecs are the
engine's. What differs from four threads is the order in which sums are rounded, and that Muon's
Newton-Schulz steps are in float32, where torch's are in bfloat16 (slow on a CPU without it).

Shape legend: M models in the stack, B sequences, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from threading import Barrier
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the customary name

from benchmarks.optim._workload import (
    BETAS,
    CLIP_NORM,
    MODEL,
    MUON,
    SEQUENCE_LENGTH,
    WEIGHT_DECAY,
    Problem,
    batches,
    learning_rate,
    make_model,
    set_learning_rate,
)
from fivefold.optim import DelayedGradients, OuterRule, OuterSync
from fivefold.testing import InMemoryTransport, run_world
from fivefold.train import Transformer
from fivefold.train._model import rms_norm, split_rotated_heads

# ruff: noqa: N803, N806 - tensor names end in their shape

__all__ = ["StackedModel", "train_ddp_stacked", "train_rule_stacked"]

_EPSILON = 1e-6  # of the model's norms
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS, _MUON_MOMENTUM = 5, 0.95
_TIMEOUT_S = 36_000.0


class StackedModel:
    """Equal models side by side: their loss, gradients and optimizer steps in one go.

    Args:
        problem: What is trained.
        number: Models, M.
        dtype: Of parameters and arithmetic.
        device: Where they are.
        alike: The models are equal at every update (they take the same mean gradient), so one is
            updated and copied.

    Attributes:
        modules: The M models, whose parameters are views of the stacked ones.
        steps_done: Optimizer steps so far.
    """

    def __init__(
        self, problem: Problem, *, number: int, dtype: torch.dtype = torch.float32,
        device: str = "cpu", alike: bool = False,
    ) -> None:  # fmt: skip
        self.problem = problem
        shape = MODEL.model_copy(update={"width": problem.width, "layers": problem.layers})
        self.modules: list[Transformer] = [
            make_model(problem.seed, shape).to(device, dtype) for _ in range(number)
        ]
        self.steps_done = 0
        self._lr = problem.lr
        self.stacked = {
            name: torch.stack([p.detach()] * number).requires_grad_()
            for name, p in self.modules[0].named_parameters()
        }
        for index, module in enumerate(self.modules):
            for name, parameter in module.named_parameters():
                parameter.data = self.stacked[name].data[index]
        self._updated = {
            name: p.detach()[:1].requires_grad_() if alike else p
            for name, p in self.stacked.items()
        }
        self._make_optimizers(problem)

    def _make_optimizers(self, problem: Problem) -> None:
        matrices = [n for n, p in self._updated.items() if p.dim() == 3]
        muon = problem.optimizer == MUON
        self._muon = [self._updated[n] for n in matrices if muon and "embedding" not in n]
        rest = [p for p in self._updated.values() if all(p is not m for m in self._muon)]
        decays = [p for p in rest if p.dim() == 3 and not muon]
        groups = [
            {"params": decays, "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in rest if all(p is not d for d in decays)], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=problem.lr, betas=BETAS, fused=True
        )
        self._momenta = [torch.zeros_like(p) for p in self._muon]

    def loss(self, inputs_MBT: torch.Tensor, targets_MBT: torch.Tensor) -> torch.Tensor:
        """Return the sum over the models of each one's mean cross entropy, in nats per token."""
        M, B, T = inputs_MBT.shape
        p, first = self.stacked, self.modules[0]
        embedding_MVD = p["embedding_VD"]
        _, V, D = embedding_MVD.shape
        cos_TJ, sin_TJ = first.cos_TJ[:T], first.sin_TJ[:T]
        ones_D = embedding_MVD.new_ones(D)
        rows = inputs_MBT.reshape(M, B * T) + torch.arange(M, device=inputs_MBT.device)[:, None] * V
        x = F.embedding(rows, embedding_MVD.view(M * V, D))

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return rms_norm(x, ones_D, epsilon=_EPSILON) * p[name][:, None]

        def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, weight.transpose(1, 2))

        for layer in range(self.problem.layers):
            at = f"blocks.{layer}."
            qkv = linear(norm(x, at + "norm_attention_D"), p[at + "query_key_value_CD"])
            q, k, v = split_rotated_heads(
                qkv.view(M * B, T, 3 * D), cos_TJ, sin_TJ, heads=first.config.heads
            )
            mixed = _attention(q, k, v)
            x = x + linear(mixed.transpose(1, 2).reshape(M, B * T, D), p[at + "out_DD"])
            both = linear(norm(x, at + "norm_feed_forward_D"), p[at + "gate_up_2FD"])
            gate, up = both.chunk(2, dim=-1)
            x = x + linear(F.silu(gate) * up, p[at + "down_DF"])
        logits = linear(norm(x, "norm_D"), embedding_MVD)
        total = F.cross_entropy(logits.view(-1, V), targets_MBT.flatten(), reduction="sum")
        return total / (B * T)

    def gradient(self, inputs_MBT: torch.Tensor, targets_MBT: torch.Tensor) -> None:
        """Begin a step: leave each model's gradient in the stacked parameters' ``grad``."""
        self._lr = learning_rate(self.steps_done, self.problem)
        self.steps_done += 1
        for parameter in self.stacked.values():
            parameter.grad = None
        torch.autograd.backward(self.loss(inputs_MBT, targets_MBT))

    def lend_gradients(self, index: int) -> None:
        """Give one model views of its gradients, which the engine swaps in place."""
        for name, parameter in self.modules[index].named_parameters():
            gradient = self.stacked[name].grad
            parameter.grad = None if gradient is None else gradient[index]

    @torch.no_grad()
    def clip(self, bound: float = CLIP_NORM) -> None:
        """Bound the norm of each model's gradient."""
        gradients = [p.grad for p in self.stacked.values() if p.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])
        factors = (bound / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))

    @torch.no_grad()
    def update(self) -> None:
        """Take one step of the inner optimizer on every model."""
        pairs = [(p, self.stacked[n]) for n, p in self._updated.items() if p is not self.stacked[n]]
        for one, all_of_them in pairs:
            one.grad = None if all_of_them.grad is None else all_of_them.grad[:1]
        set_learning_rate(self._adamw, self._lr)
        self._adamw.step()
        for weight, momentum in zip(self._muon, self._momenta, strict=True):
            assert weight.grad is not None, "callers have gradients"
            momentum.lerp_(weight.grad, 1 - _MUON_MOMENTUM)
            update = _orthogonalised(weight.grad.lerp(momentum, _MUON_MOMENTUM))
            weight.mul_(1 - self._lr * WEIGHT_DECAY)
            weight.add_(update, alpha=-self._lr * 0.2 * max(weight.shape[1:]) ** 0.5)
        for one, all_of_them in pairs:
            all_of_them[1:].copy_(one.expand_as(all_of_them[1:]))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention as plain products: heads of few columns are faster so on a CPU."""
    T = q.shape[2]
    hidden = torch.full((T, T), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(
        hidden, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=q.shape[3] ** -0.5
    )
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(v.shape)


def _orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Return the nearest orthogonal matrices, about: Muon's five Newton-Schulz steps."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


@lru_cache(maxsize=4)
def _tokens(
    *, steps: int, world_size: int, seed: int, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of all workers and steps, [steps, world_size, B, T]."""
    kinds: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for rank in range(world_size):
        ranks = batches(rank, world_size=world_size, seed=seed, batch_size=batch_size)
        for kind, parts in zip(kinds, zip(*islice(ranks, steps), strict=True), strict=True):
            kind.append(torch.stack(parts))
    inputs, targets = (torch.stack(kind, dim=1) for kind in kinds)
    return inputs, targets


def _tokens_of(
    problem: Problem, world_size: int, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    inputs, targets = _tokens(
        steps=problem.steps, world_size=world_size, seed=problem.seed, batch_size=problem.batch_size
    )
    return zip(inputs.to(device), targets.to(device), strict=True)


def train_ddp_stacked(
    problem: Problem, *, world_size: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Transformer:
    """Train one model on the batches of all workers; the mean of their gradients is its gradient.

    Args:
        problem: What is trained.
        world_size: Workers.
        dtype: Of parameters and arithmetic.
        device: Where it is trained; it comes back on the CPU.
    """
    stack = StackedModel(problem, number=1, dtype=dtype, device=device)
    for pair in _tokens_of(problem, world_size, device):
        inputs, targets = (tokens.view(1, -1, SEQUENCE_LENGTH) for tokens in pair)
        stack.gradient(inputs, targets)
        stack.clip()
        stack.update()
    return stack.modules[0].cpu()


class _Placeholder(torch.optim.Optimizer):
    """Stands for the inner optimizer of one worker; steps are taken for all workers together."""

    def __init__(self, module: torch.nn.Module, take_step: Callable[[], object]) -> None:
        super().__init__(module.parameters(), {"lr": 1.0})
        self._take_step = take_step

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Wait for the common step."""
        del closure
        self._take_step()


def train_rule_stacked(
    problem: Problem,
    rule: OuterRule,
    *,
    world_size: int,
    coded: Callable[[Any], Any],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Transformer:
    """Train with one rule and return the drained model of the first worker.

    Args:
        problem: What is trained.
        rule: How workers are brought together.
        world_size: Workers.
        coded: Puts the codec round a worker's transport.
        dtype: Of parameters and arithmetic.
        device: Where they are trained; the model comes back on the CPU.
    """
    late = isinstance(rule, DelayedGradients)
    stack = StackedModel(problem, number=world_size, dtype=dtype, device=device, alike=late)
    tokens = _tokens_of(problem, world_size, device)

    def local_step() -> None:
        stack.gradient(*next(tokens))
        if not late:  # these clip the mean that arrives, in the engine
            stack.clip()
            stack.update()

    def late_step() -> None:
        if next(stack.modules[0].parameters()).grad is not None:  # a mean has arrived
            stack.update()

    computed = Barrier(world_size, action=local_step)
    stepped = Barrier(world_size, action=late_step)

    def work(transport: InMemoryTransport) -> None:
        module = stack.modules[transport.rank]
        optimizer = _Placeholder(module, stepped.wait)
        sync = OuterSync(module, optimizer, rule=rule, transport=coded(transport))
        for step in range(problem.steps):
            computed.wait()
            set_learning_rate(optimizer, learning_rate(step, problem))
            if late:
                stack.lend_gradients(transport.rank)
                optimizer.step()
            sync.step()
        sync.finalize()

    def guarded(transport: InMemoryTransport) -> None:
        try:
            work(transport)
        except BaseException:
            computed.abort()
            stepped.abort()
            raise

    run_world(world_size, guarded, timeout_s=_TIMEOUT_S)
    return stack.modules[0].cpu()
