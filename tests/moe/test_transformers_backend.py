"""The operator as an experts backend of transformers, against transformers' own loop."""

import importlib
import types

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


def compared(module, top_k=2, *, parallel=False):
    """Output and all gradients against those of transformers' own products."""
    generator = torch.Generator().manual_seed(1)
    hidden = module.down_proj.shape[2 if module.is_transposed else 1]
    number = module.num_experts
    x = torch.randn(9, hidden, dtype=torch.float64, generator=generator).requires_grad_()
    ids = torch.rand(9, number + parallel, generator=generator).argsort(dim=1)[:, :top_k]
    weights = torch.rand(9, top_k, dtype=torch.float64, generator=generator)
    if parallel:  # what another rank has comes as a number beyond the last, with weight zero
        weights = weights.masked_fill(ids == number, 0.0)
    weights.requires_grad_()
    leaves = [x, weights, *module.parameters()]
    calls = (module, lambda *given: moe.batched_mm_experts_forward(module, *given))
    for call in calls:
        output = call(x, ids, weights)
        loss = output.square().sum()
        torch.autograd.grad(loss, leaves, retain_graph=True)  # leaves what is kept as it was
        gradients = torch.autograd.grad(loss, leaves)
        yield output.detach(), *gradients


def agree(module, **options):
    for found, expected in zip(*compared(module, **options), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "activation",
    ["silu", "gelu", "gelu_python", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "linear"],
)
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
    agree(module, parallel=parallel)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["silu", "gelu", "softplus", "logsigmoid"])
def test_an_activation_may_be_a_plain_function(name, gated):
    module = experts(has_gate=gated)
    del module.act_fn
    module.act_fn = getattr(torch.nn.functional, name)
    agree(module)


FAMILIES = [
    ("beam", "BeamExperts"),
    ("deepseek_v4", "DeepseekV4Experts"),
    ("glm5_next", "Glm5NextTextExperts"),
    ("gpt_oss", "GptOssExperts"),
    ("hy_v4", "HYV4Experts"),
    ("inkling2", "Inkling2Experts"),
    ("lfm2_moe", "Lfm2MoeExperts"),
    ("minimax_m3_vl", "MiniMaxM3VLExperts"),
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
]
TINY = types.SimpleNamespace(
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 5),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 12),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), 1.3),
    **dict.fromkeys(("mlp_gate_softcap", "mlp_up_softcap"), 2.0),
    hidden_size=8,
    hidden_act="silu",
    _experts_implementation="fivefold",
)


@pytest.mark.parametrize(("family", "name"), FAMILIES, ids=[family for family, _ in FAMILIES])
def test_gates_of_their_own_are_called(family, name):
    """Clamped, shifted, interleaved, computed in float32: whatever the model does."""
    try:
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError:
        pytest.skip(f"this transformers has no {family}")
    torch.manual_seed(2)
    register_transformers_backend()
    module = getattr(modeling, name)(TINY)
    in_float32 = family in {"beam", "inkling2"}  # their gates are, whatever comes in
    module = module.float() if in_float32 else module.double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    if not in_float32:
        agree(module)
        return
    x, ids, weights = torch.randn(9, 8), torch.rand(9, 5).argsort(dim=1)[:, :2], torch.rand(9, 2)
    expected = moe.batched_mm_experts_forward(module, x, ids, weights)
    torch.testing.assert_close(module(x, ids, weights), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_gates_of_their_own_leave_a_graph_and_come_back():
    module = experts()
    type(module)._apply_gate = lambda _self, rows: rows[..., :10].tanh() + rows[..., 10:]
    given = (torch.randn(3, 8).double(), torch.tensor([[0, 1]] * 3), torch.ones(3, 2).double())
    compiled = torch.compile(lambda *given: module(*given) * 2, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), 2 * module(*given))
    torch.compiler.reset()


def test_what_does_not_fit_is_refused_by_name():
    given = (torch.zeros(1, 8).double(), torch.tensor([[0, 1]]), torch.ones(1, 2).double())
    with pytest.raises(UnsupportedError, match="normalises each expert's output"):
        experts(has_post_expert_norm=True)(*given)
    module = experts()
    module.act_fn = torch.nn.PReLU(dtype=torch.float64)  # a gate's gradient would be left out
    with pytest.raises(UnsupportedError, match=r"has parameters of its own \(act_fn.weight\)"):
        module(*given)


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
