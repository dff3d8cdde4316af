"""Mixtures of experts in the trainer, alone and over processes that share the experts."""

import json
import math
import shutil
import time

import pytest
import torch

from fivefold.errors import ConfigurationError
from fivefold.moe import MoE
from fivefold.runs.checkpoints import checkpoint_folders, read_checkpoint
from fivefold.train import Transformer, load_config, profile, train
from fivefold.train._mixture import mixture_blocks
from fivefold.train.config import MixtureConfig, ModelConfig


def with_table(config, table, **changes):
    section = getattr(config, table).model_copy(update=changes)
    return config.model_copy(update={table: section})


@pytest.fixture
def moe_config(make_config):
    """A run with mixtures in both of its blocks."""

    def make(method, *, batch_size=2, accumulation=1, moe=None, **run):
        table = MixtureConfig(**{"experts": 4, "top_k": 2} | (moe or {}))
        config = with_table(make_config(method, **run), "model", layers=2, moe=table)
        config = with_table(config, "optim", batch_size=batch_size, accumulation=accumulation)
        # The windows of a validation are num_batches * batch_size.
        return with_table(config, "optim", validation_batches=8 // batch_size)

    return make


def events(config, name):
    lines = (config.run.output / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == name]


def curve(config):
    return [line["loss"] for line in events(config, "validation")]


def whole_model(config, *, world_size=1):
    """Parameters of the newest checkpoint, the ranks' experts joined in the order of the ranks."""
    path = checkpoint_folders(config.run.output)[0]
    states = [read_checkpoint(path, rank=rank)["model"] for rank in range(world_size)]
    share = config.model.moe.expert_parallel
    return {
        name: torch.cat([s[name] for s in states[:share]]) if ".experts." in name else tensor
        for name, tensor in states[0].items()
    }


@pytest.mark.slow
def test_a_mixture_learns_real_text_and_says_where_its_tokens_went(moe_config):
    config = moe_config("none", steps=60, moe={"shared": 1, "capacity_factor": 1.0})
    result = train(config)
    losses = curve(config)
    assert losses[-1] < losses[0] - 0.5 < math.log(256)
    lines = events(config, "moe")
    assert [line["step"] for line in lines] == list(range(3, 61, 3))
    assignments = 3 * 2 * 16 * 2  # steps x sequences x positions x experts per token
    for line in lines:
        assert line["blocks"] == [0, 1]
        assert (line["ranks"], line["sent_bytes"]) == (1, 0)
        assert [sum(load) for load in line["load"]] == [assignments] * 2
        assert all(dropped < assignments for dropped in line["dropped"])
        worst = [max(load) / (assignments / 4) for load in line["load"]]
        assert line["imbalance"] == pytest.approx(worst)
    assert sum(sum(line["dropped"]) for line in lines) == sum(result.moe["dropped"]) > 0
    summed = torch.tensor([line["load"] for line in lines]).sum(dim=0)
    assert result.moe["load"] == summed.tolist()
    assert json.loads((config.run.output / "result.json").read_text())["moe"] == result.moe


def test_what_is_kept_for_the_backward_changes_no_number(moe_config):
    models = []
    for recompute in (True, False):
        config = moe_config(
            "none", steps=4, output=f"recompute-{recompute}", moe={"recompute": recompute}
        )
        layers = [
            m
            for m in Transformer(config.model, vocab_size=9, sequence_length=4).modules()
            if isinstance(m, MoE)
        ]
        assert [layer.config.recompute for layer in layers] == [recompute] * 2
        train(config)
        models.append(whole_model(config))
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "share", "moe"),
    [
        (2, 2, {}),
        (4, 4, {"top_k": 3, "shared": 1, "bias_rate": 0.01, "score": "sigmoid"}),
        (4, 2, {"balance_loss": 0.0, "bias_rate": 0.01}),
        (2, 1, {"balance_loss": 0.0}),
    ],
)
def test_ranks_that_share_experts_reproduce_one_process(
    moe_config, run_ranks, world_size, share, moe
):
    # Uneven validation: 5 windows of a rank's batch more than others have.
    alone = moe_config("none", batch_size=4, output="alone", moe=moe)
    train(alone)
    shared = moe_config(
        "ddp", batch_size=4 // world_size, output="shared", moe=moe | {"expert_parallel": share}
    )
    run_ranks(shared, world_size=world_size)
    assert curve(shared) == pytest.approx(curve(alone), rel=2e-5)
    expected, found = whole_model(alone), whole_model(shared, world_size=world_size)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-3, msg=name)
    norms = [[line["grad_norm"] for line in events(c, "train")] for c in (shared, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert sum(map(sum, events(alone, "moe")[-1]["load"])) == pytest.approx(
        sum(map(sum, events(shared, "moe")[-1]["load"])) * world_size / share
    )


@pytest.mark.distributed
def test_accumulated_gradients_of_shared_experts_are_those_of_one_large_batch(
    moe_config, run_ranks
):
    moe = {"balance_loss": 0.0, "z_loss": 0.0}
    alone = moe_config("none", batch_size=4, output="alone", moe=moe, steps=6)
    train(alone)
    shared = moe_config(
        "ddp",
        batch_size=1,
        accumulation=2,
        output="shared",
        moe=moe | {"expert_parallel": 2},
        steps=6,
    )
    run_ranks(shared)
    # The same windows in another order of micro-batches: step by step the same sum.
    assert curve(shared) == pytest.approx(curve(alone), rel=2e-5)


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_run_with_shared_experts_resumes_bit_for_bit(
    moe_config, run_ranks, final_digest, tmp_path
):
    moe = {"expert_parallel": 2, "bias_rate": 0.01, "capacity_factor": 1.25}
    keep = {"checkpoint_every_steps": 1, "keep_checkpoints": 99, "steps": 9}
    whole = moe_config("ddp", output="whole", moe=moe, **keep)
    run_ranks(whole)
    expected = final_digest(whole)
    for step in (2, 7):
        resumed = with_table(whole, "run", output=tmp_path / f"resumed{step}")
        source = whole.run.output / "checkpoints" / f"step-{step:08d}"
        shutil.copytree(source, resumed.run.output / "checkpoints" / source.name)
        run_ranks(resumed)
        assert final_digest(resumed) == expected, f"resumed at step {step}"
        assert events(resumed, "moe")[-1] == events(whole, "moe")[-1] | {
            "wall_s": events(resumed, "moe")[-1]["wall_s"]
        }
        totals = [json.loads((c.run.output / "result.json").read_text()) for c in (whole, resumed)]
        for key in ("load", "dropped", "payload_bytes", "sent_bytes"):
            assert totals[0]["moe"][key] == totals[1]["moe"][key]


@pytest.mark.distributed
def test_bytes_between_experts_are_those_of_the_rows_that_left(moe_config, run_ranks):
    config = moe_config("ddp", moe={"experts": 2, "top_k": 2, "expert_parallel": 2}, steps=4)
    run_ranks(config)
    totals = json.loads((config.run.output / "result.json").read_text())
    # Every token goes to both experts, so each leaves once: there and back, forward and backward.
    rows = 2 * 16 * 2 * 4  # sequences x positions x layers x steps
    assert totals["moe"]["payload_bytes"] == 4 * rows * 16 * 4
    assert totals["moe"]["sent_bytes"] > totals["moe"]["payload_bytes"]
    assert totals["communication"]["sent_bytes"] > totals["moe"]["sent_bytes"]
    assert totals["seconds"]["exposed_communication"] > 0


@pytest.mark.distributed
def test_a_peer_that_dies_is_an_error_and_not_a_hang(moe_config, start_ranks):
    config = moe_config("ddp", moe={"expert_parallel": 2}, steps=100_000, timeout_s=5.0)
    world = start_ranks(config)
    while not (config.run.output / "metrics.jsonl").exists() or not events(config, "moe"):
        pass
    world.kill(1)
    assert world.wait(30.0, ranks=[0]) == {0: 1}
    error = world.error(0)
    assert error["kind"] == "CommunicationError"
    assert "rank 0 of 2, step" in error["message"]


def test_local_updates_train_mixtures_too(moe_config, run_ranks):
    config = moe_config("co2")
    run_ranks(config)
    assert curve(config)[-1] < curve(config)[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.moe.top_k=9"], "top_k is 9, but a token can reach 8"),
        (["model.moe.groups=3"], "must divide model.moe.experts"),
        (
            ["model.moe.groups=8", "model.moe.top_groups=2", "model.moe.group_score=top2_sum"],
            '"top2_sum" needs two experts in each group; got 8 experts in 8 groups',
        ),
        (["model.moe.expert_parallel=3"], "multiple of model.moe.expert_parallel"),
        (["model.moe.expert_parallel=2"], 'needs sync.method "ddp"; got "delay_corrected"'),
        (["model.moe.bias_rate=0.1"], 'bias_rate needs sync.method "ddp" or "none"'),
        (["model.moe.expert=3"], "model.moe.expert"),
        (["model.moe.top_k=1"], "would learn nothing from the task"),
        (
            ["model.moe.top_k=1", "model.moe.normalize=false", "model.moe.score=topk_softmax"],
            "set normalize = false and score =",
        ),
        (["model.moe.experts=1", "model.moe.top_k=1", "model.moe.normalize=false"], "experts 1"),
        (["model.moe.capacity_factor=0"], "capacity_factor must be greater than 0"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, overrides, message):
    path = tmp_path / "train.toml"
    path.write_text("[model.moe]\n")
    with pytest.raises(ConfigurationError) as caught:
        load_config(path, overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "coefficient"),
    [
        ({}, 0.01),
        ({"bias_rate": 0.001}, 0.0),
        ({"bias_rate": 0.001, "balance_loss": 0.02}, 0.02),
        ({"balance_loss": 0.0}, 0.0),
    ],
)
def test_a_bias_balances_instead_of_the_loss(given, coefficient):
    moe = MixtureConfig(**given)
    model = ModelConfig(layers=1, width=16, heads=2, moe=moe)
    mixtures = Transformer(model, vocab_size=7, sequence_length=4).mixtures
    layer = mixtures.layers[0]
    layer(torch.randn(5, 16))
    wanted = layer.auxiliary_loss(balance=coefficient, z=moe.z_loss)
    assert torch.equal(mixtures.auxiliary_loss(), wanted)


def test_groups_are_chosen_by_the_configured_score():
    # Logits (5, 0) and (4, 3): the first group has the largest score, the second the largest sum.
    chosen = {}
    for score in ("max", "top2_sum"):
        moe = MixtureConfig(
            experts=4, top_k=1, score="sigmoid", normalize=False, groups=2, group_score=score
        )
        config = ModelConfig(layers=1, width=4, heads=1, moe=moe)
        layer = Transformer(config, vocab_size=7, sequence_length=4).mixtures.layers[0]
        with torch.no_grad():
            layer.gate.weight.copy_(torch.diag(torch.tensor([5.0, 0.0, 4.0, 3.0])))
        layer(torch.ones(1, 1, 4))
        chosen[score] = layer.last_load.routed.tolist()
    assert chosen == {"max": [1, 0, 0, 0], "top2_sum": [0, 0, 1, 0]}


def test_ranks_that_do_not_divide_are_refused_before_anything_starts(moe_config, monkeypatch):
    config = moe_config("ddp", moe={"expert_parallel": 2})
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigurationError, match=r"needs a multiple of 2 ranks; got world_size=3"):
        train(config)


@pytest.mark.parametrize(("layers", "every", "blocks"), [(4, 1, 4), (4, 2, 2), (5, 3, 2)])
def test_every_so_many_th_block_is_a_mixture_and_the_last_one_always(layers, every, blocks):
    config = ModelConfig(layers=layers, width=16, heads=2, moe=MixtureConfig(every=every))
    mixed = mixture_blocks(config)
    assert len(mixed) == blocks
    assert layers - 1 in mixed
    model = Transformer(config, vocab_size=7, sequence_length=4)
    assert set(model.mixtures.layers) == mixed
    assert model.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.distributed
def test_a_profile_of_shared_experts_leaves_their_exchanges_out(
    moe_config, profiled, tmp_path, monkeypatch
):
    """What a slow network adds to the passes is the network's, not the device's."""
    config = moe_config("ddp", moe={"expert_parallel": 2})
    exchange, slow_s = torch.distributed.all_to_all_single, 0.02

    def slow_exchange(*arguments, **options):
        time.sleep(slow_s)
        return exchange(*arguments, **options)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", slow_exchange)
    monkeypatch.setattr(profile, "_MEASURED_S", 0.1)
    model_s = profiled(config, tmp_path / "world", "model_s")
    exchanges = 2 * 2 * 2  # blocks, there and back, forward and backward
    assert model_s < exchanges * slow_s / 2
