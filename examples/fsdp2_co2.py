"""FSDP2 -> CO2: two workers of two ranks each, sharded inside, hidden rounds between them.

Four processes on this machine, about twenty seconds:

    python examples/fsdp2_co2.py
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fivefold.optim import CO2, OuterSync
from fivefold.testing import run_processes


def train(rank: int) -> tuple[float, float, int]:
    """Train one rank; return the first loss, the last one, and the bytes that it sent."""
    # Rows of the mesh are workers: ranks 0 and 1, ranks 2 and 3.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    fully_shard(model, mesh=mesh["shard"])  # gradients are averaged inside the worker alone
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = OuterSync(model, optimizer, rule=CO2(tau=4), process_group=mesh["replicate"])

    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(80):
        x = torch.randn(32, 16, generator=generator)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
        losses.append(float(loss.detach()))
    outer.finalize()
    return losses[0], losses[-1], sum(all_reduce.sent_bytes for all_reduce in outer.all_reduces())


def main() -> None:
    """Start the four ranks and print what came out."""
    for rank, (first, last, sent) in enumerate(run_processes(4, train)):
        print(f"rank {rank}: loss {first:.2f} -> {last:.2f}, {sent} bytes sent to other workers")


if __name__ == "__main__":
    main()
