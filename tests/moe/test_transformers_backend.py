"""The operator as an experts backend of transformers, against transformers' own loop."""

import pytest
import torch

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe import backends, register_transformers_backend

transformers = pytest.importorskip("transformers", minversion="5.0")
moe = pytest.importorskip("transformers.integrations.moe")

SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def qwen3(**changes):
    more = {"head_dim": 8, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3}
    config = transformers.Qwen3MoeConfig(**(SIZES | more | changes))
    return transformers.Qwen3MoeForCausalLM(config)


def mixtral():
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def deepseek():
    config = transformers.DeepseekV3Config(
        **SIZES,
        moe_intermediate_size=12,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def outputs_and_gradients(model, tokens):
    model.zero_grad()
    logits = model(tokens).logits
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("make", [qwen3, mixtral, deepseek], ids=lambda make: make.__name__)
def test_models_compute_what_their_own_loop_computes(make):
    torch.manual_seed(0)
    model = make().double()
    for parameter in model.parameters():  # their own initial values are near zero
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(29, (2, 7))
    model.set_experts_implementation("eager")
    expected, expected_gradients = outputs_and_gradients(model, tokens)
    model.set_experts_implementation(register_transformers_backend())
    found, gradients = outputs_and_gradients(model, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-7, atol=1e-9, msg=name)


class Experts(torch.nn.Module):
    """Expert weights as transformers keeps them, for one layout."""

    def __init__(self, config):
        super().__init__()
        layout = config.layout
        rows = 20 if layout.get("has_gate", True) else 10
        first, second = (5, rows, 8), (5, 8, 10)
        if layout.get("is_transposed"):
            first, second = (5, 8, rows), (5, 10, 8)
        name = "gate_up_proj" if layout.get("has_gate", True) else "up_proj"
        self.num_experts = 5
        setattr(self, name, torch.nn.Parameter(torch.randn(first).double()))
        self.down_proj = torch.nn.Parameter(torch.randn(second).double())
        if layout.get("has_bias"):
            setattr(self, f"{name}_bias", torch.nn.Parameter(torch.randn(5, rows).double()))
            self.down_proj_bias = torch.nn.Parameter(torch.randn(5, 8).double())
        self.act_fn = transformers.activations.ACT2FN[config.activation]

    def forward(self, *_operands):
        pytest.fail("the backend was not asked")


def experts(activation="silu", **layout):
    class Config:
        _experts_implementation = "fivefold"

    Config.layout, Config.activation = layout, activation
    made = moe.use_experts_implementation(type("Own", (Experts,), {}), **layout)(Config())
    register_transformers_backend()
    return made


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize(
    "layout",
    [{}, {"is_transposed": True}, {"has_bias": True}, {"has_gate": False, "has_bias": True}],
    ids=str,
)
@pytest.mark.parametrize("parallel", [False, True])
def test_layouts_and_activations_agree_with_grouped_products(activation, layout, parallel):
    torch.manual_seed(1)
    module = experts(activation, **layout)
    module._is_expert_parallel = parallel
    x = torch.randn(9, 8, dtype=torch.float64)
    ids = torch.rand(9, 6 if parallel else 5).argsort(dim=1)[:, :2]
    weights = torch.rand(9, 2, dtype=torch.float64)
    if parallel:  # what another rank has comes as a number beyond the last, with weight zero
        weights = weights.masked_fill(ids == 5, 0.0)
    expected = moe.batched_mm_experts_forward(module, x, ids, weights)
    torch.testing.assert_close(module(x, ids, weights), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("activation", "layout", "reason"),
    [
        ("quick_gelu", {}, "has the activation QuickGELUActivation"),
        ("relu2", {}, "gates with ReLUSquaredActivation"),
        ("silu", {"is_concatenated": False}, "interleaves"),
        ("silu", {"has_post_expert_norm": True}, "normalises each expert's output"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(activation, layout, reason):
    module = experts(activation, **layout)
    with pytest.raises(UnsupportedError, match=reason):
        module(torch.zeros(1, 8).double(), torch.tensor([[0, 1]]), torch.ones(1, 2).double())


def test_a_gate_of_its_own_is_refused():
    module = experts()
    type(module)._apply_gate = lambda _self, rows: rows[..., :10]
    with pytest.raises(UnsupportedError, match="has a gate of its own"):
        module(torch.zeros(1, 8).double(), torch.tensor([[0, 1]]), torch.ones(1, 2).double())


def test_names_of_transformers_and_unknown_backends_are_refused():
    for name in ("eager", "grouped_mm"):
        with pytest.raises(ConfigurationError, match="is a backend of transformers itself"):
            register_transformers_backend(name)
    with pytest.raises(ConfigurationError, match="there is no backend 'none'"):
        register_transformers_backend(backend="none")
    if backends("cpu")["fused"] is not None and not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="cannot work here"):
            register_transformers_backend(backend="fused")
    assert register_transformers_backend("fivefold_reference", backend="reference")
    assert register_transformers_backend() == register_transformers_backend()
