"""Typical mistakes: a message says what is wrong, the value got, what is allowed, and at once."""

import subprocess
import sys
import time

import pytest

import fivefold.cli._main as entry

JOB = 'model = "llama3-8b"\ngpus = 8\nglobal_batch = 8\n'
JOBS = '[[jobs]]\nid="a"\ngpus=2\ncompute="0.1 s"\ngradients="1 GB"\n'
GPU = "--cluster h100-nemo"
NET = "--cluster switch:4"
WORST_S = 1.0

# The file t.toml, the command line, and words that the two lines must have.
MISTAKES = [
    # a file that is not there, or is not what it should be
    (None, f"plan nothere.toml {GPU}", "'nothere.toml' does not exist|--help"),
    (JOB, f"plan s.toml {GPU}", "'s.toml' does not exist|plan --help"),
    (JOB, f"plan . {GPU}", "'.' is a directory|--help"),
    (JOB, "plan t.toml --cluster nothere.toml", "nothere.toml does not exist|TOML file"),
    (JOB, "plan t.toml --cluster h100-nemoo", "'h100-nemoo' is unknown|mean 'h100-nemo'|TOML"),
    (JOB, "plan t.toml --cluster fat_tree:4", "'fat_tree:4' is a network|base = "),
    ('model = "llama3-8b\n', f"plan t.toml {GPU}", "not TOML|line 1|quotes"),
    ('{"model": 1}', f"plan t.toml {GPU}", "not TOML|line 1"),
    ("", f"plan t.toml {GPU}", "does not say 'model'|add model"),
    (None, "train nothere.toml", "'nothere.toml' does not exist|train --help"),
    (None, "gnn train nothere.toml", "'nothere.toml' does not exist|train --help"),
    (None, "gnn info nofolder", "'nofolder' does not exist|--help"),
    (None, "report norun", "'norun' does not exist|report --help"),
    (None, "explain norun", "'norun' does not exist|--help"),
    (None, "explain .", "no run found in .|manifest.json"),
    (None, "collectives verify nothere.json", "'nothere.json' does not exist|verify --help"),
    (None, f"execute nothere.toml {NET}", "'nothere.toml' does not exist|--help"),
    # the wrong key, or a value that a key does not take
    (JOB + "microbatch = 1\n", f"plan t.toml {GPU}", "no key 'microbatch'|global_batch"),
    (JOB.replace("8b", "9b"), f"plan t.toml {GPU}", "'llama3-9b'|mean 'llama3-8b'"),
    (JOB.replace("gpus = 8", 'gpus = "8"'), f"plan t.toml {GPU}", "got '8'|whole number|1 to"),
    (JOB.replace("batch = 8", "batch = 0"), f"plan t.toml {GPU}", "got 0|1 to 100,000,000"),
    (JOB + "[search]\nzeros = [1]\n", f"plan t.toml {GPU}", "no key 'zeros'|mean 'zero'"),
    (JOB + "[search]\nzero = [7]\n", f"plan t.toml {GPU}", "zero .* has 7|0, 1, 2, 3"),
    (JOB + '[search]\nschedules = ["1b1f"]\n', f"plan t.toml {GPU}", "'1b1f'|1f1b"),
    (JOB + "[plan]\ndata = 3\n", f"plan t.toml {GPU}", "not a multiple|= 3|whole micro-batches"),
    (JOB + "[plan]\ndata = 4\n", f"plan t.toml {GPU}", "takes 4 GPUs|has 8|data = 8"),
    (JOB + "[plan]\ndata = 8\nzero = 5\n", f"plan t.toml {GPU}", "zero=5|0, 1, 2, 3"),
    (JOB + "[plan]\ndata = 8\n", f"plan t.toml {GPU}", "does not fit|has 85.9 GB|leave out"),
    (JOB + "[plan]\ntensor = 8\nsequence_paralel = true\n", f"plan t.toml {GPU}",
     "'sequence_paralel'|mean 'sequence_parallel'"),
    (JOB.replace("= 8\ng", "= 1\ng"), f"plan t.toml {GPU}", "no plan|memory|GPUs"),
    (JOBS.replace("gradients", "gradient"), f"simulate t.toml {NET}",
     "jobs.gradient |mean jobs.gradients"),
    (JOBS.replace("1 GB", "1"), f"simulate t.toml {NET}", "'1' has no unit|'1 MB'"),
    (JOBS.replace("=2", "=99"), f"simulate t.toml {NET}", "needs 99 ranks|4 of 4|4 or fewer"),
    ("x = 1\n", f"simulate t.toml {NET}", "describes no jobs|\\[\\[jobs\\]\\]"),
    ('[run]\noutputs = "x"\n', "train t.toml", "run.outputs|mean run.output"),
    ('[sync]\nmethod = "co3"\n', "train t.toml", "got 'co3'|one of .*'co2'"),
    ('[sync]\nmethod = "co2"\ntau = 0\n', "train t.toml", "got 0|at least 1"),
    ("[model]\nwidth = 100\nheads = 3\n", "train t.toml", "width 100, heads 3|use width 96 or 102"),
    ('[optim]\nlr = "fast"\n', "train t.toml", "got 'fast'|a number"),
    ("", "train t.toml --set run.steps", "'run.steps'|section.key=value|run.steps=50"),
    ('[run]\nout = "x"\n', "gnn train t.toml", "run.out |mean run.output"),
    ("nodes = 3\n", "topology show t.toml", "got 3|list of tables|\\[\\[nodes\\]\\]"),
    # a wrong command line
    (None, "plann", "'plann'|mean 'plan'"),
    (JOB, f"plan t.toml {GPU} --clustr x", "--clustr|--cluster"),
    (JOB, "plan t.toml", "missing option '--cluster'|h100-nemo"),
    (JOB, f"plan t.toml {GPU} --top 0", "--top|equal to 1|got '0'"),
    (JOB, f"plan t.toml {GPU} --top x", "--top|integer|got 'x'"),
    (JOB, "plan t.toml h100-nemo", "'h100-nemo'|--cluster"),
    (JOB, "plan t.toml --compare", "t.toml|A.toml B.toml"),
    (JOB, f"plan t.toml {GPU} --price 2", "--price|--compare"),
    (JOB, f"plan t.toml {GPU} --json --csv", "--json and --csv|one of them"),
    (None, f"plan --check nodir {GPU}", "'nodir' does not exist|--help"),
    (JOB, "explain t.toml", "the job t.toml|--cluster h100-nemo"),
    (JOBS, f"explain t.toml {GPU}", "'h100-nemo'|does not say how many GPUs|h100-nemo:16"),
    (JOBS, "simulate t.toml", "missing option '--cluster'|simulate --help"),
    (JOBS, "simulate t.toml --cluster fat_tre:4", "'fat_tre'|mean 'fat_tree'"),
    (JOBS, "simulate t.toml --cluster fat_tree:3", "even; got 3|2 or 4"),
    (JOBS, f"simulate t.toml {NET} --co-designs Q", "'Q'|V\\+H\\+II\\+HN"),
    (JOBS, f"simulate t.toml {NET} --start worst", "'worst'|'null', 'best'"),
    (None, f"ablate {NET} --seeds 0", "--seeds|equal to 1|got '0'"),
    (None, f"ablate {NET} --sizes two", "got 'two'|4,8,16"),
    (None, "train --nproc 0", "--nproc|equal to 1|got '0'"),
    (None, "lab run", "missing argument|--help"),
    (None, "lab run --rate fast -- true", "'fast' is not a rate|200 Mbit/s"),
    (None, "lab run --hosts 0 -- true", "got 0|1 to 253"),
    (None, "lab run --delay 5 -- true", "'5' has no unit|'5 ms'"),
    (None, "topology show nowhere:4", "'nowhere'|fat_tree"),
    (None, "topology show torus:4x", "got '4x'|whole number"),
    (None, "collectives synthesize all_reduc ring:4", "'all_reduc'|all_reduce"),
    (None, "collectives synthesize broadcast ring:4 --root 9", "root is 9|from 0 to 3"),
    (None, "collectives synthesize all_reduce ring:4 --method tacl", "'tacl'|taccl"),
    (None, "collectives synthesize all_reduce ring:4 --size 64", "'64' has no unit|'64 MB'"),
    (None, "doctor --jsn", "--jsn|--json"),
    (None, "gnn generate g --nodes -3", "--nodes|equal to 0|got '-3'"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    """The packages that commands work with: what loading costs is another test's."""
    import fivefold.codesign
    import fivefold.collectives.synthesis
    import fivefold.gnn.training.config
    import fivefold.lab  # noqa: F401


@pytest.mark.parametrize(("file", "line", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_told_at_once(tmp_path, monkeypatch, capsys, file, line, words):
    import re

    monkeypatch.chdir(tmp_path)
    if file is not None:
        (tmp_path / "t.toml").write_text(file)
    monkeypatch.setattr(sys, "argv", ["fivefold", *line.split()])
    begun_s = time.process_time()
    with pytest.raises(SystemExit) as ended:
        entry.main()
    taken_s = time.process_time() - begun_s
    seen = capsys.readouterr()
    assert ended.value.code in {1, 2, 3}
    assert seen.out == ""
    error, hint = seen.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert "internal error" not in error
    for word in words.split("|"):
        assert re.search(word, seen.err), f"{word!r} is not in {seen.err}"
    assert taken_s < WORST_S


LIGHT = """
import sys
import fivefold.cli._main as entry
for line in {lines!r}:
    sys.argv = ["fivefold", *line.split()]
    try:
        entry.main()
    except SystemExit:
        pass
heavy = {{"torch", "numba", "scipy", "numpy", "networkx"}} & set(sys.modules)
sys.exit(f"{{line}} loads {{heavy}}" if heavy else 0)
"""


def test_help_and_wrong_command_lines_load_nothing():
    groups = ("lab", "gnn", "topology", "collectives", "elastic")
    commands = ("plan", "explain", "simulate", "ablate", "execute", "train", "report", "doctor",
                "profile", "demo")  # fmt: skip
    lines = [f"{name} --help" for name in (*commands, *groups)]
    lines += [f"plan nothere.toml {GPU}", f"simulate nothere.toml {NET} --bad", "gnn info nofolder",
              "lab run", "collectives synthesize", "ablate --seeds 0", "plan --top x"]  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", LIGHT.format(lines=lines)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-500:]


@pytest.mark.parametrize("line", ["train t.toml", "train t.toml --nproc 2", "gnn train t.toml"])
def test_an_unknown_key_is_told_before_torch_is_loaded(tmp_path, line):
    (tmp_path / "t.toml").write_text('[run]\noutputs = "x"\n')
    text = LIGHT.format(lines=[line]).replace('"numpy", ', "")
    found = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-500:]
    assert "run.outputs" in found.stderr


def test_an_unknown_cluster_is_told_before_compiled_loops_are_loaded():
    text = LIGHT.format(lines=["plan --cluster nosuch examples/plan_job.toml"])
    found = subprocess.run(
        [sys.executable, "-c", text.replace('"numpy", ', "")], capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-500:]
    assert "cluster 'nosuch' is unknown" in found.stderr
