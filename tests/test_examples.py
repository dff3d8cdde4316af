"""Every example and the README's own run as a person would run them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.forked_programs import Forker
from helpers.night import by_night

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
ALONE = [
    "report_from_runs.py",
    "lab_two_hosts.py",
    "fsdp2_co2.py",
    "moe_layer.py",
    "collectives_backend.py",
    "gnn_pyg_model.py",
    "gnn_from_toml.py",
]
# Their imports take seconds, or they train for seconds; what they show has tests by day.
FOR_THE_NIGHT = ["lab_two_hosts.py", "fsdp2_co2.py", "collectives_backend.py", "gnn_pyg_model.py"]
FRESH = "moe_expert_parallel.py"
ELASTIC = "elastic_co2.py"
ON_TWO_RANKS = [
    "co2_plain_loop.py",
    "ddp.py",
    "hf_style_loop.py",
    "hf_trainer.py",
    "lightning_trainer.py",
]


@pytest.fixture(scope="module")
def forker():
    with Forker() as forker:
        yield forker


@pytest.fixture
def run(forker, tmp_path):
    def run(name):
        done = forker.run(EXAMPLES / name, tmp_path)
        assert done.code == 0, done.err[-3000:]
        return done.out

    return run


@pytest.fixture
def run_ranks(forker, tmp_path):
    def run_ranks(name, **options):
        both = forker.run_ranks(EXAMPLES / name, tmp_path, **options)
        for done in both:
            assert done.code == 0, done.err[-3000:]
        return "".join(done.out for done in both)

    return run_ranks


def test_every_example_is_run_by_this_file():
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == {*ALONE, FRESH, *ON_TWO_RANKS, ELASTIC}


@pytest.mark.parametrize("name", by_night(ALONE, FOR_THE_NIGHT))
def test_example(name, run):
    assert run(name).strip()


@pytest.mark.nightly
def test_example_in_a_fresh_process(tmp_path):
    """It sets what triton reads when it is imported."""
    assert output_of([sys.executable, str(EXAMPLES / FRESH)], tmp_path).strip()


@pytest.mark.alone
@pytest.mark.distributed
def test_elastic_example_ends_with_equal_workers(run):
    pytest.importorskip("torchft", reason="torchft is not installed (fivefold[elastic])")
    output = run(ELASTIC)
    assert "worker c was killed" in output
    assert int(re.search(r"worker d: starts at step (\d+)", output)[1]) > 0
    checksums = dict(re.findall(r"worker (\w): checksum (\S+)", output))
    assert checksums.keys() == {"a", "b", "d"}
    assert len(set(checksums.values())) == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_plain_loop_ends_with_equal_replicas(run_ranks):
    checksums = re.findall(r"rank [01]: checksum (\S+),", run_ranks("co2_plain_loop.py"))
    assert len(checksums) == 2
    assert checksums[0] == checksums[1]


@pytest.mark.nightly
@pytest.mark.distributed
def test_hugging_face_style_loop_resumes_to_the_same_bits(run_ranks):
    output = run_ranks("hf_style_loop.py")
    ends = re.findall(r"rank [01]: checksum (\S+), resumed (\S+), 20 rounds", output)
    assert len(ends) == 2
    assert len({checksum for pair in ends for checksum in pair}) == 1
    losses = [float(loss) for loss in re.findall(r"step 160  loss (\S+)", output)]
    assert losses[0] == losses[1] < 1.0  # a uniform guess has log(32) = 3.47


@pytest.mark.nightly
@pytest.mark.distributed
def test_hugging_face_trainer_resumes_to_the_same_bits(run_ranks):
    pytest.importorskip("accelerate", reason="accelerate is not installed (fivefold[hf])")
    output = run_ranks("hf_trainer.py")
    ends = re.findall(r"rank [01]: loss (\S+), model (\S+), resumed (\S+)", output)
    assert len(ends) == 2
    assert len({checksum for _, *pair in ends for checksum in pair}) == 1
    assert float(ends[0][0]) < 1.8  # a uniform guess has log(16) = 2.77


@pytest.mark.nightly
@pytest.mark.distributed
def test_lightning_resumes_to_the_same_bits(run_ranks):
    pytest.importorskip("pytorch_lightning", reason="no Lightning here (fivefold[lightning])")
    output = run_ranks("lightning_trainer.py")
    assert "resumed from step 60: the same model" in output
    assert float(re.search(r"validation loss (\S+), replicas equal", output)[1]) < 0.5


@pytest.mark.distributed
def test_ddp_learns(run_ranks):
    """Torch alone: destroying its groups may hang, or abort the process (pytorch, pull 179291)."""
    output = run_ranks("ddp.py", destroys=False)
    assert float(re.search(r"loss (\S+)", output)[1]) < 0.95  # a guess of 0 has 1


@pytest.mark.nightly
@pytest.mark.distributed
def test_readme_example_under_torchrun(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    script = tmp_path / "train.py"
    script.write_text(code)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    output = output_of([*launcher, "--nproc-per-node", "2", str(script)], tmp_path)
    assert output.count("64 steps, 18 rounds, 18 merged") == 2


def output_of(command, cwd):
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, cwd=cwd
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_links_in_the_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
