"""A plan for other programs: Chakra execution traces, MSCCL's XML, a timeline for Perfetto.

Chakra: one file per rank and one iteration, as ASTRA-sim and others read them: compute nodes of the
planned length, one node per collective, dependencies as planned, the order of the channel among
them. What is lost: paths, classes and algorithms, which the reader chooses itself. Message classes
come from the ``mlc-chakra`` package (schema 0.0.4), an optional one.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fivefold.codesign.jobs import JobSpec
from fivefold.codesign.plans import ClusterPlan, JobPlan
from fivefold.codesign.simulate import (
    Outcome,
    alone_quote,
    channel_predecessors,
    schedule_iteration,
)
from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.lowering import lower, to_msccl_xml
from fivefold.collectives.pricing.phases import host_groups
from fivefold.collectives.schedules import Schedule, all_reduce, all_to_all
from fivefold.errors import UnsupportedError
from fivefold.network.topology import Topology
from fivefold.tasks import ComputeTask

_KINDS = {
    "all_reduce": "ALL_REDUCE", "all_to_all": "ALL_TO_ALL", "all_gather": "ALL_GATHER",
    "reduce_scatter": "REDUCE_SCATTER", "broadcast": "BROADCAST", "reduce": "REDUCE",
}  # fmt: skip
_IN_ANY_ORDER = {
    "tree": "double_binary_tree",
    "halving_doubling": "recursive_halving_doubling",
}
_VERSION = "0.0.4"


def chakra_traces(
    topology: Topology, jobs: Sequence[JobSpec], plan: ClusterPlan
) -> Mapping[str, bytes]:
    """Return one iteration of every job as Chakra traces.

    Args:
        topology: The cluster; its ranks are the traces' processors.
        jobs: The jobs.
        plan: Their plans.

    Returns:
        Files by name: ``trace.<rank>.et`` for every rank of the topology (ranks without a job have
        an empty trace), and ``comm_groups.json`` with the processors of each group.

    Raises:
        UnsupportedError: ``mlc-chakra`` is not installed, two jobs share a rank, or a job is
            split along more axes than its data.

    References:
        https://github.com/mlcommons/chakra, schema/protobuf/et_def.proto.
    """
    schema = _schema()
    files: dict[str, bytes] = {}
    groups: dict[str, list[int]] = {}
    for number, job in enumerate(jobs, start=1):
        own = plan.jobs[job.job_id]
        groups[str(number)] = list(job.ranks)
        nodes = _nodes(schema, topology, job, own, str(number))
        for rank in job.ranks:
            name = f"trace.{rank}.et"
            if name in files:
                raise UnsupportedError(
                    f"two jobs share rank {rank}, and a trace has one", hint="give each its own"
                )
            files[name] = _file(schema, nodes)
    for rank in range(topology.num_ranks):
        files.setdefault(f"trace.{rank}.et", _file(schema, []))
    return files | {"comm_groups.json": (json.dumps(groups, indent=1) + "\n").encode()}


def _schema() -> Any:
    try:
        return importlib.import_module("chakra.schema.protobuf.et_def_pb2")
    except ImportError as error:
        message = f"Chakra traces need the package mlc-chakra, which cannot be imported: {error}"
        raise UnsupportedError(
            message, hint="pip install --no-deps mlc-chakra 'protobuf>=6.31'"
        ) from error


def _nodes(schema: Any, topology: Topology, job: JobSpec, plan: JobPlan, group: str) -> list[Any]:
    """Return the nodes of one rank: all ranks of a data-parallel job do the same."""
    if job.split_as(plan.split).mesh is not None:
        raise UnsupportedError(
            f"job {job.job_id!r} is split along several axes, and traces are made of "
            "data-parallel jobs",
            hint="describe the job by its compute and gradients",
        )
    schedule = schedule_iteration(job, plan, alone_quote(topology, job, plan))
    numbers = {name: place for place, name in enumerate(schedule.graph.order, start=1)}
    before = channel_predecessors(schedule)
    nodes = []
    begin_s = job.arrival_s + plan.shift_s
    if begin_s > 0:
        nodes.append(_compute(schema, 0, "begins later", begin_s))
    for name in schedule.graph.order:
        task = schedule.graph.by_id[name]
        if isinstance(task, ComputeTask):
            node = _compute(schema, numbers[name], name, task.duration_s)
        else:
            node = schema.Node(id=numbers[name], name=name, type=schema.COMM_COLL_NODE)
            kind = schema.CollectiveCommType.Value(_KINDS[task.kind])
            node.attr.add(name="is_cpu_op", bool_val=False)
            node.attr.add(name="comm_type", int64_val=kind)
            node.attr.add(name="comm_size", int64_val=task.size_bytes)
            node.attr.add(name="pg_name", string_val=group)
        awaited = {numbers[other] for other in task.depends_on}
        if name in before:
            awaited.add(numbers[before[name]])
        if not awaited and begin_s > 0:
            awaited = {0}
        node.data_deps.extend(sorted(awaited))
        nodes.append(node)
    return nodes


def _compute(schema: Any, number: int, name: str, seconds: float) -> Any:
    node = schema.Node(id=number, name=name, type=schema.COMP_NODE)
    node.duration_micros = max(1, round(seconds * 1e6))
    node.attr.add(name="is_cpu_op", bool_val=False)
    node.attr.add(name="num_ops", int64_val=0)
    node.attr.add(name="tensor_size", uint64_val=0)
    return node


def _file(schema: Any, nodes: Sequence[Any]) -> bytes:
    """Write messages one after the other, each behind its length as a varint."""
    out = io.BytesIO()
    for message in (schema.GlobalMetadata(version=_VERSION), *nodes):
        content = message.SerializeToString()
        length = len(content)
        while length >= 0x80:
            out.write(bytes([length & 0x7F | 0x80]))
            length >>= 7
        out.write(bytes([length]))
        out.write(content)
    return out.getvalue()


def msccl_programs(topology: Topology, job: JobSpec, plan: JobPlan) -> Mapping[str, str]:
    """Return what layer 3 chose for a job, for an NCCL that has MSCCL.

    Args:
        topology: The cluster: whose ranks sit in one host.
        job: The job; ranks of the programs are its own, from 0.
        plan: Its plan.

    Returns:
        Text of each file by the collective's name.

    Raises:
        UnsupportedError: The plan aggregates in switches, which MSCCL cannot express; or the job
            is split along several axes.
        InfeasibleError: A program exceeds a limit of MSCCL's interpreter.

    Examples:
        >>> from fivefold.network.topology import switch
        >>> from fivefold.tasks import LayerCost
        >>> layer = LayerCost(forward_s=0.1, backward_s=0.2, gradient_bytes=10)
        >>> job = JobSpec(job_id="a", ranks=(2, 0), layers=(layer,))
        >>> list(msccl_programs(switch(4), job, JobPlan(order=(0, 2))))
        ['all_reduce']
    """
    if job.split_as(plan.split).mesh is not None or plan.algorithm == "in_network":
        in_switches = plan.algorithm == "in_network"
        reason = "it aggregates in switches" if in_switches else "it has several axes"
        raise UnsupportedError(
            f"job {job.job_id!r} has no MSCCL program: {reason}",
            hint="plan with the co-designs V, H and II, for data-parallel jobs",
        )
    number = len(job.ranks)
    programs: dict[str, str] = {}
    if number > 1 and any(layer.gradient_bytes for layer in job.layers):
        programs["all_reduce"] = to_msccl_xml(
            lower(_reduction(topology, job, plan), in_place=True)  # as PyTorch calls it
        )
    if number > 1 and any(layer.all_to_all_bytes for layer in job.layers):
        direct = build_algorithm("direct", all_to_all(number))
        programs["all_to_all"] = to_msccl_xml(lower(direct))
    return programs


def _reduction(topology: Topology, job: JobSpec, plan: JobPlan) -> Schedule:
    collective = all_reduce(len(job.ranks))
    places = {rank: place for place, rank in enumerate(job.ranks)}
    order = [places[rank] for rank in plan.order]
    if plan.algorithm in {"ring", "ring_or_tree"}:
        return build_algorithm("ring", collective, order=order)
    if plan.algorithm in _IN_ANY_ORDER:
        made = build_algorithm(_IN_ANY_ORDER[plan.algorithm], collective)
        renamed = np.array(order, np.int32)
        return made.replaced(sources=renamed[made.sources], targets=renamed[made.targets])
    if plan.algorithm == "synthesized":
        raise UnsupportedError(
            f"job {job.job_id!r} has a schedule for each of its sizes",
            hint="fivefold collectives synthesize writes the one of a size",
        )
    groups = host_groups(topology, plan.order)
    if groups is None:
        raise UnsupportedError(
            f"job {job.job_id!r} is planned host by host, but has no even hosts",
            hint="plan it again on this cluster",
        )
    own = [[places[rank] for rank in group] for group in groups]
    return build_algorithm("hierarchical", collective, groups=own)


def timeline_of(outcome: Outcome) -> dict[str, Any]:
    """Return the last iteration of every job as a Chrome trace, which Perfetto opens.

    One process per job, a thread for compute and one for each kind of flow.
    """
    events: list[dict[str, Any]] = []
    jobs = {job: place for place, job in enumerate(outcome.completion_s)}
    for job, place in jobs.items():
        events.append({"ph": "M", "pid": place, "name": "process_name", "args": {"name": job}})
        for tid, name in enumerate(("compute", "network")):
            thread = {"ph": "M", "pid": place, "tid": tid, "name": "thread_name"}
            events.append(thread | {"args": {"name": name}})
    shown: set[tuple[Any, ...]] = set()
    for span in outcome.result.timeline():
        parts = span.name if isinstance(span.name, tuple) else (span.name,)
        length_s = span.finish_s - span.start_s
        if parts[0] not in jobs or not length_s > 0:
            continue
        name = str(parts[1][0] if isinstance(parts[1], tuple) else parts[1])
        # Flows of one step go side by side: one bar stands for all that begin and end together.
        key = (parts[0], name, span.kind, span.start_s, span.finish_s)
        if key in shown:
            continue
        shown.add(key)
        events.append({
            "name": name, "ph": "X", "ts": span.start_s * 1e6, "dur": length_s * 1e6,
            "pid": jobs[parts[0]], "tid": int(span.kind != "compute"),
            "args": {"id": str(span.name)},
        })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
