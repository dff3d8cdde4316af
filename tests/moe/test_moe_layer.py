"""The layer: forward against the parts, losses, training, checkpoints of other libraries."""

import copy
import io
import json
import warnings

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from fivefold.errors import ConfigurationError, DataError
from fivefold.moe import (
    ACTIVATIONS,
    MoE,
    MoEConfig,
    Router,
    convert_checkpoint,
    export_checkpoint,
    open_checkpoint,
    route,
)
from fivefold.moe.checkpoints import LAYOUTS
from oracles.experts import experts_one_by_one


def layer_of(**options):
    torch.manual_seed(0)
    return MoE(MoEConfig(**({"hidden": 6, "intermediate": 5, "experts": 4} | options))).double()


def test_forward_is_router_experts_and_shared_expert():
    layer = layer_of(shared_intermediate=7, selection_bias=True, router=Router(
        top_k=2, score="sigmoid", scale=2.5))  # fmt: skip
    layer.gate.selection_bias.copy_(torch.tensor([0.0, 1.0, 0.0, -1.0]))
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    tokens = x.view(-1, 6)
    routing = route(tokens @ layer.gate.weight.T, layer.config.router,
                    selection_bias=layer.gate.selection_bias)  # fmt: skip
    swiglu = ACTIVATIONS["swiglu"]
    wanted = experts_one_by_one(tokens, layer.experts.w13, layer.experts.w2, routing.ids_TK,
                                routing.weights_TK, activation=swiglu)  # fmt: skip
    wanted = wanted + swiglu(tokens @ layer.shared.w13[0].T) @ layer.shared.w2[0].T
    assert torch.allclose(layer(x).view(-1, 6), wanted, rtol=1e-12, atol=1e-13)
    assert torch.equal(layer.last_routing.ids_TK, routing.ids_TK)


def test_losses_reach_the_router_and_training_learns():
    layer = layer_of(router=Router(top_k=2), bias=True)
    with pytest.raises(ConfigurationError, match="no routing yet"):
        layer.auxiliary_loss()
    x = torch.randn(64, 6, dtype=torch.float64)
    target = torch.sin(2 * x)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(150):
        loss = (layer(x) - target).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        (loss + layer.auxiliary_loss(balance=0.01, z=1e-3)).backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    assert layer.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_without_tokens_the_losses_are_zero_with_a_graph(score):
    """A rank whose batch is empty takes part in its peers' backward pass like any other."""
    layer = layer_of(router=Router(top_k=2, score=score))
    x = torch.zeros(0, 6, dtype=torch.float64, requires_grad=True)
    output = layer(x)
    loss = layer.auxiliary_loss(balance=0.3, z=0.2)
    assert float(loss.detach()) == 0.0
    (output.sum() + loss).backward()
    assert x.grad.shape == (0, 6)
    assert torch.equal(layer.gate.weight.grad, torch.zeros(4, 6, dtype=torch.float64))


def test_what_a_layer_remembers_holds_no_graph():
    layer = layer_of(router=Router(top_k=2))
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    layer(x)
    assert not layer.last_logits.requires_grad
    assert not layer.last_routing.weights_TK.requires_grad
    assert not layer.last_routing.scores_TE.requires_grad
    wanted = torch.autograd.grad(layer.auxiliary_loss(), layer.gate.weight, retain_graph=True)
    again = torch.autograd.grad(layer.auxiliary_loss(), layer.gate.weight)  # as often as one likes
    assert torch.equal(wanted[0], again[0])
    assert wanted[0].any()
    with torch.no_grad():
        layer(x)
        assert not layer.auxiliary_loss().requires_grad
    assert not layer.eval().auxiliary_loss().requires_grad


def through_a_checkpoint(layer, x):
    checkpoint(layer, x, use_reentrant=True)


def without_gradients(layer, x):
    with torch.no_grad():
        layer(x)


def in_evaluation(layer, x):
    without_gradients(layer.eval(), x)
    layer.train()


@pytest.mark.parametrize("forward", [through_a_checkpoint, without_gradients, in_evaluation])
def test_a_loss_whose_gradient_would_reach_no_router_is_refused(forward):
    layer = layer_of(router=Router(top_k=2))
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    forward(layer, x)
    with pytest.raises(ConfigurationError, match="use_reentrant=False"):
        layer.auxiliary_loss()
    layer.gate.weight.requires_grad_(False)  # nothing is to be learned
    assert float(layer.auxiliary_loss()) > 0


def test_a_layer_is_copied_and_averaged_after_a_training_step():
    layer = layer_of(router=Router(top_k=2), shared_intermediate=3)
    x = torch.randn(5, 6, dtype=torch.float64)
    output = layer(x)
    averaged = AveragedModel(layer)
    twin = copy.deepcopy(layer)
    (output.sum() + layer.auxiliary_loss()).backward()  # the copies took nothing away
    averaged.update_parameters(layer)
    assert torch.equal(twin(x), output.detach())
    twin.auxiliary_loss().backward()
    for part in (copy.deepcopy(layer), averaged.module):
        assert torch.equal(part.last_routing.ids_TK, layer.last_routing.ids_TK)
        with pytest.raises(ConfigurationError, match="call the layer before its losses"):
            part.auxiliary_loss()  # the copy itself has computed nothing yet
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), layer(x))


BIAS = 7.5 + 1e-3 * torch.arange(4.0)  # 16 bits hold none of the differences


def assigned(layer):
    narrow = {
        name: t.bfloat16() if "bias" not in name else t for name, t in layer.state_dict().items()
    }
    fresh = MoE(layer.config)
    fresh.load_state_dict(narrow, assign=True)
    return fresh


def made_narrow(layer):
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        fresh = MoE(layer.config)
    finally:
        torch.set_default_dtype(default)
    fresh.load_state_dict(layer.state_dict())
    return fresh


CASTS = {
    "bfloat16": lambda layer: layer.bfloat16(),
    "half": lambda layer: layer.half(),
    "to": lambda layer: layer.to(torch.bfloat16),
    "type": lambda layer: layer.type(torch.bfloat16),
    "inside of a model": lambda layer: torch.nn.Sequential(layer).bfloat16()[0],
    "a state assigned": assigned,
    "made in 16 bits": made_narrow,
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_router_stays_wide_whatever_the_layer_becomes(cast):
    torch.manual_seed(0)
    layer = MoE(MoEConfig(hidden=6, intermediate=5, experts=4, selection_bias=True))
    layer.gate.selection_bias.copy_(BIAS)
    narrow = cast(layer)
    assert narrow.experts.w13.dtype.itemsize == 2
    assert torch.equal(narrow.gate.selection_bias, BIAS)
    x = torch.randn(50, 6).to(narrow.experts.w13.dtype)
    narrow(x)
    logits = x.float() @ narrow.gate.weight.float().T
    assert torch.equal(narrow.last_logits, logits)
    wanted = route(logits, layer.config.router, selection_bias=BIAS)
    assert torch.equal(narrow.last_routing.ids_TK, wanted.ids_TK)
    narrow.double()
    assert narrow.gate.selection_bias.dtype == torch.float64


def test_a_bias_that_something_else_narrowed_is_refused():
    layer = layer_of(selection_bias=True)
    layer.gate.selection_bias = layer.gate.selection_bias.bfloat16()
    with pytest.raises(ConfigurationError, match=r"selection_bias has become torch\.bfloat16"):
        layer(torch.zeros(1, 6, dtype=torch.float64))
    saved = {n: t.bfloat16() for n, t in layer.state_dict().items()}
    layer.load_state_dict(saved, assign=True)  # all that is left of it
    assert layer.gate.selection_bias.dtype == torch.float32


def test_capacity_of_the_layer():
    layer = layer_of(capacity_factor=0.5, router=Router(top_k=1, normalize=False))
    with torch.no_grad():
        layer.gate.weight.zero_()  # ties: every token to expert 0
    x = torch.randn(8, 6, dtype=torch.float64)
    assert layer(x).abs().sum(-1).nonzero()[:, 0].tolist() == [0]  # ceil(8 / 4 * 0.5) = 1


SCORES = ["softmax", "topk_softmax", "sigmoid", "topk_sigmoid", "sqrtsoftplus"]


@pytest.mark.slow
@given(
    router=st.builds(
        Router,
        top_k=st.integers(1, 3),
        score=st.sampled_from(SCORES),
        normalize=st.booleans(),
        scale=st.floats(0.5, 2.0),
        epsilon=st.sampled_from([1e-20, 1e-9, 1e-2, 1.0]),
    ),
    experts=st.integers(1, 6),
    options=st.fixed_dictionaries(
        {
            "activation": st.sampled_from(sorted(ACTIVATIONS)),
            "bias": st.booleans(),
            "shared_intermediate": st.sampled_from([0, 3]),
            "selection_bias": st.booleans(),
            "capacity_factor": st.sampled_from([None, 0.5, 2.0]),
            "recompute": st.booleans(),
        }
    ),
    gated=st.booleans(),
    on_input=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_parameter_learns_from_the_task_or_is_named(
    router, experts, options, gated, on_input, seed
):
    """A router whose weights are the same for all tokens gets a gradient of rounding errors."""
    assume(router.top_k <= experts)
    options |= {"shared_gate": gated and options["shared_intermediate"] > 0}
    options |= {"weight_on_input": on_input and router.top_k == 1}
    torch.manual_seed(seed)
    config = MoEConfig(hidden=4, intermediate=5, experts=experts, router=router, **options)
    layer = MoE(config).double()
    for name, parameter in layer.named_parameters():
        if name.endswith(("b13", "b2")):
            torch.nn.init.normal_(parameter)
    x = torch.randn(64, 4, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (layer(x) - torch.randn_like(x)).square().sum().backward()
    named = {str(warning.message).split()[0] for warning in said}
    slopes = {
        n: 0.0 if p.grad is None else float(p.grad.norm()) for n, p in layer.named_parameters()
    }
    assert named == {n for n, slope in slopes.items() if slope < 1e-6 * max(slopes.values())}


@pytest.mark.filterwarnings("ignore:gate.weight gets no gradient")
@given(
    tokens=st.integers(0, 9),
    router=st.builds(
        Router,
        top_k=st.integers(1, 2),
        score=st.sampled_from(["softmax", "topk_softmax", "sigmoid", "topk_sigmoid"]),
        normalize=st.booleans(),
        scale=st.floats(0.5, 2.0),
        groups=st.sampled_from([1, 2]),
        group_score=st.sampled_from(["max", "top2_sum"]),
    ),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_names_of_experts_and_places_of_tokens_do_not_matter(tokens, router, bias, seed):
    """Experts are renamed within their groups; with them output, loss and loads go along."""
    torch.manual_seed(seed)
    config = MoEConfig(
        hidden=6,
        intermediate=5,
        experts=6,
        router=router,
        bias=bias,
        selection_bias=True,
        shared_intermediate=3,
        shared_gate=True,
    )
    layer, renamed = MoE(config).double(), MoE(config).double()
    layer.gate.selection_bias.normal_(std=0.3)
    if bias:
        for parameter in (layer.experts.b13, layer.experts.b2):
            torch.nn.init.normal_(parameter)
    size = 6 // router.groups
    groups = torch.randperm(router.groups)
    names = torch.cat([group * size + torch.randperm(size) for group in groups])
    state = layer.state_dict()
    renamed.load_state_dict(
        {n: t[names] if n.startswith(("gate.", "experts.")) else t for n, t in state.items()}
    )
    x = torch.randn(tokens, 6, dtype=torch.float64)
    order = torch.randperm(tokens)
    found, wanted = renamed(x[order]), layer(x)[order]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert torch.equal(renamed.last_load.routed, layer.last_load.routed[names])
    losses = [part.auxiliary_loss(balance=1.0, z=0.5) for part in (renamed, layer)]
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-12)
    slopes = [
        torch.autograd.grad(output.square().sum() + loss, (part.gate.weight, part.experts.w2))
        for part, output, loss in zip((renamed, layer), (found, wanted), losses, strict=True)
    ]
    for slope, other in zip(*slopes, strict=True):
        torch.testing.assert_close(slope, other[names], rtol=1e-9, atol=1e-11)


def published_layer(layout):
    """A state dictionary as others write it, and this layer's own."""
    shared = 3 if LAYOUTS[layout].shared else 0
    layer = layer_of(shared_intermediate=shared, selection_bias=LAYOUTS[layout].bias is not None)
    if layer.gate.selection_bias is not None:
        layer.gate.selection_bias.copy_(torch.randn(4))
    return layer, export_checkpoint(layer.state_dict(), layout, prefix="model.layers.0.mlp.")


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts_come_back(layout):
    layer, published = published_layer(layout)
    found = convert_checkpoint(published, layout, prefix="model.layers.0.mlp.")
    own = layer.state_dict()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    fresh = layer_of(
        shared_intermediate=layer.config.shared_intermediate,
        selection_bias=layer.config.selection_bias,
    )
    fresh.load_state_dict(found)
    x = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(fresh(x), layer(x))


def test_names_of_the_layouts():
    names = {layout: set(published_layer(layout)[1]) for layout in LAYOUTS}
    prefix = "model.layers.0.mlp."
    assert f"{prefix}experts.3.w1.weight" in names["mixtral"]
    assert f"{prefix}experts.0.down_proj.weight" in names["qwen3"]
    assert f"{prefix}gate.e_score_correction_bias" in names["deepseek"]
    assert f"{prefix}shared_experts.up_proj.weight" in names["deepseek"]
    assert f"{prefix}experts.gate_up_proj" in names["transformers"]
    assert {f"{prefix}experts.w1", f"{prefix}router.gate.weight"} <= names["torchtitan"]


def test_published_maths_of_a_mixtral_layer():
    """The layer's published formula on the published weights, written out."""
    layer, published = published_layer("mixtral")
    x = torch.randn(9, 6, dtype=torch.float64)
    state = {name.removeprefix("model.layers.0.mlp."): value for name, value in published.items()}
    probabilities = torch.softmax(x @ state["gate.weight"].T, -1)
    weights, ids = probabilities.topk(2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    wanted = torch.zeros_like(x)
    for token in range(9):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            w1, w3, w2 = (state[f"experts.{expert}.{name}.weight"] for name in ("w1", "w3", "w2"))
            hidden = torch.nn.functional.silu(w1 @ x[token]) * (w3 @ x[token])
            wanted[token] += weight * (w2 @ hidden)
    assert torch.allclose(layer(x), wanted, rtol=1e-12, atol=1e-13)


def test_bad_checkpoints():
    _, published = published_layer("qwen3")
    with pytest.raises(ConfigurationError, match="there is no layout 'gpt'"):
        convert_checkpoint(published, "gpt")
    with pytest.raises(DataError, match=r"has no 'gate\.weight'"):
        convert_checkpoint(published, "qwen3")
    prefix = "model.layers.0.mlp."
    damaged = published | {f"{prefix}experts.2.up_proj.weight": torch.zeros(1, 6)}
    with pytest.raises(DataError, match=r"experts\.2\.up_proj\.weight has shape \(1, 6\)"):
        convert_checkpoint(damaged, "qwen3", prefix=prefix)
    with pytest.raises(ConfigurationError, match=r"no place for experts\.b13"):
        export_checkpoint(layer_of(bias=True).state_dict(), "mixtral")
    gated = layer_of(shared_intermediate=3, shared_gate=True)
    with pytest.raises(ConfigurationError, match="'deepseek' has no place for shared_gate"):
        export_checkpoint(gated.state_dict(), "deepseek")
    with pytest.raises(DataError, match=r"w13 has shape .* or the activation has no gate"):
        export_checkpoint(layer_of(activation="relu").state_dict(), "mixtral")
    for name, shape in {
        "gate.weight": (4, 7), "experts.gate_up_proj": (4, 10, 7), "experts.down_proj": (5, 6, 5),
        "shared_experts.down_proj.weight": (6, 2), "gate.e_score_correction_bias": (3,),
    }.items():  # fmt: skip
        damaged = published_layer("transformers")[1] | {prefix + name: torch.zeros(shape)}
        with pytest.raises(DataError, match="the other weights make it"):
            convert_checkpoint(damaged, "transformers", prefix=prefix)


def test_what_the_layout_does_not_know_is_not_left_behind():
    """A gate on the shared expert, more experts than the router has: it is another model."""
    _, published = published_layer("qwen3")
    for name in ("shared_expert_gate.weight", "experts.4.up_proj.weight", "experts.0.bias"):
        for prefix in ("model.layers.0.mlp.", ""):
            state = {n.replace("model.layers.0.mlp.", prefix): t for n, t in published.items()}
            state |= {"model.layers.1.mlp.gate.weight": torch.zeros(1)}  # of another layer
            convert_checkpoint(state, "qwen3", prefix=prefix)
            with pytest.raises(DataError, match=f"'qwen3' has no place for {prefix}{name}"):
                convert_checkpoint(state | {prefix + name: torch.zeros(1)}, "qwen3", prefix=prefix)
    _, published = published_layer("torchtitan")
    prefix = "model.layers.0.mlp."
    counter = {f"{prefix}tokens_per_expert": torch.zeros(4)}
    convert_checkpoint(published | counter, "torchtitan", prefix=prefix)


def test_float8_in_blocks_is_widened_by_its_scales():
    rows, columns = 130, 200  # blocks at the borders are not whole
    state = {"gate.weight": torch.randn(1, columns)}
    wanted = {}
    for name, shape in {
        "gate_proj": (rows, columns), "up_proj": (rows, columns), "down_proj": (columns, rows)
    }.items():  # fmt: skip
        weight = torch.randn(shape).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
        state[f"experts.0.{name}.weight"] = weight
        state[f"experts.0.{name}.weight_scale_inv"] = scale
        by_hand = weight.float()
        for row in range(shape[0]):
            for column in range(0, shape[1], 128):
                by_hand[row, column : column + 128] *= scale[row // 128, column // 128]
        wanted[name] = by_hand.bfloat16()
    found = convert_checkpoint(state, "deepseek")
    assert torch.equal(found["experts.w2"][0], wanted["down_proj"])
    assert torch.equal(found["experts.w13"][0], torch.cat([wanted["gate_proj"], wanted["up_proj"]]))
    scale = state.pop("experts.0.up_proj.weight_scale_inv")
    with pytest.raises(DataError, match=r"there is no 'experts\.0\.up_proj\.weight_scale_inv'"):
        convert_checkpoint(state, "deepseek")
    state["experts.0.up_proj.weight_scale_inv"] = scale[:1]
    with pytest.raises(DataError, match=r"scales of experts\.0\.up_proj\.weight .* shape \(1, 2\)"):
        convert_checkpoint(state, "deepseek")


def test_reads_a_layer_out_of_sharded_files(tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    layer, published = published_layer("mixtral")
    prefix = "model.layers.0.mlp."
    published = {name: tensor.contiguous() for name, tensor in published.items()}
    halves = [dict(list(published.items())[part::2]) for part in range(2)]
    for number, half in enumerate(halves):
        torch_files.save_file(half, tmp_path / f"model-{number}.safetensors")
    own = layer.state_dict()

    assert len(open_checkpoint(tmp_path)) == len(published)
    found = convert_checkpoint(open_checkpoint(tmp_path), "mixtral", prefix=prefix)
    assert all(torch.equal(found[name], own[name]) for name in own)
    places = {n: f"model-{number}.safetensors" for number, half in enumerate(halves) for n in half}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert set(open_checkpoint(tmp_path)) == set(published)
    found = convert_checkpoint(open_checkpoint(tmp_path), "mixtral", prefix=prefix)
    assert all(torch.equal(found[name], own[name]) for name in own)
    index.write_text(json.dumps({"weight_map": places | {"more": "model-9.safetensors"}}))
    with pytest.raises(DataError, match=r"model-9\.safetensors, which is not there"):
        open_checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(DataError, match="is damaged"):
        open_checkpoint(tmp_path)
    index.unlink()
    (tmp_path / "model-1.safetensors").write_bytes(b"cut off")
    with pytest.raises(DataError, match=r"model-1\.safetensors cannot be read"):
        open_checkpoint(tmp_path)
    with pytest.raises(DataError, match="there are no safetensors files"):
        open_checkpoint(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 0}, "experts must be a whole number from 1"),
        ({"shared_intermediate": -1}, "shared_intermediate must be a whole number from 0"),
        ({"capacity_factor": 0.0}, "capacity_factor must be a number, finite and above 0"),
        ({"activation": "mish"}, "no activation 'mish'"),
        ({"router": 2}, "router is 2"),
        ({"router": Router(top_k=5)}, "can reach 4 experts only"),
        ({"drop_policy": "luck"}, "drop policy is 'luck'"),
        ({"backend": "magic"}, "there is no backend 'magic'"),
        ({"capacity_factor": float("nan")}, "capacity_factor must be .* got nan"),
        ({"capacity_factor": "2"}, "capacity_factor must be .* got '2'"),
        ({"shared_gate": True}, "shared_gate needs a shared expert"),
        ({"weight_on_input": True}, "weight_on_input needs top_k 1; got 2"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ConfigurationError, match=message):
        MoEConfig(**({"hidden": 6, "intermediate": 5, "experts": 4} | options))


def test_wrong_width():
    with pytest.raises(ConfigurationError, match="the layer has width 6"):
        layer_of()(torch.zeros(2, 5, dtype=torch.float64))
    with pytest.raises(ConfigurationError, match="the layer has width 6"):
        layer_of()(torch.tensor(1.0))
