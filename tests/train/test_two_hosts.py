"""torchrun on two machines with a network of their own: one is lost and comes back."""

import json
import sys

import pytest

from fivefold.lab import LabSpec, probe_capabilities, run_lab
from fivefold.train import config_to_toml

STEPS = 120

# What a scheduler does on each host: start torchrun's agent, and again where the host was lost.
HOST = """
import json, os, pathlib, signal, subprocess, sys, time

config, output = sys.argv[1:]
rank = int(os.environ["RANK"])
conf = f"is_host={1 - rank},keep_alive_interval=2,keep_alive_max_attempt=5"
agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
         "--rdzv-backend", "c10d", "--rdzv-endpoint", os.environ["MASTER_ADDR"] + ":29700",
         "--rdzv-id", "run", "--rdzv-conf", conf, "--max-restarts", "3",
         "--monitor-interval", "0.1", "-m", "fivefold", "train", config]
first = subprocess.Popen(agent)
if rank == 1:  # this host is lost with all its processes, some steps behind a checkpoint
    metrics = pathlib.Path(output) / "metrics.jsonl"
    while not metrics.exists() or '"step": 48' not in metrics.read_text():
        assert first.poll() is None, "the run ended before the host was lost"
        time.sleep(0.02)
    ranks = subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True).stdout
    for process in [first.pid, *map(int, ranks.split())]:
        os.kill(process, signal.SIGKILL)
    first.wait()
    print("lost", flush=True)
    first = subprocess.Popen(agent)
for _ in range(2):  # an agent that gives up is started again, as Kubernetes and Slurm do
    if first.wait() != 0:
        first = subprocess.Popen(agent)
sys.exit(first.wait())
"""


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize("method", ["co2", "ddp"])
def test_a_host_that_is_lost_and_comes_back_costs_the_steps_since_a_checkpoint(
    method, make_config, run_ranks, final_digest, tmp_path
):
    able = probe_capabilities()
    if not all(able[name].works for name in ("namespaces", "bridge", "veth", "tbf")):
        pytest.skip("no emulated hosts on this machine")
    options = {"steps": STEPS, "checkpoint_every_steps": 20, "timeout_s": 10.0}
    whole = make_config(method, output="whole", **options)
    run_ranks(whole)
    config = make_config(method, output="lost", **options)
    path = tmp_path / "lost.toml"
    path.write_text(config_to_toml(config))
    script = tmp_path / "host.py"
    script.write_text(HOST)
    command = [sys.executable, str(script), str(path), str(config.run.output)]
    logs = tmp_path / "logs"
    spec = LabSpec(hosts=2, rate="20Mbit/s")
    result = run_lab(spec, command, timeout_s=240.0, log_folder=logs, stream=False)
    said = "".join(file.read_text() for file in sorted(logs.glob("rank*")))
    assert result.exit_code == 0, said
    assert "lost" in result.ranks[1].stdout()
    lines = (config.run.output / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    resumed = [event["step"] for event in events if event["event"] == "resume"]
    assert resumed == [40]
    assert final_digest(config) == final_digest(whole)
