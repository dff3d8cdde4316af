"""Advice for a job of the user's own: closed forms, and a real job under DDP."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError
from fivefold.optim import AutoTau, DelayCorrected, SyncStatistics
from fivefold.optim.advise import JobTimes, options_for
from fivefold.optim.auto_tau import TauController
from helpers.night import by_day

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


def test_what_a_codec_computes_is_in_the_step_and_makes_rounds_long():
    """Half a step of encoding may take a twentieth of a round: 10 steps; without a codec, 2."""
    link = times(0.5, 0.1, 0.0, 22e6)  # 4 MB in 0.18 s: two steps, with a tenth to spare
    assert recommended(link).codec == "int8"
    slow = replace(link, busy_s=(0.0, 0.05, 0.05))
    one = recommended(slow)
    assert (one.rule, one.codec) == ("DelayCorrected(tau=2, fragments=2)", "fp32")
    (int8,) = (o for o in options_for(slow) if o.codec == "int8" and "Corrected" in o.rule)
    assert "tau=10," in int8.rule
    assert int8.step_s == pytest.approx(0.1 + 0.05 / 10)
    (late,) = (o for o in options_for(slow) if "Gradients" in o.rule)
    assert late.step_s == pytest.approx(0.1 + 0.05)


@pytest.mark.parametrize(
    ("found", "rule", "codec"),
    [
        # 4 MB at 40 MB/s, 0.1 s: 1.1 steps of 0.1 s with a tenth to spare; a quarter fits.
        (times(0.5, 0.1, 0.0, 40e6), "DelayCorrected(tau=1, fragments=1)", "int8"),
        (times(0.5, 0.1, 0.0, 10e6), "DelayCorrected(tau=1, fragments=1)", "int4"),
        # 5.7 steps in int4, and three fragments of 1 MiB are the most: two steps for each.
        (times(4.1, 0.1, 0.0, 1e6), "DelayCorrected(tau=6, fragments=3)", "int4"),
        (times(4.1, 0.1, 0.0, 1e6, tensors=2), "DelayCorrected(tau=6, fragments=2)", "int4"),
        # Half a step of latency: no codec can bring a message under it, and one is enough.
        (times(0.5, 0.1, 0.5, 1e9), "DelayCorrected(tau=6, fragments=1)", "fp32"),
        (times(0.105, 0.1, 0.0, 1e9), "", ""),
    ],
)
def test_the_shortest_round_that_hides_it(found, rule, codec):
    one = recommended(found)
    assert (one.rule, one.codec) == (rule, codec)


@by_day(30)
@given(
    st.floats(1e-3, 10), st.floats(1e4, 1e10), st.one_of(st.just(0.0), st.floats(1e-6, 1)),
    st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_what_is_advised_is_what_auto_takes(step_s, bytes_per_s, fixed_s, parts):
    """A job before it starts, a run under way and tau="auto" say the same of the same link."""
    elements = 1 << 24
    job = times(
        100 * step_s, step_s, fixed_s, bytes_per_s, elements=elements, tensors=parts
    )  # fmt: skip
    one = recommended(job)
    auto = TauController(
        AutoTau(initial=8), 2, shares={n: 1 / n for n in range(1, parts + 1)}, times=job.messages
    )
    for number in range(300):
        message_s = job.messages.message_s(auto.codec, 1 / auto.fragments)
        auto.observe([step_s] * 2, [message_s] * 2, round_number=number)
    assert one.rule == f"DelayCorrected(tau={auto.tau}, fragments={auto.fragments})"
    assert one.codec == auto.codec
    if fixed_s:  # a run under way knows one length of message
        return
    record = SyncStatistics(
        steps=100, rounds=10, merged_rounds=10, payload_bytes=10 * 4 * elements, sent_bytes=0,
        in_flight_s=1.0, exposed_wait_s=50 * step_s, overlap_fraction=0.0, boundary_s=0.0,
        staleness_gap=None, last_staleness_gap=None, clipped_fraction=0.0, tau=10, tau_changes=0,
        lost_all_reduces=0, left_out_payloads=0, rule="Local SGD", most_fragments=parts,
        step_s=step_s, all_reduce_s=4 * elements / bytes_per_s,
    )  # fmt: skip
    codec = "" if one.codec == "fp32" else f' with codec="{one.codec}"'
    assert record.advice() == [f"33% of the time is waiting: {one.rule}{codec} hides it"]


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
    widths = {"fp32": 4, "int8": 1.0078125, "int4": 0.515625}
    for one in options_for(job)[1:]:
        if not one.rule.startswith("DelayCorrected"):
            continue
        rule = eval(one.rule, {"DelayCorrected": DelayCorrected})  # noqa: S307 - as it is printed
        assert rule.fragments <= tensors
        message_s = fixed_s + widths[one.codec] * 1e6 / rule.fragments / bytes_per_s
        hides = (rule.delay_steps or rule.tau) * compute_s >= 1.1 * message_s * (1 - 1e-3)
        assert hides == (one.wait_s == 0)
        assert hides or rule.tau > 1000


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


@pytest.mark.nightly
def test_a_job_is_measured_and_ended_before_it_writes(tmp_path):
    (tmp_path / "train.py").write_text(DDP_JOB)
    (tmp_path / "checkpoint").write_text("kept")
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    done = advise(tmp_path, "--json", "--steps", "8", "--", *launch)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["measured"]
    assert (found["ranks"], found["elements"], found["tensors"]) == (2, 200 * 300 + 300, 2)
    # Of 60,300 gradients a 64th, an eighth, all, and all with one more, 4 bytes each.
    assert found["sizes_bytes"] == [4 * 942, 4 * 7537, 4 * 60300, 4 * 60301]
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


@pytest.mark.nightly
def test_a_job_that_sends_something_else_gets_no_figures(tmp_path):
    (tmp_path / "train.py").write_text(SHARDED_JOB)
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    done = advise(tmp_path, "--", *launch)
    assert done.returncode == 1
    assert "are sharded" in done.stderr.splitlines()[-2]
    assert done.stdout == ""
