"""Plans as Chakra traces and MSCCL programs, read back and compared with the plan."""

import json
import sys
import types

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper
from typer.testing import CliRunner

from fivefold.cli._main import app
from fivefold.codesign import ClusterPlan, JobPlan, JobSpec, chakra_traces, msccl_programs
from fivefold.codesign.baselines import null_plan
from fivefold.collectives.lowering import from_msccl_xml, interpret
from fivefold.errors import UnsupportedError
from fivefold.network.topology import parse_topology, switch
from fivefold.tasks import LayerCost

LAYER = LayerCost(forward_s=1.0, backward_s=2.0, gradient_bytes=10**9)
U64, I64, BOOL, TEXT, MESSAGE, ENUM = 4, 3, 8, 9, 11, 14
# The parts of Chakra's schema 0.0.4 (et_def.proto) that a trace of ours has: number, type, many.
SCHEMA = {
    "GlobalMetadata": {"version": (1, TEXT, False)},
    "AttributeProto": {
        "name": (1, TEXT, False), "int64_val": (9, I64, False), "uint64_val": (13, U64, False),
        "bool_val": (27, BOOL, False), "string_val": (29, TEXT, False),
    },
    "Node": {
        "id": (1, U64, False), "name": (2, TEXT, False), "type": (3, ENUM, False),
        "data_deps": (5, U64, True), "duration_micros": (7, U64, False),
        "attr": (10, MESSAGE, True),
    },
}  # fmt: skip
TYPES = ("INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE",
         "COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE")  # fmt: skip
KINDS = ("ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "BROADCAST", "ALL_TO_ALL",
         "REDUCE_SCATTER")  # fmt: skip


def make_schema():
    """The package's module, built from the published numbers."""
    file = descriptor_pb2.FileDescriptorProto(name="test_et.proto", package="T", syntax="proto3")
    for name, values in (("NodeType", TYPES), ("CollectiveCommType", KINDS)):
        kind = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            kind.value.add(name=value, number=number)
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")  # so that a zero is written
        for field, (number, code, many) in fields.items():
            made = message.field.add(name=field, number=number, type=code, label=3 if many else 1)
            if field.endswith("_val"):
                made.oneof_index = 0
            if code == MESSAGE:
                made.type_name = ".T.AttributeProto"
            if code == ENUM:
                made.type_name = ".T.NodeType"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    module = types.SimpleNamespace(**dict(zip(TYPES, range(8), strict=True)))
    for name in SCHEMA:
        found = pool.FindMessageTypeByName(f"T.{name}")
        setattr(module, name, message_factory.GetMessageClass(found))
    enum = pool.FindEnumTypeByName("T.CollectiveCommType")
    module.CollectiveCommType = enum_type_wrapper.EnumTypeWrapper(enum)
    return module


@pytest.fixture
def schema(monkeypatch):
    module = make_schema()
    for name in ("chakra", "chakra.schema", "chakra.schema.protobuf"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "chakra.schema.protobuf.et_def_pb2", module)
    return module


def read(schema, content):
    """Messages behind their lengths, as Chakra's reader takes them."""
    found, at = [], 0
    while at < len(content):
        length, shift = 0, 0
        while True:
            byte = content[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        kind = schema.Node if found else schema.GlobalMetadata
        found.append(kind.FromString(content[at : at + length]))
        at += length
    return found


def attributes(node):
    return {a.name: getattr(a, [f.name for f, _ in a.ListFields()][-1]) for a in node.attr}


def test_a_trace_has_the_plans_tasks_sizes_and_order(schema):
    cluster = switch(4, bandwidth="1 GB/s")
    job = JobSpec(job_id="a", ranks=(2, 0), layers=(LAYER,) * 2, arrival_s=1.5)
    plan = ClusterPlan({"a": JobPlan(order=(2, 0), bucket_bytes=None)})
    files = chakra_traces(cluster, [job], plan)
    assert json.loads(files["comm_groups.json"]) == {"1": [2, 0]}
    assert sorted(files) == ["comm_groups.json", *(f"trace.{rank}.et" for rank in range(4))]
    assert files["trace.0.et"] == files["trace.2.et"]
    assert len(read(schema, files["trace.1.et"])) == 1  # nobody runs there
    metadata, *nodes = read(schema, files["trace.0.et"])
    assert metadata.version == "0.0.4"
    by_name = {node.name: node for node in nodes}
    assert set(by_name) == {
        "begins later", "backward 1", "backward 0", "reduce 1", "reduce 0", "forward 0", "forward 1"
    }  # fmt: skip
    assert by_name["begins later"].duration_micros == 1_500_000
    assert by_name["backward 1"].duration_micros == 2_000_000
    assert list(by_name["backward 1"].data_deps) == [by_name["begins later"].id]
    ends = {node.id for node in nodes}
    assert all(set(node.data_deps) <= ends for node in nodes)
    reduce = by_name["reduce 0"]
    assert reduce.type == schema.COMM_COLL_NODE
    found = attributes(reduce)
    assert (found["comm_type"], found["comm_size"], found["pg_name"]) == (0, 10**9, "1")
    # After its gradients, and after what the channel sends first.
    assert set(reduce.data_deps) == {by_name["backward 0"].id, by_name["reduce 1"].id}
    assert set(by_name["forward 0"].data_deps) >= {reduce.id, by_name["reduce 1"].id}


def test_a_trace_without_its_package_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "chakra", None)
    cluster = switch(2)
    jobs = [JobSpec(job_id="a", ranks=(0, 1), layers=(LAYER,))]
    with pytest.raises(UnsupportedError, match="mlc-chakra") as caught:
        chakra_traces(cluster, jobs, null_plan(cluster, jobs))
    assert "pip install" in caught.value.hint


def test_two_jobs_of_one_rank_have_no_trace(schema):
    del schema
    cluster = switch(3)
    jobs = [JobSpec(job_id=n, ranks=r, layers=(LAYER,)) for n, r in (("a", (0, 1)), ("b", (1, 2)))]
    with pytest.raises(UnsupportedError, match="share rank 1"):
        chakra_traces(cluster, jobs, null_plan(cluster, jobs))


def test_traces_of_a_larger_cluster_are_removed_and_nothing_else(schema, tmp_path):
    del schema
    jobs, folder = tmp_path / "jobs.toml", tmp_path / "traces"
    jobs.write_text('[[jobs]]\nid="a"\ngpus=2\ncompute="1 s"\ngradients="1 MB"\niterations=2\n')
    folder.mkdir()
    for name in ("trace.2.et", "trace.17.et", "trace.of.et", "notes.txt"):
        (folder / name).write_text("old")
    asked = ["simulate", str(jobs), "--cluster", "switch:2", "--chakra", str(folder)]
    assert CliRunner().invoke(app, asked).exit_code == 0
    written = {path.name for path in folder.iterdir()}
    traces = {"trace.0.et", "trace.1.et", "comm_groups.json"}
    assert written == {*traces, "trace.of.et", "notes.txt"}


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_msccl_programs_sum_in_the_planned_order(algorithm):
    cluster = parse_topology("fat_tree:4,gpus=2,bandwidth=12.5GB/s")
    ranks = (5, 4, 9, 8)
    layer = LayerCost(forward_s=1.0, backward_s=1.0, gradient_bytes=8, all_to_all_bytes=8)
    job = JobSpec(job_id="a", ranks=ranks, layers=(layer,))
    plan = JobPlan(order=(4, 5, 8, 9), algorithm=algorithm)
    texts = msccl_programs(cluster, job, plan)
    assert list(texts) == ["all_reduce", "all_to_all"]
    program = from_msccl_xml(texts["all_reduce"])
    chunks = program.collective.num_chunks
    inputs = [np.arange(chunks, dtype=np.float64) * (rank + 1) for rank in range(4)]
    for output in interpret(program, inputs):
        np.testing.assert_array_equal(output, sum(inputs))
    if algorithm == "ring":
        sends = {
            (number, block.send_peer)
            for number, rank in enumerate(program.ranks)
            for block in rank.blocks
            if block.send_peer >= 0
        }
        # 4 to 5 to 8 to 9 to 4, in the job's own numbers 1, 0, 3, 2.
        assert sends == {(1, 0), (0, 3), (3, 2), (2, 1)}


def test_sums_in_switches_have_no_msccl_program():
    job = JobSpec(job_id="a", ranks=(0, 1), layers=(LAYER,))
    plan = JobPlan(order=(0, 1), algorithm="in_network", root="switch", slots=1)
    with pytest.raises(UnsupportedError, match="aggregates in switches"):
        msccl_programs(switch(2), job, plan)


JOBS = """
[[jobs]]
id = 'a <b>'
gpus = 4
compute = 0.3
gradients = '1 GB'
layers = 2
iterations = 3
"""


def test_the_commands_write_pages_and_programs(tmp_path):
    file, out = tmp_path / "jobs.toml", tmp_path / "out"
    file.write_text(JOBS)
    cluster = ["--cluster", "switch:4,bandwidth=1GB/s"]
    page = tmp_path / "page.html"
    result = CliRunner().invoke(
        app, ["simulate", str(file), *cluster, "--output", str(out), "--report", str(page)]
    )
    assert result.exit_code == 0, result.output
    assert (out / "msccl" / "job0.all_reduce.xml").read_text().startswith("<algo")
    two = tmp_path / "two.toml"
    two.write_text(JOBS + JOBS.replace("a <b>", "b"))
    again = ["simulate", str(two), "--cluster", "switch:8", "--output", str(out)]
    assert CliRunner().invoke(app, again).exit_code == 0
    assert len(list((out / "msccl").iterdir())) == 2
    again[1] = str(file)
    assert CliRunner().invoke(app, again).exit_code == 0
    assert len(list((out / "msccl").iterdir())) == 1  # none of the plan before
    text = page.read_text()
    assert "a &lt;b&gt;" in text
    assert "a <b>" not in text
    bars = tmp_path / "bars.html"
    arguments = ["ablate", str(file), *cluster, "--seeds", "1", "--budget", "2"]
    result = CliRunner().invoke(app, [*arguments, "--report", str(bars)])
    assert result.exit_code == 0, result.output
    assert "V+H+II+HN" in bars.read_text()
    in_a_file = file / "such.html"
    result = CliRunner().invoke(app, [*arguments, "--report", str(in_a_file)])
    assert result.exit_code != 0
    assert str(in_a_file) in str(result.exception)
