# mypy: disable-error-code="no-untyped-call,import-untyped,misc"
"""What a rung measures with: launches that can be planted with faults, rows, and a watch.

A rung's child hangs, crashes or computes something wrong where a fault is planted in its launch:
so tests show that the ladder goes on in every such case, and names the rung.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.ladder import say

__all__ = ["TOLERANCE", "Bench", "error_of"]

TOLERANCE = {"bf16": 5e-3, "fp16": 1e-3, "tf32": 1e-3, "fp32": 2e-6}
"""Relative Frobenius error against float64, of a forward; gradients may have twice as much."""
_WATCHED_WORDS = 1 << 16
_SHOWN = 16  # bad tiles and flags


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative Frobenius error; infinite where something is not a number."""
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    norm = wanted.double().norm().clamp_min(1e-30)
    return float(((found.double() - wanted.double()).norm() / norm).detach())


class Bench:
    """One step's launches, checks and rows.

    Args:
        device: A GPU, or the CPU where kernels are interpreted.
        step: The step's name; every row has it.
        fault: "hang", "wrong" or "crash" in the first launch, or "".
    """

    def __init__(self, device: torch.device, *, step: str, fault: str = "") -> None:
        self.device, self.step, self._fault = device, step, fault
        self.good = True
        self._watched: tuple[torch.Tensor, dict[str, tuple[int, int, int | None]]] | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether kernels run on a GPU."""
        return self.device.type == "cuda"

    def run(self, launch: Callable[[], Any], *outputs: torch.Tensor) -> Any:
        """Launch and wait; ``outputs`` is what may be planted with something wrong."""
        fault, self._fault = self._fault, ""
        if fault == "hang":
            if self._watched is not None:
                self._watched[0][:1] = 7  # as if tickets were taken
            while True:
                time.sleep(0.05)
        if fault == "crash":
            os.abort()
        found = launch()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        if fault == "wrong":
            for output in outputs or (found,):
                output.view(-1)[:4].add_(3)
        return found

    def row(self, metric: str, unit: str, value: float, **more: Any) -> None:
        """Say a figure; ``most`` is the largest that is right."""
        most = more.pop("most", None)
        line = {"metric": metric, "unit": unit, "value": min(float(value), 1e30), **more}
        if most is not None:
            line |= {"limit": most, "met": bool(value <= most)}
            self.good &= bool(value <= most)
        say(event="row", step=self.step, **line)

    def error(
        self, what: str, found: torch.Tensor, wanted: torch.Tensor, most: float, **more: Any
    ) -> None:
        """Compare with what is right."""
        self.row(f"error of {what}", "ratio", error_of(found, wanted), most=most, **more)

    def equal(self, what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compare whole numbers; where they differ first is said."""
        differ = (found != wanted.to(found.dtype)).reshape(-1)
        more = {}
        if bool(differ.any()):
            place = int(differ.nonzero()[0])
            pair = (int(found.reshape(-1)[place]), int(wanted.reshape(-1)[place]))
            more = {"first": {"place": place, "found": pair[0], "expected": pair[1]}}
        self.row(f"wrong {what}", "words", int(differ.sum()), most=0, **more)

    def tiles(
        self,
        what: str,
        found: torch.Tensor,
        wanted: torch.Tensor,
        *,
        rows: list[tuple[int, int, int]],
        columns: int,
        most: float,
    ) -> None:
        """Compare rows tile by tile, and say which tiles are wrong.

        Args:
            what: The name of what is compared.
            found: [R, N].
            wanted: Likewise.
            rows: Expert, first row and end of every row tile.
            columns: Of a tile.
            most: Largest relative error of a tile.
        """
        bad, worst = [], 0.0
        for m, (expert, first, stop) in enumerate(rows):
            for n, (ours, right) in enumerate(
                zip(
                    found[first:stop].split(columns, 1),
                    wanted[first:stop].split(columns, 1),
                    strict=True,
                )
            ):
                error = error_of(ours, right)
                worst = max(worst, error)
                if error > most:
                    bad.append({"row_tile": m, "column_tile": n, "expert": expert, "error": error})
        shown = {"bad_tiles": bad[:_SHOWN]} if bad else {}
        self.row(f"bad tiles of {what}", "tiles", len(bad), most=0, worst=min(worst, 1e30), **shown)

    def watch(
        self, control: torch.Tensor, words: Mapping[str, tuple[int, int, int | None]]
    ) -> None:
        """Remember control words, to be shown should this step hang.

        Args:
            control: int32.
            words: By name: the first word, how many, and what they end at (None: not known).
        """
        self._watched = (control, dict(words))

    def seen(self) -> dict[str, Any]:
        """What the watched control words are now; read beside the kernel that may be running."""
        if self._watched is None:
            return {}
        control, words = self._watched
        flat = control.view(-1)[:_WATCHED_WORDS]
        if self.on_gpu:  # the stream that hangs is not waited for
            stream = torch.cuda.Stream(self.device)
            copy = torch.empty(len(flat), dtype=flat.dtype, pin_memory=True)
            with torch.cuda.stream(stream):
                copy.copy_(flat, non_blocking=True)
            stream.synchronize()
            flat = copy
        found: dict[str, Any] = {}
        for name, (first, count, expected) in words.items():
            values = flat[first : first + count].tolist()
            if count == 1:
                found[name] = {"found": values[0], "expected": expected}
                continue
            late = [i for i, v in enumerate(values) if expected is not None and v < expected]
            shown = [{"flag": i, "found": values[i]} for i in late[:_SHOWN]]
            found[name] = {"expected": expected, "below": len(late), "of": count, "first": shown}
        return found

    def guard(self, limit_s: float) -> threading.Timer:
        """Begin to watch: what the control words are is said at the limit, and the child ends."""

        def give_up() -> None:
            try:
                say(event="control", step=self.step, words=self.seen())
            finally:
                os._exit(97)

        timer = threading.Timer(limit_s, give_up)
        timer.daemon = True
        timer.start()
        return timer
