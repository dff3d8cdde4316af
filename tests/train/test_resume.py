import json
import shutil

import pytest

from fivefold.runs.checkpoints import checkpoint_folders
from fivefold.train.config import AutoTauConfig
from helpers.night import by_night

# At step 5 an all-reduce of each fragment is in flight.
STREAMING = {"fragments": 2, "delay_steps": 3}
METHODS = {
    "none": {},
    "ddp": {},
    "ddp bf16": {"codec": "bf16"},
    "local_sgd": {},
    "slowmo": {},
    "diloco": {},
    "co2": {},
    "co2 int8": {"codec": "int8", "fragments": 2, "delay_steps": 3},
    "co2 muon": {"average_states": {"momentum_buffer": 1, "exp_avg_sq": 2}},
    "delay_corrected": {},
    "delay_corrected int4": {"codec": "int4"},
    "delay_corrected topk": {"codec": "topk", "fragments": 2},
    "overlap_local_sgd": {},
    "eager_diloco": {},
    "delay_corrected ends": {
        "fragments": 2,
        "synchronous_start": 2,
        "synchronous_end": 3,
    },
    "delayed_gradients": {"extrapolation": 1.0, "ramp_steps": 3},
    "streaming_diloco": STREAMING,
    "streaming_diloco bf16": STREAMING | {"codec": "bf16"},
    "outer_optimizer": {},
    "outer_optimizer hidden": {"optimizer": "AdamW", "options": {"lr": 0.02}, "hidden": True},
}

# A codec or a rule of the same kind is tried by day; tests/conformance resumes each rule.
OTHERS = ["ddp bf16", "diloco", "local_sgd", "outer_optimizer", "streaming_diloco bf16"]
OTHERS += ["delay_corrected int4", "delay_corrected topk"]


def with_run(config, **changes):
    return config.model_copy(update={"run": config.run.model_copy(update=changes)})


def losses(events):
    return [line["loss"] for line in events if line["event"] == "train"]


@pytest.mark.slow("delay_corrected", "delayed_gradients")
@pytest.mark.distributed
@pytest.mark.parametrize("name", by_night(METHODS, OTHERS))
def test_resume_at_any_step_reaches_the_same_state_bit_for_bit(
    make_config, run_ranks, start_ranks, final_digest, tmp_path, name
):
    # tau = 4: step 4 is a boundary, 5 to 7 lie inside a round with an all-reduce in flight.
    method = name.partition(" ")[0]
    keep_all = {"checkpoint_every_steps": 1, "keep_checkpoints": 99}
    optimizer = "muon" if name.endswith("muon") else "adamw"
    whole = make_config(method, output="whole", optimizer=optimizer, sync=METHODS[name], **keep_all)
    whole = with_run(whole, steps=10, validate_every_steps=4)
    run_ranks(whole)
    expected = final_digest(whole)
    resumed = {step: with_run(whole, output=tmp_path / f"resumed{step}") for step in (1, 5, 8)}
    worlds = []
    for step, config in resumed.items():
        source = whole.run.output / "checkpoints" / f"step-{step:08d}"
        shutil.copytree(source, config.run.output / "checkpoints" / source.name)
        worlds.append(start_ranks(config))  # they start beside one another
    for world, (step, config) in zip(worlds, resumed.items(), strict=True):
        assert set(world.wait().values()) == {0}, world.logs()
        assert final_digest(config) == expected, f"resumed at step {step}"


@pytest.mark.slow
@pytest.mark.distributed
def test_an_automatic_tau_goes_on_from_what_it_had_decided(make_config, run_ranks, tmp_path):
    # The first decision comes after two measured rounds of 8: tau leaves its initial value.
    table = {"tau": "auto", "auto_tau": AutoTauConfig(window=2, patience=1, maximum=32)}
    whole = make_config("co2", output="whole", sync=table, steps=60, checkpoint_every_steps=40)
    whole = with_run(whole, log_every_steps=1, keep_checkpoints=9)
    run_ranks(whole)
    resumed = with_run(whole, output=tmp_path / "resumed", steps=60)
    source = whole.run.output / "checkpoints" / "step-00000040"
    shutil.copytree(source, resumed.run.output / "checkpoints" / source.name)
    run_ranks(resumed)

    def lines(config, event):
        text = (config.run.output / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, text) if line["event"] == event]

    before = [line for line in lines(whole, "sync") if line["step"] <= 40]
    decided = [line for line in lines(whole, "tau") if line["step"] <= 40]
    after = lines(resumed, "sync")[0]
    assert before[-1]["tau_changes"] == len(decided) > 0
    assert decided[-1]["tau"] == before[-1]["tau"]
    assert after["step"] == 41
    # Decisions are made at boundaries, and step 41 may be one: then its decision is logged.
    new = [line for line in lines(resumed, "tau") if line["step"] == 41]
    assert after["tau"] == (new[-1]["tau"] if new else before[-1]["tau"])
    assert after["tau_changes"] == before[-1]["tau_changes"] + len(new)
    record = json.loads((resumed.run.output / "result.json").read_text())["sync"]
    assert record["tau_changes"] == len(decided) + len(lines(resumed, "tau"))


@pytest.mark.slow
@pytest.mark.distributed
def test_ddp_resumes_exactly_on_three_ranks(make_config, run_ranks, final_digest, tmp_path):
    # With three ranks the order of summation depends on the layout of DDP's buckets.
    whole = make_config("ddp", output="whole", checkpoint_every_steps=3, steps=8)
    run_ranks(whole, world_size=3)
    resumed = with_run(whole, output=tmp_path / "resumed")
    source = whole.run.output / "checkpoints" / "step-00000006"
    shutil.copytree(source, resumed.run.output / "checkpoints" / source.name)
    run_ranks(resumed, world_size=3)
    assert final_digest(resumed, world_size=3) == final_digest(whole, world_size=3)
    sent = [
        json.loads((config.run.output / "result.json").read_text())["communication"]
        for config in (whole, resumed)
    ]
    for key in ("payload_bytes", "sent_bytes", "collectives"):
        assert sent[0][key] == sent[1][key] > 0


@pytest.mark.nightly
@pytest.mark.distributed
def test_resumed_metrics_continue_without_repeating_steps(make_config, run_ranks):
    config = make_config("co2", checkpoint_every_steps=5, keep_checkpoints=9)
    run_ranks(config)
    root = config.run.output
    before = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    # As if it had been killed at step 13, in the middle of a line.
    for path in checkpoint_folders(root):
        if int(path.name[5:]) > 10:
            shutil.rmtree(path)
    kept = [json.dumps(line) for line in before if line["step"] <= 13]
    (root / "metrics.jsonl").write_text("\n".join(kept) + '\n{"event": "tra')
    run_ranks(config)
    after = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in after if line["event"] != "resume"] == [
        (line["event"], line["step"]) for line in before
    ]
    (resume,) = [line for line in after if line["event"] == "resume"]
    assert (resume["step"], resume["checkpoint"]) == (10, "step-00000010")
    assert losses(after) == losses(before)
    walls = [line["wall_s"] for line in after]
    assert walls == sorted(walls)


@pytest.mark.distributed
def test_a_finished_run_is_left_as_it_is(make_config, run_ranks, final_digest):
    config = make_config("co2")
    run_ranks(config)
    first = json.loads((config.run.output / "result.json").read_text())
    digest = final_digest(config)
    run_ranks(config)
    second = json.loads((config.run.output / "result.json").read_text())
    assert final_digest(config) == digest
    for key in ("parameters_sha256", "steps", "tokens", "bits_per_byte"):
        assert second[key] == first[key]


@pytest.mark.slow
@pytest.mark.distributed
def test_truncated_newest_checkpoint_the_one_before_is_used_and_it_says_so(
    make_config, run_ranks, final_digest, start_ranks
):
    config = make_config("co2", checkpoint_every_steps=5, keep_checkpoints=9)
    run_ranks(config)
    expected = final_digest(config)
    newest, second, *_ = checkpoint_folders(config.run.output)
    damaged = newest / "__1_0.distcp"
    size = damaged.stat().st_size
    with damaged.open("r+b") as file:
        file.truncate(100)
    world = start_ranks(config)
    assert world.wait() == {0: 0, 1: 0}, world.logs()
    said = " ".join(world.logs()["rank0.log"].split())
    assert f"checkpoint {newest.name} is not whole: __1_0.distcp has 100 bytes" in said
    assert f"instead of {size}; skipped, resuming from {second.name}" in said
    assert final_digest(config) == expected


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("damage", ["flip", "manifest", "remove"])
def test_no_whole_checkpoint_is_an_error_and_nothing_is_overwritten(
    make_config, run_ranks, start_ranks, damage
):
    config = make_config("ddp")
    run_ranks(config)
    (path,) = checkpoint_folders(config.run.output)
    reason = {
        "flip": "the checksum of __0_0.distcp does not match",
        "manifest": "manifest.json cannot be read",
        "remove": "__0_0.distcp cannot be read",
    }[damage]
    if damage == "flip":
        content = bytearray((path / "__0_0.distcp").read_bytes())
        content[len(content) // 2] ^= 1
        (path / "__0_0.distcp").write_bytes(content)
    elif damage == "manifest":
        (path / "manifest.json").write_text('{"schema": 1,')
    else:
        (path / "__0_0.distcp").unlink()
    before = (config.run.output / "metrics.jsonl").read_text()
    world = start_ranks(config)
    assert world.wait() == {0: 1, 1: 1}
    for rank in range(2):
        error = world.error(rank)
        assert error["kind"] == "CheckpointError"
        assert reason in error["message"]
        assert "no checkpoint in" in error["message"]
        assert "start afresh" in error["hint"]
    assert (config.run.output / "metrics.jsonl").read_text() == before


@pytest.mark.nightly
@pytest.mark.distributed
def test_another_configuration_or_world_size_is_refused(make_config, run_ranks, start_ranks):
    config = make_config("co2")
    run_ranks(config)
    wider = config.model_copy(update={"model": config.model.model_copy(update={"width": 32})})
    world = start_ranks(wider)
    assert world.wait() == {0: 1, 1: 1}
    assert "was written with model.width = 16; now it is 32" in world.error(1)["message"]
    assert "run.output" in world.error(1)["hint"]
    world = start_ranks(config, world_size=3)
    assert set(world.wait().values()) == {1}
    assert "was written by 2 ranks, but this run has 3" in world.error(2)["message"]
    assert "start 2 ranks" in world.error(2)["hint"]
    world = start_ranks(with_run(config, resume="never"))
    assert set(world.wait().values()) == {1}
    assert 'run.resume is "never"' in world.error(0)["message"]
    world = start_ranks(with_run(config, resume="/no/such/folder"))
    assert set(world.wait().values()) == {1}
    assert "/no/such/folder, which is not a folder" in world.error(1)["message"]
