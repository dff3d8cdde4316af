"""A software stack: what it keeps in memory, what it overlaps, what it launches, by release.

A GPU's data sheet says nothing of how wide gradients are or what an FP8 recipe stores; the same
GPU under two stacks refuses different plans. Known stacks lie in ``stacks/``, one file each.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Real

from fivefold.errors import ConfigurationError, require_one_of

__all__ = ["StackSpec"]

_SHARES = ("spare_memory", "fragments", "overlap_slowdown", "selective_products", "outer_window")
_LEAST_ONE = ("bucket_parameters", "loss_chunks", "slices", "expert_imbalance", "expert_passes",
              "peak_flops", "memory_bytes", "memory_bandwidth_bytes_per_s")  # fmt: skip
_EFFICIENCIES = ("gemm_efficiency", "attention_efficiency", "memory_efficiency")
_LIMITS = {  # of a stack's numbers and of a device's; others are 0 or more
    **dict.fromkeys(_SHARES, (0.0, 1.0)), **dict.fromkeys(_LEAST_ONE, (1.0, math.inf)),
    **dict.fromkeys(_EFFICIENCIES, (1e-6, 1.0)), "anchor": (1e-3, 1e3),
}  # fmt: skip
_DROPS = ("scores", "norm", "activation", "latent")


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """Properties of a training framework of one release on a GPU.

    Args:
        stack: Name of the stack.
        framework: What it is built on, such as "Megatron" or "PyTorch": error bars are kept apart.
        release: Its release.
        released: Year and month of that release, such as ``"2025-11"``.
        fused_attention: Attention never writes scores to memory (FlashAttention).
        attention_flops: Most FLOPs per second of the attention kernels, on any GPU: those that
            were written for an earlier one do not use what a newer one has.
        causal_skips: The attention kernel skips what the mask hides.
        recompute_stops_early: Full recomputation of a layer ends with the input of its last
            product, as PyTorch's checkpoints that are not reentrant do; Megatron-LM's repeat all.
        selective_drops: What selective recomputation of products' inputs leaves out, of
            ``"scores"`` (of unfused attention), ``"norm"`` (outputs of norms), ``"activation"``
            (outputs of the feed-forward part's activation), ``"latent"`` (expanded queries, keys
            and values of latent attention), separated by spaces.
        selective_products: Share of the 16-bit products that selective recomputation repeats.
        selective_products_fp8: The same of 8-bit products.
        host_kernel_s: Time in which the host can issue one kernel: the floor of small layers.
        expert_kernel_s: The same for products of experts, one by one; 0: they are one kernel.
        scan_slowdown: Time of a scan (Mamba) over that of its bytes and FLOPs at full rates.
            Fitted: Nemotron 3 Nano on H100 to GB300, Megatron-Bridge 26.02.01, with later releases
            in sight; Triton's kernels of mamba_ssm run there.
        dropless: No token is dropped, so the host waits for the router before it issues experts.
        graphed: Types of products, separated by spaces, whose whole iteration is one CUDA graph:
            the host issues nothing and waits for nothing.
        fused_experts: Types whose experts are fused kernels: activation, casts and the rows that
            scales want are part of the products.
        overlap_slowdown: Share by which compute slows down while communication runs beside it.
        gradient_bytes: Width of gradients in memory, copies of another width included.
        gradient_wire_bytes: Width of gradients when they are reduced.
        parameter_wire_bytes: Width of parameters when they are gathered.
        bucket_parameters: Parameters whose gradients travel together, beside compute.
        bucket_parameters_per_rank: The same for each rank of the group, where that is more.
        owned_per_layer: Parameters of a layer where each has one owner (ZeRO-1 by parameter):
            gradients are reduced over all replicas, and what an owner updated comes back in a
            broadcast of its own. 0: every rank has a share of all.
        reduces_beside: Gradients can travel beside backward, where a plan says so.
        gathers_beside: Updated parameters can come back beside the next forward, where it does.
        optimizer_state_bytes: Bytes of optimizer states per parameter: master copy, moments.
        outer_state_bytes: Bytes that local updates hold per parameter: anchor, payload, and what
            else the rule needs; CO2 has a momentum.
        outer_owned_bytes: The same that the workers share among them: the residuals of the sums.
        outer_wire_bytes: Width of outer updates on the wire.
        outer_window: Share of local steps beside which outer updates travel; 0: all ranks wait.
        optimizer_bytes_per_parameter: Memory traffic of one optimizer step per parameter.
        current_scaling: Scales of 8-bit products come from the tensor at hand, which is read once
            more for them, instead of from earlier iterations.
        input_bytes_fp8: Bytes per element that an 8-bit product keeps of its input for backward.
        loss_bytes: Bytes per logit that head and loss keep at once.
        loss_chunks: Pieces in which the loss is computed; 1 is whole.
        fused_elementwise: Rotary embedding, activation and a norm's backward are one kernel each.
            False: PyTorch's operators one by one, not compiled: what one gives goes to memory, and
            stays there where the backward of the next reads it.
        autocast: Parameters, and the stream between blocks, have 32 bits; every forward casts the
            weights of its products, and their backward keeps the casts.
        frees_gradients: Gradients are freed after the update. Those of a step's only micro-batch
            come as its activations go, so the fullest moment is the loss, the end of backward, or
            a layer in between; and logits are gone before a layer is computed again.
        gathered_layers: Layers whose parameters ZeRO-3 holds whole at a time.
        splits_checkpoints: Inputs kept by full recomputation are split over the tensor group.
        reserved_bytes: What context and communication buffers take of the memory.
        spare_memory: Share of the memory that a search leaves free, if any plan lets it: what a run
            takes varies, and a plan is a prediction.
        fragments: Share of all else that the allocator holds and does not use.
        shard_gather_share: Share of a ring's rate that gathers of shared parameters reach (ZeRO-3).
        splits_stage_messages: Tensor ranks send a share each to the next stage, gathered there.
        expert_passes: How often tokens are read and written around dispatch and combine, over the
            sorting alone: padding, scaling by the router's weights, activations that are not fused.
        dispatches_once: A token is sent once to each node and each rank that it visits, whatever
            experts it visits there (DeepEP, HybridEP); otherwise once for each expert.
        expert_imbalance: Tokens of the fullest rank of an expert group, over the mean.
        slices: Into how many pieces pipelined tensor overlap cuts a product; one stays exposed.
        step_overhead_s: Fixed time of an iteration: data, logging, norms, synchronisation.
        jitter: Share that the slowest of many ranks lags behind the mean, per doubling of nodes.

    Raises:
        ConfigurationError: A constant is negative, or a share is more than 1.

    Examples:
        >>> StackSpec(gradient_bytes=2.0).gradient_bytes
        2.0
    """

    stack: str = ""
    framework: str = ""
    release: str = ""
    released: str = ""
    fused_attention: bool = False
    attention_flops: float = 1e18
    causal_skips: bool = False
    recompute_stops_early: bool = False
    selective_drops: str = "scores"
    selective_products: float = 0.0
    selective_products_fp8: float = 0.0
    host_kernel_s: float = 1e-5
    expert_kernel_s: float = 0.0
    scan_slowdown: float = 6.2
    dropless: bool = False
    graphed: str = ""
    fused_experts: str = ""
    overlap_slowdown: float = 0.1
    gradient_bytes: float = 4.0
    gradient_wire_bytes: float = 2.0
    parameter_wire_bytes: float = 2.0
    bucket_parameters: float = 40e6
    bucket_parameters_per_rank: float = 1e6
    owned_per_layer: float = 0.0
    reduces_beside: bool = True
    gathers_beside: bool = True
    optimizer_state_bytes: float = 12.0
    outer_state_bytes: float = 12.0
    outer_owned_bytes: float = 0.0
    outer_wire_bytes: float = 4.0
    outer_window: float = 1.0
    optimizer_bytes_per_parameter: float = 34.0
    current_scaling: bool = False
    input_bytes_fp8: float = 1.0
    loss_bytes: float = 4.0
    loss_chunks: int = 1
    fused_elementwise: bool = True
    autocast: bool = False
    frees_gradients: bool = False
    gathered_layers: float = 2.0
    splits_checkpoints: bool = False
    reserved_bytes: float = 2e9
    spare_memory: float = 0.04
    fragments: float = 0.0
    shard_gather_share: float = 1.0
    splits_stage_messages: bool = True
    expert_passes: float = 1.0
    dispatches_once: bool = False
    expert_imbalance: float = 1.0
    slices: int = 4
    step_overhead_s: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for drop in self.selective_drops.split():
            require_one_of(drop, _DROPS, f"selective_drops has {drop}")
        for field in dataclasses.fields(self):
            if field.type not in {"float", "int"}:  # annotations are text
                continue
            name, value = field.name, getattr(self, field.name)
            low, high = _LIMITS.get(name, (0.0, math.inf))
            real = isinstance(value, Real) and not isinstance(value, bool)  # also NumPy's
            if not real or not (low <= value <= high and math.isfinite(value)):
                owner = getattr(self, "name", "") or self.stack
                message = f"{name}={value!r} of {owner!r} is out of range"
                raise ConfigurationError(message, hint=f"between {low:g} and {high:g}, finite")
