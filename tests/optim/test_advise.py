"""Advice for a job of the user's own: closed forms, and a real job under DDP."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.optim import DelayCorrected
from fivefold.optim.advise import JobTimes, options_for

DDP_JOB = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(200, 300))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for _ in range(10**6):
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
finally:
    open("checkpoint", "w").write("overwritten")
"""


def times(step_s, compute_s, fixed_s, bytes_per_s, *, elements=1_000_000, tensors=20):
    sizes = (4 * elements // 64, 4 * elements)
    return JobTimes(
        ranks=4, step_s=step_s, compute_s=compute_s, elements=elements, tensors=tensors,
        sizes_bytes=sizes,
        all_reduce_s=tuple(fixed_s + size / bytes_per_s for size in sizes),
    )  # fmt: skip


def recommended(found):
    (one,) = (one for one in options_for(found) if one.recommended)
    return one


@pytest.mark.parametrize(
    ("found", "rule", "codec"),
    [
        # 4 MB at 10 MB/s, 0.4 s: 4.4 steps of 0.1 s with a tenth to spare.
        (times(0.5, 0.1, 0.0, 10e6), "DelayCorrected(tau=5, fragments=5)", "fp32"),
        # 0.5 steps of latency per message, half a fragment's time: one message, 4.95 steps long.
        (times(0.5, 0.1, 0.05, 10e6), "DelayCorrected(tau=5, fragments=1)", "fp32"),
        # 44 steps are a long round; 22 with half the bytes too; int8 is 11.1, in six of two each.
        (times(4.1, 0.1, 0.0, 1e6), "DelayCorrected(tau=12, fragments=6)", "int8"),
        (times(0.105, 0.1, 0.0, 1e9), "", ""),
        # Of two tensors there are no five fragments, and half the model takes 2.2 steps.
        (times(0.5, 0.1, 0.0, 10e6, tensors=2), "DelayCorrected(tau=6, fragments=2)", "fp32"),
    ],
)
def test_the_shortest_round_that_hides_it(found, rule, codec):
    one = recommended(found)
    assert (one.rule, one.codec) == (rule, codec)


@given(st.floats(1e-3, 10), st.floats(1e-6, 1), st.floats(1e5, 1e10), st.floats(1, 100))
def test_a_slower_link_never_shortens_the_round(compute_s, fixed_s, bytes_per_s, slower):
    def rounds(factor):
        found = times(10 * compute_s, compute_s, fixed_s * factor, bytes_per_s / factor)
        return {
            one.codec: int(one.rule.partition("tau=")[2].partition(",")[0])
            for one in options_for(found)
            if one.rule.startswith("DelayCorrected")
        }

    before, after = rounds(1.0), rounds(slower)
    assert all(after[codec] >= before[codec] for codec in before.keys() & after.keys())


@given(st.floats(1e-3, 10), st.floats(1e-6, 1), st.floats(1e5, 1e10), st.integers(1, 20))
def test_every_message_fits_behind_its_delay(compute_s, fixed_s, bytes_per_s, tensors):
    job = times(10 * compute_s, compute_s, fixed_s, bytes_per_s, tensors=tensors)
    widths = {"fp32": 4, "bf16": 2, "int8": 1.0078125, "int4": 0.515625}
    for one in options_for(job)[1:]:
        if not one.rule.startswith("DelayCorrected"):
            continue
        rule = eval(one.rule, {"DelayCorrected": DelayCorrected})  # noqa: S307 - as it is printed
        assert rule.fragments <= tensors
        message_s = fixed_s + widths[one.codec] * 1e6 / rule.fragments / bytes_per_s
        assert (rule.delay_steps or rule.tau) * compute_s >= 1.1 * message_s * (1 - 1e-3)


def test_a_job_without_ddp_is_never_told_to_stay():
    assert recommended(times(0.1, None, 0.0, 1e9)).rule


def test_times_that_are_none_are_refused():
    with pytest.raises(ConfigurationError, match="are no measurement"):
        times(0.0, 0.1, 0.0, 1e6)


def advise(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "fivefold", "advise", *words], capture_output=True, text=True,
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, timeout=120,
    )  # fmt: skip


def test_a_job_is_measured_and_ended_before_it_writes(tmp_path):
    (tmp_path / "train.py").write_text(DDP_JOB)
    (tmp_path / "checkpoint").write_text("kept")
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    done = advise(tmp_path, "--json", "--steps", "8", "--", *launch)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["measured"]
    assert (found["ranks"], found["elements"], found["tensors"]) == (2, 200 * 300 + 300, 2)
    assert found["sizes_bytes"][0] < found["sizes_bytes"][-1]
    assert found["compute_s"] > 0
    assert all(seconds > 0 for seconds in found["all_reduce_s"])
    assert (tmp_path / "checkpoint").read_text() == "kept"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((sys.executable, "-c", "print(1)"), "before 20 steps were measured"),
        (("no-such-command",), "the command 'no-such-command' was not found"),
    ],
)
def test_a_job_that_cannot_be_measured(tmp_path, words, text):
    done = advise(tmp_path, "--", *words)
    assert done.returncode != 0
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: ")
    assert text in error
    assert hint.startswith("hint: ")


SHARDED_JOB = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("gloo")
model = FullyShardedDataParallel(torch.nn.Linear(20, 30), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 20)).square().mean().backward()
optimizer.step()
"""


def test_a_job_that_sends_something_else_gets_no_figures(tmp_path):
    (tmp_path / "train.py").write_text(SHARDED_JOB)
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    done = advise(tmp_path, "--", *launch)
    assert done.returncode == 1
    assert "are sharded" in done.stderr.splitlines()[-2]
    assert done.stdout == ""
