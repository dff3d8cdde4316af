"""Workers that leave and join: one is killed in the middle of training, another one comes.

python examples/elastic_co2.py

On several machines: ``fivefold elastic lighthouse --min-workers 2`` on one of them, and the loop of
``train`` below on each worker, with the lighthouse's address. No torchrun, no ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event

import torch

from fivefold.optim import (
    DelayCorrected,
    LeftBehindError,
    OuterSync,
    elastic_transport,
    start_lighthouse,
)

STEPS = 400
BUSY_STEP = 80  # worker c is killed then


def train(name: str, lighthouse: str, busy: Event) -> None:
    """Fit a small network, from the start or from wherever the others are."""
    torch.manual_seed(int.from_bytes(name.encode()))  # other data on each worker
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    transport = elastic_transport(lighthouse=lighthouse, max_workers=8, timeout_s=30)
    sync = OuterSync(model, optimizer, rule=DelayCorrected(tau=8), transport=transport)
    transport.join(sync)
    first = sync.statistics().steps
    say(f"worker {name}: starts at step {first}")

    while True:
        try:
            take_steps(name, model, optimizer, sync, busy)
            sync.finalize()
            break
        except LeftBehindError as error:  # silent for too long: come back with a peer's state
            say(f"worker {name}: {error}")
            transport.join(sync)
    checksum = torch.cat([p.detach().flatten() for p in model.parameters()]).sum()
    say(f"worker {name}: checksum {checksum.item():.6f}")
    transport.close()


def take_steps(
    name: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: OuterSync,
    busy: Event,
) -> None:
    """Take the local steps that are left; ``sync`` counts them."""
    while (step := sync.statistics().steps) < STEPS:
        inputs = torch.randn(64, 8)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True).sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
        time.sleep(0.02)  # stands for a model that takes longer
        if step % 80 == 0:
            say(f"worker {name}: step {step:3d}  loss {loss.item():.4f}")
        if step >= BUSY_STEP:
            busy.set()


def say(line: str) -> None:
    """Print a line in one write, so that the workers' lines do not mix."""
    print(f"{line}\n", end="", flush=True)


class Worker:
    """A process that stands ready, with torch loaded, until it learns where the lighthouse is."""

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("fork")
        self.addresses: SimpleQueue[str] = context.SimpleQueue()
        self.busy = context.Event()
        self.process = context.Process(target=self._run, args=(name,))
        self.process.start()

    def _run(self, name: str) -> None:
        train(name, self.addresses.get(), self.busy)


def main() -> None:
    """Play the story on this machine."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    workers = {name: Worker(name) for name in "abcd"}
    lighthouse = start_lighthouse("127.0.0.1:0", min_workers=2, heartbeat_timeout_s=2)
    for name in "abc":
        workers[name].addresses.put(f"127.0.0.1:{lighthouse.port}")
    workers["c"].busy.wait(timeout=60)
    workers["c"].process.kill()
    say("worker c was killed")
    workers["d"].addresses.put(f"127.0.0.1:{lighthouse.port}")
    for worker in workers.values():
        worker.process.join()
    lighthouse.close()


if __name__ == "__main__":
    main()
