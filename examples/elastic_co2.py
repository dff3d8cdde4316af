"""Workers that leave and join: one is killed in the middle of training, another one comes.

python examples/elastic_co2.py

On several machines: ``fivefold elastic lighthouse --min-workers 2`` on one of them, and the loop of
``train`` below on each worker, with the lighthouse's address. No torchrun, no ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

from fivefold.optim import (
    DelayCorrected,
    LeftBehindError,
    OuterSync,
    elastic_transport,
    start_lighthouse,
)

STEPS = 960  # long enough for a newcomer to load torch on a busy machine


def train(name: str, lighthouse: str) -> None:
    """Fit a small network, from the start or from wherever the others are."""
    torch.manual_seed(int.from_bytes(name.encode()))  # other data on each worker
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    transport = elastic_transport(lighthouse=lighthouse, max_workers=8, timeout_s=30)
    sync = OuterSync(model, optimizer, rule=DelayCorrected(tau=8), transport=transport)
    transport.join(sync)
    first = sync.statistics().steps
    print(f"worker {name}: starts at step {first}", flush=True)

    while True:
        try:
            take_steps(name, model, optimizer, sync)
            sync.finalize()
            break
        except LeftBehindError as error:  # silent for too long: come back with a peer's state
            print(f"worker {name}: {error}", flush=True)
            transport.join(sync)
    checksum = torch.cat([p.detach().flatten() for p in model.parameters()]).sum()
    print(f"worker {name}: checksum {checksum.item():.6f}", flush=True)
    transport.close()


def take_steps(
    name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: OuterSync
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
            print(f"worker {name}: step {step:3d}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Play the story on this machine."""
    lighthouse = start_lighthouse("127.0.0.1:0", min_workers=2, heartbeat_timeout_s=2)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, name, f"127.0.0.1:{lighthouse.port}"]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    workers = {name: start(name) for name in "abc"}
    echo(workers["c"], until="step  80")
    workers["c"].kill()
    print("worker c was killed", flush=True)
    workers["d"] = start("d")
    for worker in workers.values():
        echo(worker)
        worker.wait()
    lighthouse.close()


def echo(worker: subprocess.Popen[str], until: str | None = None) -> None:
    """Print what a worker says, up to a line that has this text."""
    assert worker.stdout is not None, "it was started with a pipe"
    for line in worker.stdout:
        print(line, end="", flush=True)
        if until is not None and until in line:
            return


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(sys.argv[1], sys.argv[2])
    else:
        main()
