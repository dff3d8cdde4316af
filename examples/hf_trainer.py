"""Hugging Face's Trainer with CO2 instead of DDP: one line between making it and ``train()``.

A tiny GPT-2 learns to count; then the run is resumed from its middle and reaches the same model.
Needs transformers and accelerate (``pip install 'fivefold[hf]'``).

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
)

from fivefold.optim import CO2
from fivefold.optim.integrations import use_outer_sync

STEPS = 96
SAVE_STEPS = 48


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count modulo 16 from any start in steps of one to three."""

    def __len__(self) -> int:
        return 768

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index % 16 + (1 + index // 16 % 3) * torch.arange(12)) % 16
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(folder: str) -> Trainer:
    """A trainer as it would be without fivefold, and the line that makes it local."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=16, n_positions=12, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=folder, max_steps=STEPS, save_steps=SAVE_STEPS, eval_steps=SAVE_STEPS,
        eval_strategy="steps", logging_steps=SAVE_STEPS, learning_rate=3e-3, use_cpu=True,
        per_device_train_batch_size=8, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    data = Counting()
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    if "--ddp" not in sys.argv:
        use_outer_sync(trainer, CO2(tau=4, outer_lr=1.0, outer_momentum=0.0), codec="int8")
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def checksum(model: torch.nn.Module) -> float:
    """A sum over all parameters, to compare replicas and runs by."""
    return sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


def main() -> None:
    """Train, resume from the middle, and say what both came to."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        whole = make_trainer(own)  # the trainer sets up torch.distributed
        dist.broadcast_object_list(folders, src=0)
        whole.args.output_dir = folders[0]
        whole.train()
        loss = whole.evaluate()["eval_loss"]
        resumed = make_trainer(folders[0])
        resumed.train(resume_from_checkpoint=str(Path(folders[0]) / f"checkpoint-{SAVE_STEPS}"))
        rank = dist.get_rank()
        print(
            f"rank {rank}: loss {loss:.3f}, model {checksum(whole.model):.9f}, "
            f"resumed {checksum(resumed.model):.9f}\n",
            end="",
            flush=True,
        )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
