"""Every example and the README's own run as a person would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALONE = [
    "report_from_runs.py",
    "lab_two_hosts.py",
    "fsdp2_co2.py",
    "moe_layer.py",
    "moe_expert_parallel.py",
    "collectives_backend.py",
    "gnn_pyg_model.py",
    "gnn_from_toml.py",
]
ELASTIC = "elastic_co2.py"
ON_TWO_RANKS = [
    "co2_plain_loop.py",
    "ddp.py",
    "hf_style_loop.py",
    "hf_trainer.py",
    "lightning_trainer.py",
]


def run(command, cwd, *, may_abort_at_exit=False):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=150, cwd=cwd, env=environment
    )
    aborted = "terminate called without an active exception" in result.stderr
    assert result.returncode == 0 or (may_abort_at_exit and aborted), result.stderr[-3000:]
    return result.stdout


def torchrun(script, cwd, **options):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return run([*launcher, "--nproc-per-node", "2", str(script)], cwd, **options)


def test_every_example_is_run_by_this_file():
    found = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert found == {*ALONE, *ON_TWO_RANKS, ELASTIC}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_example(name, tmp_path):
    assert run([sys.executable, str(ROOT / "examples" / name)], tmp_path).strip()


@pytest.mark.slow
@pytest.mark.distributed
def test_elastic_example_ends_with_equal_workers(tmp_path):
    pytest.importorskip("torchft", reason="torchft is not installed (fivefold[elastic])")
    output = run([sys.executable, str(ROOT / "examples" / ELASTIC)], tmp_path)
    assert "worker c was killed" in output
    assert int(re.search(r"worker d: starts at step (\d+)", output)[1]) > 0
    checksums = dict(re.findall(r"worker (\w): checksum (\S+)", output))
    assert checksums.keys() == {"a", "b", "d"}
    assert len(set(checksums.values())) == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_plain_loop_ends_with_equal_replicas(tmp_path):
    output = torchrun(ROOT / "examples" / "co2_plain_loop.py", tmp_path)
    checksums = re.findall(r"rank [01]: checksum (\S+),", output)
    assert len(checksums) == 2
    assert checksums[0] == checksums[1]


@pytest.mark.slow
@pytest.mark.distributed
def test_hugging_face_style_loop_resumes_to_the_same_bits(tmp_path):
    output = torchrun(ROOT / "examples" / "hf_style_loop.py", tmp_path)
    ends = re.findall(r"rank [01]: checksum (\S+), resumed (\S+), 20 rounds", output)
    assert len(ends) == 2
    assert len({checksum for pair in ends for checksum in pair}) == 1
    losses = [float(loss) for loss in re.findall(r"step 160  loss (\S+)", output)]
    assert losses[0] == losses[1] < 1.0  # a uniform guess has log(32) = 3.47


@pytest.mark.slow
@pytest.mark.distributed
def test_hugging_face_trainer_resumes_to_the_same_bits(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed (fivefold[hf])")
    output = torchrun(ROOT / "examples" / "hf_trainer.py", tmp_path)
    ends = re.findall(r"rank [01]: loss (\S+), model (\S+), resumed (\S+)", output)
    assert len(ends) == 2
    assert len({checksum for _, *pair in ends for checksum in pair}) == 1
    assert float(ends[0][0]) < 1.8  # a uniform guess has log(16) = 2.77


@pytest.mark.slow
@pytest.mark.distributed
def test_lightning_resumes_to_the_same_bits(tmp_path):
    pytest.importorskip("pytorch_lightning", reason="no Lightning here (fivefold[lightning])")
    output = torchrun(ROOT / "examples" / "lightning_trainer.py", tmp_path)
    assert "resumed from step 60: the same model" in output
    assert float(re.search(r"validation loss (\S+), replicas equal", output)[1]) < 0.5


@pytest.mark.slow
@pytest.mark.distributed
def test_ddp_learns(tmp_path):
    """The example is torch alone: a thread of gloo may abort its exit (pytorch, pull 179291)."""
    output = torchrun(ROOT / "examples" / "ddp.py", tmp_path, may_abort_at_exit=True)
    assert float(re.search(r"loss (\S+)", output)[1]) < 0.95  # a guess of 0 has 1


@pytest.mark.slow
@pytest.mark.distributed
def test_readme_example(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    script = tmp_path / "train.py"
    script.write_text(code)
    output = torchrun(script, tmp_path)
    assert output.count("64 steps, 9 rounds, 9 merged") == 2


def test_links_in_the_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
