"""What local updates cost a plan, against the engine that does them."""

import pytest
import torch

from fivefold.cli._plan_files import as_sent
from fivefold.optim import OuterSync
from fivefold.strategy import ModelSpec, ParallelPlan, evaluate_plan, load_cluster
from fivefold.testing import run_processes
from fivefold.train.config import SyncConfig, TrainConfig

SIZE = 256
SETTINGS = [
    {"method": "local_sgd"},
    {"method": "diloco"},  # whose momentum tau decides
    {"method": "co2", "outer_momentum": 0.0},
    {"method": "co2", "outer_momentum": 0.0, "staleness": "gap-param"},
    {"method": "co2", "codec": "bf16"},
    {"method": "delay_corrected", "codec": "int8", "average_states": {"exp_avg": 2}},
    {"method": "overlap_local_sgd"},
    {"method": "eager_diloco"},
    {"method": "eager_diloco", "outer_momentum": 0.0, "codec": "int4"},
    {"method": "streaming_diloco", "fragments": 1},
    {"method": "outer_optimizer"},
    {"method": "outer_optimizer", "optimizer": "Adam", "options": {"lr": 1e-3}},
]


def counted_bytes(tree):
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    return sum(map(counted_bytes, tree.values())) if isinstance(tree, dict) else 0


def engines_bytes(_):
    """Bytes of the engine's tensors after two rounds, of each setting, per parameter.

    A state has all of them but an outer optimizer's gradient, which every merge writes anew.
    """
    found = []
    for given in SETTINGS:
        config = SyncConfig(tau=2, **given)
        model = torch.nn.Linear(SIZE, SIZE, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        sync = OuterSync(
            model, optimizer, rule=config.rule(), codec=config.codec,
            average_states=config.average_states,
        )  # fmt: skip
        for _ in range(4):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            sync.step()
        sync.finalize()
        not_saved = 4 if given["method"] == "outer_optimizer" else 0
        found.append(counted_bytes(sync.state_dict()) / SIZE**2 + not_saved)
    return found


@pytest.mark.distributed
def test_the_outer_state_is_priced_as_the_engine_holds_it():
    model = ModelSpec(name="x", num_layers=2, hidden=64, num_heads=4, seq_len=64, vocab=999)
    for counted in run_processes(2, engines_bytes):
        for given, expected in zip(SETTINGS, counted, strict=True):
            cluster = as_sent(load_cluster("cpu-lab"), TrainConfig(sync={"tau": 2, **given}))
            plain, local = (
                evaluate_plan(model, cluster.device, cluster.fabric,
                              plan=ParallelPlan(global_batch=4, data=2, tau=tau)).memory
                for tau in (1, 2)
            )  # fmt: skip
            extra = (local.working_bytes - plain.working_bytes) / model.num_parameters
            assert extra == pytest.approx(expected, rel=0.01), given
