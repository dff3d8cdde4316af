"""The variants of the kernel: tile sizes, compile-time arguments, and how they are run.

A variant depends on data type, activation and sizes of the model, never on the number of tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.moe._activations import Activation
from fivefold.moe._workspace import CHUNK_SLOTS

_SPIN_LIMIT = 1_000  # polls in the interpreter, where one that does not succeed at once never will
_DEBUG_SPIN_LIMIT = 50_000_000  # tens of seconds on a GPU


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of one variant of the kernel.

    Attributes:
        rows: BM.
        columns: BN of the first product.
        second_columns: BN of the second product.
        depth: BK.
        stages: Loads in flight.
        warps: Of a program.
        group: Row tiles that share a step.
        combine_tokens: Tokens of a combining task.
        combine_columns: Columns it adds up at a time.
    """

    rows: int
    columns: int
    second_columns: int
    depth: int
    stages: int = 3
    warps: int = 8
    group: int = 8
    combine_tokens: int = 8
    combine_columns: int = 256


_INTERPRETED = Tiles(
    rows=16, columns=16, second_columns=16, depth=16, group=2, combine_tokens=8, combine_columns=16
)


def tiles_for(
    dtype: torch.dtype, *, gated: bool, precision: str, by_descriptor: bool, interpreted: bool
) -> Tiles:
    """The variant for a data type; chosen by what compiles without spills, not yet by timing.

    Args:
        dtype: Of the tokens.
        gated: Whether the first product has two accumulators.
        precision: Of float32.
        by_descriptor: Whether weights come through the tensor memory accelerator; ordinary loads
            need registers for their addresses.
        interpreted: Whether the interpreter runs it.

    Returns:
        Sizes.
    """
    if interpreted:
        return _INTERPRETED
    if not by_descriptor or (dtype == torch.float32 and precision != "tf32"):
        return Tiles(rows=64, columns=64, second_columns=64, depth=32, stages=2)
    if dtype != torch.float32:
        columns = 128 if gated else 256
        return Tiles(rows=128, columns=columns, second_columns=256, depth=64)
    columns = 64 if gated else 128
    return Tiles(rows=128, columns=columns, second_columns=128, depth=32)


def backward_tiles_for(
    dtype: torch.dtype, *, precision: str, by_descriptor: bool, interpreted: bool
) -> Tiles:
    """The variant of the backward's kernels, chosen as the forward's.

    A weight gradient's tile is ``rows`` by ``second_columns``.

    Args:
        dtype: Of the tokens.
        precision: Of float32.
        by_descriptor: Whether weights come through the tensor memory accelerator.
        interpreted: Whether the interpreter runs it.

    Returns:
        Sizes.
    """
    if interpreted:
        return _INTERPRETED
    if not by_descriptor or (dtype == torch.float32 and precision != "tf32"):
        # Ordinary multiply-adds unroll the depth: 32 would spill.
        depth = 16 if dtype == torch.float32 and precision == "ieee" else 32
        return Tiles(rows=64, columns=64, second_columns=64, depth=depth, stages=2)
    if dtype != torch.float32:
        return Tiles(rows=128, columns=128, second_columns=256, depth=64)
    return Tiles(rows=128, columns=64, second_columns=128, depth=32)


def interpreting() -> bool:
    """Whether triton runs kernels in its CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _power_of_two(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length())


def constants_for(  # noqa: PLR0913 - the sizes of a call
    tiles: Tiles,
    *,
    activation: Activation,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    weight_on_input: bool,
    precision: str,
    by_descriptor: bool,
    interpreted: bool,
) -> dict[str, Any]:
    """The kernels' compile-time arguments by name.

    Args:
        tiles: The variant.
        activation: f.
        hidden: H.
        intermediate: I.
        num_experts: E.
        top_k: K.
        weight_on_input: As in ``fused_moe``.
        precision: Of float32.
        by_descriptor: Whether weights come through the tensor memory accelerator.
        interpreted: Whether the interpreter runs it.

    Returns:
        Values by name.
    """
    plain = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
    bins = _power_of_two(num_experts, 16)
    return {
        "H": hidden,
        "I": intermediate,
        "K": top_k,
        "KP": _power_of_two(top_k),
        "E": num_experts,
        "EP": bins,
        "GATED": activation.gated,
        "ACTIVATION": plain.get(activation.name, activation.name),
        "WEIGHT_ON_INPUT": weight_on_input,
        "TMA": by_descriptor,
        "INTERPRETED": interpreted,
        "PRECISION": precision,
        "SPIN_LIMIT": _spin_limit(interpreted=interpreted),
        "CHUNK": CHUNK_SLOTS[interpreted],
        "PART": 16 if interpreted else 128,
        "READ": max(2, min(32, 8192 // bins)),
        "BM": tiles.rows,
        "BN": tiles.columns,
        "BK": tiles.depth,
        "BN2": tiles.second_columns,
        "STAGES": tiles.stages,
        "GROUP": tiles.group,
        "BT": tiles.combine_tokens,
        "BH": tiles.combine_columns,
    }


def _spin_limit(*, interpreted: bool) -> int:
    if interpreted:
        return _SPIN_LIMIT
    return _DEBUG_SPIN_LIMIT if debugging() else 0


def debugging() -> bool:
    """Whether waits are bounded, and looked at after each call."""
    return os.environ.get("FIVEFOLD_MOE_DEBUG", "0") == "1"
