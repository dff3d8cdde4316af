"""The real Trainer and the real Accelerate, with local updates in place of DDP."""

import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed (fivefold[hf])")
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from fivefold.errors import CheckpointError, ConfigurationError, UnsupportedError
from fivefold.optim import CO2, DelayedGradients, LocalSGD, OuterSync
from fivefold.optim.integrations import (
    _OwnFile,
    disable_ddp,
    lightning_strategy,
    use_outer_sync,
)
from fivefold.testing import run_world

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from fivefold.optim import LocalSGD, OuterSync
from fivefold.optim.integrations import disable_ddp

def train(local):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if local:
        disable_ddp(accelerator)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.DataLoader(torch.randn(64, 4, generator=generator), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    assert isinstance(model, DistributedDataParallel) is not local
    sync = OuterSync(model, optimizer, rule=LocalSGD(tau=1)) if local else None
    for batch in data:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if sync is not None and accelerator.sync_gradients:
            sync.step()
    if sync is not None:
        sync.finalize()
        assert sync.statistics().merged_rounds == 8, sync.statistics()
    bare = accelerator.unwrap_model(model)
    return torch.cat([p.detach().flatten() for p in bare.parameters()])

local, ddp = train(True), train(False)
torch.testing.assert_close(local, ddp)  # SGD with tau 1: the mean of models is that of gradients
print(f"weights {local.tolist()}\\n", end="", flush=True)  # one write: ranks share the pipe
torch.distributed.destroy_process_group()
"""


def on_two_ranks(folder, text, *arguments):
    script = folder / "train.py"
    script.write_text(text)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*launcher, script, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def make_trainer(folder, **settings):
    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 1}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **settings)
    return Trainer(model, arguments)


@pytest.mark.nightly
@pytest.mark.distributed
def test_accelerate_with_tau_1_is_ddp(tmp_path):
    done = on_two_ranks(tmp_path, ACCELERATE)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall("^weights .*$", done.stdout, re.MULTILINE)
    assert len(lines) == 2
    assert lines[0] == lines[1]


def test_an_optimizer_that_accelerate_has_prepared_is_unwrapped():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prepared = Accelerator(cpu=True).prepare_optimizer(optimizer)
    assert prepared is not optimizer

    def work(transport):
        own = torch.nn.Linear(2, 1) if transport.rank else model
        mine = torch.optim.SGD(own.parameters(), lr=0.5) if transport.rank else prepared
        sync = OuterSync(own, mine, rule=DelayedGradients(), transport=transport)
        start = own.weight.detach().clone()
        for _ in range(2):  # the first sends, the second steps with the mean
            for p in own.parameters():
                p.grad = torch.full_like(p, 1.0 + transport.rank)
            mine.step()
            sync.step()
        return start - own.weight.detach()

    for moved in run_world(2, work):
        torch.testing.assert_close(moved, torch.full_like(moved, 0.5 * 1.5))


def test_settings_that_do_not_go_together_are_refused_at_once(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.args.load_best_model_at_end = True
    trainer_two = make_trainer(tmp_path, average_tokens_across_devices=True)
    with pytest.raises(ConfigurationError, match="load_best_model_at_end=True"):
        use_outer_sync(trainer, LocalSGD(tau=2))
    trainer_two.args._n_gpu = 2
    with pytest.raises(ConfigurationError, match="2 GPUs"):
        use_outer_sync(trainer_two, LocalSGD(tau=2))
    trainer_two.args._n_gpu = 0
    use_outer_sync(trainer_two, CO2(tau=2))
    assert trainer_two.args.average_tokens_across_devices is False


def test_a_checkpoint_without_this_ranks_part_is_refused_before_training(tmp_path):
    trainer = make_trainer(tmp_path)
    use_outer_sync(trainer, LocalSGD(tau=2))
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "outer_sync_rank0_of_4.pt").touch()
    with pytest.raises(CheckpointError, match=r"outer_sync_rank0_of_1.*outer_sync_rank0_of_4"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "empty").mkdir()
    other = make_trainer(tmp_path / "empty")
    use_outer_sync(other, LocalSGD(tau=2))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        other.train(resume_from_checkpoint=True)


def test_an_earlier_versions_file_is_refused_before_anything_is_overwritten(tmp_path):
    model, path = torch.nn.Linear(2, 1), tmp_path / "outer_sync_rank0_of_2.pt"
    before = model.weight.detach().clone()
    saved = {name: value + 1 for name, value in model.state_dict().items()}
    torch.save({"model": saved, "optimizer": {}, "sync": {}}, path)
    with pytest.raises(CheckpointError, match="earlier version") as caught:
        _OwnFile(path).load(model, [], sync=None)
    assert "load its model alone" in caught.value.hint
    assert torch.equal(model.weight, before)


def test_without_lightning_the_error_says_what_to_install(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match="Lightning") as caught:
        lightning_strategy(LocalSGD(tau=2))
    assert "fivefold[lightning]" in caught.value.hint


def test_sharding_accelerators_are_refused():
    class Sharding:
        distributed_type = "FSDP"

    with pytest.raises(ConfigurationError, match="shards the model"):
        disable_ddp(Sharding())
    accelerator = Accelerator(cpu=True)
    disable_ddp(accelerator)
    assert not isinstance(
        accelerator.prepare(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1))),
        DistributedDataParallel,
    )


LIGHTNING = """
import warnings
import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from fivefold.optim import DelayCorrected, DiLoCo
from fivefold.optim.integrations import lightning_strategy

warnings.filterwarnings("ignore")

class PutIn(lightning.Callback):
    def on_train_end(self, trainer, module):
        self.before = module.net.weight.detach().clone()
        module.net.weight.data.fill_(3.0 + trainer.global_rank)

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

dist.init_process_group("gloo")
for rule in (DiLoCo(tau=4), DelayCorrected(tau=4, fragments=1)):
    module, callback = Net(), PutIn()
    trainer = lightning.Trainer(
        strategy=lightning_strategy(rule, strategy={"process_group_backend": "gloo"}),
        accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, max_steps=6,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[callback],
    )
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    both = [torch.empty_like(callback.before) for _ in range(2)]
    dist.all_gather(both, callback.before)
    assert torch.equal(*both), "the callback came before the last outer step"
    torch.testing.assert_close(module.net.weight, torch.full((1, 4), 3.5))
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.distributed
def test_weights_that_a_lightning_callback_puts_in_at_the_end_stay_there(tmp_path):
    pytest.importorskip("pytorch_lightning")
    done = on_two_ranks(tmp_path, LIGHTNING)
    assert done.returncode == 0, done.stderr[-3000:]


SAVED = """
import logging, os, sys
import torch
import torch.distributed as dist
from accelerate import Accelerator
from fivefold.optim import DelayCorrected, OuterSync
from fivefold.optim.integrations import disable_ddp

logging.basicConfig(level=logging.WARNING, format="log %(message)s")

def make():
    accelerator = Accelerator(cpu=True)
    disable_ddp(accelerator)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    sync = OuterSync(model, optimizer, rule=DelayCorrected(tau=4, fragments=2))
    accelerator.register_for_checkpointing(sync)
    return accelerator, model, optimizer, sync

def train(parts, first, last):
    accelerator, model, optimizer, sync = parts
    for step in range(first, last):
        g = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        x = torch.randn(16, 8, generator=g)
        accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        sync.step()

folder, parts = sys.argv[1], make()
train(parts, 0, 13)
parts[0].save_state(folder)
dist.barrier()
anchor = []
with parts[3].global_parameters():
    anchor.append(torch.cat([p.detach().flatten().clone() for p in parts[1].parameters()]))
parts = make()
parts[0].load_state(folder)
begun = torch.cat([p.detach().flatten() for p in parts[1].parameters()])
train(parts, 13, 120)
parts[3].finalize()
weights = torch.cat([p.detach().flatten() for p in parts[1].parameters()])
assert parts[3].statistics().steps == 120, parts[3].statistics()
torch.testing.assert_close(begun, anchor[0])  # by hand: from the anchor, without the open steps
torch.testing.assert_close(weights[:8], torch.ones(8), rtol=0, atol=0.2)
print(f"weights {weights.tolist()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.distributed
def test_the_state_that_accelerate_saves_of_rank_0_goes_on_at_the_anchor(tmp_path):
    done = on_two_ranks(tmp_path, SAVED, str(tmp_path / "state"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall("^weights .*$", done.stdout, re.MULTILINE)
    assert len(set(lines)) == 1
    assert len(lines) == 2
    assert "log 1 of 2 ranks load another rank's outer state" in done.stderr


TRAINER = """
import sys
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from fivefold.optim import LocalSGD
from fivefold.optim.integrations import use_outer_sync

class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        tokens = (index % 16 + (1 + index // 16 % 3) * torch.arange(8)) % 16
        return {"input_ids": tokens, "labels": tokens}

def train(local):
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=sys.argv[1], max_steps=12, use_cpu=True, report_to=[], disable_tqdm=True,
        optim="sgd", learning_rate=0.1, max_grad_norm=0.0, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, save_strategy="no", logging_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=Counting())
    if local:
        use_outer_sync(trainer, LocalSGD(tau=1))
    trainer.train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

local, ddp = train(True), train(False)
torch.testing.assert_close(local, ddp, rtol=0, atol=1e-5)
print(f"sum {float(local.double().sum())!r}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.distributed
def test_the_trainer_with_tau_1_is_the_trainer_with_ddp(tmp_path):
    done = on_two_ranks(tmp_path, TRAINER, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall("^sum .*$", done.stdout, re.MULTILINE)
    assert len(lines) == 2
    assert lines[0] == lines[1]


EMA = """
import warnings
import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.strategies import DDPStrategy
from fivefold.optim import DelayCorrected, LocalSGD
from fivefold.optim.integrations import lightning_strategy

warnings.filterwarnings("ignore")

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

dist.init_process_group("gloo")

def train(strategy, steps):
    module = Net()
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, logger=False, max_steps=steps,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        max_epochs=-1, callbacks=[EMAWeightAveraging(decay=0.8)],
    )
    data = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    return torch.cat([p.detach().flatten() for p in module.parameters()])

def ours(rule):
    return lightning_strategy(rule, strategy={"process_group_backend": "gloo"})

by_ddp = train(DDPStrategy(process_group_backend="gloo"), 10)
torch.testing.assert_close(train(ours(LocalSGD(tau=1)), 10), by_ddp)
hidden = train(ours(DelayCorrected(tau=4)), 300)
torch.testing.assert_close(hidden, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), rtol=0, atol=1e-3)
both = [torch.empty_like(hidden) for _ in range(2)]
dist.all_gather(both, hidden)
assert torch.equal(*both)
"""


@pytest.mark.nightly
@pytest.mark.distributed
def test_lightnings_own_average_of_weights_is_that_under_ddp(tmp_path):
    pytest.importorskip("pytorch_lightning")
    done = on_two_ranks(tmp_path, EMA)
    assert done.returncode == 0, done.stderr[-3000:]
