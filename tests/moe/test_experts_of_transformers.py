"""Every experts class of the installed transformers: computed as by its own loop, or refused."""

import importlib
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from fivefold.errors import UnsupportedError
from fivefold.moe import register_transformers_backend

transformers = pytest.importorskip("transformers", minversion="5.0")

CLASS = re.compile(r"^(@use_experts_implementation[^\n]*\n)?class (\w*Experts\w*)\(", re.MULTILINE)
NOT_ASKED = {  # transformers computes these itself, whatever backend a model is given
    "AriaSharedExpertsMLP": "shared by all tokens",
    "DbrxExperts": "older than the registry",
    "InklingSharedExperts": "shared by all tokens",
    "JetMoeParallelExperts": "one product, not two",
    "Llama4TextExperts": "older than the registry",
    "LongcatFlashExperts": "has experts that do nothing",
    "NllbMoeExperts": "a list of modules",
    "Step3p7Experts": "its limits differ by layer",
    "SwitchTransformersExperts": "a list of modules",
}
REFUSED = {"MuseSparkExperts": "normalises each expert's output"}
# Their gates are in float32, whatever comes in.
IN_FLOAT32 = {"BeamExperts", "Inkling2Experts", "OpenAIPrivacyFilterExperts"}
EXPERTS, HIDDEN, INNER = 5, 8, 12


@cache
def classes():
    """Folder and whether a backend is asked, by name of the class; read from the sources."""
    found = {}
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        for match in CLASS.finditer(path.read_text(encoding="utf-8")):
            found.setdefault(match[2], (path.parent.name, match[1] is not None))
    return found


class Tiny:
    """A configuration that has whatever it is asked for, small."""

    hidden_act = hidden_activation = mlp_hidden_act = moe_hidden_act = "silu"
    swiglu_limit = swiglu_alpha = 1.3
    mlp_gate_softcap = mlp_up_softcap = 2.0
    moe_latent_size = None
    mlp_bias = use_bias = add_bias_linear = False

    def __init__(self, implementation):
        self._experts_implementation = implementation

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if "experts" in name:
            return EXPERTS
        if "limit" in name or "alpha" in name or "scale" in name:
            return 1.3
        return INNER if re.search("intermediate|ffn|inner|expert_dim", name) else HIDDEN


def outcome(name, dtype=torch.float64):
    """How far ours is from the class's own loop in float64, outputs and gradients, and how far it
    is itself in this data type; or why it is refused."""
    folder, _ = classes()[name]
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    register_transformers_backend()
    found = {}
    for implementation, kind in (("eager", torch.float64), ("eager", dtype), ("fivefold", dtype)):
        module = getattr(modeling, name)(Tiny(implementation)).double()
        generator = torch.Generator().manual_seed(3)
        leaves = [p for _, p in sorted(module.named_parameters())]
        with torch.no_grad():
            for tensor in (*leaves, *(b for _, b in sorted(module.named_buffers()))):
                if tensor.is_floating_point():
                    # All begin from numbers that the narrowest of them has.
                    drawn = torch.randn(tensor.shape, generator=generator)
                    tensor.copy_(drawn.to(dtype))
        module = module.to(kind)
        leaves = [p for _, p in sorted(module.named_parameters())]
        x = torch.randn(9, HIDDEN, dtype=torch.float64, generator=generator).to(dtype).to(kind)
        x.requires_grad_()
        ids = torch.rand(9, EXPERTS, generator=generator).argsort(dim=1)[:, :2]
        weights = torch.rand(9, 2, generator=generator)  # a router's are float32 whatever it serves
        weights = weights.to(torch.promote_types(kind, torch.float32)).requires_grad_()
        try:
            output = module(x, ids, weights)
        except UnsupportedError as error:
            return str(error)
        gradients = torch.autograd.grad(
            output.double().square().sum(), [x, weights, *leaves], allow_unused=True
        )
        found[implementation, kind] = [output, *(g for g in gradients if g is not None)]
    exact = found["eager", torch.float64]

    def apart(others):
        pairs = zip(exact, others, strict=True)
        return max(float(((a - b.double()).norm() / (a.norm() + 1e-30)).detach()) for a, b in pairs)

    return apart(found["fivefold", dtype]), apart(found["eager", dtype])


def check(name):
    found = outcome(name)
    if name in REFUSED:
        assert REFUSED[name] in found
    else:
        assert found[0] < (1e-5 if name in IN_FLOAT32 else 1e-9), found


def check_in_bfloat16(name):
    """Ours rounds about as the class's own loop does, and both are near the exact result."""
    if name in REFUSED:
        assert REFUSED[name] in outcome(name, torch.bfloat16)
    else:
        ours, theirs = outcome(name, torch.bfloat16)
        assert ours < (2.0**-6 if name in IN_FLOAT32 else 2.0 * theirs) < 0.05, (ours, theirs)


def test_what_is_not_asked_is_known():
    """A class that is new, or asked now, is looked at before anything is promised of it."""
    found = {name for name, (_, asked) in classes().items() if not asked}
    if transformers.__version__.startswith("5.23."):
        assert found == set(NOT_ASKED)
    assert len(classes()) - len(found) > 20


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "Qwen3_5MoeExperts"])
def test_some_compute_what_their_own_loops_do(name):
    if name not in classes():
        pytest.skip(f"this transformers has no {name}")
    check(name)
    check_in_bfloat16(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(n for n, (_, asked) in classes().items() if asked))
def test_all_compute_what_their_own_loops_do_or_are_refused(name):
    check(name)
    check_in_bfloat16(name)
