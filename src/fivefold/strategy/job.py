"""A job file: what is to be trained, on how many GPUs, and which plans may be looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError, InfeasibleError, require_whole
from fivefold.files import read_toml
from fivefold.reading import Reading
from fivefold.runs import format_toml
from fivefold.strategy._space import SearchSpace
from fivefold.strategy.cluster import Cluster
from fivefold.strategy.hugging_face import is_configuration, read_model
from fivefold.strategy.model import ModelSpec
from fivefold.strategy.plan import ParallelPlan
from fivefold.strategy.presets import load_model, model_from_table, with_adapters
from fivefold.strategy.tables import check_keys, read_fields

_KEYS = {"model", "gpus", "global_batch", "seq_len", "search", "plan", "adapters",
         "optimizer"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """Model, search space and given plan of a planning task.

    Args:
        model: What is trained.
        space: Which plans are looked at.
        plan: A plan to be judged instead of searched for, or None.
        reading: What was read of the model's configuration, where it is another program's.
    """

    model: ModelSpec
    space: SearchSpace
    plan: ParallelPlan | None = None
    reading: Reading | None = None


def load_job(path: Path | str, *, cluster: Cluster | None = None) -> Job:
    r"""Read a job file.

    Args:
        path: TOML with ``model`` (a preset, a ``config.json``, or a table of ``ModelSpec``),
            ``gpus``, ``global_batch``, and where wanted ``seq_len``, ``optimizer``,
            ``[search]`` (fields of ``SearchSpace``), ``[plan]`` (fields of ``ParallelPlan``) and
            ``[adapters]`` (fields of ``LowRankAdapters``).
        cluster: Gives the number of GPUs where the file does not; a job cannot have more.

    Raises:
        ConfigurationError: A key is missing, unknown or not allowed.
        InfeasibleError: The plan takes another number of GPUs than the job has, or the job more
            than the cluster.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "job.toml"
        >>> _ = file.write_text('model = "llama3-8b"\ngpus = 8\nglobal_batch = 16\n')
        >>> load_job(file).space.num_gpus
        8
    """
    return job_from_table(
        read_toml(Path(path)), where=str(path), folder=Path(path).parent, cluster=cluster
    )


def job_from_table(
    table: Mapping[str, Any], *, where: str, folder: Path, cluster: Cluster | None = None
) -> Job:
    """Return a job from the keys of a job file."""
    check_keys(table, _KEYS, where=where)
    gpus = table.get("gpus", None if cluster is None else cluster.num_gpus)
    for name, value in (("model", table.get("model")), ("gpus", gpus),
                        ("global_batch", table.get("global_batch"))):  # fmt: skip
        if value is None:
            raise ConfigurationError(f"{where} does not say {name!r}", hint=f"add {name} = ...")
    seq_len = table.get("seq_len")
    length = 1 if seq_len is None else seq_len
    for name, value, most in (("gpus", gpus, 1_000_000), ("seq_len", length, 1 << 30),
                              ("global_batch", table["global_batch"], 100_000_000)):  # fmt: skip
        require_whole(f"{name} in {where}", value, most=most)
    if cluster is not None:
        cluster.require(gpus)
    model, reading = _model(table["model"], seq_len=seq_len, folder=folder)
    model = with_adapters(model, table.get("adapters"))
    search = _search_of(table)
    space = SearchSpace(**{"num_gpus": gpus, "global_batch": table["global_batch"], **search})
    plan = None if "plan" not in table else _plan_of(table, where=where, num_gpus=space.num_gpus)
    return Job(model=model, space=space, plan=plan, reading=reading)


def _plan_of(table: Mapping[str, Any], *, where: str, num_gpus: int) -> ParallelPlan:
    given = {name: table[name] for name in ("global_batch", "optimizer") if name in table}
    plan = ParallelPlan(**(given | read_fields(table["plan"], ParallelPlan, where="[plan]")))
    for name, said in given.items():
        if getattr(plan, name) != said:
            message = f"{where} says {name} = {said}, its [plan] {getattr(plan, name)}"
            raise ConfigurationError(message, hint="leave one of the two out, or make them equal")
    if plan.num_gpus != num_gpus:
        message = f"[plan] takes {plan.num_gpus} GPUs, the job has {num_gpus}"
        replicas = plan.data * num_gpus / plan.num_gpus
        near = f"data = {replicas:.0f}" if replicas.is_integer() else f"gpus = {plan.num_gpus}"
        raise InfeasibleError(
            message, hint=f"data x tensor x pipeline x context = gpus; nearest: {near}"
        )
    return plan


def _search_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the search space that the file gives."""
    given = table.get("search", {})
    check_keys(given, {field.name for field in dataclasses.fields(SearchSpace)}, where="[search]")
    search = {  # SearchSpace looks at each value
        name: tuple(value) if isinstance(value, list)
        else value if name in {"num_gpus", "global_batch"} else (value,)
        for name, value in given.items()
    }  # fmt: skip
    if "shards" in search:  # TOML has no None: 0 stands for all replicas
        search["shards"] = tuple(count or None for count in search["shards"])
    if "optimizer" in table:
        search["optimizers"] = (table["optimizer"],)
    return search


def _model(source: Any, *, seq_len: int | None, folder: Path) -> tuple[ModelSpec, Reading | None]:
    """Return the model, and the account of its file where it is a ``config.json``."""
    if isinstance(source, str):
        beside = folder / source
        path = str(beside) if beside.exists() else source
        if is_configuration(path):
            return read_model(path, seq_len=seq_len)
        return load_model(path, seq_len=seq_len), None
    extra = {} if seq_len is None else {"seq_len": seq_len}
    if isinstance(source, Mapping):
        source = {"name": "model", **source, **extra}
    return model_from_table(source, where="[model]"), None


def plan_to_toml(plan: ParallelPlan) -> str:
    """Return a plan as the ``[plan]`` table of a job file.

    Examples:
        >>> print(plan_to_toml(ParallelPlan(global_batch=8, data=4)).splitlines()[1])
        global_batch = 8
    """
    values = dict(sorted(dataclasses.asdict(plan).items()))
    order = ("global_batch", "micro_batch", "data", "tensor", "pipeline", "context", "expert")
    ordered = {name: values.pop(name) for name in order} | values
    return format_toml({"plan": {k: v for k, v in ordered.items() if v is not None}})
