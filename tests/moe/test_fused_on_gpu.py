"""The kernel on a real GPU: real tiles, real concurrency. Skipped where there is none."""

import pytest
import torch

from fivefold.moe import Workspace, backends, fused_moe
from oracles.experts import TOLERANCE, expected, operands, relative

missing = backends("cuda")["fused"]
if missing is not None:
    pytest.skip(f"the kernel cannot run here: {missing}", allow_module_level=True)

SHAPES = [  # T, H, I, E, K
    (1, 256, 256, 8, 2),
    (37, 256, 384, 8, 8),
    (300, 512, 256, 64, 4),
    (1500, 256, 512, 4, 2),
    (130, 130, 70, 5, 3),  # weights without descriptors
]


SIZES = ("num_tokens", "hidden", "intermediate", "num_experts", "top_k")


def on_gpu(given):
    return {name: value.cuda() for name, value in given.items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["fused", "split"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_equals_one_by_one(shape, backend, dtype, activation):
    given = operands(shape, activation, bias=True, dtype=dtype)
    found = fused_moe(**on_gpu(given), activation=activation, backend=backend).cpu()
    assert relative(found, expected(given, activation)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("precision", "limit"), [("tf32", 1e-3), ("tf32x3", 5e-6)])
def test_precisions(precision, limit):
    given = operands((300, 512, 256, 16, 4), dtype=torch.float32)
    found = fused_moe(**on_gpu(given), backend="fused", precision=precision).cpu()
    assert relative(found, expected(given, "swiglu")) < limit


def test_the_same_bits_in_a_thousand_launches_without_a_pause():
    shape = (700, 256, 256, 32, 4)
    given = on_gpu(operands(shape, dtype=torch.bfloat16))
    skewed = given | {"topk_ids": torch.arange(4).repeat(700, 1).cuda()}
    sizes = dict(zip(SIZES, shape, strict=True))
    workspace = Workspace.allocate(**sizes, dtype=torch.bfloat16, device="cuda")
    first = [fused_moe(**g, backend="fused", workspace=workspace) for g in (given, skewed)]
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(500):
        workspace.scratch.fill_(0xFF)
        for g, wanted in zip((given, skewed), first, strict=True):
            differs |= (fused_moe(**g, backend="fused", workspace=workspace) != wanted).any()
    assert not bool(differs)
    assert not bool(workspace.control.any())


def test_in_a_graph():
    shape = (64, 256, 256, 8, 2)
    given = on_gpu(operands(shape, dtype=torch.bfloat16))
    sizes = dict(zip(SIZES, shape, strict=True))
    workspace = Workspace.allocate(**sizes, dtype=torch.bfloat16, device="cuda")
    wanted = fused_moe(**given, backend="fused", workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused_moe(**given, backend="fused", workspace=workspace)
    found.fill_(float("nan"))
    graph.replay()
    assert torch.equal(found, wanted)
