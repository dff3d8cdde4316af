"""Plain torchrun with restarts: any rank is killed, all start again from the last checkpoint."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from fivefold.runs.ranks import name_attempt
from fivefold.train import config_to_toml
from helpers.night import by_night

STEPS = 400


def torchrun(config_path, *, restarts):
    clean = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", str(restarts), "--monitor-interval=0.1"]
    return subprocess.Popen(
        [*command, "-m", "fivefold", "train", str(config_path)],
        env=clean | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks(config_path):
    """Process by rank of the ranks that run now."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if b"torch.distributed.run" in command or str(config_path).encode() not in command:
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
            (rank,) = [value[5:] for value in variables if value.startswith(b"RANK=")]
            found[int(rank)] = int(folder.name)
        except (OSError, ValueError):  # it has ended, or is no process of ours
            continue
    return found


def last_step(config):
    path = config.run.output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def wait_for(condition, process, *, timeout_s=60):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.05)


@pytest.mark.alone
@pytest.mark.distributed
@pytest.mark.parametrize("method", by_night(["co2", "ddp"], ["ddp"]))
def test_kills_of_either_rank_cost_only_the_steps_since_a_checkpoint(
    method, make_config, run_ranks, final_digest, tmp_path
):
    options = {"steps": STEPS, "checkpoint_every_steps": 20, "timeout_s": 6.0}
    whole = make_config(method, output="whole", **options)
    run_ranks(whole)
    config = make_config(method, output="killed", **options)
    path = tmp_path / "killed.toml"
    path.write_text(config_to_toml(config))
    draw = random.Random(method)  # noqa: S311 - a seeded choice of moments, no secret
    process = torchrun(path, restarts=3)
    try:
        for victim in (1, 0):
            reached = last_step(config)
            wait_for(lambda: last_step(config) > reached + 40, process)  # noqa: B023 - used at once
            time.sleep(draw.random() / 5)
            os.kill(ranks(path)[victim], signal.SIGKILL)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 0, output
    finally:
        process.kill()
    assert final_digest(config) == final_digest(whole)
    results = [json.loads((c.run.output / "result.json").read_text()) for c in (config, whole)]
    assert results[0]["steps"] == results[1]["steps"] == STEPS
    assert results[0]["tokens"] == results[1]["tokens"]  # each counted once


def agree(store, ranks, *, world_size=3, timeout_s=10.0):
    with ThreadPoolExecutor(world_size) as pool:
        jobs = [pool.submit(name_attempt, store, r, world_size, timeout_s=timeout_s) for r in ranks]
        return [job.result() for job in jobs]


def test_every_attempt_has_a_name_of_its_own():
    store, names = HashStore(), set()
    for attempt in range(5):
        found = set(agree(store, range(3)))
        assert len(found) == 1
        names |= found
        assert len(names) == attempt + 1


def test_what_dead_ranks_left_is_not_taken_for_an_answer():
    store = HashStore()
    (old,) = set(agree(store, range(3)))
    # Rank 1 of the next attempt dies after it has shown its token; rank 0 has answered it.
    store.set("token/1", "dead")
    store.set("answer/1", f"dead {old}")
    with pytest.raises(RuntimeError, match=r"ranks \[0\] did not come within 0.2 s"):
        name_attempt(store, 1, 3, timeout_s=0.2)
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come within 0.2 s"):
        name_attempt(store, 0, 3, timeout_s=0.2)
    (new,) = set(agree(store, [2, 0, 1]))
    assert new != old
