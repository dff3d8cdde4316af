"""The Gluon kernel on a Hopper GPU: numbers, bits, graphs. Skipped where there is none."""

import sys
from pathlib import Path

import pytest
import torch

from fivefold.moe import Workspace, backends, fused_moe

sys.path.insert(0, str(Path(__file__).parent))

from moe_oracle import TOLERANCE, expected, operands, relative

missing = backends("cuda")["gluon"]
if missing is not None:
    pytest.skip(f"the kernel cannot run here: {missing}", allow_module_level=True)

SHAPES = [  # T, H, I, E, K
    (1, 256, 256, 8, 2),
    (37, 256, 384, 8, 8),
    (300, 512, 192, 64, 4),  # the last columns of gate and up are half a tile
    (1500, 320, 512, 4, 2),
    (5, 64, 64, 3, 1),
]
SIZES = ("num_tokens", "hidden", "intermediate", "num_experts", "top_k")


def on_gpu(given):
    return {name: value.cuda() for name, value in given.items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu", "gelu_tanh"])
def test_equals_one_by_one(shape, dtype, activation):
    given = operands(shape, activation, bias=True, dtype=dtype)
    found = fused_moe(**on_gpu(given), activation=activation, backend="gluon").cpu()
    assert relative(found, expected(given, activation)) < TOLERANCE[dtype]


def test_weight_on_the_input_and_dropped_ids():
    given = operands((300, 256, 256, 8, 1), dtype=torch.bfloat16)
    given["topk_ids"][::3] = -1
    found = fused_moe(**on_gpu(given), backend="gluon", weight_on_input=True).cpu()
    wanted = expected(given, "swiglu", weight_on_input=True)
    assert relative(found, wanted) < TOLERANCE[torch.bfloat16]
    assert not found[::3].any()


def test_the_same_bits_in_a_thousand_launches_without_a_pause():
    shape = (700, 256, 256, 32, 4)
    given = on_gpu(operands(shape, dtype=torch.bfloat16))
    skewed = given | {"topk_ids": torch.arange(4).repeat(700, 1).cuda()}
    sizes = dict(zip(SIZES, shape, strict=True))
    workspace = Workspace.allocate(**sizes, dtype=torch.bfloat16, device="cuda")
    first = [fused_moe(**g, backend="gluon", workspace=workspace) for g in (given, skewed)]
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(500):
        workspace.scratch.fill_(0xFF)
        for g, wanted in zip((given, skewed), first, strict=True):
            differs |= (fused_moe(**g, backend="gluon", workspace=workspace) != wanted).any()
    assert not bool(differs)
    assert not bool(workspace.control.any())


def test_the_same_bits_for_all_grids():
    from fivefold.moe._activations import activation_named
    from fivefold.moe._gluon import forward_gluon

    given = on_gpu(operands((300, 256, 256, 8, 2), dtype=torch.bfloat16))
    call = [given[name] for name in ("x", "w13", "w2", "topk_ids", "topk_weights")]
    found = [
        forward_gluon(*call, activation=activation_named("swiglu"), programs=programs)
        for programs in (1, 7, 132)
    ]
    assert all(torch.equal(each, found[0]) for each in found)


def test_in_a_graph():
    shape = (64, 256, 256, 8, 2)
    given = on_gpu(operands(shape, dtype=torch.bfloat16))
    sizes = dict(zip(SIZES, shape, strict=True))
    workspace = Workspace.allocate(**sizes, dtype=torch.bfloat16, device="cuda")
    wanted = fused_moe(**given, backend="gluon", workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused_moe(**given, backend="gluon", workspace=workspace)
    found.fill_(float("nan"))
    graph.replay()
    assert torch.equal(found, wanted)
