# ruff: noqa: S311, E501
"""Whatever a file or a line of text holds, a command ends soon: with a result or with two lines.

Every reader and every command that takes a file or a spec gets changed copies of what it takes.
None may end with a traceback or an internal error, take long, or say nothing of what to do.
"""

import contextlib
import importlib.util
import io
import json
import random
import signal
import sys
import warnings
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

import fivefold.cli._main as entry
from fivefold.errors import FivefoldError
from helpers.fuzz import mutated, mutated_line

EXAMPLES = Path(__file__).parents[2] / "examples"
# Parts whose cases take tenths of a second draw a fifth of what the profile says, except at night.
_DRAWN = settings().max_examples
SLOW = settings(max_examples=_DRAWN // 5 if _DRAWN <= 50 else _DRAWN)
MOST_CPU_S = 60  # a case that computes for so long hangs; ordinary ones take milliseconds

JOB = """
model = "llama3-8b"
gpus = 8
global_batch = 16
seq_len = 4096
[search]
micro_batch = [1, 2]
virtual = [1]
tau = [1, 4]
"""
PLANNED = """
model = "llama3-8b"
gpus = 16
global_batch = 32
[plan]
data = 4
tensor = 2
pipeline = 2
micro_batch = 1
"""
MODEL = """
gpus = 8
global_batch = 8
[model]
name = "small"
num_layers = 4
hidden = 256
num_heads = 4
ffn = 1024
vocab = 1000
seq_len = 128
[plan]
data = 8
"""
CLUSTER = """
base = "h100-nemo"
gpus = 16
[device]
memory = "80 GB"
gemm_efficiency = 0.6
[[tier]]
name = "node"
gpus = 8
bandwidth = "450 GB/s"
hop = "1 us"
[[tier]]
name = "network"
gpus = 64
bandwidth = "50 GB/s"
hop = "5 us"
"""
TOPOLOGY = """
name = "two"
nodes = [
  { name = "a", kind = "gpu", host = "h0" },
  { name = "b", kind = "gpu", host = "h1" },
  { name = "s", kind = "switch" },
]
links = [
  { source = "a", target = "s", bandwidth = "25 GB/s", latency = "1 us", both_ways = true },
  { source = "b", target = "s", bandwidth = "25 GB/s", count = 2, both_ways = true },
]
[[switches]]
node = "s"
multicast = true
aggregation = { slots = 64, slot_size = "256 B", rate = "10 GB/s", dtypes = ["float32"] }
[[changes]]
source = "a"
target = "s"
bandwidth = "1 GB/s"
"""
GENERATED = """
generate = "leaf_spine:4,leaves=2,spines=2,gpus=2"
[[changes]]
source = "leaf0"
target = "spine0"
latency = "3 us"
"""
JOBS = (EXAMPLES / "codesign_jobs.toml").read_text().replace("gpus = 16", "gpus = 4").replace(
    "gpus = 8", "gpus = 2"
)  # fmt: skip
MODEL_JOBS = """
[[jobs]]
id = "a"
model = { name = "m", num_layers = 4, hidden = 256, num_heads = 4, ffn = 1024, vocab = 1000, seq_len = 128 }
devices = "h100-nemo"
batch = 8
ranks = [0, 1, 2, 3]
iterations = 5
plan = { data = 4 }
"""
SKETCH = """
name = "relay"
boxes = 1
chunks = 1
balance = "minmax"
connections = "all"
symmetry = [[1, 4]]
senders = { 0 = [0] }
own_chunks_first = false
"""
TACCL_SKETCH = json.dumps(
    {
        "nnodes": 1,
        "intranode_sketch": {
            "strategy": "none",
        },
        "symmetry_offsets": [[1, 4]],
        "hyperparameters": {"input_chunkup": 1},
    }
)
SPECS = [
    "ring:4", "line:8", "mesh:4x4", "torus:4x4x4", "hypercube:4", "fully_connected:8", "star:8", "switch:8",
    "fat_tree:4,gpus=2,bandwidth=12.5GB/s", "leaf_spine:4,leaves=2,spines=2,gpus=2", "clos:2x2x2,aggs=2,cores=4,gpus=2",
    "rail_optimized:4,spines=2", "dragonfly:2", "dgx_a100:2", "taccl:ndv2_1MB:2", "lingjun:topo.csv", "ndv2",
    "ring:4,bandwidth=1GB/s,latency=2us",
]  # fmt: skip


HUGGING_FACE = json.dumps(
    {
        "model_type": "deepseek_v3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 512,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 1,
        "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    }
)  # fmt: skip
TACCL_PROFILE = json.dumps(
    {
        "name": "box", "gpus_per_node": 2, "nics_per_node": 1, "alpha": 0.3, "remote_alpha": 2.6,
        "remote_beta": 105, "remote_invbw": 107, "links": [[0, 1], [1, 0]],
        "betas": [[0, 8], [8, 0]], "invbws": [[0, 9], [9, 0]],
    }
)  # fmt: skip
# A flag and its value, of a command that reads it.
FLAGS = [
    ("collectives synthesize all_reduce ring:4 --method library --size", "16MB"),
    ("collectives synthesize all_reduce ring:4 --method library --chunks", "4"),
    ("collectives synthesize broadcast ring:4 --method library --root", "1"),
    ("collectives synthesize all_gather ring:4 --method library --time-limit", "1s"),
    ("collectives bench all_reduce ring:4 --sizes", "64KB,1MB"),
    ("ablate --cluster switch:4 --seeds 1 --number 1 --iterations 1 --budget 1 --sizes", "2,2"),
    ("topology show ring:4 --bandwidth", "50 GB/s"),
    ("topology show ring:4 --latency", "1 us"),
    ("lab run --host-rate 9=1Mbit/s --rate", "200Mbit/s"),  # refused before anything is run
    ("lab run --host-class 9=0 --delay", "5ms"),
    ("lab run --host-class 9=0 --host-rate", "1=50Mbit/s"),
    ("lab run --host-rate 9=1Mbit/s --host-class", "1=0"),
    ("lab run --host-rate 9=1Mbit/s --topology", "ring:4"),
]


class TooLongError(BaseException):
    """A case hangs; no reader catches this."""


@contextlib.contextmanager
def within_time():
    def stop(*_):
        raise TooLongError

    # Processor time: other work on the machine slows a case down. One that waits for ever is
    # ended by the time limit of the test.
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.fixture(autouse=True)
def _one_command_tree(monkeypatch):
    # Built once: typer makes it anew for every call, which takes longer than a case.
    monkeypatch.setattr(entry, "app", typer.main.get_command(entry.app))
    monkeypatch.setattr(sys, "argv", ["fivefold"])


def run_command(words):
    """Exit code and standard error of the command, in this process."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    sys.argv = ["fivefold", *words]
    with contextlib.ExitStack() as around:
        around.enter_context(contextlib.redirect_stdout(out))
        around.enter_context(contextlib.redirect_stderr(err))
        around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        around.enter_context(within_time())
        try:
            entry.main()
        except SystemExit as end:
            return end.code, err.getvalue()
    pytest.fail("the command did not end")


def check_command(words):
    code, err = run_command(words)
    assert code in {0, 1, 2, 3}, err
    assert "internal error" not in err
    if code:
        last = err.splitlines()[-2:]
        assert [line.partition(":")[0] for line in last] == ["error", "hint"], err
        assert max(map(len, last)) < 2100
    return code


def algorithms():
    from fivefold.collectives.algorithms import build_algorithm
    from fivefold.collectives.lowering import lower, to_msccl_xml
    from fivefold.collectives.schedules import all_gather, all_reduce

    summed, gathered = (
        build_algorithm("ring", all_reduce(3, 3)),
        build_algorithm("ring", all_gather(3)),
    )
    return {
        "schedule": (gathered.to_json(), "json"),
        "xml": (to_msccl_xml(lower(summed)), "xml"),
    }


VERIFY = "collectives verify FILE"
COMMANDS = {
    "topology": (TOPOLOGY, "toml", "topology show FILE"),
    "generated": (GENERATED, "toml", "topology convert FILE"),
    "loads": (json.dumps([1.0] * 2), "json", "topology draw ring:2 PICTURE --loads FILE"),
    "job": (JOB, "toml", "plan FILE --cluster h100-nemo"),
    "plan": (PLANNED, "toml", "plan FILE --cluster h100-nemo"),
    "model": (MODEL, "toml", "plan FILE --cluster h100-nemo"),
    "cluster": (CLUSTER, "toml", "plan JOB --cluster FILE"),
    "jobs": (JOBS, "toml", "simulate FILE --cluster switch:8 --budget 2"),
    "model-jobs": (MODEL_JOBS, "toml", "simulate FILE --cluster switch:4 --budget 2"),
    **dict.fromkeys(("schedule", "xml"), (None, None, VERIFY)),
}


def base_of(name):
    text, kind, words = COMMANDS[name]
    if text is None:
        text, kind = algorithms()[name]
    return text, kind, words.split()


def call(tmp_path, name, data):
    text, kind, words = base_of(name)
    file, job = tmp_path / f"given.{kind}", tmp_path / "job.toml"
    job.write_text(PLANNED)
    file.write_bytes(text.encode() if data is None else data)
    places = {"FILE": str(file), "JOB": str(job), "PICTURE": str(tmp_path / "p.svg")}
    return check_command([places.get(word, word) for word in words])


@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_changed_copies_are_made_of_is_right(tmp_path, name):
    assert call(tmp_path, name, None) == 0


@pytest.mark.parametrize("name", COMMANDS)
@given(seed=st.integers(0, 2**32))
def test_a_changed_file_ends_in_a_result_or_in_two_lines(tmp_path_factory, name, seed):
    text, kind, _ = base_of(name)
    call(tmp_path_factory.getbasetemp(), name, mutated(text, kind, seed))


@SLOW
@given(seed=st.integers(0, 2**32))
def test_a_changed_spec_ends_in_a_result_or_in_two_lines(seed):
    spec = mutated_line(random.Random(seed).choice(SPECS), seed)
    check_command(["topology", "show", "--", spec])


@SLOW
@given(seed=st.integers(0, 2**32))
def test_a_changed_option_ends_in_a_result_or_in_two_lines(seed):
    words, value = random.Random(seed).choice(FLAGS)
    *words, option = words.split()
    last = ["--", "true"] if words[0] == "lab" else []
    check_command([*words, f"{option}={mutated_line(value, seed)}", *last])


@pytest.fixture(scope="module")
def make_run():
    path = Path(__file__).parents[1] / "report" / "conftest.py"
    found = importlib.util.spec_from_file_location("report_conftest", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.make_run


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("manifest.json", "json"),
        ("metrics.jsonl", "jsonl"),
        ("result.json", "json"),
        ("config.toml", "toml"),
        ("ranks/rank0.jsonl", "jsonl"),
    ],
)
@given(seed=st.integers(0, 2**32))
def test_a_changed_run_folder_ends_in_a_report_or_in_two_lines(
    tmp_path_factory, make_run, name, kind, seed
):
    folder = tmp_path_factory.getbasetemp() / "fuzzed" / name.replace("/", "-")
    if not folder.exists():
        make_run(folder, "co2")
        (folder / "original").write_bytes((folder / name).read_bytes())
    text = (folder / "original").read_text()
    (folder / name).write_bytes(mutated(text, kind, seed))
    check_command(["report", str(folder), "--no-html"])


def readers():
    """Readers of what commands do not read in this process: text, kind, and the reader of a path."""
    from fivefold.codesign import ClusterPlan
    from fivefold.collectives.synthesis import Sketch
    from fivefold.gnn import training as gnn
    from fivefold.network.topology import TacclProfile
    from fivefold.strategy import load_model
    from fivefold.train import load_config

    def text_of(read):
        return lambda path: read(path.read_bytes().decode(errors="replace"))

    return {
        "train": ((EXAMPLES / "train.toml").read_text(), "toml", lambda p: load_config(p, [])),
        "experts": ((EXAMPLES / "moe_train.toml").read_text(), "toml", lambda p: load_config(p, [])),
        "gnn": ((EXAMPLES / "gnn_train.toml").read_text(), "toml", lambda p: gnn.load_gnn_config(p, [])),
        "sketch": (SKETCH, "toml", Sketch.from_toml),
        "taccl-sketch": (TACCL_SKETCH, "json", Sketch.from_taccl),
        "taccl-profile": (
            TACCL_PROFILE, "json", lambda p: TacclProfile.load(p, chunk_bytes="1 MB").to_topology(boxes=2)
        ),
        "hugging-face": (HUGGING_FACE, "json", lambda p: load_model(str(p))),
        "cluster-plan": (ClusterPlan({}).to_json(), "json", text_of(ClusterPlan.from_json)),
    }  # fmt: skip


READERS = (
    "train", "experts", "gnn", "sketch", "taccl-sketch", "taccl-profile", "hugging-face",
    "cluster-plan",
)  # fmt: skip


@pytest.mark.parametrize("name", READERS)
@given(seed=st.integers(0, 2**32))
def test_a_changed_text_is_read_or_refused(tmp_path_factory, name, seed):
    text, kind, read = readers()[name]
    path = tmp_path_factory.getbasetemp() / f"fuzzed-{name}.{kind}"
    path.write_bytes(mutated(text, kind, seed))
    with within_time(), contextlib.suppress(FivefoldError):
        read(path)


@given(seed=st.integers(0, 2**32))
def test_a_changed_override_is_taken_or_refused(seed):
    from fivefold.train import load_config

    assignment = random.Random(seed).choice(["run.steps=50", "sync.tau=auto", 'run.output="a"'])
    with within_time(), contextlib.suppress(FivefoldError):
        load_config(EXAMPLES / "train.toml", [mutated_line(assignment, seed)])
