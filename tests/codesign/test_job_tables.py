"""Job tables of schedulers: what becomes of every row and column, and who runs where and when."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.codesign import load_jobs, run_plan
from fivefold.codesign.baselines import null_plan
from fivefold.codesign.tables import TableJob, TableTold, place_in_time, read_job_table
from fivefold.errors import FivefoldError
from fivefold.network.topology import parse_topology

TOLD = TableTold(compute_s=0.5, gradient_bytes=10**9)
SLURM = """JobID|User|State|Submit|Start|End|Elapsed|AllocTRES|NodeList
101|a|COMPLETED|2024-05-01T10:00:00|2024-05-01T10:00:05|2024-05-01T10:00:35|00:00:30|cpu=8,gres/gpu=4|n1
101.batch||COMPLETED|2024-05-01T10:00:00|2024-05-01T10:00:05|2024-05-01T10:00:35|00:00:30|cpu=8|n1
102|b|COMPLETED|2024-05-01T10:00:10|2024-05-01T10:00:15|2024-05-02T10:00:15|1-00:00:00|gres/gpu:a100=2,gres/gpu:v100=2|n2
103|b|RUNNING|2024-05-01T10:00:10|2024-05-01T10:00:15|Unknown||gres/gpu=4|n3
104|c|PENDING|2024-05-01T10:00:10|Unknown|Unknown|00:00:00|gres/gpu=4|
105|c|COMPLETED|2024-05-01T10:00:30|2024-05-01T10:00:35|2024-05-01T10:00:45|00:00:10|cpu=2,gres/gpu=4|n1
"""
PHILLY = [
    {
        "jobid": "application_1", "status": "Pass", "vc": "v", "user": "u",
        "submitted_time": "2017-10-09 07:00:28",
        "attempts": [
            {"start_time": "2017-10-09 07:00:30", "end_time": "2017-10-09 07:00:31", "detail": []},
            {
                "start_time": "2017-10-09 07:01:00", "end_time": "2017-10-09 07:02:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}],
            },
        ],
    },
    {"jobid": "application_2", "submitted_time": "2017-10-09 07:00:28", "attempts": []},
]  # fmt: skip
MURI = """job_id,num_gpu,submit_time,iterations,model_name,duration,iteration_time
0,8,0,100,gpt2,50000,500
1,8,1000,10,vgg16,2000,200
2,16,2000,10,vgg16,2000,200
"""


def read(tmp_path, text, told=TOLD):
    path = tmp_path / "jobs.txt"
    path.write_text(text)
    return read_job_table(path, told)


def test_slurm_says_who_ran_when_on_how_many_gpus(tmp_path):
    jobs, reading = read(tmp_path, SLURM)
    found = [(job.job_id, job.gpus, job.start_s, job.duration_s, job.compute_s) for job in jobs]
    assert found == [
        ("101", 4, 0.0, 30.0, 0.5), ("102", 4, 10.0, 86400.0, 0.5), ("105", 4, 30.0, 10.0, 0.5),
    ]  # fmt: skip
    left = {note.name: note.why for note in reading.left_out}
    assert (
        left["row 2 (job 101.batch)"] == "it has no GPU" or "step" in left["row 2 (job 101.batch)"]
    )
    assert left["row 4 (job 103)"] == "it has not ended"
    assert left["row 5 (job 104)"] == "it has not started"
    assert {"Elapsed", "Start", "Submit", "State"} <= {note.name for note in reading.read}
    assert "placed anew" in left["NodeList"]


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ("7|2024-05-01T10:00:00||05:30|gres/gpu=2,gres/gpumem=640G,gres/gpuutil=90", 330.0),
        ("7|2024-05-01T10:00:00||1-05|gres/gpu:h100=2,gres/gpumem=640G", 29 * 3600.0),
        ("7_3|2024-05-01T10:00:00||1-02:03:04|gres/gpu=2", 93784.0),
        ("7_3.batch|2024-05-01T10:00:00||00:05:30|gres/gpu=2", None),
        ("7+1.0|2024-05-01T10:00:00||00:05:30|gres/gpu=2", None),
        ("7|2024-05-01T10:00:00|Unknown|00:05:30|gres/gpu=2", None),
    ],
)
def test_times_steps_and_resources_as_slurm_writes_them(tmp_path, row, seconds):
    last = "9|2024-05-01T10:00:00|2024-05-01T10:00:10|00:00:10|gres/gpu=1"
    jobs, _ = read(tmp_path, f"JobID|Start|End|Elapsed|AllocTRES\n{row}\n{last}\n")
    found = {job.job_id: (job.gpus, job.duration_s) for job in jobs}
    wanted = {} if seconds is None else {row.partition("|")[0]: (2, seconds)}
    assert found == wanted | {"9": (1, 10.0)}


def test_no_time_of_compute_is_no_job(tmp_path):
    with pytest.raises(FivefoldError, match="no job that ran"):
        read(tmp_path, SLURM, TableTold(compute_s=0.0, gradient_bytes=1))


def test_jobs_have_ranks_of_their_own_while_they_run(tmp_path):
    path = tmp_path / "sacct.txt"
    path.write_text(SLURM)
    jobs = {
        job.job_id: job for job in load_jobs(path, parse_topology("fat_tree:2,gpus=4"), told=TOLD)
    }
    assert not set(jobs["101"].ranks) & set(jobs["102"].ranks)
    assert jobs["105"].ranks == jobs["101"].ranks  # free again
    assert jobs["102"].arrival_s == 10.0
    assert jobs["101"].gradient_bytes == 10**9


def test_phillys_log_has_every_attempt_that_held_gpus(tmp_path):
    jobs, reading = read(tmp_path, json.dumps(PHILLY))
    assert [(job.job_id, job.gpus, job.duration_s) for job in jobs] == [("application_1", 3, 60.0)]
    left = {note.name for note in reading.left_out}
    assert {"row 1 (job application_1, attempt 1)", "row 3 (job application_2)"} <= left
    again = json.loads(json.dumps(PHILLY))
    again[0]["attempts"][0]["detail"] = [{"ip": "m1", "gpus": ["gpu0"]}]
    jobs, _ = read(tmp_path, json.dumps(again))
    found = {job.job_id: (job.gpus, job.start_s) for job in jobs}
    assert found == {"application_1, attempt 1": (1, 0.0), "application_1": (3, 30.0)}


def test_parts_of_a_job_of_several_kinds_are_one_job(tmp_path):
    rows = SLURM.splitlines()
    mixed = [rows[0], rows[1].replace("101", "9+0"), rows[1].replace("101", "9+1"), rows[6]]
    jobs, reading = read(tmp_path, "\n".join(mixed))
    assert [(job.job_id, job.gpus, job.duration_s) for job in jobs] == [
        ("9", 8, 30.0), ("105", 4, 10.0),
    ]  # fmt: skip
    assert {note.name: note.why for note in reading.read}["row 2 (job 9+1)"] == "a part of 9"


@pytest.mark.parametrize(
    ("state", "is_left_out", "is_assumed"),
    [
        ("COMPLETED", False, False), ("FAILED", False, True), ("CANCELLED by 1000", False, True),
        ("OUT_OF_MEMORY", False, True), ("PENDING", True, False), ("BOOT_FAIL", True, False),
        ("RUNNING", True, False),
    ],
)  # fmt: skip
def test_how_a_job_ended_is_read(tmp_path, state, is_left_out, is_assumed):
    jobs, reading = read(tmp_path, SLURM.replace("101|a|COMPLETED", f"101|a|{state}"))
    assert ("101" not in {job.job_id for job in jobs}) == is_left_out
    word = state.lower().split()[0]
    assert (f"1 jobs that ended as {word}" in {note.name for note in reading.assumed}) == is_assumed


def test_a_job_lasts_as_long_as_in_its_table(tmp_path):
    """Its communication has its time in the duration, and in what an iteration took."""
    cluster = parse_topology("switch:8,bandwidth=1GB/s,latency=0s")
    path = tmp_path / "jobs.csv"
    for text, told in (
        (SLURM, TOLD),
        ("job_id,num_gpu,start_time,duration,iteration_time\na,4,0,3000,30\nb,2,40,100,10\n",
         TableTold(gradient_bytes=10**9, unit="s")),
    ):  # fmt: skip
        path.write_text(text)
        jobs = load_jobs(path, cluster, told=told)
        lasted = {row.job_id: row.duration_s for row in read_job_table(path, told)[0]}
        for job in jobs:
            few = replace(job, iterations=min(job.iterations, 20), arrival_s=0.0)
            alone = run_plan(cluster, [few], null_plan(cluster, [few]))
            took_s = alone.iteration_s[job.job_id] * job.iterations
            assert took_s == pytest.approx(lasted[job.job_id], rel=0.05)


def test_jobs_lie_on_the_fewest_hosts_that_have_room():
    def job(name, gpus, start_s, duration_s=100.0):
        return TableJob(job_id=name, gpus=gpus, start_s=start_s, duration_s=duration_s)

    cluster = parse_topology("fat_tree:4,gpus=4")
    jobs = [
        job("a", 3, 0.0),
        job("b", 1, 1.0),
        job("c", 2, 2.0),
        job("d", 6, 3.0),
        job("e", 2, 4.0),
    ]
    placed = place_in_time(cluster, jobs)
    hosts = {
        name: sorted({cluster.host_of(rank) for rank in ranks})
        for name, (_, ranks) in placed.items()
    }
    assert hosts["b"] == hosts["a"]
    assert len(hosts["d"]) == 2
    assert hosts["c"][0] in hosts["d"]  # whose other ranks are free
    assert len(hosts["e"]) == 1
    assert len({rank for _, ranks in placed.values() for rank in ranks}) == 14


def test_without_starts_jobs_wait_first_in_first_out(tmp_path):
    jobs, reading = read(tmp_path, MURI, TableTold(gradient_bytes=1, unit="ms"))
    assert [(job.iterations, job.iteration_s) for job in jobs] == [(100, 0.5), (10, 0.2), (10, 0.2)]
    assert "queue" in {note.name for note in reading.assumed}
    placed = place_in_time(parse_topology("fat_tree:2,gpus=8"), jobs, queued=True)
    assert [placed[str(n)][0] for n in range(3)] == [0.0, 1.0, 50.0]


@pytest.mark.parametrize(
    ("text", "told", "words"),
    [
        (SLURM, TableTold(compute_s=1.0), "--gradients"),
        (SLURM, TableTold(gradient_bytes=1), "--compute"),
        (MURI, TableTold(gradient_bytes=1), "has no unit; .*--time-unit"),
        (
            SLURM.replace("gres/gpu=4", "gres/gpu=four"),
            TOLD,
            r"row 1 \(job 101\): 'four' is no whole",
        ),
        (
            SLURM.replace("2024-05-01T10:00:05", "yesterday", 1),
            TOLD,
            r"row 1 \(job 101\): 'yesterday'",
        ),
        (SLURM.replace("105|", "101|"), TOLD, "stands there twice"),
        (SLURM.replace("|n2", "|n2|n3"), TOLD, "row 3 has not as many cells"),
        (SLURM.replace("AllocTRES", "Tres"), TOLD, "no column that says gpus"),
        (SLURM.splitlines()[0], TOLD, "no job that ran on GPUs"),
    ],
)
def test_what_a_table_lacks_is_asked_for(tmp_path, text, told, words):
    with pytest.raises(FivefoldError, match=words):
        read(tmp_path, text, told)


def test_too_many_jobs_at_once_are_refused_by_name():
    jobs = [
        TableJob(job_id=str(n), gpus=2, start_s=0.0, duration_s=1.0, compute_s=1.0, iterations=1)
        for n in range(3)
    ]
    with pytest.raises(FivefoldError, match=r"job '2' needs 2 ranks .*, and 0 of 4 are free"):
        place_in_time(parse_topology("switch:4"), jobs)


def test_simulate_reads_a_table(tmp_path):
    path = tmp_path / "sacct.txt"
    path.write_text("\n".join(line for line in SLURM.splitlines() if not line.startswith("102")))
    words = ["simulate", str(path), "--cluster", "fat_tree:2,gpus=4", "--budget", "1"]
    told = ["--compute", "0.5 s", "--gradients", "1 MB", "--json"]
    found = json.loads(CliRunner().invoke(app, [*words, *told]).stdout)
    assert "101" in json.dumps(found)
    account = found["readings"][0]
    assert {"iterations", "placement"} <= {note["name"] for note in account["assumed"]}
    refused = CliRunner().invoke(app, words)
    assert "--gradients" in str(refused.exception)


@given(seed=st.randoms(use_true_random=False))
def test_every_row_and_column_has_one_place(tmp_path_factory, seed):
    lines = [line.split("|") for line in SLURM.splitlines()]
    columns = list(range(len(lines[0])))
    seed.shuffle(columns)
    columns = columns[: seed.randint(len(columns) - 2, len(columns))]
    extra = seed.choice(["", "Zeta", "MaxRSS"])
    rows = [[line[at] for at in columns] + [extra] * bool(extra) for line in lines]
    body = rows[1:]
    seed.shuffle(body)
    body = body[: seed.randint(1, len(body))]
    try:
        jobs, reading = read(
            tmp_path_factory.getbasetemp(), "\n".join("|".join(row) for row in [rows[0], *body])
        )
    except FivefoldError:  # a column that is needed is gone, or no row is a job
        return
    lists = [
        {note.name for note in notes}
        for notes in (reading.read, reading.assumed, reading.left_out, reading.harmless)
    ]
    for name in rows[0]:
        assert sum(name in one for one in lists) == 1
    for number in range(1, len(body) + 1):
        named = [name for one in lists for name in one if name.split(" (")[0] == f"row {number}"]
        assert len(named) == 1
    assert len(jobs) == sum(note.name.startswith("row ") for note in reading.read)


def test_every_command_says_what_it_took_a_machine_of_others_for(tmp_path):
    path = tmp_path / "matrix.txt"
    path.write_text("\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n")
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[[jobs]]\nid="a"\ngpus=2\ncompute="0.3 s"\ngradients="1 GB"\niterations=2')
    for words in (
        ["collectives", "bench", "all_gather", str(path), "--sizes", "1MB"],
        ["collectives", "synthesize", "all_gather", str(path)],
        ["simulate", str(jobs), "--cluster", str(path), "--budget", "1"],
    ):
        done = CliRunner().invoke(app, [*words, "--json"])
        found = json.loads(done.stdout)
        found = found[0] if isinstance(found, list) else found
        account = found["readings"][0] if "readings" in found else found["reading"]
        assert "nvlink" in {note["name"] for note in account["assumed"] if note.get("decisive")}
        assert "not known from" in done.stderr
        assert "nvlink = 200 Gbit/s" in done.stderr
