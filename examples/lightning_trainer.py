"""Lightning with delay-corrected local updates instead of DDP: one strategy.

A small network learns a sum; then the run is resumed from its middle and reaches the same model.
Needs Lightning (``pip install 'fivefold[lightning]'``).

torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
import torch.distributed as dist

from fivefold.optim import DelayCorrected
from fivefold.optim.integrations import lightning_strategy

EPOCHS, HALF = 5, 3
STEPS_PER_EPOCH = 20


class Net(lightning.LightningModule):  # type: ignore[misc]
    """A LightningModule as it would be without fivefold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Return the loss of one batch."""
        loss: torch.Tensor = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        """Judge the parameters, which are the same on all ranks here."""
        weight = next(self.parameters()).detach().sum()
        everyone = self.all_gather(weight)
        assert bool((everyone == weight).all()), everyone
        self.log("validation", self.training_step(batch, number), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return any optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: Path, resume: Path | None = None) -> tuple[torch.Tensor, float]:
    """Train; the strategy is the only line that is not Lightning's own."""
    strategy = lightning_strategy(
        DelayCorrected(tau=4, fragments=2), strategy={"process_group_backend": "gloo"}
    )
    keeper = lightning.callbacks.ModelCheckpoint(folder, save_top_k=-1)
    options: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=EPOCHS, callbacks=[keeper],
        **options,
    )  # fmt: skip
    numbers = torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
    load: Any = torch.utils.data.DataLoader
    train, validation = load(numbers[:320], batch_size=8), load(numbers[320:], batch_size=8)
    model = Net()
    trainer.fit(model, train, validation, ckpt_path=resume)
    assert trainer.strategy.model is model, "DDP did not wrap it"
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    gathered = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(gathered, weights)
    assert torch.equal(gathered[0], gathered[1]), "all replicas are equal at the end"
    return weights, float(trainer.callback_metrics["validation"])


def main() -> None:
    """Train once, resume once, compare."""
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    with tempfile.TemporaryDirectory() as temporary:
        shared = [temporary]
        dist.init_process_group("gloo")
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        weights, loss = fit(folder / "whole")
        middle = f"epoch={HALF - 1}-step={HALF * STEPS_PER_EPOCH}.ckpt"
        again, _ = fit(folder / "again", resume=folder / "whole" / middle)
        assert torch.equal(weights, again), "a resumed run reaches the same model"
        if dist.get_rank() == 0:
            print(f"{EPOCHS * STEPS_PER_EPOCH} steps: validation loss {loss:.4f}, replicas equal")
            print(f"resumed from step {HALF * STEPS_PER_EPOCH}: the same model")
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
