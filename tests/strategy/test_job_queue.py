"""Queues of jobs: policies by hand, turns against a slow recursion, rounds against a slow clock."""

import itertools

import pytest
from benchmarks.strategy._queue_policies import QueuedJob, group_period_s, run_queue
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigurationError

TIMES = st.floats(0.0, 10.0).map(lambda value: round(value, 3))
STAGES = st.tuples(TIMES, TIMES, TIMES)


def job(name, *, gpus=8, submit_s=0.0, work_s=100.0, stages_s=(0.2, 0.5, 0.1), iteration_s=1.0):
    return QueuedJob(
        job_id=name, num_gpus=gpus, submit_s=submit_s, iterations=round(work_s / iteration_s),
        iteration_s=iteration_s, stages_s=stages_s,
    )  # fmt: skip


def slow_period_s(stages):
    """Quarter by quarter for a long time, over all ways to place the jobs."""
    best = float("inf")
    for places in itertools.permutations(range(4), len(stages)):
        ends = [0.0]
        for quarter in range(240):
            end = ends[-1]
            for (load, compute, send), place in zip(stages, places, strict=True):
                at = (quarter - place) % 4
                if at == 1 and quarter >= 1:
                    end = max(end, ends[quarter - 1] + load)
                if at == 2:
                    end = max(end, ends[-1] + compute)
                if at == 3:
                    end = max(end, ends[-1] + send)
            ends.append(end)
        best = min(best, (ends[240] - ends[120]) / 30)
    return best


@settings(max_examples=40, deadline=None)
@given(st.lists(STAGES, min_size=1, max_size=4))
def test_period_of_turns_equals_the_recursion(stages):
    assert group_period_s(tuple(stages)) == pytest.approx(slow_period_s(stages), abs=1e-9)


@given(st.lists(STAGES, min_size=2, max_size=4))
def test_turns_are_no_faster_than_any_job_or_resource_allows(stages):
    period = group_period_s(tuple(stages))
    assert period >= max(map(sum, stages)) - 1e-9
    assert period >= sum(stage[1] for stage in stages) - 1e-9
    assert period >= sum(stage[2] for stage in stages) - 1e-9
    assert period <= sum(map(sum, stages)) + 1e-9
    assert period >= group_period_s(tuple(stages[:-1])) - 1e-9


def test_two_jobs_in_turns_by_hand():
    one, other = (4.0, 2.0, 1.0), (1.0, 3.0, 2.0)
    # The other computes (3) while one loads (4), sends (2) while one computes (2), loads (1) while
    # one sends (1): as fast as one alone. Half a turn apart it would be max(4, 5) + max(1, 3).
    assert group_period_s((one, other)) == 7.0
    # Both compute for 5 in turn, and the last to compute sends for 2 while nobody computes.
    assert group_period_s(((1.0, 5.0, 2.0), (2.0, 5.0, 2.0))) == 12.0


@pytest.mark.parametrize(
    ("policy", "ends"),
    [
        ("fifo", {"long": 1000.0, "wide": 1200.0, "short": 1250.0}),
        # Round 0: only "long" is there. From 100 on the shortest first.
        ("srtf", {"long": 1300.0, "wide": 400.0, "short": 150.0}),
        # 16 GPU for 200 s are as much service as 8 for 400.
        ("srsf", {"long": 1300.0, "wide": 400.0, "short": 150.0}),
    ],
)
def test_order_by_hand(policy, ends):
    jobs = [
        job("long", gpus=16, work_s=1000.0),
        job("wide", gpus=16, work_s=200.0, submit_s=50.0),
        job("short", gpus=8, work_s=50.0, submit_s=60.0),
    ]
    result = run_queue(jobs, 16, policy=policy, round_s=100.0)
    assert result.end_s == pytest.approx(ends)
    assert result.completion_s["wide"] == pytest.approx(ends["wide"] - 50.0)


def test_service_counts_gpus_and_time_does_not():
    jobs = [job("wide", gpus=16, work_s=300.0), job("thin", gpus=8, work_s=400.0)]
    by_time = run_queue(jobs, 16, policy="srtf", round_s=100.0)
    by_service = run_queue(jobs, 16, policy="srsf", round_s=100.0)
    assert by_time.end_s == {"wide": 300.0, "thin": 700.0}
    assert by_service.end_s == {"thin": 400.0, "wide": 700.0}


def test_policies_that_know_no_durations_take_turns_by_hand():
    """Two jobs on all GPUs, rounds of 100 s: 16 GPUs serve 1,600 a round."""
    jobs = [job("a", gpus=16, work_s=300.0), job("b", gpus=16, work_s=300.0, submit_s=50.0)]
    ends = {
        policy: run_queue(jobs, 16, policy=policy, round_s=100.0).end_s
        for policy in ("las", "tiresias", "themis")
    }
    # Least service first: a, then b has less, then a again (equal: who came first), and so on.
    assert ends["las"] == {"a": 500.0, "b": 600.0}
    # a leaves the first queue with 4,800 at its end only (3,200 after two rounds): never preempted.
    assert ends["tiresias"] == {"a": 300.0, "b": 600.0}
    # After round 0 b waited 50 of 300 and a nothing; after round 1 a waited 100, b 50; and so on.
    assert ends["themis"] == {"a": 500.0, "b": 600.0}


def test_a_long_job_moves_down_a_queue():
    jobs = [job("long", gpus=16, work_s=1000.0), job("short", gpus=16, work_s=100.0, submit_s=50.0)]
    found = run_queue(jobs, 16, policy="tiresias", round_s=100.0).end_s
    assert found == {"long": 1100.0, "short": 400.0}  # after 3 rounds: 4,800 of 3,250 GPU seconds


def test_jobs_in_turns_share_gpus_only_where_gpus_are_scarce():
    jobs = [
        job("loader", work_s=1000.0, stages_s=(0.8, 0.1, 0.1)),
        job("thinker", work_s=1000.0, stages_s=(0.1, 0.8, 0.1)),
    ]
    roomy = run_queue(jobs, 16, policy="muri_s", round_s=100.0)
    assert set(roomy.end_s.values()) == {1000.0}
    tight = run_queue(jobs, 8, policy="muri_s", round_s=100.0)
    period_s = group_period_s(((0.8, 0.1, 0.1), (0.1, 0.8, 0.1)))
    assert period_s == pytest.approx(1.0)  # thinker computes while loader loads
    assert tight.makespan_s == pytest.approx(1000.0 * period_s)
    slowed = run_queue(jobs, 8, policy="muri_s", round_s=100.0, slowdown=1.5)
    assert slowed.makespan_s == pytest.approx(1000.0 * 1.5 * period_s)


def slow_clock(jobs, num_gpus, *, key, round_s):
    """One decision every round, whether or not anything has changed; no groups."""
    left = {one.job_id: one.work_s for one in jobs}
    end_s, now_s = {}, 0.0
    while left:
        here = [one for one in jobs if one.job_id in left and one.submit_s <= now_s]
        free = num_gpus
        known = (left, now_s)[: key.__code__.co_argcount - 1]
        for one in sorted(here, key=lambda one: (key(one, *known), one.submit_s, jobs.index(one))):
            if one.num_gpus <= free:
                free -= one.num_gpus
                left[one.job_id] -= round_s
                if left[one.job_id] <= 1e-6:
                    end_s[one.job_id] = now_s + round_s + left.pop(one.job_id)
        now_s += round_s
    return end_s


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 2000), st.integers(1, 1500)),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_rounds_without_change_are_skipped_without_a_difference(rows):
    jobs = [
        job(str(i), gpus=gpus, submit_s=float(at), work_s=float(work))
        for i, (gpus, at, work) in enumerate(rows)
    ]

    def served(one, left):
        return (one.work_s - left[one.job_id]) * one.num_gpus

    def behind(one, left, now_s):
        return -(now_s - one.submit_s + left[one.job_id]) / one.work_s

    keys = {
        "las": served,
        "tiresias": lambda one, left: sum(x <= served(one, left) for x in (3250, 7200, 18000)),
        "themis": behind,
        "fifo": lambda one, _: one.submit_s,
        "srtf": lambda one, left: left[one.job_id],
        "srsf": lambda one, left: left[one.job_id] * one.num_gpus,
    }
    for policy, key in keys.items():
        found = run_queue(jobs, 8, policy=policy, round_s=100.0)
        assert found.end_s == pytest.approx(slow_clock(jobs, 8, key=key, round_s=100.0))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([2, 8]), st.integers(0, 900), st.integers(1, 900), STAGES),
        min_size=1, max_size=14,
    ),
    st.sampled_from(["las", "tiresias", "themis", "muri_s", "muri_l"]),
)  # fmt: skip
def test_every_job_ends_and_none_faster_than_alone(rows, policy):
    jobs = [
        job(str(i), gpus=gpus, submit_s=float(at), work_s=float(work),
            stages_s=tuple(value / 40 for value in stages))
        for i, (gpus, at, work, stages) in enumerate(rows)
    ]  # fmt: skip
    result = run_queue(jobs, 16, policy=policy, round_s=60.0, slowdown=2.0)
    assert set(result.end_s) == {one.job_id for one in jobs}
    if not policy.startswith("muri"):
        assert all(result.completion_s[one.job_id] >= one.work_s - 1e-6 for one in jobs)
    assert result.mean_s > 0.0
    assert result.percentile_s(0.0) <= result.percentile_s(0.99) <= result.makespan_s


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: run_queue([job("a")], 8, policy="best"), "unknown"),
        (lambda: run_queue([job("a", gpus=9)], 8, policy="fifo"), "needs 9 GPUs of 8"),
        (lambda: run_queue([job("a"), job("a")], 8, policy="fifo"), "names"),
        (lambda: run_queue([], 8, policy="fifo"), "names"),
        (lambda: run_queue([job("a")], 8, policy="fifo", round_s=0.0), "round_s"),
        (lambda: run_queue([job("a"), job("b", stages_s=None)], 8, policy="muri_s"), "stages_s"),
        (lambda: job("a", work_s=-1.0), "must be positive|-1"),
        (lambda: job("a", submit_s=float("nan")), "not finite"),
        (lambda: group_period_s(()), "0 jobs"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ConfigurationError, match=words):
        call()
