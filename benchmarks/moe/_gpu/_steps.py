# mypy: disable-error-code="no-untyped-call,import-untyped,misc"
"""The steps of the ladder in order, and the child that runs them one after another."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.ladder import Rung, say, serve
from benchmarks.machine import describe_machine
from benchmarks.moe._gpu._bench import Bench
from benchmarks.moe._gpu._cases import (
    KINDS,
    Case,
    checked_cases,
    exchanged_cases,
    kind_of,
    of_kind,
    timed_cases,
    tiny_case,
)
from benchmarks.moe._gpu._rungs import BACKWARD
from benchmarks.moe._gpu._rungs import RUNGS as ONE_PROCESS
from benchmarks.moe._gpu._timeline import time_line
from benchmarks.moe._gpu._timing import (
    SWEPT,
    SWEPT_BACKWARD,
    ceilings,
    sweep,
    sweep_backward,
    swept_cases,
    time_case,
    time_training,
    time_tuned,
)
from benchmarks.moe._gpu._two_ranks import two_ranks
from benchmarks.moe._gpu._variants import TUNED, missing_peer

__all__ = ["Step", "steps_of", "work"]

PROGRAMS = (1, 2, 16, 132)
_RUNGS = ONE_PROCESS | {"two ranks": two_ranks}


@dataclass(frozen=True, kw_only=True)
class Step(Rung):
    """One thing that a child does.

    Backends are "split" (also its kernels one by one), "fused", "backward" and "exchange"; kinds
    are the keys of ``KINDS``.

    Attributes:
        run: What to do, given a bench and the backends of ours that have not failed.
        bounded: Whether waits of kernels give up by themselves; timed kernels have no clock.
    """

    run: Callable[[Bench, set[str]], None]
    bounded: bool = True


def machine(bench: Bench, _allowed: set[str]) -> None:
    """What there is, and whether a kernel of three lines runs at all."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers", "liger-kernel", "sonic-moe"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["Python.h"] = str(Path(sysconfig.get_paths()["include"], "Python.h").exists())
    if bench.on_gpu:
        properties = torch.cuda.get_device_properties(bench.device)
        major, minor = torch.cuda.get_device_capability(bench.device)
        found |= {"GPU": properties.name, "compute capability": f"{major}.{minor}"}
        found |= {"CUDA": str(torch.version.cuda)}
        bench.row("multiprocessors", "", properties.multi_processor_count)
        bench.row("memory", "bytes", properties.total_memory)
    say(event="machine", step=bench.step, versions=found, machine=describe_machine())
    from benchmarks.moe._gpu._clear import clear_kernel  # noqa: PLC0415 - triton may be missing

    words = torch.full((3000,), 7, dtype=torch.int32, device=bench.device)
    bench.run(lambda: clear_kernel[1,](words, 2999), words)
    bench.row(
        "words that a first kernel did not clear", "words", int((words[:-1] != 0).sum()), most=0
    )
    bench.row("words that it should have left alone", "words", int(words[-1] != 7), most=0)


def _checked(rung: str, case: Case, backend: str, parameter: int = 0, note: str = "") -> Step:
    kind = kind_of(case)
    name = " / ".join(filter(None, (rung, kind, case.name, note)))

    def run(bench: Bench, _allowed: set[str]) -> None:
        _RUNGS[rung](case, bench, parameter)

    return Step(rung=rung, name=name, backend=backend, kind=kind, run=run, needs=(backend,))


def _checks(*, tiny: bool) -> list[Step]:
    cases = checked_cases(tiny=tiny)
    usual, found = cases[0], []
    found += [_checked("count and place", case, "split") for case in cases]
    for rung in ("first product", "second product", "combine"):
        for kind in KINDS:
            found += [_checked(rung, of_kind(case, kind), "split") for case in (usual, cases[-1])]
    for kind in KINDS:
        found += [_checked("split", of_kind(case, kind), "split") for case in cases]
    counts = PROGRAMS[:2] if tiny else PROGRAMS
    for kind in KINDS:
        for case, programs in [(usual, p) for p in counts] + [(c, counts[-1]) for c in cases[1:]]:
            note = f"{programs} programs"
            found.append(_checked("fused", of_kind(case, kind), "fused", programs, note))
    launches = 4 if tiny else 1000
    for kind in ("bf16",) if tiny else ("bf16", "fp16"):
        found.append(_checked("launches", of_kind(usual, kind), "fused", launches))
    for kind in KINDS:
        case = of_kind(usual, kind)
        for number, what in enumerate(BACKWARD):
            found.append(_checked("backward", case, "backward", number, what))
        whole = cases if kind == "bf16" else (usual,)
        found += [_checked("whole backward", of_kind(c, kind), "backward") for c in whole]
    return found + _exchanges(tiny=tiny)


def _exchanges(*, tiny: bool) -> list[Step]:
    cases = exchanged_cases(tiny=tiny)
    virtual = [
        _checked("exchange", case, "exchange", ranks, f"{ranks} virtual ranks")
        for case, ranks in cases
    ]
    real = [
        replace(_checked("two ranks", case, "exchange", 2, "in two processes"), limit_s=90.0)
        for case, ranks in cases
        if ranks == 2
    ]
    return virtual + real


def _times(*, tiny: bool) -> list[Step]:
    cases = timed_cases()
    if tiny:
        cases = [tiny_case(case) for case in (cases[1], cases[4])]
    found = [Step(rung="timing", name="timing / ceilings", run=lambda b, _: ceilings(b))]
    for training in (False, True):
        for case in cases:
            if training and not case.backward:
                continue
            name = f"{'training' if training else 'timing'} / {case}"
            kind, function = kind_of(case), time_training if training else time_case
            found.append(
                Step(
                    rung="training" if training else "timing", name=name, kind=kind, bounded=False,
                    run=partial(_timed, function, case), needs=("backward",) if training else (),
                    limit_s=90.0 if case.compiled else 45.0,
                )
            )  # fmt: skip
    swept = [tiny_case(case) for case in swept_cases()[:1]] if tiny else swept_cases()
    found += [
        Step(
            rung="timeline", name=f"timeline / {case}", kind=kind_of(case), needs=("fused",),
            run=partial(_timed, time_line, case), bounded=False,
        )
        for case in (swept if tiny else cases[:3])
    ]  # fmt: skip
    for case in swept:
        for number, (tiles, more) in enumerate(SWEPT[:2] if tiny else SWEPT):
            if case.gated and tiles.columns > 128:  # two such tiles are more than there is room for
                continue
            shape = f"{tiles.rows}x{tiles.columns}x{tiles.second_columns}x{tiles.depth}"
            how = f"{shape}, {tiles.stages} stages, {tiles.warps} warps, group {tiles.group}"
            found.append(
                Step(
                    rung="sweep", name=f"sweep / {case} / {how}, {more or 'usual'}",
                    run=partial(_swept, case, number), bounded=False, limit_s=20.0,
                )
            )  # fmt: skip
    for case in swept[1:] if tiny else cases[1:3]:
        for number, tiles in enumerate(SWEPT_BACKWARD):
            how = f"{tiles.second_columns} columns, {tiles.stages} stages, group {tiles.group}"
            found.append(
                Step(
                    rung="sweep", name=f"sweep backward / {case} / {how}", bounded=False,
                    run=partial(_swept_backward, case, number), limit_s=20.0,
                )
            )  # fmt: skip
    return found + _times_of_tuned(cases, tiny=tiny)


def _times_of_tuned(cases: list[Case], *, tiny: bool) -> list[Step]:
    """Steps beside those who tune themselves, last: each may take minutes."""
    return [
        Step(
            rung="tuned", name=f"tuned / {case}, beside {peer}", kind=kind_of(case), bounded=False,
            run=partial(_timed, partial(time_tuned, peer), case), limit_s=45.0 if tiny else 200.0,
            absent=missing_peer(peer, on_gpu=not tiny),
        )
        for peer in TUNED
        for case in cases
        if case.activation == "swiglu" and case.target_flops_per_s is not None
    ]  # fmt: skip


def _timed(
    function: Callable[[Case, Bench, set[str]], None], case: Case, bench: Bench, allowed: set[str]
) -> None:
    function(case, bench, allowed)


def _swept_backward(case: Case, number: int, bench: Bench, _allowed: set[str]) -> None:
    sweep_backward(case, bench, number)


def _swept(case: Case, number: int, bench: Bench, _allowed: set[str]) -> None:
    sweep(case, bench, number)


def steps_of(*, tiny: bool) -> list[Step]:
    """All steps, in order; the parent and its children make the same list."""
    first = Step(rung="machine", name="machine", run=machine, limit_s=60.0)
    return [first, *_checks(tiny=tiny), *_times(tiny=tiny)]


def _listen() -> None:
    """Say what is compiled, so that the parent gives it the time, and trust cubins by version."""
    import triton  # noqa: PLC0415 - a step says so where it is missing

    def compiled(*, src: object, times: object, cache_hit: bool, **_more: object) -> None:
        del times
        if not cache_hit:
            say(event="compiled", kernel=str(getattr(src, "name", src)))

    triton.knobs.compilation.listener = compiled
    if "FIVEFOLD_CUBINS" in os.environ:  # made by another Python's triton of the same version
        triton.runtime.cache.triton_key = lambda: f"triton {triton.__version__}"


def work(*, tiny: bool) -> int:
    """Run the steps that come in by number, until there are no more.

    Args:
        tiny: On the CPU, in the interpreter.

    Returns:
        The exit code.
    """
    device = torch.device("cpu" if tiny else "cuda:0")
    torch.set_num_threads(1 if tiny else torch.get_num_threads())
    steps = steps_of(tiny=tiny)
    try:
        _listen()
    except Exception as reason:  # noqa: BLE001 - said; the first step says why
        say(event="note", text=f"triton: {type(reason).__name__}: {reason}")

    def attempt(step: Step, order: Mapping[str, Any]) -> bool:
        bench = Bench(device, step=step.name, fault=order["fault"])
        if step.bounded:
            os.environ["FIVEFOLD_MOE_DEBUG"] = "6"
        else:
            os.environ.pop("FIVEFOLD_MOE_DEBUG", None)
        guard = bench.guard(order["guard_s"])
        try:
            step.run(bench, set(order["allowed"]))
        finally:
            guard.cancel()
        return bench.good

    return serve(steps, attempt, poisonous=not tiny)
