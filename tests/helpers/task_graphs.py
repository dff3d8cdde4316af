"""Tasks and graphs that the task tests share."""

from hypothesis import strategies as st

from fivefold.tasks import CommunicationTask, ComputeTask, TaskGraph


def compute(name, duration_s=1.0, after=(), **more):
    return ComputeTask(task_id=name, duration_s=duration_s, depends_on=after, **more)


def send(name, size_bytes=1, after=(), **more):
    return CommunicationTask(
        task_id=name, kind="all_reduce", size_bytes=size_bytes, depends_on=after,
        **({"cost_s_per_byte": 1.0} | more),
    )  # fmt: skip


@st.composite
def graphs(draw, most=8):
    """Random graphs of both kinds of tasks on a few resources."""
    tasks = []
    for number in range(draw(st.integers(1, most))):
        after = tuple(
            sorted(draw(st.sets(st.sampled_from([t.task_id for t in tasks])))) if tasks else ()
        )
        if draw(st.booleans()):
            resource = draw(st.sampled_from(["compute", "compute 2"]))
            duration_s = draw(st.integers(0, 4))
            task = compute(f"t{number}", duration_s, after, resource=resource)
        else:
            latency_s = draw(st.sampled_from([0.0, 1.0]))
            task = send(f"t{number}", draw(st.integers(0, 5)), after, latency_s=latency_s)
        tasks.append(task)
    return TaskGraph(tuple(tasks))


def earliest_end_s(graph):
    """The end of the longest chain, as if every task had its own resource."""
    ends = {}
    for name in graph.order:
        task = graph.by_id[name]
        start_s = max((ends[other] for other in task.depends_on), default=0.0)
        ends[name] = start_s + task.duration_s
    return max(ends.values())
