"""How much memory the outer state takes: the formula, without making one."""

from __future__ import annotations

from fivefold.errors import ConfigurationError
from fivefold.optim._codecs import Codec, ExactCodec, named_codec
from fivefold.optim._layout import state_extras
from fivefold.optim._rule import OuterRule

_ELEMENT_BYTES = 4  # the outer state is float32 for parameters of at most 32 bits


def outer_state_bytes(
    rule: OuterRule,
    num_parameters: int,
    *,
    num_workers: int = 2,
    num_shards: int = 1,
    codec: str | Codec = "fp32",
) -> int:
    """Return the bytes of outer state that each rank keeps for float32 or 16-bit parameters.

    Per parameter: 4 for the anchor, 4 for the payload, 4 for the momentum where the rule has one,
    4 for what delay-corrected merges sent, 12 more for the eager merge with momentum, 4 for the
    gradient of an outer optimizer (whose own state is not counted), and 4 + 4 / num_workers for
    the residuals of a lossy codec; all of it divided by ``num_shards``.

    Args:
        rule: The outer rule.
        num_parameters: Trainable parameters of the model.
        num_workers: Number of workers.
        num_shards: Ranks that act as one worker.
        codec: How payloads travel.

    Raises:
        ConfigurationError: A number is not positive.

    References:
        CO2, arXiv 2401.16265, Algorithm 2.

    Examples:
        >>> from fivefold.optim import CO2
        >>> outer_state_bytes(CO2(tau=8), 1_000_000, num_shards=4)
        3000000
    """
    counts = {
        "num_parameters": num_parameters,
        "num_workers": num_workers,
        "num_shards": num_shards,
    }
    for name, value in counts.items():
        if value < 1:
            raise ConfigurationError(f"{name} must be positive; got {value!r}")
    buffers = 2.0 + len(state_extras(rule, may_lose=False))
    if not isinstance(named_codec(codec) if isinstance(codec, str) else codec, ExactCodec):
        buffers += 1 + 1 / num_workers
    return round(_ELEMENT_BYTES * buffers * num_parameters / num_shards)
