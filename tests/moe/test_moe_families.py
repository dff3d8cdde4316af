"""Routers and layers made from a configuration of transformers, against the model's own block."""

import importlib
import inspect
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError, UnsupportedError
from fivefold.moe import MoE, Router, route

transformers = pytest.importorskip("transformers", minversion="5.0")

# Family: folder of its module, and the class of its block, which has a router and experts.
BLOCKS = {
    "afmoe": ("afmoe", "AfmoeSparseMoeBlock"),
    "aria_text": ("aria", "AriaTextMoELayer"),
    "axk2": ("axk2", "AXK2MoE"),
    "bailing_hybrid": ("bailing_hybrid", "BailingHybridMoE"),
    "beam": ("beam", "BeamMoE"),
    "cohere2_moe": ("cohere2_moe", "Cohere2MoeSparseMoeBlock"),
    "dbrx": ("dbrx", "DbrxFFN"),
    "deepseek_ocr2_text": ("deepseek_ocr2", "DeepseekOcr2TextMoe"),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2Moe"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3MoE"),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32MoE"),
    "dots1": ("dots1", "Dots1MoE"),
    "dots3_note_text": ("dots3_note", "Dots3NoteTextMoE"),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock"),
    "exaone_moe": ("exaone_moe", "ExaoneMoeSparseMoEBlock"),
    "flex_olmo": ("flex_olmo", "FlexOlmoSparseMoeBlock"),
    "flint": ("flint", "FlintSparseMoeBlock"),
    "glm4_moe": ("glm4_moe", "Glm4MoeMoE"),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteMoE"),
    "glm4v_moe_text": ("glm4v_moe", "Glm4vMoeTextMoE"),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsaMoE"),
    "granitemoe": ("granitemoe", "GraniteMoeMoE"),
    "granitemoe_swa": ("granitemoe_swa", "GraniteMoeSWAMoE"),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridMoE"),
    "granitemoeshared": ("granitemoeshared", "GraniteMoeSharedMoE"),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", "HunYuanMoEV1Moe"),
    "hy_v3": ("hy_v3", "HYV3MoE"),
    "jamba": ("jamba", "JambaSparseMoeBlock"),
    "kimi_linear": ("kimi_linear", "KimiLinearMoE"),
    "kolibri1": ("kolibri1", "Kolibri1SparseMoeBlock"),
    "laguna": ("laguna", "LagunaSparseMoeBlock"),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeSparseMoeBlock"),
    "llama4_text": ("llama4", "Llama4TextMoe"),
    "mellum": ("mellum", "MellumSparseMoeBlock"),
    "mimo_v2_flash": ("mimo_v2_flash", "MiMoV2FlashMoE"),
    "minimax": ("minimax", "MiniMaxSparseMoeBlock"),
    "minimax_m2": ("minimax_m2", "MiniMaxM2SparseMoeBlock"),
    "mistral4": ("mistral4", "Mistral4MoE"),
    "mistral_large4_text": ("mistral_large4", "MistralLarge4TextMoE"),
    "mixtral": ("mixtral", "MixtralSparseMoeBlock"),
    "nemotron_h": ("nemotron_h", "NemotronHMoE"),
    "olmoe": ("olmoe", "OlmoeSparseMoeBlock"),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeSparseMoeBlock"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    "qwen3_next": ("qwen3_next", "Qwen3NextSparseMoeBlock"),
    "qwen3_omni_moe_text": ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextSparseMoeBlock"),
    "qwen3_omni_moe_talker_text": ("qwen3_omni_moe", "Qwen3OmniMoeTalkerTextSparseMoeBlock"),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", "Qwen3VLMoeTextSparseMoeBlock"),
    "qwen4_exp_text": ("qwen4_exp", "Qwen4ExpTextSparseMoeBlock"),
    "solar_open": ("solar_open", "SolarOpenMoE"),
    "unlimited_ocr_text": ("unlimited_ocr", "UnlimitedOcrTextMoe"),
}
# Family: its module, the class of its router, and what its block multiplies weights by afterwards.
ROUTERS = {
    "axk1": ("axk1", "AXK1TopkRouter", None),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4TopKRouter", None),
    "ernie4_5_vl_moe_text": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeMoeTopKRouter", None),
    "glm5_next_text": ("glm5_next", "Glm5NextTextTopkRouter", None),
    "gpt_oss": ("gpt_oss", "GptOssTopKRouter", None),
    "hy_v4": ("hy_v4", "HYV4TopkRouter", None),
    "inkling2_text": ("inkling2", "Inkling2TopKRouter", None),
    "longcat_flash": ("longcat_flash", "LongcatFlashTopkRouter", None),
    "minimax_m3_vl_text": ("minimax_m3_vl", "MiniMaxM3VLTopKRouter", "routed_scaling_factor"),
    "muse_spark_text": ("muse_spark", "MuseSparkTopkRouter", None),
    "openai_privacy_filter": (
        "openai_privacy_filter",
        "OpenAIPrivacyFilterTopKRouter",
        "num_experts_per_tok",
    ),
    "step3p5": ("step3p7", "Step3p7TopKRouter", "moe_router_scaling_factor"),
}
REFUSED = {
    "diffusion_gemma_text": "scales weights by expert",
    "doge": "product keys",
    "gemma4_text": "scales weights by expert",
    "inkling_text": "weighs shared experts",
    "nllb-moe": "drops tokens",
    "phimoe": "samples its experts",
    "switch_transformers": "drops tokens",
    "zaya": "network with a state",
}
HIDDEN, EXPERTS = 12, 8
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model"), HIDDEN),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS
    ),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size"), 10),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 6),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 5),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 2),
    "moe_shared_expert_intermediate_size": 5,
    "shared_experts_intermediate_size": 5,
    "shared_expert_combination_strategy": "sum",
    "output_multiplier": 1.0,
    "moe_router_logit_softcapping": 0.0,
    "mlp_bias": False,
    "use_bias": False,
    "moe_latent_size": None,
    "zero_expert_num": 0,
}
TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k")
SCALES = (
    "routed_scaling_factor",
    "route_scale",
    "router_scaling_factor",
    "moe_routed_scaling_factor",
    "moe_router_scaling_factor",
)


def modeling_of(folder):
    try:
        return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    except ImportError:
        pytest.skip(f"this transformers has no {folder}")


def config_of(family, *, top_k=2, groups=1, top_groups=1, normalize=True, scale=1.5, **more):
    """A tiny configuration of a family, with every option that it has set to one of these."""
    try:
        config = transformers.AutoConfig.for_model(family)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    wanted = dict(SIZES)
    wanted |= dict.fromkeys(TOP_K, 1 if family == "llama4_text" else top_k)
    wanted |= dict.fromkeys(("n_group", "num_expert_group"), groups)
    wanted |= {"topk_group": top_groups, "norm_topk_prob": normalize, "moe_renormalize": normalize}
    wanted |= dict.fromkeys(SCALES, scale)
    wanted["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    if family == "ernie4_5_vl_moe_text":
        wanted["moe_intermediate_size"] = [6, 6]  # by modality
    if family == "qwen3_omni_moe_talker_text":
        config.shared_expert_intermediate_size = 5  # which its configuration has no default for
    for part in (config, getattr(config, "ffn_config", None)):
        for name, value in (wanted | more).items():
            if part is not None and hasattr(part, name):
                setattr(part, name, value)
    config._experts_implementation = "eager"
    return config


def made(kind, config):
    """A block or router of transformers with random weights, and biases that matter."""
    names = inspect.signature(kind.__init__).parameters
    module = kind(config, **({"layer_idx": 0} if "layer_idx" in names else {})).float().eval()
    for name, tensor in module.state_dict().items():
        torch.nn.init.normal_(tensor, std=0.2 if "bias" in name else 0.5)
    return module


def bias_of(module):
    found = [
        t for name, t in module.state_dict().items() if "bias" in name and t.numel() == EXPERTS
    ]
    return found[0].flatten() if found else None


def copied(block, config):
    """A layer from the configuration with a block's weights."""
    layer = MoE.from_config(config)
    state = {name: t for name, t in block.state_dict().items() if "bias" not in name}
    own = layer.state_dict()
    found = {"gate.weight": next(t for t in state.values() if t.shape == (EXPERTS, HIDDEN))}
    if layer.config.selection_bias:
        found["gate.selection_bias"] = bias_of(block)
    experts = {name.split(".")[-1]: t for name, t in state.items() if name.startswith("experts.")}
    first = experts.get("gate_up_proj", experts.get("up_proj"))
    second = experts["down_proj"]
    turned = first.shape[-1] != HIDDEN
    found["experts.w13"] = first.mT if turned else first
    found["experts.w2"] = second.mT if turned else second
    if layer.shared is not None:
        found |= shared_of(state, own)
    layer.load_state_dict({name: tensor.reshape(own[name].shape) for name, tensor in found.items()})
    return layer


def shared_of(state, own):
    parts = {n.split(".")[-2]: t for n, t in state.items() if n.startswith("shared_")}
    rows = [parts[name] for name in ("gate_proj", "up_proj") if name in parts]
    found = {"shared.w13": torch.cat(rows), "shared.w2": parts["down_proj"]}
    if "shared_gate" in own:
        found["shared_gate"] = parts["shared_expert_gate"]
    return found


def dense(ids, weights):
    return torch.zeros(len(ids), EXPERTS).scatter_(1, ids, weights.float())


def check_block(family, tokens=7, seed=0, **options):
    folder, name = BLOCKS[family]
    modeling, config = modeling_of(folder), config_of(family, **options)
    torch.manual_seed(seed)
    block = made(getattr(modeling, name), config)
    granite = {"granitemoeshared", "granitemoehybrid"} & {family}
    if granite:  # their shared expert stands beside the block, not in it
        config.shared_intermediate_size = 0
    layer = copied_dbrx(block, config) if family == "dbrx" else copied(block, config)
    x = torch.randn(1, tokens, HIDDEN)
    with torch.no_grad():
        wanted = block(x)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        found = layer(x)
    torch.testing.assert_close(found, wanted.view(1, tokens, HIDDEN), rtol=2e-4, atol=2e-5)


def copied_dbrx(block, config):
    layer = MoE.from_config(config)
    state = block.state_dict()
    by_name = {name.split(".")[-1]: t for name, t in state.items()}
    shape = (EXPERTS, -1, HIDDEN)
    first = torch.cat([by_name["w1"].view(shape), by_name["v1"].view(shape)], 1)
    layer.load_state_dict({
        "gate.weight": next(t for t in state.values() if t.shape == (EXPERTS, HIDDEN)),
        "experts.w13": first,
        "experts.w2": by_name["w2"].view(shape).mT,
    })  # fmt: skip
    return layer


def check_router(family, tokens=7, seed=0, **options):
    folder, name, factor = ROUTERS[family]
    modeling, config = modeling_of(folder), config_of(family, **options)
    torch.manual_seed(seed)
    module = made(getattr(modeling, name), config)
    x = torch.randn(tokens, HIDDEN)
    weight = next(t for t in module.parameters() if t.shape == (EXPERTS, HIDDEN))
    logits = x @ weight.T
    bias = bias_of(module)
    if family in {"gpt_oss", "openai_privacy_filter"}:  # theirs is one of the logits
        logits, bias = logits + bias, None
    with torch.no_grad():
        found = [t for t in module(x) if t is not None and t.shape[1:] != (EXPERTS,)]
    ids = next(t for t in found if not t.is_floating_point())
    weights = next(t for t in found if t.is_floating_point()) * getattr(config, factor or "", 1.0)
    routing = route(logits, Router.from_config(config), selection_bias=bias)
    wanted = dense(ids, weights)
    torch.testing.assert_close(
        dense(routing.ids_TK, routing.weights_TK.detach()), wanted, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("family", BLOCKS)
def test_a_layer_computes_what_the_model_s_own_block_does(family):
    check_block(family)


@pytest.mark.parametrize("family", BLOCKS)
def test_in_bfloat16_no_token_goes_to_another_expert(family):
    """Beside the same numbers in float32: what 16 bits hold of weights and tokens is the model.

    Biases differ in bits that 16 do not hold, as those of a balanced router do.
    """
    folder, name = BLOCKS[family]
    modeling, config = modeling_of(folder), config_of(family)
    torch.manual_seed(1)
    block = made(getattr(modeling, name), config).bfloat16().float()
    if (bias := bias_of(block)) is not None:
        bias.add_(7.5).add_(1e-3 * torch.randn(EXPERTS))
    if family in {"granitemoeshared", "granitemoehybrid"}:  # as in check_block
        config.shared_intermediate_size = 0
    layer = (copied_dbrx if family == "dbrx" else copied)(block, config)
    x = torch.randn(1, 200, HIDDEN).bfloat16()
    with torch.no_grad():
        layer(x.float())
        wanted, wide = layer.last_routing, block(x.float())
        own = layer.state_dict()
        for narrow in (layer.bfloat16(), MoE.from_config(config).bfloat16()):
            narrow.load_state_dict(own)
            found = narrow(x)
            assert torch.equal(narrow.last_routing.ids_TK, wanted.ids_TK)
            assert torch.equal(narrow.last_routing.weights_TK, wanted.weights_TK)
    wide = (wide[0] if isinstance(wide, tuple) else wide).view(found.shape)
    assert found.dtype == torch.bfloat16
    assert (found - wide).norm() < 0.02 * wide.norm()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("qwen2_moe", "shared_expert_intermediate_size"),  # none, and so no gate of it
        ("hy_v3", "num_shared_experts"),  # that of a dense layer, as of the next
        ("nemotron_h", "moe_shared_expert_intermediate_size"),
    ],
)
def test_a_shared_expert_of_width_zero_is_what_the_model_makes_of_it(family, field):
    check_block(family, **{field: 0})


@pytest.mark.parametrize("family", ROUTERS)
def test_a_router_decides_what_the_model_s_own_does(family):
    check_router(family)
    with pytest.raises(UnsupportedError, match=r"which is not supported"):
        MoE.from_config(config_of(family))


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_jetmoe_whose_router_returns_sorted_assignments(tokens):
    gating = modeling_of("jetmoe").JetMoeTopKGating(HIDDEN, EXPERTS, 2)
    x = torch.randn(tokens, HIDDEN)
    _, token, weights, sizes, logits = gating(x)
    expert = torch.arange(EXPERTS).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    wanted = torch.zeros(tokens, EXPERTS).index_put_((token, expert), weights)
    routing = route(logits, Router.from_config(config_of("jetmoe")))
    torch.testing.assert_close(dense(routing.ids_TK, routing.weights_TK), wanted)
    with pytest.raises(UnsupportedError, match="adds a bias to its output"):
        MoE.from_config(config_of("jetmoe"))


OPTIONS = {
    "cohere2_moe": {"expert_selection_fn": ["softmax", "sigmoid"]},
    "dbrx": {"moe_normalize_expert_weights": [None, 1.0]},
    "deepseek_v4": {"scoring_func": ["sqrtsoftplus", "sigmoid"]},
    "inkling2_text": {"scoring_func": ["sqrtsoftplus", "sigmoid"]},
    "lfm2_moe": {"use_expert_bias": [False, True]},
}


@given(
    family=st.sampled_from([*BLOCKS, *ROUTERS]),
    tokens=st.sampled_from([0, 1, 2, 17]),
    shape=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 3)]),
    weights=st.fixed_dictionaries(
        {
            "top_k": st.integers(1, 4),
            "normalize": st.booleans(),
            "scale": st.floats(0.25, 4.0),
        }
    ),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_all_options_of_all_families(family, tokens, shape, weights, seed, data):
    options = dict(weights)
    if family != "axk2":
        options |= {"groups": shape[0], "top_groups": shape[1]}
    choices = OPTIONS.get(family, {})
    options |= {name: data.draw(st.sampled_from(values)) for name, values in choices.items()}
    check = check_block if family in BLOCKS else check_router
    check(family, tokens=tokens, seed=seed, **options)


@pytest.mark.parametrize("family", REFUSED)
def test_routers_that_do_more_are_refused_by_name(family):
    config = types.SimpleNamespace(model_type=family)
    for make in (Router.from_config, MoE.from_config):
        with pytest.raises(UnsupportedError, match=REFUSED[family]):
            make(config)


def test_every_family_of_transformers_is_made_or_refused():
    """None is taken for another: what is not written down is refused."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    made = {family.removesuffix("_text") for family in [*BLOCKS, *ROUTERS, "jetmoe"]}
    for name in CONFIG_MAPPING_NAMES:
        if name.removesuffix("_text") in made:
            continue
        with pytest.raises(UnsupportedError, match=r"not known here|which is not supported"):
            Router.from_config(types.SimpleNamespace(model_type=name))


REFUSALS = [
    ("aria_text", {"hidden_act": "gelu"}, "another activation in its shared expert"),
    ("axk2", {"groups": 4, "top_groups": 2}, "lets a token leave its groups"),
    ("cohere2_moe", {"num_shared_experts": 1, "shared_expert_combination_strategy": "average"},
     "averages the shared expert"),
    ("cohere2_moe", {"expert_selection_fn": "tanh"}, "scores by 'tanh'"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "chooses by topk_method 'noaux_tc'"),
    ("dbrx", {"moe_normalize_expert_weights": 2.0}, "2.0-norm"),
    ("ernie4_5_moe", {"moe_norm_min": 0.5}, "normalises by no less than 0.5"),
    ("ernie4_5_moe", {"use_bias": True}, "biases in its shared expert"),
    ("laguna", {"moe_router_logit_softcapping": 3.0}, "caps its logits"),
    ("mixtral", {"router_jitter_noise": 0.1}, "adds noise"),
    ("mixtral", {"hidden_act": "tanh"}, "has the activation 'tanh'"),
    ("muse_spark_text", {"output_multiplier": 0.5}, "multiplies its logits"),
    ("nemotron_h", {"moe_latent_size": 4}, "projects tokens"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    REFUSALS,
    ids=[f"{f}-{i}" for i, (f, *_) in enumerate(REFUSALS)],
)
def test_options_that_there_are_none_for_are_refused(family, options, reason):
    with pytest.raises(UnsupportedError, match=reason):
        MoE.from_config(config_of(family, **options))


def test_what_is_no_configuration_is_named():
    with pytest.raises(ConfigurationError, match="a dict is not a transformers configuration"):
        Router.from_config({"model_type": "mixtral"})
    with pytest.raises(
        ConfigurationError, match="num_experts_per_tok of the configuration is None"
    ):
        Router.from_config(types.SimpleNamespace(model_type="mixtral"))
    lacking = types.SimpleNamespace(model_type="deepseek_v3", num_experts_per_tok=2)
    with pytest.raises(ConfigurationError, match=r"deepseek_v3 lacks a field: .*norm_topk_prob"):
        Router.from_config(lacking)


def test_fields_may_be_set_otherwise():
    layer = MoE.from_config(config_of("mixtral"), capacity_factor=1.0, backend="reference")
    assert (layer.config.capacity_factor, layer.config.backend) == (1.0, "reference")
