"""CO2 in a plain PyTorch loop: local steps, communication behind them, one exact model at the end.

torchrun --standalone --nproc-per-node 2 examples/co2_plain_loop.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fivefold.optim import CO2, OuterSync

STEPS = 400


def main() -> None:
    """Fit a small network on a different half of the data on each rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # another start on each rank: OuterSync takes rank 0's
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = OuterSync(model, optimizer, rule=CO2(tau=8, outer_lr=0.7, outer_momentum=0.2))

    for step in range(STEPS):
        inputs = torch.randn(64, 8)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True).sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.step()
        if rank == 0 and step % 80 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")

    sync.finalize()
    checksum = torch.cat([p.detach().flatten() for p in model.parameters()]).sum()
    statistics = sync.statistics()
    line = (
        f"rank {rank}: checksum {checksum.item():.6f}, {statistics.merged_rounds} rounds, "
        f"{statistics.exposed_wait_s * 1e3:.1f} ms waited, staleness gap "
        f"{statistics.staleness_gap:.2f}\n"
    )
    print(line, end="")  # one write, so that the ranks' lines do not mix
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
