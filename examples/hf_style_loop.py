"""A trainer in Hugging Face's style with CO2 instead of DDP; what changes is marked (1) to (5).

Sequences of mixed length, so batches differ in tokens; gradient accumulation; a learning rate
schedule; evaluation; checkpoints and resume. Needs neither Accelerate nor transformers.

torchrun --standalone --nproc-per-node 2 examples/hf_style_loop.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from fivefold.optim import CO2, OuterSync

VOCABULARY = 32
PADDING = -100  # label of positions that do not count, as in Hugging Face's models


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """The usual names."""

    output_dir: Path
    max_steps: int = 160
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    learning_rate: float = 1e-2
    eval_steps: int = 40
    save_steps: int = 100


class TinyLanguageModel(torch.nn.Module):
    """Takes and returns what a causal language model of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 48)
        self.layer = torch.nn.GRU(48, 48, batch_first=True)
        self.head = torch.nn.Linear(48, VOCABULARY)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Summed loss, so that batches of another size weigh what they should."""
        logits = self.head(self.layer(self.embedding(input_ids))[0])
        target = labels.flatten()
        loss = cross_entropy(logits.flatten(0, 1), target, ignore_index=PADDING, reduction="sum")
        return {"loss": loss, "logits": logits}


def batches(seed: int, *, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless counting sequences of mixed length, padded to the longest of their batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        lengths = torch.randint(4, 25, (size,), generator=generator)
        starts = torch.randint(VOCABULARY, (size, 1), generator=generator)
        strides = torch.randint(1, 4, (size, 1), generator=generator)
        positions = torch.arange(int(lengths.max()))
        tokens = (starts + strides * positions) % VOCABULARY
        labels = tokens.roll(-1, dims=1).masked_fill(positions >= lengths[:, None] - 1, PADDING)
        yield {"input_ids": tokens, "labels": labels}


class Trainer:
    """Training loop, evaluation and checkpoints of one rank."""

    def __init__(self, model: torch.nn.Module, arguments: TrainingArguments) -> None:
        self.model, self.arguments = model, arguments
        self.rank, self.step = dist.get_rank(), 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, start_factor=1.0, end_factor=0.1, total_iters=arguments.max_steps
        )
        # (1) The bare model, not DistributedDataParallel(model).
        rule = CO2(tau=8, outer_lr=0.5, outer_momentum=0.0)
        self.sync = OuterSync(model, self.optimizer, rule=rule)

    def train(self) -> None:
        """Run to ``max_steps`` from wherever it stands."""
        data = batches(1 + self.rank, size=self.arguments.per_device_train_batch_size)
        micro_steps = self.arguments.gradient_accumulation_steps
        for _ in range(self.step * micro_steps):  # skip what was read before the resume
            next(data)
        while self.step < self.arguments.max_steps:
            micro_batches = [next(data) for _ in range(micro_steps)]
            tokens = sum(int((batch["labels"] != PADDING).sum()) for batch in micro_batches)
            for batch in micro_batches:
                (self.model(**batch)["loss"] / tokens).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            # (2) Once per optimizer step. This rank's part of the mean is its share of the tokens.
            self.sync.step(weight=tokens)
            self.step += 1
            if self.step % self.arguments.eval_steps == 0:
                self.log(f"step {self.step:3d}  loss {self.evaluate():.3f}")
            if self.step % self.arguments.save_steps == 0:
                self.save()
        # (3) At the end: merge what is in flight. All ranks have equal parameters then.
        self.sync.finalize()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Loss per token of the model that all ranks share."""
        data = batches(0, size=64)
        loss, tokens = 0.0, 0
        # (4) Between rounds the ranks' own parameters differ; the anchor is equal on all.
        with self.sync.global_parameters():
            for batch in (next(data) for _ in range(4)):
                loss += float(self.model(**batch)["loss"])
                tokens += int((batch["labels"] != PADDING).sum())
        return loss / tokens

    def save(self) -> None:
        """One file per rank: between rounds the ranks differ."""
        torch.save(
            {
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "sync": self.sync.state_dict(),  # (5) with the all-reduce, which goes on
            },
            self._file(self.step),
        )

    def resume(self, step: int) -> None:
        """Go on from a checkpoint as if nothing had happened; the sync's state comes last."""
        state: dict[str, Any] = torch.load(self._file(step), weights_only=True)
        self.step = state["step"]
        for name in ("model", "optimizer", "scheduler", "sync"):
            getattr(self, name).load_state_dict(state[name])

    def _file(self, step: int) -> Path:
        return self.arguments.output_dir / f"checkpoint-{step}-rank{self.rank}.pt"

    def log(self, text: str) -> None:
        """Rank 0 speaks."""
        if self.rank == 0:
            print(text, flush=True)


def checksum(model: torch.nn.Module) -> float:
    """One number of all parameters, exact enough to tell one bit of difference."""
    return float(torch.cat([p.detach().double().flatten() for p in model.parameters()]).sum())


def main() -> None:
    """Train to the end, then again from a checkpoint in the middle of a round, and compare."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=Path(folder))
        whole = Trainer(TinyLanguageModel(), arguments)
        whole.train()
        resumed = Trainer(TinyLanguageModel(), arguments)
        resumed.resume(100)  # 100 is no multiple of tau: an all-reduce was in the air
        resumed.train()
    statistics = whole.sync.statistics()
    line = (
        f"rank {dist.get_rank()}: checksum {checksum(whole.model):.12f}, resumed "
        f"{checksum(resumed.model):.12f}, {statistics.merged_rounds} rounds, "
        f"{statistics.sent_bytes / 1e6:.1f} MB sent\n"
    )
    print(line, end="")  # one write, so that the ranks' lines do not mix
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
