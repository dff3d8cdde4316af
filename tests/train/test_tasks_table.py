"""``[tasks]``: DDP's gradients in a planned order, bit for bit the same training."""

import json
import math
import shutil

import pytest

from fivefold.errors import ConfigurationError
from fivefold.train import config_to_toml, load_config
from fivefold.train._methods import method_label
from fivefold.train.config import TasksConfig

CHUNK, BUCKET = 1500, 4000


def with_tasks(config, *, clip=math.inf, accumulation=1, **tasks):
    optim = config.optim.model_copy(update={"grad_clip": clip, "accumulation": accumulation})
    table = TasksConfig(**{"chunk": CHUNK, "bucket": BUCKET} | tasks) if tasks else None
    return config.model_copy(update={"optim": optim, "tasks": table})


def events(config, kind):
    lines = (config.run.output / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == kind]


def losses(config):
    found = [line["loss"] for line in events(config, "train")]
    return found, [line["loss"] for line in events(config, "validation")]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_train_as_plain_ddp_does_bit_for_bit(make_config, run_ranks, final_digest):
    variants = {
        "plain": {},
        "fifo": {"ordering": "fifo", "overlap_forward": False},
        "overlap": {"ordering": "priority", "plan_after_steps": 2},
    }
    found = {}
    for name, tasks in variants.items():
        config = make_config("ddp", output=name, log_every_steps=1, checkpoint_every_steps=5)
        config = with_tasks(config, accumulation=2, **tasks)
        run_ranks(config)
        found[name] = (losses(config), final_digest(config))
        result = json.loads((config.run.output / "result.json").read_text())
        assert math.isclose(sum(result["seconds"].values()), result["wall_s"], rel_tol=1e-9)
        assert min(result["seconds"].values()) >= 0
        communication = result["communication"]
        manifest = json.loads((config.run.output / "manifest.json").read_text())
        assert communication["payload_bytes"] == 18 * 4 * manifest["num_parameters"]
        if tasks:
            assert communication["collectives"] > 18 * 4  # chunks, not buckets
            assert communication["exposed_wait_s"] > 0
    assert found["fifo"] == found["plain"]
    assert found["overlap"] == found["plain"]


@pytest.mark.distributed
def test_clipping_by_norm_stays_where_forward_waits_for_all(make_config, run_ranks, final_digest):
    found = []
    for name, tasks in (("plain", {}), ("chunks", {"ordering": "fifo", "overlap_forward": False})):
        config = with_tasks(make_config("ddp", output=name, steps=6), clip=0.5, **tasks)
        run_ranks(config)
        found.append(final_digest(config))
    assert found[0] == found[1]


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_resumed_run_of_three_ranks_reaches_the_same_state(
    make_config, run_ranks, start_ranks, final_digest, tmp_path
):
    whole = make_config("ddp", output="whole", steps=8, checkpoint_every_steps=4)
    whole = with_tasks(whole, ordering="priority", plan_after_steps=2)
    run_ranks(whole, world_size=3)
    run = whole.run.model_copy(update={"output": tmp_path / "resumed"})
    resumed = whole.model_copy(update={"run": run})
    source = whole.run.output / "checkpoints" / "step-00000004"
    shutil.copytree(source, resumed.run.output / "checkpoints" / source.name)
    run_ranks(resumed, world_size=3)
    assert final_digest(resumed) == final_digest(whole)
    # Another order of sums rounds otherwise: that is another run, and so is one without the table.
    for other, was in (
        (with_tasks(resumed, ordering="fifo"), "tasks.ordering = 'priority'; now it is 'fifo'"),
        (resumed.model_copy(update={"tasks": None}), "tasks.ordering = 'priority'; now it is None"),
    ):
        world = start_ranks(other, world_size=3)
        assert set(world.wait().values()) == {1}
        assert f"was written with {was}" in world.error(1)["message"]


@pytest.mark.nightly
@pytest.mark.distributed
def test_experts_that_are_never_called_are_updated_in_time(make_config, run_ranks, final_digest):
    """A mixture uses its experts' weights itself: their module is never called."""
    from fivefold.train.config import MixtureConfig, ModelConfig

    moe = MixtureConfig(experts=4, top_k=2, expert_width=8)
    model = ModelConfig(layers=2, width=16, heads=2, moe=moe)
    found = []
    for name, tasks in (("plain", {}), ("overlap", {"ordering": "priority"})):
        config = with_tasks(make_config("ddp", output=name, steps=7), **tasks)
        config = config.model_copy(update={"model": model})
        run_ranks(config)
        found.append((final_digest(config), losses(config)))
    assert found[0] == found[1]


# Each: text of the file, words of the message, words of the hint.
BAD = [
    ("[sync]\nmethod = 'co2'\n[tasks]\n", 'needs sync.method "ddp"', "leave out [tasks]"),
    ("[sync]\nmethod = 'ddp'\ncodec = 'bf16'\n[tasks]\n", "with bf16", "leave out [tasks]"),
    ("[sync]\nmethod = 'ddp'\n[tasks]\n", "optim.grad_clip 1", "optim.grad_clip = inf"),
    ("[tasks]\noverlap_forward = false\n", "does nothing", 'tasks.ordering = "fifo"'),
    ("[tasks]\nordring = 'fifo'\n", "unknown key tasks.ordring", "did you mean tasks.ordering?"),
    ("[tasks]\ncredit = 0\n", "tasks.credit must be at least 1", "in flight"),
    ("[tasks]\nchunk = -1\n", "tasks.chunk must be at least 0", "pieces"),
    ("[tasks]\nchunk = '5 parsecs'\n", "parsecs", "MB"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message", "hint"), BAD)
def test_a_wrong_table_is_a_clear_error(tmp_path, text, message, hint):
    file = tmp_path / "train.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_config(file)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_table_survives_its_file_and_gives_way_to_other_methods(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text(
        "[sync]\nmethod = 'ddp'\n[optim]\ngrad_clip = inf\n[tasks]\nchunk = '2 MB'\ncredit = 3\n"
    )
    config = load_config(file)
    assert config.tasks == TasksConfig(chunk=2_000_000, credit=3)
    again = tmp_path / "again.toml"
    again.write_text(config_to_toml(config))
    assert load_config(again) == config
    assert load_config(file, ["sync.method=co2"]).tasks is None
    assert load_config(file, ["tasks.credit=5"]).tasks.credit == 5
    assert method_label(config.sync, config.tasks) == "DDP (overlaps forward, priority)"
