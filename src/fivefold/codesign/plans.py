"""What the layers decided: one plan per job, and all of them together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

from fivefold.collectives.pricing.phases import Algorithm
from fivefold.errors import ConfigurationError, require_number, require_whole
from fivefold.files import parse_json
from fivefold.strategy.tables import check_types
from fivefold.tasks.schedule import Ordering
from fivefold.units import format_bytes

_SCHEMA = "fivefold.codesign/1"
Path = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Communication of one job.

    Attributes:
        ordering: Layer 2: which communication goes first where several wait.
        bucket_bytes: Layer 2: gradients are fused until a bucket has so many bytes; None reduces
            each layer by itself, 0 all of them together.
        overlap_forward: Layer 2: whether a layer's forward pass waits for its own gradients only.
        algorithm: Layer 3.
        order: Layer 3: ranks along the ring.
        split: Layer 1: which of the job's splits.
        root: Layers 3 to 5: the switch at the root of the aggregation trees, if any.
        roots: The root of each tree where a job has several, in the order of its trees; none
            where all have ``root``.
        slots: Layers 4 and 5: slots of a tree at each of its switches.
        paths: Layer 4: links of each edge, by source and target rank; an edge that is not named
            takes the shortest route.
        priority: Layer 4: class, 0 the most urgent.
        shift_s: Layer 4: by how much the job begins later.
    """

    order: tuple[int, ...]
    ordering: Ordering = "fifo"
    bucket_bytes: int | None = 25_000_000
    overlap_forward: bool = False
    algorithm: Algorithm = "ring"
    split: int = 0
    root: str | None = None
    roots: tuple[str, ...] = ()
    slots: int = 0
    paths: Mapping[tuple[int, int], Path] = field(default_factory=dict)
    priority: int = 0
    shift_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(self.order))
        object.__setattr__(self, "roots", tuple(self.roots))
        object.__setattr__(self, "paths", MappingProxyType(dict(self.paths)))
        if self.algorithm == "in_network" and (self.root is None or self.slots < 1):
            message = "in-network aggregation needs a root and slots"
            raise ConfigurationError(message, hint="or choose a host algorithm")
        for name in ("bucket_bytes", "split", "slots", "priority"):
            if getattr(self, name) is not None or name != "bucket_bytes":
                require_whole(f"{name} of a job's plan", getattr(self, name), least=0)
        require_number("shift_s of a job's plan", self.shift_s)

    def __reduce__(self) -> tuple[Any, ...]:  # a mapping proxy cannot be pickled
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return partial(JobPlan, **values | {"paths": dict(self.paths)}), ()

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Everything that was decided, hashable."""
        values = (getattr(self, name) for name in self.__dataclass_fields__ if name != "paths")
        return (*values, tuple(sorted(self.paths.items())))

    @property
    def order_words(self) -> str:
        """Return layer 2's choice in words."""
        fused = {None: "layer by layer", 0: "one bucket"}.get(
            self.bucket_bytes, f"buckets of {format_bytes(self.bucket_bytes or 0)}"
        )
        waits = "each layer waits for its own" if self.overlap_forward else "forward waits for all"
        return f"{self.ordering.replace('_', ' ')}, {fused}; {waits}"

    def root_of(self, tree: int) -> str:
        """Return the root of one of the job's trees."""
        found = self.roots[tree] if self.roots else self.root
        assert found is not None, "only asked for in-network aggregation"
        return found


@dataclass(frozen=True)
class ClusterPlan:
    """The plans of all jobs."""

    jobs: Mapping[str, JobPlan]

    def __post_init__(self) -> None:
        object.__setattr__(self, "jobs", MappingProxyType(dict(self.jobs)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterPlan) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return ClusterPlan, (dict(self.jobs),)

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Everything that was decided, hashable."""
        return tuple((name, plan.key) for name, plan in sorted(self.jobs.items()))

    def changed(self, job_id: str, **changes: Any) -> ClusterPlan:
        """Return the same with other decisions for one job."""
        return ClusterPlan({**self.jobs, job_id: replace(self.jobs[job_id], **changes)})

    def to_json(self) -> str:
        """Return the plan as text that ``from_json`` reads."""
        jobs = {}
        for name, plan in self.jobs.items():
            record = {key: getattr(plan, key) for key in plan.__dataclass_fields__}
            record["paths"] = [[*edge, *path] for edge, path in sorted(plan.paths.items())]
            jobs[name] = record
        return json.dumps({"schema": _SCHEMA, "jobs": jobs}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ClusterPlan:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigurationError: It is not such a text.
        """
        hint = f"give what ClusterPlan.to_json wrote (schema {_SCHEMA})"
        try:
            record = parse_json(text, where="the text")
            if record["schema"] != _SCHEMA:
                raise ConfigurationError(f"unknown schema {record['schema']!r}", hint=hint)
            jobs = {}
            for name, values in record["jobs"].items():
                check_types(values, JobPlan, where=f"the plan of job {name!r}")
                lists = [tuple(map(int, path)) for path in values["paths"]]
                paths = {(a, b): tuple(links) for a, b, *links in lists}
                jobs[name] = JobPlan(**{**values, "paths": paths})
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"this is no plan: {error}", hint=hint) from error
        return cls(jobs)


Layer = Literal["strategy", "tasks", "collectives", "flows", "network", "coordinator"]


@dataclass(frozen=True)
class DecisionRecord:
    """One decision, of a layer about an entity; alternatives with their seconds."""

    layer: Layer
    entity: str
    decision: str
    inputs: tuple[tuple[str, str], ...]
    co_designs: tuple[str, ...] = ()
    alternatives: Mapping[str, float] = field(default_factory=dict)
    round: int = 0


def decisions_to_json(records: Iterable[DecisionRecord]) -> str:
    """Return the log as JSON, one object per line."""
    return "".join(json.dumps(asdict(record)) + "\n" for record in records)


_LETTERS = {"vertical": "V", "horizontal": "H", "intra_inter": "II", "host_net": "HN"}


@dataclass(frozen=True, kw_only=True)
class CoDesigns:
    """Information that may cross boundaries between layers and jobs.

    Args:
        vertical: Layers of one job tell each other intent and cost.
        horizontal: Jobs, and tasks of one job, know of each other.
        intra_inter: Links inside hosts and the fabric are planned as one network.
        host_net: Work may be given to switches that aggregate.

    Examples:
        >>> CoDesigns(vertical=True, host_net=True).label, CoDesigns.none().label
        ('V+HN', 'none')

    References:
        arXiv 2403.07585 names the four; what each lets through is defined by this project
        (docs/guides/codesign.md).
    """

    vertical: bool = False
    horizontal: bool = False
    intra_inter: bool = False
    host_net: bool = False

    @property
    def label(self) -> str:
        """Short name: ``V+H+II+HN`` or a part of it, ``none`` for nothing."""
        on = [_LETTERS[field.name] for field in fields(self) if getattr(self, field.name)]
        return "+".join(on) or "none"

    @classmethod
    def none(cls) -> CoDesigns:
        """Return no co-design: a plain stack of layers."""
        return cls()

    @classmethod
    def all(cls) -> CoDesigns:
        """Return all four co-designs."""
        return cls(vertical=True, horizontal=True, intra_inter=True, host_net=True)

    @classmethod
    def combinations(cls) -> Iterator[CoDesigns]:
        """Yield all sixteen combinations, from none to all."""
        for flags in sorted(product((False, True), repeat=4), key=sum):
            names = (field.name for field in fields(cls))
            yield cls(**dict(zip(names, flags, strict=True)))

    def __contains__(self, other: CoDesigns) -> bool:
        """Return whether all that the other lets through is let through here as well."""
        return all(mine or not its for mine, its in zip(astuple(self), astuple(other), strict=True))
