"""Experts on four ranks: tokens travel to them and back within one launch, without a barrier.

python examples/moe_expert_parallel.py

The ranks are virtual: they share this process, as they can share one GPU. Without a GPU, Triton's
interpreter runs the kernel on the CPU, slowly, so the sizes are tiny. Between processes the same
call goes over ``OneSidedGroup.between_processes``, between GPUs over ``TorchSymmetricHeap``.
"""

from __future__ import annotations

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from fivefold.moe import OneSidedConfig, OneSidedGroup, Router, VirtualHeap, fused_moe

RANKS, EXPERTS, HIDDEN, INNER, TOP_K = 4, 8, 32, 32, 2


def main() -> None:
    """Spread eight experts over four ranks, and compare with one rank that has them all."""
    if importlib.util.find_spec("triton") is None:
        print("this needs triton: pip install 'fivefold[moe]'")
        return
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = [7, 0, 12, 3]  # of each rank
    x = torch.randn(sum(tokens), HIDDEN, device=device)
    gate = torch.randn(EXPERTS, HIDDEN, device=device)
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, device=device) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, device=device) / INNER**0.5

    config = OneSidedConfig(
        ranks=RANKS,
        experts=EXPERTS,
        hidden=HIDDEN,
        intermediate=INNER,
        top_k=TOP_K,
        max_tokens=max(tokens),
        dtype=x.dtype,
    )
    heap = VirtualHeap(RANKS, nbytes=config.heap_bytes(), device=device)
    group = OneSidedGroup(config, heap)
    y, ids, weights = group.routed(x, w13, w2, gate, Router(top_k=TOP_K), num_tokens=tokens)
    group.check()

    alone = fused_moe(x, w13, w2, ids, weights, backend="reference")
    print(f"heap: {heap.nbytes} bytes per rank; largest difference {(y - alone).abs().max():.1e}")
    print("bytes of tokens from each rank to each rank's experts:")
    for rank, row in enumerate(group.statistics()["sent_bytes"]):
        print(f"  rank {rank}: {row}")
    routed = int((ids >= 0).sum())
    total = sum(map(sum, group.statistics()["sent_bytes"]))
    print(f"{routed} routed rows x {HIDDEN} x {x.dtype.itemsize} bytes = {total}")


if __name__ == "__main__":
    main()
