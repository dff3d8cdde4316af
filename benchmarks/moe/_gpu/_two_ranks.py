# mypy: disable-error-code="no-untyped-call,import-untyped,misc"
"""Two ranks in processes of their own that share one GPU, by torch's symmetric memory.

torch refuses ranks whose memory lies on one device unless it is told that this is meant. On a
processor the ranks share files in memory instead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.moe._gpu._bench import TOLERANCE, Bench
from benchmarks.moe._gpu._cases import Case, exchanged_cases, kind_of
from benchmarks.moe._gpu._exact import Exact
from benchmarks.moe._gpu._operands import operands_of
from fivefold.moe import OneSidedConfig, OneSidedGroup, TorchSymmetricHeap

__all__ = ["two_ranks"]

_RANKS, _EPOCHS = 2, 3
_LONGEST_S = 60.0
_ALLOWED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


def two_ranks(case: Case, bench: Bench, _parameter: int) -> None:
    """Compare what the ranks computed together with what is right, and time their launches."""
    seconds: list[float] = []
    outs = bench.run(lambda: _together(case, bench, seconds))
    given = operands_of(case, bench.device)
    wanted = Exact(case, given).out
    for epoch, out in enumerate(outs):
        error = f"the forward of epoch {epoch}"
        bench.error(error, out.to(bench.device), wanted, TOLERANCE[kind_of(case)])
    bench.row("longest launch of a rank, the first left out", "s", max(seconds))


def _together(case: Case, bench: Bench, seconds: list[float]) -> torch.Tensor:
    """Return the outputs [epochs, T, H] of all ranks' tokens; ``seconds`` gets the launches'."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(_RANKS):
            order = {
                "rank": rank, "folder": folder, "kind": kind_of(case), "tiny": not bench.on_gpu,
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.moe._gpu._two_ranks", json.dumps(order)]
            with Path(folder, f"said-{rank}").open("wb") as said:
                child = subprocess.Popen(
                    command, env=os.environ | _ALLOWED, stdout=said, stderr=said
                )
            children.append(child)
        end_s = time.monotonic() + _LONGEST_S
        try:
            codes = [child.wait(max(end_s - time.monotonic(), 0.1)) for child in children]
        except subprocess.TimeoutExpired:
            codes = [child.poll() for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        if any(codes) or None in codes:
            ends = [Path(folder, f"said-{n}").read_text(errors="replace") for n in range(_RANKS)]
            message = f"the ranks ended with exit codes {codes} (None: not in {_LONGEST_S:g} s): "
            raise RuntimeError(message + " | ".join(text[-600:] for text in ends))
        found = [torch.load(Path(folder, f"out-{rank}.pt")) for rank in range(_RANKS)]
    seconds += [value for each in found for value in each["seconds"][1:]]
    return torch.cat([torch.stack(each["outs"]) for each in found], dim=1)


def _group(case: Case, order: dict[str, object], device: torch.device) -> OneSidedGroup:
    config = OneSidedConfig(
        ranks=_RANKS, experts=case.experts, hidden=case.hidden, intermediate=case.inner,
        top_k=case.top_k, max_tokens=case.tokens // _RANKS, dtype=case.dtype,
        activation=case.activation, precision=case.precision,
    )  # fmt: skip
    rank, folder = int(str(order["rank"])), Path(str(order["folder"]))
    if device.type == "cpu":
        heap = folder / "heap"
        heap.mkdir(exist_ok=True)
        return OneSidedGroup.between_processes(config, heap, rank=rank, timeout_s=30.0)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS
    )
    memory = TorchSymmetricHeap(nbytes=config.heap_bytes(), device=device)
    return OneSidedGroup(config, memory, timeout_s=8.0)


def _be_rank(order: dict[str, object]) -> None:
    from fivefold.lab._linux import die_with_parent  # noqa: PLC0415 - of a rank only

    die_with_parent(signal.SIGKILL)
    device = torch.device("cpu" if order["tiny"] else "cuda:0")
    cases = exchanged_cases(tiny=bool(order["tiny"]))
    case = next(c for c, ranks in cases if ranks == _RANKS and kind_of(c) == order["kind"])
    given, rank = operands_of(case, device), int(str(order["rank"]))
    group = _group(case, order, device)
    tokens, local = case.tokens // _RANKS, case.experts // _RANKS
    mine, ours = slice(rank * tokens, (rank + 1) * tokens), slice(rank * local, (rank + 1) * local)
    b13, b2 = (None if bias is None else bias[ours] for bias in (given.b13, given.b2))
    outs, seconds = [], []
    for _ in range(_EPOCHS):
        started_s = time.perf_counter()
        out = group.fused_moe(
            given.x[mine], given.w13[ours], given.w2[ours], given.ids[mine], given.weights[mine],
            backend="fused", b13=b13, b2=b2,
        )  # fmt: skip
        outs.append(out.cpu())  # waits
        seconds.append(time.perf_counter() - started_s)
        group.check()
    torch.save({"outs": outs, "seconds": seconds}, Path(str(order["folder"]), f"out-{rank}.pt"))


if __name__ == "__main__":
    _be_rank(json.loads(sys.argv[1]))
