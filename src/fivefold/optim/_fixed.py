"""Tensors that no round moves: frozen parameters and integer buffers, equal at the start.

Where training moves them all the same (a teacher that follows, a queue of features), ranks part
without a word; so some of their bytes are compared now and then.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Sequence

import torch

from fivefold.optim._shards import local_tensor

_LOG = logging.getLogger(__name__)
_SAMPLES = 256  # elements that are looked at in each tensor


class FixedWatch:
    """Compares samples of the fixed tensors over the ranks, and warns once."""

    def __init__(self, model: torch.nn.Module, names: Iterable[str], *, every_rounds: int) -> None:
        self._model, self._every = model, every_rounds
        self._names = list(names)  # tensors may be replaced, and would be kept alive
        self._start: dict[str, int] = {}
        self._told = False

    def begin(self) -> None:
        """Remember what is equal on all ranks now."""
        self._start = self._samples()

    def digest(self, round_number: int) -> float:
        """Return what is equal on ranks whose fixed tensors are; 0 where it is not their turn."""
        due = self._every and round_number % self._every == self._every - 1
        if not due or not self._names or self._told:
            return 0.0
        watched = len(self._names)
        samples = self._samples()
        if len(self._names) < watched:  # other ranks may notice a round later
            return 0.0
        return float(zlib.crc32(repr(sorted(samples.items())).encode()) + 1)

    def compare(self, digests: Sequence[float], weights: Sequence[float]) -> None:
        """Warn where ranks differ; all are given the same numbers."""
        found = {d for d, weight in zip(digests, weights, strict=True) if weight and d}
        if len(found) < 2 or self._told:
            return
        self._told = True
        now = self._samples()
        moved = [name for name, value in now.items() if value != self._start.get(name)]
        _LOG.warning(
            "training moves tensors that outer synchronisation leaves alone, and they differ over "
            "the ranks; moved on this rank: %s. Bring them together yourself after each round, or "
            "keep a teacher as floating-point buffers, which are averaged, or name them in "
            "OuterSync(ignore=...) where each rank may have its own",
            ", ".join(moved[:5]) or "none",
        )

    @torch.no_grad()
    def _samples(self) -> dict[str, int]:
        live = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        # What has begun to train is watched no longer, for good: it is brought together.
        self._names = [n for n in self._names if n in live and not live[n].requires_grad]
        # Single integers are counters, which may count each rank's own steps.
        names = [name for name in self._names if live[name].dim()]
        samples = [_sample(local_tensor(live[name])) for name in names]
        if not samples:
            return {}
        # The host waits once for all of them.
        read = torch.cat([sample.to(samples[0].device) for sample in samples]).cpu()
        parts = torch.split(read, [sample.numel() for sample in samples])
        return {
            name: zlib.crc32(bytes(part.numpy())) for name, part in zip(names, parts, strict=True)
        }


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLES, 1)].contiguous().view(torch.uint8)
