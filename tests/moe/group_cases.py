"""The operator over a group's virtual ranks: more cases of ``exchange_cases``.

Forward and gradients against one process that has all experts, which other tests compare with
float64.
"""

import copy
import pickle

import torch

from fivefold.errors import FivefoldError
from fivefold.moe import (
    MoE,
    MoEConfig,
    OneSidedConfig,
    OneSidedGroup,
    Router,
    VirtualHeap,
    fused_moe,
)
from fivefold.moe.parallel._config import heap_layout
from oracles.experts import TOLERANCE, operands, relative

CASES = {}


def case(function):
    CASES[f"group: {function.__name__.replace('_', ' ')}"] = function
    return function


def group_of(given, ranks, *, activation="swiglu", **options):
    experts, hidden, inner = given["w2"].shape
    tokens, top_k = given["topk_ids"].shape
    usual = {"max_tokens": max(1, tokens), "dtype": given["x"].dtype, "training": True}
    config = OneSidedConfig(
        ranks=ranks,
        experts=experts,
        hidden=hidden,
        intermediate=inner,
        top_k=top_k,
        activation=activation,
        debug=True,
        **(usual | options),
    )
    return OneSidedGroup(config, VirtualHeap(ranks, nbytes=config.heap_bytes()), timeout_s=5.0)


def with_gradients(given, scale=None, **options):
    """The output, and the gradients of some function of it by name."""
    leaves = {n: v.clone().requires_grad_() for n, v in given.items() if v.is_floating_point()}
    output = fused_moe(**(given | leaves), **options)
    steepness = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype)
    (output * (steepness.view_as(output) if scale is None else scale)).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())
    return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def spoil(group):
    """Rows of earlier calls become NaN; words that count stay."""
    group._scratch.fill_(0xFF)
    sections = heap_layout(group.config).sections
    first, last = sections["weights"][0], sections["shadow"][0]
    group.heap.own[:, first:last] = 0xFF


def agree(slopes, right):
    """Gradients of torch's own products, over other rows at once."""
    for name, slope in slopes.items():
        limit = TOLERANCE[slope.dtype] if right[name].any() else 0.0
        assert (slope - right[name]).norm() <= limit * right[name].norm(), name


def compared(given, ranks, *, backends=("reference",), **options):
    """The bits of one process with the same kernels.

    Not with "reference": a rank's rows are other blocks at other places in memory, for which a
    matrix library may take another way. There they agree up to rounding.
    """
    names = ("activation", "weight_on_input", "capacity", "drop_policy")
    known = {name: options.pop(name) for name in names if name in options}
    made = {"activation": known["activation"]} if "activation" in known else {}
    worst = 0.0
    for number in ranks:
        group = group_of(given, number, **made, **options)
        for backend in backends:
            spoil(group)
            found, slopes = with_gradients(given, group=group, backend=backend, **known)
            wanted, right = with_gradients(given, backend=backend, **known)
            if backend == "reference":
                agree(slopes, right)
            else:
                assert torch.equal(found, wanted), (number, backend)
                for name, slope in slopes.items():
                    assert torch.equal(slope, right[name]), (number, backend, name)
            worst = max(worst, relative(found, wanted.double()) if found.any() else 0.0)
        assert group.epoch == 2 * len(backends)
    return {"error": worst}


@case
def forward_and_gradients_of_one_launch():
    given = operands((9, 16, 24, 4, 2), bias=True, dtype=torch.float32)
    return compared(given, (2,), backends=("fused", "split"))


@case
def any_number_of_ranks():
    given = operands((13, 24, 16, 6, 3), bias=True, dtype=torch.float32)
    return compared(given, (1, 3))


@case
def the_capacity_layout():
    given = operands((40, 16, 8, 6, 2), dtype=torch.float32)
    group = group_of(given, 3, capacity=14)
    found, slopes = with_gradients(given, group=group)
    wanted, right = with_gradients(given)
    agree(slopes, right)
    return {"error": relative(found, wanted.double())}


@case
def bfloat16():
    return compared(operands((21, 16, 32, 4, 2), dtype=torch.bfloat16), (2,))


@case
def float16_with_a_plain_activation():
    given = operands((10, 16, 32, 4, 2), "relu2", dtype=torch.float16)
    return compared(given, (4,), activation="relu2")


@case
def weights_on_the_input():
    given = operands((9, 16, 16, 4, 1), bias=True, dtype=torch.float32)
    return compared(given, (2,), weight_on_input=True, backends=("reference", "fused"))


@case
def dropped_and_skewed():
    given = operands((20, 16, 16, 4, 2), bias=True, dtype=torch.float32)
    given["topk_ids"] = torch.tensor([[1, -1], [3, 1]]).repeat(10, 1)  # two experts get nothing
    given["topk_ids"][::3] = -1
    return compared(given, (2,))


@case
def a_capacity_of_each_rank():
    given = operands((12, 16, 16, 2, 2), dtype=torch.float32)
    found, slopes = with_gradients(given, group=group_of(given, 2), capacity=4)
    part = ("x", "topk_ids", "topk_weights")
    halves = [given | {n: given[n][a : a + 6] for n in part} for a in (0, 6)]
    wanted = [with_gradients(half, capacity=4)[0] for half in halves]
    assert not slopes["topk_weights"].all()  # some were dropped
    return {"error": relative(found, torch.cat(wanted).double())}


@case
def a_layer():
    """Output, losses, loads and all gradients, with a shared expert."""
    torch.manual_seed(3)
    router = Router(top_k=2, score="sigmoid")
    config = MoEConfig(
        hidden=16, intermediate=8, experts=4, bias=True, shared_intermediate=4, router=router
    )
    whole = MoE(config)
    made = OneSidedConfig(
        ranks=2,
        experts=4,
        hidden=16,
        intermediate=8,
        top_k=2,
        max_tokens=9,
        dtype=torch.float32,
        training=True,
    )
    group = OneSidedGroup(made, VirtualHeap(2, nbytes=made.heap_bytes()))
    spread = MoE(config, group)
    spread.load_state_dict(whole.state_dict())
    x = torch.randn(1, 15, 16)  # 8 tokens on one rank, 7 on the other
    for layer in (whole, spread):
        loss = layer(x).square().sum() + layer.auxiliary_loss(balance=1.0, z=0.1)
        loss.backward()
    assert torch.equal(spread.last_load.routed, whole.last_load.routed)
    assert torch.equal(spread.last_load.kept, whole.last_load.kept)
    right = dict(whole.named_parameters())
    worst = max(relative(p.grad, right[n].grad.double()) for n, p in spread.named_parameters())
    return {"error": worst}


@case
def a_copy_of_a_layer_has_its_ranks():
    """It once read what came from a copy of the heap, where nothing comes."""
    group = group_of(operands((5, 16, 8, 4, 2), dtype=torch.float32), 2)
    layer = MoE(MoEConfig(hidden=16, intermediate=8, experts=4), group)
    before, x = torch.randn(2, 5, 16)
    layer(before)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x), layer(x))
    try:
        pickle.dumps(layer)  # addresses mean nothing in another process
    except FivefoldError as error:
        return {"holds": "save the layer's state_dict()" in str(error)}
    return {"holds": False}


@case
def no_tokens_anywhere():
    given = operands((5, 16, 16, 4, 2), bias=True, dtype=torch.float32)
    given |= {name: given[name][:0] for name in ("x", "topk_ids", "topk_weights")}
    found, slopes = with_gradients(given, group=group_of(given, 2))
    assert not any(slope.any() for slope in slopes.values())
    return {"holds": found.shape == (0, 16)}


@case
def what_does_not_fit_is_named():
    given = operands((8, 16, 16, 4, 2), dtype=torch.float32)
    group = group_of(given, 2, training=False)
    sizes = {"hidden": 16, "intermediate": 16, "experts": 4}
    spread = MoE(MoEConfig(**sizes), group_of(given, 2))
    wrong = {
        "no room for a backward": {"w2": given["w2"].clone().requires_grad_()},
        "made for 'swiglu'": {"activation": "reglu"},
        "memory of its own": {"workspace": object()},
        "must be a OneSidedGroup": {"group": 2},
        "nothing is kept for the backward": {"recompute": False},
        "are not those of the group": {name: given[name][:2] for name in ("w13", "w2")},
        "topk_weights of token 0 hold NaN": {"topk_weights": given["topk_weights"] * torch.nan},
        "there are 4 experts": {"topk_ids": given["topk_ids"] + 3},
        "weight_on_input needs top_k 1": {"weight_on_input": True},
        "no backend 'fast'": {"backend": "fast"},
        "the group was made for 8": {
            name: given[name].repeat(3, 1) for name in ("x", "topk_ids", "topk_weights")
        },
        "x is on meta": {name: value.to("meta") for name, value in given.items()},
    }
    calls = {
        part: lambda change=change: fused_moe(**({"group": group} | given | change))
        for part, change in wrong.items()
    } | {
        "programs must be a whole number from 1; got -1": lambda: group.fused_moe(
            **given, programs=-1
        ),
        "num_tokens must be a whole number from 0; got 4.0": lambda: group.fused_moe(
            **given, num_tokens=[4.0, 4.0]
        ),
        "no precision 'fp8'": lambda: group.fused_moe(**given, precision="fp8"),
        "timeout_s must be positive and below 1e+09; got inf": lambda: OneSidedGroup(
            group.config, group.heap, timeout_s=torch.inf
        ),
        "the layer has 6 experts, the group 4": lambda: MoE(
            MoEConfig(**(sizes | {"experts": 6})), group
        ),
        "hidden of the layer is 8, of the group 16": lambda: MoE(
            MoEConfig(**(sizes | {"hidden": 8})), group
        ),
        "top_k of the layer is 1": lambda: MoE(MoEConfig(**sizes, router=Router(top_k=1)), group),
        "keeps nothing": lambda: MoE(MoEConfig(**sizes, recompute=False), group),
        "the layer has width": lambda: spread(torch.zeros(2, 8)),
    }
    for part, call in calls.items():
        try:
            call()
            found = "nothing"
        except FivefoldError as error:
            found = str(error)
        assert part in found, found
    group.close()
    try:
        fused_moe(**given, group=group)
    except FivefoldError as error:
        return {"holds": "it is closed" in str(error)}
    return {"holds": False}
