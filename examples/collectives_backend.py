"""Trains the same model over gloo and over fivefold's backend, with DDP as it is.

The topology says that one link is slow, so the backend goes around it. Four processes on this
machine: it shows that nothing in the training code changes, not how fast it is.

    python examples/collectives_backend.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fivefold.collectives.execution import configure
from fivefold.network.topology import Link, Node, Topology
from fivefold.testing import run_processes

RANKS = 4
STEPS = 10


def slow_edge() -> Topology:
    """A ring of four hosts whose last link is five times slower than the others."""
    links = []
    for host in range(RANKS):
        rate = 20e6 if host == RANKS - 1 else 100e6
        ends = f"host{host}", f"host{(host + 1) % RANKS}"
        links += [Link(*ends, bandwidth_bytes_per_s=rate)]
        links += [Link(*reversed(ends), bandwidth_bytes_per_s=rate)]
    return Topology("ring with a slow edge", [Node(f"host{i}", "gpu") for i in range(RANKS)], links)


def train(rank: int) -> list[float]:
    """Ordinary DDP; which backend carries it was said by whoever made the process group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(32, 256, generator=generator)
        targets = torch.randint(0, 10, (32,), generator=generator)
        loss = nn.functional.cross_entropy(replica(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train twice by each backend and compare the losses."""
    configure(topology=slow_edge(), algorithms={"all_reduce": "trees"})
    ours, again = (run_processes(RANKS, train, backend="fivefold") for _ in range(2))
    gloo = run_processes(RANKS, train)
    gap = max(abs(a - b) for a, b in zip(ours[0], gloo[0], strict=True))
    print(f"loss of rank 0: {ours[0][0]:.4f} at first, {ours[0][-1]:.4f} after {STEPS} steps")
    print(f"two runs over fivefold: {'the same bits' if ours == again else 'different'}")
    print(f"largest difference from gloo: {gap:.1e}")


if __name__ == "__main__":
    main()
