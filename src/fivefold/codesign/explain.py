"""Which of the five layers limits a run, what to change, and what the prediction says of it.

Nothing here is a price of its own: a change is made to the plan, the device or the fabric, and the
layer that owns the question is asked again. What cannot be chosen (a GPU twice as fast, messages
that hide entirely) is asked too, as a bound, and marked so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fivefold.collectives.pricing import FabricSpec, Tier
from fivefold.errors import ConfigurationError, InfeasibleError
from fivefold.strategy import Cluster, Job, ParallelPlan, PlanPrediction, SearchSpace, evaluate_plan
from fivefold.strategy import search_plans as search
from fivefold.strategy.plan import degrees_of, settings_of
from fivefold.tasks.schedule import exposed_s
from fivefold.units import format_bytes

LAYERS = ("strategy", "tasks", "collectives", "flows", "network")
Kind = Literal["setting", "convergence", "purchase", "bound", "risk"]
KINDS: Mapping[Kind, str] = {
    "setting": "can be set",
    "convergence": "changes what is learnt",
    "purchase": "other hardware",
    "bound": "cannot be passed",
    "risk": "may happen",
}
_LEAST_SHARE = 0.001  # of the iteration: smaller savings are not worth a line
_LIMITS_FROM = 0.05  # a layer that costs less of the iteration limits nothing
_SCHEDULES = ("1f1b", "interleaved", "zb_1p", "zb_v")
_SEARCHED_TAUS = (8, 64)
_TAUS = (2, 4, 8, 16, 32, 64, 128, 256)
_HIDDEN = 0.01  # of the iteration: what may be left of a message that counts as hidden
_FREE = 1e9  # times the rate of a link: messages take no time
_HOW = (
    "each line is the prediction asked again with that one change; savings do not add up, and "
    "nothing was run"
)
_IDLE = "the links are taken to be idle but for this job: fivefold simulate plans several"
_SPLIT = ("recompute_s", "pipeline_bubble_s", "offload_s")


@dataclass(frozen=True)
class Change:
    """One change, with what the prediction says of the run that has it.

    Args:
        layer: Whose it is; "compute" for what no layer answers for.
        action: What to change, in words.
        seconds: Predicted seconds of an iteration after it.
        kind: Whether it is a setting, one that changes convergence, other hardware, a bound that
            nothing passes, or a risk.
        settings: Fields of ``ParallelPlan`` that differ, where it is a setting.
        saves_s: By how much ``seconds`` is less than before; negative where it is more. Known once
            it stands in an ``Explanation``.
    """

    layer: str
    action: str
    seconds: float
    kind: Kind = "setting"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    saves_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Parts of an iteration's time, and changes that would shorten it.

    Args:
        subject: What is explained.
        seconds: It takes, predicted or measured.
        parts_s: Where they go; they add up.
        changes: Every change that was asked for and counts, the most saving first.
        notes: What a reader must know.
        what: What takes those seconds.
    """

    subject: str
    seconds: float
    parts_s: Mapping[str, float]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    what: str = "iteration"

    def best_of(self, layer: str) -> Change | None:
        """Return the change of a layer that saves most and learns the same; None without one."""
        own = [one for one in self.changes if one.layer == layer and one.kind != "convergence"]
        found = [one for one in own if one.saves_s > 0]
        return max(found, key=lambda one: one.saves_s, default=None)

    @property
    def limit(self) -> str:
        """Name of the layer whose best change saves most; "compute" where none saves a twentieth.

        The network's figure is that of links twice as fast, the others' of the best that they
        could do: a faster link is always for sale. What changes convergence is advice, no limit.
        """
        best = [found for layer in LAYERS if (found := self.best_of(layer)) is not None]
        most = max(best, key=lambda one: one.saves_s, default=None)
        if most is None or most.saves_s < _LIMITS_FROM * self.seconds:
            return "compute"
        return most.layer


def worth_saying(changes: Iterable[Change], seconds: float) -> tuple[Change, ...]:
    """Return the changes that make a difference, with what each saves of ``seconds``, in order."""
    found = (dataclasses.replace(one, saves_s=seconds - one.seconds) for one in changes)
    counted = [one for one in found if abs(one.saves_s) >= _LEAST_SHARE * seconds]
    return tuple(sorted(counted, key=lambda one: -one.saves_s))


def explain_plan(job: Job, cluster: Cluster) -> Explanation:
    """Say which layer limits one job, and what each change would bring.

    Args:
        job: What is trained; its plan where it has one, else the fastest of its space.
        cluster: Where.

    Raises:
        InfeasibleError: No plan fits the memory, or the given one does not.

    Examples:
        >>> from fivefold.strategy import SearchSpace, load_cluster, load_model
        >>> space = SearchSpace(num_gpus=16, global_batch=64)
        >>> job = Job(model=load_model("gpt3-1.3b"), space=space)
        >>> explain_plan(job, load_cluster("a100-megatron")).limit in {"compute", *LAYERS}
        True
    """
    asked = _Question(job, cluster)
    now = asked.now
    changes = [change for make in _LAYERS_ASKED for change in make(asked)]
    linked = len(cluster.fabric.tiers) > 1 and now.plan.num_gpus > 1
    searched = "the fastest plan of the space" if job.plan is None else "the plan given"
    return Explanation(
        subject=f"{job.model.name} on {now.plan.num_gpus} GPUs of {cluster.name}, {searched}: "
        f"{degrees_of(now.plan)}, {settings_of(now.plan)}",
        seconds=now.time_s,
        parts_s=_parts(asked),
        changes=worth_saying(changes, now.time_s),
        notes=(_HOW, _IDLE) if linked else (_HOW,),
    )


class _Question:
    """One job on one cluster, asked again with something changed."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        if job.plan is None:
            space, fabric = job.space, cluster.fabric
            self.now = search(job.model, cluster.device, fabric, space=space, top=1).best[0]
        else:
            self.now = self.with_plan(job.plan)
            if not self.now.fits:
                needs = format_bytes(self.now.memory.total_bytes)
                has = format_bytes(cluster.device.memory_bytes)
                raise InfeasibleError(
                    f"the plan does not fit: it needs {needs} a GPU, {cluster.name!r} has {has}",
                    hint="leave out [plan] to search for one that fits",
                )

    @property
    def plan(self) -> ParallelPlan:
        """Return the plan in question."""
        return self.now.plan

    @property
    def free(self) -> FabricSpec:
        """The fabric with links on which nothing takes any time."""
        return self.tiers(lambda _, tier: _faster(tier, rate=_FREE, latency=0.0))

    def with_plan(self, plan: ParallelPlan, **hardware: Any) -> PlanPrediction:
        """Predict a plan, on changed hardware where that is given."""
        device = hardware.get("device", self.cluster.device)
        fabric = hardware.get("fabric", self.cluster.fabric)
        return evaluate_plan(self.job.model, device, fabric, plan=plan)

    def setting(
        self, layer: str, action: str, kind: Kind = "setting", **fields: Any
    ) -> Iterator[Change]:
        """Yield the change where the model can run it, it fits and it is one."""
        if all(getattr(self.plan, name) == value for name, value in fields.items()):
            return
        try:
            found = self.with_plan(dataclasses.replace(self.plan, **fields))
        except ConfigurationError:
            return
        if found.fits:
            yield Change(layer, action, found.time_s, kind, fields)

    def hardware(self, layer: str, action: str, kind: Kind, **changed: Any) -> Change:
        """Return the change to other hardware under the same plan."""
        return Change(layer, action, self.with_plan(self.plan, **changed).time_s, kind)

    def at(self, place: int, **changes: float) -> FabricSpec:
        """Return the fabric with one tier faster, or changed otherwise."""
        return self.tiers(lambda n, tier: _faster(tier, **changes) if n == place else tier)

    def tiers(self, change: Callable[[int, Tier], Tier]) -> FabricSpec:
        """Return the fabric with every tier changed."""
        fabric = self.cluster.fabric
        tiers = tuple(change(place, tier) for place, tier in enumerate(fabric.tiers))
        return dataclasses.replace(fabric, tiers=tiers)


def _parts(asked: _Question) -> dict[str, float]:
    """Split the iteration's time; waits for ZeRO-3's parameters count as communication."""
    parts: dict[str, float] = dataclasses.asdict(asked.now.time)
    free = asked.with_plan(asked.plan, fabric=asked.free).time
    waits_s = max(parts["compute_s"] - free.compute_s, 0.0)
    parts["compute_s"] -= waits_s
    parts["data_s"] += waits_s
    return {name: value for name, value in parts.items() if value > 0}


def _searches(asked: _Question) -> Iterator[Change]:
    """Yield layer 1's fastest split: of the space, a wider one, and one with local updates."""
    job, cluster, space = asked.job, asked.cluster, asked.job.space
    wide = dataclasses.replace(
        space, schedules=tuple(dict.fromkeys((*space.schedules, *_SCHEDULES))),
        tensor_overlap=tuple(dict.fromkeys((*space.tensor_overlap, "pipe"))),
    )  # fmt: skip
    spaces: list[tuple[Kind, SearchSpace]] = [("setting", wide)]
    if max(space.tau) == 1:
        spaces.append(("convergence", dataclasses.replace(space, tau=_SEARCHED_TAUS)))
    if job.plan is not None:
        spaces.insert(0, ("setting", space))
    now, seen = dataclasses.asdict(asked.plan), {asked.plan}
    for kind, choices in spaces:
        try:
            found = search(job.model, cluster.device, cluster.fabric, space=choices, top=1)
        except InfeasibleError:  # the space of the file may be too small for what its plan does
            continue
        best = found.best[0]
        if best.plan not in seen:
            seen.add(best.plan)
            named = f"split it as {degrees_of(best.plan)}, {settings_of(best.plan)}"
            new = dataclasses.asdict(best.plan)
            other = {name: value for name, value in new.items() if value != now[name]}
            yield Change("strategy", named, best.time_s, kind, other)


def _strategy(asked: _Question) -> Iterator[Change]:
    """Yield layer 1's changes: each setting of this split by itself."""
    plan = asked.plan
    options: list[tuple[str, dict[str, Any]]] = [
        *((f"recompute {kept}", {"recompute": kept}) for kept in ("none", "selective")),
        *((f"ZeRO-{stage}", {"zero": stage, "shard": None})
          for stage in range(4 if plan.data * plan.context > 1 else 1)),
        *((f"micro-batches of {size}", {"micro_batch": size})
          for size in {plan.micro_batch * 2, max(plan.micro_batch // 2, 1)}),
    ]  # fmt: skip
    if plan.pipeline > 1:
        options += _schedules(asked)
        options.append(("the pipeline inside the data axis", {"order": "tcpd"}))
    if plan.tensor > 1:
        options.append(("sequence parallelism", {"sequence_parallel": True}))
    for name in ("weights", "activations", "optimizer"):
        if getattr(plan, f"offload_{name}"):
            options.append((f"{name} in device memory", {f"offload_{name}": False}))
    for action, fields in options:
        yield from asked.setting("strategy", action, **fields)
    spent_s = sum(getattr(asked.now.time, name) for name in _SPLIT)
    if spent_s > 0:
        bound = "no bubble, no recomputation, no transfers to the host"
        yield Change("strategy", bound, asked.now.time_s - spent_s, "bound")


def _schedules(asked: _Question) -> Iterator[tuple[str, dict[str, Any]]]:
    plan = asked.plan
    for schedule in ("1f1b", "zb_1p", "zb_v"):
        beside = plan.pipeline_overlap or schedule != "1f1b"
        chunks = 2 if schedule == "zb_v" else 1
        fields = {"schedule": schedule, "virtual": chunks, "pipeline_overlap": beside}
        yield f"schedule {schedule}", fields
    layers = asked.job.model.num_layers // plan.pipeline
    for chunks in (count for count in range(2, layers + 1) if layers % count == 0):
        fields = {"schedule": "interleaved", "virtual": chunks, "pipeline_overlap": True}
        yield f"{chunks} virtual stages on a GPU (interleaved)", fields


def _local_updates(asked: _Question) -> Iterator[Change]:
    """Yield the smallest tau that hides the gradients, or the best of those that fit."""
    plan, node = asked.plan, asked.cluster.fabric.gpus_per_host
    if plan.data * plan.context == 1 or plan.tau > 1:
        return
    # The data-parallel ranks of a node may share the states of one worker.
    in_node = math.gcd(plan.data * plan.context, max(node // plan.group("data").stride, 1))
    found: list[Change] = []
    for tau in _TAUS:
        action = f"local updates: synchronise every {tau} iterations"
        for zero, shard in ((0, None), (3, in_node)):
            fields: dict[str, Any] = {"tau": tau, "zero": zero, "shard": shard}
            if one := list(asked.setting("strategy", action, "convergence", **fields)):
                found += one
                break
        if len(found) > 1 and found[-2].seconds - found[-1].seconds < _HIDDEN * asked.now.time_s:
            yield found[-2]
            return
    yield from found[-1:]


def _tasks(asked: _Question) -> Iterator[Change]:
    """Yield layer 2's changes: what more could run beside compute."""
    plan = asked.plan
    if plan.data * plan.context > 1:
        yield from asked.setting("tasks", "gradients beside the backward pass", data_overlap=True)
    if plan.pipeline > 1:
        yield from asked.setting(
            "tasks", "messages between stages beside compute", pipeline_overlap=True
        )
    if plan.tensor > 1:
        for how in ("ring", "pipe"):
            yield from asked.setting(
                "tasks", f"tensor communication in slices beside products ({how})",
                tensor_overlap=how,
            )  # fmt: skip
    plain = dataclasses.replace(
        plan, data_overlap=False, pipeline_overlap=False, tensor_overlap="none"
    )
    free_s = asked.with_plan(plain, fabric=asked.free).time_s
    sent_s = asked.with_plan(plain).time_s - free_s
    least_s = free_s + float(exposed_s(max(sent_s, 0.0), free_s))
    if least_s < asked.now.time_s:  # some plans send over several links at once
        yield Change("tasks", "all communication beside compute", least_s, "bound")


def _collectives(asked: _Question) -> Iterator[Change]:
    """Yield layer 3's changes: an algorithm that wastes nothing of the links, and fewer bytes."""
    full = asked.tiers(
        lambda _, tier: _faster(
            tier, latency=0.0, efficiency=max(1.0, tier.efficiency), exchange_efficiency=1.0
        )
    )
    yield asked.hardware(
        "collectives", "collectives at the links' full rate, without latency", "bound", fabric=full
    )
    for place, tier in enumerate(asked.cluster.fabric.tiers):
        if tier.all_reduce_gain == 1.0:
            summed = asked.at(place, all_reduce_gain=2.0)
            yield asked.hardware(
                "collectives", f"switches of {tier.name!r} that reduce (in-network aggregation)",
                "purchase", fabric=summed,
            )  # fmt: skip
    device = asked.cluster.device
    sent = "gradient_wire_bytes" if asked.plan.tau == 1 else "outer_wire_bytes"
    width = getattr(device, sent)
    narrow, bits = dataclasses.replace(device, **{sent: width / 2}), round(4 * width)
    what = "gradients" if asked.plan.tau == 1 else "outer updates"
    yield asked.hardware(
        "collectives", f"{what} sent in {bits} bits instead of {2 * bits}", "convergence",
        device=narrow,
    )  # fmt: skip


def _flows(asked: _Question) -> Iterator[Change]:
    """Yield layer 4's changes: neighbours on the links, and tiers without oversubscription."""
    tiers = asked.cluster.fabric.tiers
    if len(tiers) > 2:
        wide = tiers[1].bandwidth_bytes_per_s
        if any(tier.bandwidth_bytes_per_s < wide for tier in tiers[2:]):
            even = asked.tiers(
                lambda place, tier: tier if place < 2 else dataclasses.replace(
                    tier, bandwidth_bytes_per_s=max(tier.bandwidth_bytes_per_s, wide))
            )  # fmt: skip
            yield asked.hardware(
                "flows", f"paths beyond {tiers[1].name!r} as wide as in it, no oversubscription",
                "bound", fabric=even,
            )  # fmt: skip
    if len(tiers) > 1:
        shared = asked.tiers(lambda place, tier: _faster(tier, rate=0.5) if place else tier)
        yield asked.hardware(
            "flows", "a neighbour takes half of the links between nodes", "risk", fabric=shared
        )


def _network(asked: _Question) -> Iterator[Change]:
    """Yield layer 5's changes: each tier twice as fast, or at half the latency."""
    for place, tier in enumerate(asked.cluster.fabric.tiers):
        for what, factor in (("links of {} twice as fast", {"rate": 2.0}),
                             ("latency of {} halved", {"latency": 0.5})):  # fmt: skip
            named, changed = what.format(repr(tier.name)), asked.at(place, **factor)
            yield asked.hardware("network", named, "purchase", fabric=changed)


def _compute(asked: _Question) -> Iterator[Change]:
    device = asked.cluster.device
    rates = ("peak_flops", "peak_flops_fp8", "peak_flops_fp4", "peak_flops_fp32",
             "memory_bandwidth_bytes_per_s")  # fmt: skip
    fast = dataclasses.replace(
        device,
        **{name: 2 * getattr(device, name) for name in rates},
        host_kernel_s=device.host_kernel_s / 2,
        kernel_gap_s=device.kernel_gap_s / 2,
    )
    yield asked.hardware("compute", "a GPU twice as fast", "purchase", device=fast)


def _faster(tier: Tier, *, rate: float = 1.0, latency: float = 1.0, **more: Any) -> Tier:
    """Return a tier at so many times its rate and its fixed times."""
    times: Any = {name: latency * getattr(tier, name) for name in ("base_s", "hop_s", "fill_s")}
    return dataclasses.replace(
        tier, bandwidth_bytes_per_s=rate * tier.bandwidth_bytes_per_s, **times, **more
    )


_LAYERS_ASKED = (
    _searches, _strategy, _local_updates, _tasks, _collectives, _flows, _network, _compute,
)  # fmt: skip
