"""The backward's kernels on a real GPU. Skipped where there is none."""

import pytest
import torch

from fivefold.moe import backends, fused_moe
from oracles.experts import TOLERANCE, expected, operands, relative

missing = backends("cuda")["fused"]
if missing is not None:
    pytest.skip(f"the kernels cannot run here: {missing}", allow_module_level=True)

SHAPES = [  # T, H, I, E, K
    (1, 256, 256, 8, 2),
    (300, 512, 256, 64, 4),
    (700, 256, 392, 4, 2),
    (130, 130, 70, 5, 3),  # weights without descriptors
]
NAMES = ("x", "w13", "w2", "topk_weights", "b13", "b2")


def gradients(given, **options):
    leaves = {n: v.cuda().requires_grad_(n in NAMES) for n, v in given.items()}
    out = fused_moe(**leaves, **options)
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    found = torch.autograd.grad((out * weight.cuda()).sum(), [leaves[n] for n in NAMES])
    return weight, dict(zip(NAMES, found, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_equals_autograd_of_one_by_one(shape, recompute, dtype, activation):
    given = operands(shape, activation, bias=True, dtype=dtype)
    options = {"activation": activation, "backend": "fused", "recompute": recompute}
    weight, found = gradients(given, **options)
    wide = {n: v.double().requires_grad_() if n in NAMES else v for n, v in given.items()}
    loss = (expected(wide, activation) * weight.double()).sum()
    wanted = torch.autograd.grad(loss, [wide[n] for n in NAMES])
    for name, right in zip(NAMES, wanted, strict=True):
        assert relative(found[name].cpu(), right) < TOLERANCE[dtype], name


@pytest.mark.parametrize(("precision", "limit"), [("tf32", 2e-3), ("tf32x3", 5e-6)])
def test_precisions(precision, limit):
    given = operands((300, 512, 256, 16, 4), bias=True, dtype=torch.float32)
    _, exact = gradients(given, backend="fused")
    _, found = gradients(given, backend="fused", precision=precision)
    for name, right in exact.items():
        assert relative(found[name], right.double()) < limit, name


def test_the_same_bits_every_time():
    given = operands((700, 256, 256, 32, 4), bias=True, dtype=torch.bfloat16)
    _, first = gradients(given, backend="fused")
    for _ in range(100):
        _, found = gradients(given, backend="fused")
        assert all(torch.equal(found[name], first[name]) for name in NAMES)
