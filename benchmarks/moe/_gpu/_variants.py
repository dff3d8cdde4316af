"""Who computes the operator: our backends, pipelines of torch, transformers, Liger-Kernel."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.moe._gpu._cases import Case
from benchmarks.moe._gpu._operands import Operands
from fivefold.moe import Workspace, backends, fused_moe
from fivefold.moe.operator.activations import activation_named

__all__ = [
    "LIGER",
    "OURS",
    "OUR_BACKENDS",
    "TUNED",
    "Variant",
    "missing_peer",
    "missing_variants",
    "tuned_variants",
    "variants_of",
    "versions_of_peers",
]

OURS = "fused"
LIGER = "Liger-Kernel"
SONIC = "SonicMoE"
TUNED = {LIGER: "liger_kernel", SONIC: "sonicmoe"}
"""Modules of those who tune themselves, by name."""
OUR_BACKENDS = (OURS, "split")
Variant = Callable[[Operands], torch.Tensor]

_MOST_BATCHED_TOKENS = 64  # transformers' batched_mm copies the weights of every assignment
_MOST_EXPERTS_ONE_BY_ONE = 32  # beyond, transformers' loop takes ten times as long as the rest
_PACKAGES = {"liger_kernel": "liger-kernel", "sonicmoe": "sonic-moe"}
_PEER_MODULES = ("transformers", "liger_kernel", "sonicmoe")


def variants_of(case: Case, device: torch.device, *, compiler: str | None) -> dict[str, Variant]:
    """Everyone who can compute a case here, ours first.

    Args:
        case: What.
        device: Where.
        compiler: Backend of torch.compile for torch's pipeline; None to leave that one out.

    Returns:
        Functions of operands, by name.
    """
    found: dict[str, Variant] = {
        name: _our_backend(case, device, name)
        for name in OUR_BACKENDS
        if backends(device).get(name, "not there") is None
    }
    pipeline = _grouped_pipeline(case)
    found["torch grouped_mm"] = pipeline
    if compiler is not None:
        found["torch grouped_mm, compiled"] = torch.compile(pipeline, backend=compiler)
    if case.activation == "swiglu":
        found |= _transformers_backends(case)
    return found


def missing_peer(name: str, *, on_gpu: bool) -> str:
    """Return why a peer that tunes itself cannot take part; or ""."""
    module = TUNED[name]
    if importlib.util.find_spec(module) is None:
        return f"not installed: pip install {_PACKAGES[module]}"
    return "" if on_gpu else "it runs on a GPU only"


def tuned_variants(case: Case, device: torch.device, peer: str) -> dict[str, Variant]:
    """Return ours, and one that tunes itself for minutes at its first call, by name."""
    found = {
        name: _our_backend(case, device, name)
        for name in OUR_BACKENDS
        if backends(device).get(name, "not there") is None
    }
    return found | {peer: {LIGER: _liger, SONIC: _sonic}[peer]()}


def missing_variants(device: torch.device) -> dict[str, str]:
    """Who cannot take part at all, and why."""
    found = {name: reason for name, reason in backends(device).items() if reason is not None}
    for module in _PEER_MODULES:
        if importlib.util.find_spec(module) is None:
            found[module] = f"not installed: pip install {_PACKAGES.get(module, module)}"
    return found


def versions_of_peers() -> dict[str, str]:
    """Versions of what is installed, triton included."""
    metadata = importlib.import_module("importlib.metadata")
    names = ("triton", "transformers", *_PACKAGES.values())
    found = {}
    for name in names:
        try:
            found[name] = str(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return found


def _our_backend(case: Case, device: torch.device, name: str) -> Variant:
    workspace = Workspace.allocate(
        num_tokens=case.tokens,
        hidden=case.hidden,
        intermediate=case.inner,
        num_experts=case.experts,
        top_k=case.top_k,
        dtype=case.dtype,
        device=device,
    )

    def run(given: Operands) -> torch.Tensor:
        return fused_moe(
            given.x,
            given.w13,
            given.w2,
            given.ids,
            given.weights,
            activation=case.activation,
            backend=name,
            precision=case.precision,
            workspace=workspace,
            recompute=False,
            check=False,
        )

    return run


def _grouped_pipeline(case: Case) -> Variant:
    """Sort, gather, two grouped products, weighted sum: what one writes with torch alone."""
    kind = activation_named(case.activation)

    def run(given: Operands) -> torch.Tensor:
        experts, top_k = len(given.w2), given.ids.shape[1]
        flat = given.ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.zeros(experts, dtype=torch.int32, device=flat.device)
        counts = counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = given.x[order // top_k]
        hidden = torch.nn.functional.grouped_mm(rows, given.w13.mT, offs=ends)
        if kind.gated:
            gate, up = hidden.chunk(2, dim=-1)
            inner = kind.function(gate) * up
        else:
            inner = kind.function(hidden)
        out = torch.nn.functional.grouped_mm(inner, given.w2.mT, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        by_token = out[back].view(*given.ids.shape, -1)
        return (by_token * given.weights.unsqueeze(-1)).sum(1).to(given.x.dtype)

    return run


def _transformers_backends(case: Case) -> dict[str, Variant]:
    if importlib.util.find_spec("transformers") is None:
        return {}
    transformers = importlib.import_module("transformers")
    module = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = transformers.Qwen3MoeConfig(
        hidden_size=case.hidden,
        moe_intermediate_size=case.inner,
        num_experts=case.experts,
        num_experts_per_tok=case.top_k,
    )
    with torch.device("meta"):  # the weights are the operands'
        experts = module.Qwen3MoeExperts(config)
    names = ["grouped_mm"]
    if case.experts <= _MOST_EXPERTS_ONE_BY_ONE:
        names.append("eager")
    if case.tokens <= _MOST_BATCHED_TOKENS:
        names.append("batched_mm")
    return {f"transformers {name}": _transformers(experts, config, name) for name in names}


def _transformers(experts: Any, config: Any, name: str) -> Variant:
    def run(given: Operands) -> torch.Tensor:
        config._experts_implementation = name  # noqa: SLF001 - where transformers looks
        weights = {"gate_up_proj": given.w13, "down_proj": given.w2}
        operands = (given.x, given.ids, given.weights.to(given.x.dtype))
        output: torch.Tensor = torch.func.functional_call(experts, weights, operands)
        return output

    return run


def _liger() -> Variant:
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def run(given: Operands) -> torch.Tensor:
        output: torch.Tensor = function.apply(
            given.x, given.w13, given.w2, given.ids.to(torch.int32), given.weights
        )
        return output

    return run


def _sonic() -> Variant:
    """Return SonicMoE with routing from outside; it wants a token's assignments side by side."""
    function = importlib.import_module("sonicmoe.functional").moe_general_routing_inputs
    kind = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU

    def run(given: Operands) -> torch.Tensor:
        tokens, top_k = given.ids.shape
        token = torch.arange(tokens, dtype=torch.int32, device=given.x.device)
        output: torch.Tensor = function(
            given.x,
            given.weights.reshape(-1),
            token.repeat_interleave(top_k),
            given.ids.reshape(-1).to(torch.int32),
            given.w13.permute(1, 2, 0),
            None,
            given.w2.permute(1, 2, 0),
            None,
            len(given.w2),
            torch.cuda.current_stream().cuda_stream,
            kind,
            not torch.is_grad_enabled(),
            concat_layout=True,
        )[0]
        return output

    return run
