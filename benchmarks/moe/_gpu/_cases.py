"""What is measured: shapes of published models, loads, data types, and what was aimed at."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fivefold.moe.operator.operands import Precision

__all__ = [
    "KINDS",
    "Case",
    "checked_cases",
    "exchanged_cases",
    "kind_of",
    "of_kind",
    "timed_cases",
    "tiny_case",
]

ROUTINGS = ("balanced", "Zipf", "worst")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer and its load.

    Attributes:
        name: Of the model.
        tokens: T.
        hidden: H.
        inner: I.
        experts: E.
        top_k: K.
        activation: A key of ``ACTIVATIONS``.
        dtype: Of tokens and weights.
        precision: Of float32.
        routing: One of ``ROUTINGS``, or "dropped": every seventh assignment is none.
        weight_on_input: Whether the experts get weight * x.
        biases: Whether both products have one.
        backward: Whether forward and backward are timed too.
        compiled: Whether the compiled pipeline takes part: it costs much time to compile.
        target_s: Longest time of a forward that was aimed at.
        target_flops_per_s: Least speed of a forward that was aimed at.
    """

    name: str
    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    activation: str = "swiglu"
    dtype: torch.dtype = torch.bfloat16
    precision: Precision = "ieee"
    routing: str = "balanced"
    weight_on_input: bool = False
    biases: bool = False
    backward: bool = False
    compiled: bool = False
    target_s: float | None = None
    target_flops_per_s: float | None = None

    @property
    def gated(self) -> bool:
        """Whether the first weight has two halves."""
        return self.activation.endswith("glu")

    @property
    def flops(self) -> int:
        """Of a forward pass: two per multiply-add, 4 T K H I, or 6 where gated."""
        return (6 if self.gated else 4) * self.tokens * self.top_k * self.hidden * self.inner

    def least_bytes(self, used_experts: int) -> int:
        """Bytes that a forward pass cannot avoid: weights in use once, tokens in and out."""
        weights = (3 if self.gated else 2) * used_experts * self.hidden * self.inner
        return (weights + 2 * self.tokens * self.hidden) * self.dtype.itemsize

    def __str__(self) -> str:
        """As a case of the results."""
        kind = str(self.dtype).removeprefix("torch.")
        kind += f" in {self.precision}" if self.dtype == torch.float32 else ""
        return (
            f"{self.name}: T {self.tokens}, H {self.hidden}, I {self.inner}, E {self.experts}, "
            f"K {self.top_k}, {self.activation}, {kind}, {self.routing}"
        )


_PAPER = Case(
    name="FlashMoE paper",
    tokens=8192,
    hidden=2048,
    inner=2048,
    experts=32,
    top_k=2,
    activation="relu",
)
_QWEN3 = Case(name="Qwen3-30B-A3B", tokens=8192, hidden=2048, inner=768, experts=128, top_k=8)
_MIXTRAL = Case(name="Mixtral-8x7B", tokens=8192, hidden=4096, inner=14336, experts=8, top_k=2)
# 32 of the 256 experts, and as many rows as 8 ranks with 4,096 tokens each send them on average.
_DEEPSEEK = Case(
    name="DeepSeek-V3, one rank of 8", tokens=4096, hidden=7168, inner=2048, experts=32, top_k=8
)


def timed_cases() -> list[Case]:
    """All cases, the ones with targets first: time may run out."""
    with_targets = [
        replace(_PAPER, target_s=0.70e-3, backward=True, compiled=True),
        replace(_QWEN3, target_flops_per_s=400e12, backward=True, compiled=True),
        replace(_MIXTRAL, target_flops_per_s=500e12, backward=True),
        replace(_QWEN3, tokens=32768, target_flops_per_s=480e12),
        replace(_PAPER, tokens=16384, dtype=torch.float32, precision="tf32", target_s=2.3e-3),
    ]
    return [
        *with_targets,
        _DEEPSEEK,
        replace(_PAPER, tokens=4096),
        *(replace(_PAPER, tokens=16384, experts=experts) for experts in (8, 16, 32, 64, 128)),
        *(replace(_QWEN3, name="Qwen3-30B-A3B decode", tokens=tokens) for tokens in (1, 8, 64)),
        replace(_QWEN3, tokens=1024),
        *(replace(_QWEN3, routing=routing) for routing in ROUTINGS[1:]),
        *(replace(_PAPER, routing=routing) for routing in ROUTINGS[1:]),
        replace(_MIXTRAL, routing="worst"),
    ]


KINDS: dict[str, dict[str, object]] = {
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "tf32": {"dtype": torch.float32, "precision": "tf32"},
    "fp32": {"dtype": torch.float32, "precision": "ieee"},
}
"""What decides which instructions are used: a failed check disqualifies one of these."""


def checked_cases(*, tiny: bool) -> list[Case]:
    """Shapes with borders inside tiles, few rows, odd sizes and skewed loads; bfloat16."""
    usual = Case(name="usual", tokens=300, hidden=512, inner=256, experts=64, top_k=4, biases=True)
    if tiny:
        usual = replace(usual, tokens=21, hidden=32, inner=24, experts=4, top_k=2)
        odd = replace(usual, name="odd sizes", tokens=9, hidden=17, inner=7, activation="geglu")
        return [usual, odd]
    return [
        usual,
        replace(usual, name="all to the same", routing="worst"),
        replace(usual, name="one token", tokens=1, experts=8, top_k=8, biases=False),
        replace(usual, name="long", tokens=1500, experts=4, top_k=2, activation="relu"),
        replace(usual, name="dropped", routing="dropped", activation="geglu"),
        replace(usual, name="weights on the input", top_k=1, weight_on_input=True),
        replace(usual, name="odd sizes", tokens=130, hidden=130, inner=70, experts=5, top_k=3),
    ]


def exchanged_cases(*, tiny: bool) -> list[tuple[Case, int]]:
    """Cases between virtual ranks, and how many of them."""
    usual = checked_cases(tiny=tiny)[0]
    usual = replace(usual, tokens=usual.tokens // 4 * 4)
    kinds, counts = (("fp32",), (1, 2)) if tiny else (("bf16", "fp32"), (1, 2, 4))
    return [(of_kind(usual, kind), ranks) for kind in kinds for ranks in counts]


def of_kind(case: Case, kind: str) -> Case:
    """The same in another data type."""
    return replace(case, **KINDS[kind])  # type: ignore[arg-type]  # fields


def kind_of(case: Case) -> str:
    """Its key of ``KINDS``."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(case.dtype, "tf32" if case.precision == "tf32" else "fp32")


def tiny_case(case: Case) -> Case:
    """A likeness for the interpreter: sizes of a tile or two."""
    sizes = {"tokens": min(case.tokens, 12), "hidden": 16, "inner": 24, "compiled": False}
    return replace(case, **sizes, experts=min(case.experts, 4), top_k=min(case.top_k, 2))  # type: ignore[arg-type]  # fields
