# mypy: disable-error-code="no-untyped-call,import-untyped,misc"
"""Compile the steps' kernels for sm_90a without a GPU, in several processes; cubins travel.

Triton finds a cubin again by its sources, sizes and version. So a folder made here by triton 3.6.0
serves a machine that has the same version, whatever its Python; what it does not find, it compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.ladder import say
from benchmarks.moe._gpu._cases import (
    KINDS,
    Case,
    checked_cases,
    exchanged_cases,
    of_kind,
    timed_cases,
)
from benchmarks.moe._gpu._operands import Operands
from benchmarks.moe._gpu._rungs import exchanged, group_of, options_of
from benchmarks.moe._gpu._timing import SWEPT, SWEPT_BACKWARD, swept_cases

__all__ = ["build", "pieces", "settle"]

_KEPT = {".cubin", ".json"}


def _operands(case: Case) -> Operands:
    """Operands of a case that lie nowhere."""
    rows = (2 if case.gated else 1) * case.inner
    shapes = {
        "x": (case.tokens, case.hidden),
        "w13": (case.experts, rows, case.hidden),
        "w2": (case.experts, case.hidden, case.inner),
    }
    if case.biases:
        shapes |= {"b13": (case.experts, rows), "b2": (case.experts, case.hidden)}
    made = {n: torch.empty(s, dtype=case.dtype, device="meta") for n, s in shapes.items()}
    chosen = (case.tokens, case.top_k)
    ids = torch.empty(chosen, dtype=torch.int64, device="meta")
    weights = torch.empty(chosen, dtype=torch.float32, device="meta")
    return Operands(**made, ids=ids, weights=weights)


def pieces() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a name and a call for each set of launches that the ladder makes."""
    from fivefold.moe.kernels import launch as launches  # noqa: PLC0415 - triton, if any

    few = [replace(case, tokens=16) for case in timed_cases()]
    checked = [of_kind(case, kind) for case in checked_cases(tiny=False) for kind in KINDS]
    cases = list(dict.fromkeys(replace(c, name="", routing="", target_s=None) for c in checked))
    for case in [*cases, *dict.fromkeys(few)]:
        given = _operands(case)
        options = options_of(case, given)
        hidden = torch.empty(
            (given.ids.numel(), given.w13.shape[1]), dtype=case.dtype, device="meta"
        )
        calls = {"fused": launches.forward_fused, "split": launches.forward_split}
        what = "" if case in cases else "timed "
        for name, call in calls.items():
            yield f"{what}{name}, {case}", lambda c=call, g=given, o=options: c(*g.positional, **o)
        if case in cases or case.backward:
            for kept in (None, hidden):
                yield (
                    f"{what}backward, {case}",
                    lambda g=given, o=options, h=kept: launches.backward_fused(
                        g.x, *g.positional, hidden=h, **o
                    ),
                )
    for case, ranks in exchanged_cases(tiny=False):
        yield f"exchange, {ranks} ranks, {case}", lambda c=case, r=ranks: _exchange(c, r)
    for case in timed_cases()[1:3]:
        given = _operands(replace(case, tokens=16))
        for tiles in SWEPT_BACKWARD:
            more = options_of(case, given) | {"tiles": tiles}
            yield (
                f"sweep backward, {case}, {tiles}",
                lambda g=given, o=more: launches.backward_fused(g.x, *g.positional, **o),
            )
    for case in swept_cases():
        small = replace(case, tokens=16)
        given = _operands(small)
        options = options_of(small, given)
        for tiles in dict.fromkeys(tiles for tiles, _ in SWEPT):
            more = options | {"tiles": tiles}
            yield (
                f"sweep, {small}, {tiles}",
                lambda g=given, o=more: launches.forward_fused(*g.positional, **o),
            )


def _exchange(case: Case, ranks: int) -> None:
    """Forward and backward of virtual ranks, as the rung calls them."""
    from fivefold.moe.kernels import launch as launches  # noqa: PLC0415 - triton, if any
    from fivefold.moe.operator.fused import Backend  # noqa: PLC0415
    from fivefold.moe.parallel import _one_sided as one_sided  # noqa: PLC0415

    anywhere = Backend(
        name="fused", forward=launches.forward_fused, backward=launches.backward_fused,
        missing=lambda _device: None,
    )  # fmt: skip
    group = group_of(case, ranks, torch.device("meta"))
    with (
        mock.patch.object(one_sided, "backend_for", return_value=anywhere),
        mock.patch.object(one_sided.OneSidedGroup, "check"),  # reads words that are nowhere
    ):
        out = exchanged(case, _operands(case).leaves(), group)
        torch.autograd.backward(out, torch.empty_like(out))


def _share(share: str, only: str) -> None:
    """Compile every n-th piece."""
    from benchmarks.moe.offline import compiled_instead  # noqa: PLC0415 - triton

    _trust_versions()
    first, step = map(int, share.split("/"))
    named = [(name, call) for name, call in pieces() if only in name]
    for name, call in named[first::step]:
        began_s = time.monotonic()
        # Timed kernels have no clock; those of the checks give up waiting.
        os.environ["FIVEFOLD_MOE_DEBUG"] = "0" if name.startswith(("sweep", "timed")) else "6"
        with compiled_instead() as found:
            try:
                call()
            except Exception as reason:  # noqa: BLE001 - one of many; the ladder says it again
                say(event="note", text=f"{name}: {type(reason).__name__}: {str(reason)[:300]}")
                continue
        seconds = round(time.monotonic() - began_s, 1)
        say(event="built", piece=name, kernels=[kernel for kernel, _ in found], seconds=seconds)


def _trust_versions() -> None:
    import triton  # noqa: PLC0415

    triton.runtime.cache.triton_key = lambda: f"triton {triton.__version__}"


def settle(folder: Path) -> None:
    """Tell triton which files a folder has, and where it lies now.

    Triton writes a kernel's files down with their whole paths, and from 3.9 on uses none of them
    where one is missing.
    """
    for path in folder.resolve().rglob("__grp__*.json"):
        names = json.loads(path.read_text())["child_paths"]
        there = {name: str(path.parent / name) for name in names if (path.parent / name).exists()}
        path.write_text(json.dumps({"child_paths": there}))


def build(folder: Path, share: str, only: str) -> int:
    """Compile all pieces into a folder, as many at a time as there are cores.

    Args:
        folder: Becomes triton's cache; what a machine does not need is taken out at the end.
        share: "2/8" for every eighth piece from the third on: a child; "0/1" for all.
        only: Pieces whose name contains this.

    Returns:
        The exit code.
    """
    if share != "0/1":
        _share(share, only)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(folder.resolve())
    count = os.cpu_count() or 1
    command = [sys.executable, "-m", "benchmarks.moe.gpu", "--build", str(folder), "--only", only]
    # One child at least, however many cores: this process has no target machine set.
    children = [
        subprocess.Popen([*command, "--share", f"{number}/{max(count, 2)}"])
        for number in range(max(count, 2))
    ]
    codes = [child.wait() for child in children]
    kept = 0
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in _KEPT:
            path.unlink()
        elif path.is_file():
            kept += path.stat().st_size
    settle(folder)
    say(event="note", text=f"{kept} bytes in {folder}")
    return max(codes)
