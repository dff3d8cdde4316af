"""A cluster: one GPU with its software stack, the tiers that join it, and its numbers' sources.

A file names a known cluster in ``base`` and changes some of it, or says everything. The known ones
lie in ``devices/``, one file per pair of GPU and software stack. The same file may describe the
links one by one (``topology``, or ``generate``, ``nodes`` and ``links`` as in a topology file) or
by the network cards of a node (``nic``); every command reads it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fivefold.collectives.pricing import FabricSpec, Tier, fabric_from_topology
from fivefold.errors import ConfigurationError, InfeasibleError, require_one_of, require_whole
from fivefold.files import read_toml
from fivefold.network.topology import Link, Node, Topology, parse_topology
from fivefold.network.topology.readers import file_of
from fivefold.network.topology.text import catalogue, describes_graph, topology_from_tables
from fivefold.strategy.stack import StackSpec
from fivefold.strategy.tables import (
    TEXT_DEVICE,
    TEXT_TIER,
    build_spec,
    check_keys,
    key_of,
    read_fields,
    with_unit,
)
from fivefold.units import parse_bytes_per_s

_LOG = logging.getLogger(__name__)
# Rows, columns, share of the best tile's speed: smaller tiles reuse less of what they load.
_TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (192, 128, 0.98), (128, 192, 0.98), (128, 128, 0.94),
    (256, 64, 0.85), (64, 256, 0.85), (128, 64, 0.8), (64, 64, 0.62),
)  # fmt: skip
_LEAST_DEPTH = 1024
# Bytes of an element with its share of the scales: one for 32 in MXFP8, for 16 in NVFP4.
MATRIX_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "fp32": 4.0}


def element_bytes(dtype: str) -> float:
    """Return the width of what is no narrow product's input: parameters, activations, messages."""
    return max(MATRIX_BYTES[dtype], MATRIX_BYTES["bf16"])


@dataclass(frozen=True, kw_only=True)
class DeviceSpec(StackSpec):
    """One GPU, what it reaches under one software stack, and that stack's constants.

    Args:
        name: Of the pair, such as ``"a100-megatron"``.
        peak_flops: Dense peak of 16-bit matrix products.
        peak_flops_fp8: The same of 8-bit products; 0 where there are none.
        peak_flops_fp4: The same of 4-bit products; 0 where there are none.
        peak_flops_fp32: The same of 32-bit products; 0 where it is not known. A processor's is
            ``peak_flops``.
        memory_bytes: Device memory.
        memory_bandwidth_bytes_per_s: Peak of device memory.
        multiprocessors: How many tiles run at a time.
        gemm_efficiency: Share of the peak that an endless product reaches.
        gemm_efficiency_fp8: The same for 8-bit products, casts included.
        gemm_efficiency_mxfp8: The same where blocks of 32 share a scale; 0: as with one scale.
        gemm_efficiency_fp4: The same for NVFP4; 0: as for 8-bit products.
        tile_start_s: Fixed time of a tile: first loads, no multiplication yet.
        epilogue_share: Share of writing the results that multiplication does not hide.
        attention_efficiency: Share of the peak inside a fused attention kernel.
        unaligned_efficiency: Share of the peak that unfused attention reaches on heads whose width
            is no multiple of 8, whose rows tensor cores cannot load; 0: as others.
        memory_efficiency: Share of the memory's peak in element-wise kernels.
        kernel_gap_s: Time between two kernels on the device.
        host_bandwidth_bytes_per_s: To host memory, for offloading.
        gpu: The GPU, such as ``"h100"``; empty: what ``name`` begins with.
        hardware: What card it is, where its name and memory do not say it.
        anchor: Measured over predicted time of one run, by which all predictions are multiplied.
        sources: Where each constant comes from, by name.

    Raises:
        ConfigurationError: A constant is negative, a share is more than 1.
    """

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    multiprocessors: int
    peak_flops_fp8: float = 0.0
    peak_flops_fp4: float = 0.0
    peak_flops_fp32: float = 0.0
    gemm_efficiency: float = 0.75
    gemm_efficiency_fp8: float = 0.6
    gemm_efficiency_mxfp8: float = 0.0
    gemm_efficiency_fp4: float = 0.0
    tile_start_s: float = 1e-6
    epilogue_share: float = 1.0
    attention_efficiency: float = 0.5
    unaligned_efficiency: float = 0.0
    memory_efficiency: float = 0.8
    kernel_gap_s: float = 2e-6
    host_bandwidth_bytes_per_s: float = 25e9
    gpu: str = ""
    hardware: str = ""
    anchor: float = 1.0
    sources: tuple[tuple[str, str], ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """Return what a prediction is of: the card, the software, its release and date."""
        card = (self.gpu or self.name.partition("-")[0]).upper()
        return {
            "device": self.name,
            "hardware": self.hardware or f"{card} with {self.memory_bytes / 2**30:.0f} GiB",
            "stack": self.stack, "release": self.release, "released": self.released,
        }  # fmt: skip

    @property
    def of(self) -> str:
        """Return the same in words."""
        facts = self.facts
        stack = facts["stack"] or "software that is not named"
        dated = ", ".join(filter(None, (facts["release"], facts["released"])))
        return f"{facts['device']}: {facts['hardware']}; {stack}" + (f" ({dated})" * bool(dated))

    def peak_matrix_flops(self, *, dtype: str) -> float:
        """Return the peak of matrix products of ``dtype``."""
        require_one_of(dtype, MATRIX_BYTES, f"dtype {dtype!r} is unknown")
        peaks = {"fp8": self.peak_flops_fp8, "mxfp8": self.peak_flops_fp8,
                 "nvfp4": self.peak_flops_fp4,
                 "fp32": self.peak_flops_fp32 or self.peak_flops * (self.gpu == "cpu")}  # fmt: skip
        peak = peaks.get(dtype, self.peak_flops)
        if not peak and dtype == "fp32":
            message = f"how fast {self.name} multiplies in 32 bits is not known"
            hint = "set peak_flops_fp32 under [device] of a cluster file, or use 'bf16'"
            raise ConfigurationError(message, hint=hint)
        if not peak:
            bits = 4 if dtype == "nvfp4" else 8
            message = f"{self.name} has no {bits}-bit matrix products"
            raise ConfigurationError(message, hint="use dtype 'bf16'")
        return peak

    def matrix_flops(self, *, dtype: str) -> float:
        """Return the peak times efficiency of an endless matrix product of ``dtype``."""
        shares = {"fp8": self.gemm_efficiency_fp8, "mxfp8": self.gemm_efficiency_mxfp8,
                  "nvfp4": self.gemm_efficiency_fp4}  # fmt: skip
        share = shares.get(dtype, self.gemm_efficiency)
        return self.peak_matrix_flops(dtype=dtype) * (share or self.gemm_efficiency_fp8)


@functools.lru_cache(maxsize=200_000)
def gemm_time_s(
    device: DeviceSpec,
    *,
    m: float,
    n: float,
    k: float,
    batch: float = 1.0,
    dtype: str = "bf16",
    output_bytes: float = 2.0,
) -> float:
    """Return the time of ``batch`` products of m x k with k x n, in waves of tiles or bytes moved.

    Each tile shape is tried and the fastest taken, as the library's heuristic does. The time is
    that of the fullest multiprocessor, or of reading and writing the matrices where that is more.
    """
    if min(m, n, k, batch) <= 0:
        return 0.0
    rate = device.matrix_flops(dtype=dtype)
    best_s = math.inf
    for rows, columns, speed in _TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
        waves = math.ceil(tiles / device.multiprocessors)
        work = waves * device.multiprocessors * 2.0 * rows * columns
        # Few tiles of a deep product share their depth out, and add the parts up afterwards.
        parts = max(1, min(int(device.multiprocessors // max(tiles, 1)), int(k // _LEAST_DEPTH)))
        added_s = memory_time_s(device, 8.0 * (parts - 1) * batch * m * n)
        deep_s = work * k / (parts * rate * speed) + added_s
        best_s = min(best_s, deep_s + waves * device.tile_start_s)
    written_s = memory_time_s(device, output_bytes * batch * m * n)
    loaded_s = memory_time_s(device, MATRIX_BYTES[dtype] * batch * (m * k + k * n))
    slow_s = best_s + device.epilogue_share * written_s
    return max(slow_s, loaded_s + written_s) + device.kernel_gap_s


def memory_time_s(device: DeviceSpec, size_bytes: float) -> float:
    """Return the time in which element-wise kernels move ``size_bytes`` of device memory."""
    return size_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


_GRAPH = {"source", "generate", "nodes", "links", "switches", "changes"}
_TOP = {
    *("name", "base", "gpus", "device", "tier", "sources", "topology", "stack"),
    *("gpus_per_node", "nic", "nics_per_node", *_GRAPH),
}
# What software makes of a link, which a graph cannot know.
_REACHED = ("efficiency", "exchange_efficiency", "base_s", "fill_s", "all_reduce_gain")
_MOST_DRAWN = 65_536  # GPUs of a cluster whose tiers are made links


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind and what joins them.

    Args:
        name: For people.
        device: The GPU with its stack.
        fabric: The tiers.
        num_gpus: How many there are; None where it does not matter.
        topology: The graph that the tiers were taken from; None where tiers are all that is known.

    Raises:
        ConfigurationError: ``num_gpus`` is below 1.
    """

    name: str
    device: DeviceSpec
    fabric: FabricSpec
    num_gpus: int | None = None
    topology: Topology | None = None

    def __post_init__(self) -> None:
        if self.num_gpus is not None:
            require_whole(f"num_gpus of cluster {self.name!r}", self.num_gpus)

    def graph(self) -> Topology:
        """Return the links: those described, or a tree of switches with the rates of the tiers.

        Raises:
            ConfigurationError: Only tiers are known, and not for how many GPUs, or for too many.
        """
        if self.topology is not None:
            return self.topology
        if self.num_gpus is None:
            raise ConfigurationError(
                f"the links of {self.name!r} are wanted, and it does not say how many GPUs it has",
                hint=f"write gpus = 16 in a file, or {self.name}:16 on the command line",
            )
        if self.num_gpus > _MOST_DRAWN:
            message = f"the links of {self.num_gpus:,} GPUs of {self.name!r} are wanted"
            raise ConfigurationError(message, hint=f"links are made for at most {_MOST_DRAWN:,}")
        return _tree(self, self.num_gpus)

    def require(self, num_gpus: int) -> None:
        """Refuse a job of more GPUs than there are.

        Raises:
            InfeasibleError: There are fewer.
        """
        most = self.fabric.num_gpus if self.num_gpus is None else self.num_gpus
        if isinstance(num_gpus, int) and num_gpus > most:
            message = f"the job wants {num_gpus} GPUs, cluster {self.name!r} has {most}"
            raise InfeasibleError(message, hint=f"use at most {most} GPUs")


def named_clusters() -> tuple[str, ...]:
    """Return the names of the known pairs of GPU and stack.

    Examples:
        >>> "h100-nemo" in named_clusters()
        True
    """
    folder = files("fivefold.strategy") / "devices"
    found = [entry.name.removesuffix(".toml") for entry in folder.iterdir()]
    return tuple(sorted(name for name in found if not name.startswith("_")))


@functools.cache
def _formerly() -> Mapping[str, str]:
    """Return the names that known pairs had before, and what they are called now."""
    tables = {name: tomllib.loads(_known_text(name)) for name in named_clusters()}
    return {table["formerly"]: name for name, table in tables.items() if "formerly" in table}


def named_cluster_of(card: str) -> str:
    """Return the known pair whose constants a measured GPU starts from.

    Args:
        card: What the driver calls it, as ``torch.cuda.get_device_name()`` returns it.

    Raises:
        ConfigurationError: No known pair names this card (``cards`` in its file).

    Examples:
        >>> named_cluster_of("NVIDIA H200")
        'h200-nemo'
    """
    cards = {
        _card(known): name
        for name in named_clusters()
        for known in tomllib.loads(_known_text(name)).get("cards", ())
    }
    if _card(card) not in cards:
        near = difflib.get_close_matches(_card(card), cards, n=1, cutoff=0.0)
        raise ConfigurationError(
            f"the constants of {card!r} are not known",
            hint=f"give the nearest known GPU and software with --base, such as {cards[near[0]]}: "
            f"one of {', '.join(named_clusters())}",
        )
    return cards[_card(card)]


def _card(name: str) -> str:
    return name.removeprefix("NVIDIA ").strip().lower()


def _known_text(name: str) -> str:
    return (files("fivefold.strategy") / "devices" / f"{name}.toml").read_text()


def is_named_cluster(name: str) -> bool:
    """Return whether a name is that of a known pair of GPU and stack, or was it before."""
    name = name.partition("@")[0]
    return name in named_clusters() or name in _formerly()


def _tree(cluster: Cluster, num_gpus: int) -> Topology:
    """Draw a switch for each unit of each tier; what leaves a unit has the rate of all its GPUs."""
    tiers = cluster.fabric.packed(num_gpus).tiers
    per_node = tiers[0].gpus
    nodes = [Node(f"gpu{n}", "gpu", host=f"node{n // per_node}") for n in range(num_gpus)]
    links: list[Link] = []
    below, size = [node.name for node in nodes], 1
    for tier in tiers:
        if len(below) == 1:
            break
        if tier.gpus == size:
            continue
        above = [f"{tier.name}{n}" for n in range(-(-num_gpus // tier.gpus))]
        inside = tier.gpus <= per_node
        nodes += [
            Node(name, "switch", host=f"node{n}" if inside else None)
            for n, name in enumerate(above)
        ]
        for n, name in enumerate(below):
            up = above[n * size // tier.gpus]
            rate = tier.bandwidth_bytes_per_s * min(size, num_gpus - n * size)  # the last: fewer
            links += [
                Link(a, b, bandwidth_bytes_per_s=rate, latency_s=tier.hop_s / 2)
                for a, b in ((name, up), (up, name))
            ]
        below, size = above, tier.gpus
    return Topology(cluster.name, nodes, links, source="tiers of the cluster, as switches")


def load_cluster(source: str | Path) -> Cluster:
    """Return a known cluster, or one from a TOML file.

    Args:
        source: A name of ``named_clusters()``, with ``:16`` behind it for so many GPUs and
            ``@megatron-bridge-26.06`` for another of ``named_stacks()``, or a path.

    Raises:
        ConfigurationError: A name or key is unknown, or a value is not allowed.

    Examples:
        >>> load_cluster("h100-nemo").device.peak_flops
        989000000000000.0
    """
    return _load(source, bases=())


def _load(source: str | Path, *, bases: tuple[str, ...]) -> Cluster:
    """Return a cluster, and the files through which its base was reached."""
    if str(source) in bases:
        message = f"the base of {bases[-1]} is {source}, which is made from it"
        raise ConfigurationError(message, hint="name another base, such as 'h100-nemo'")
    bases = (*bases, str(source))
    known, _, stack = str(source).rpartition("@")
    if is_named_cluster(known.partition(":")[0]) or known.endswith(".toml"):
        # A cluster with another release of its software.
        stack, _, count = stack.partition(":")
        named = {"base": f"{known}:{count}" if count else known, "stack": stack}
        name = f"{Path(known.partition(':')[0]).stem}@{stack}"
        return _cluster(named, name=name, bases=bases, folder=Path())
    known, _, count = str(source).partition(":")
    if known in _formerly():
        new, old = _formerly()[known], known
        known = new
        _LOG.warning(
            "%s is called %s: %s; others are %s", old, new, _load(new, bases=()).device.of,
            ", ".join(name for name in named_clusters() if _is_like(name, new)),
        )  # fmt: skip
    if known in named_clusters():
        table = tomllib.loads(_known_text(known))
        for key in ("formerly", "cards"):  # of the pair's own names, not of the cluster
            table.pop(key, None)
        if ":" in str(source):
            table["gpus"] = int(count) if count.isdecimal() else count
        return _cluster(table, name=known, bases=bases, folder=Path())
    path = Path(source)
    if path.suffix != ".toml":
        raise _unknown(str(source))
    table = read_toml(path, what="cluster file")
    return _cluster(table, name=path.stem, bases=bases, folder=path.parent)


def _is_like(name: str, other: str) -> bool:
    """Return whether two presets are of the same GPU and program, on other cards."""
    ends = [(one.partition("-")[0], one.rpartition("-")[2]) for one in (name, other)]
    return name != other and ends[0] == ends[1]


def _cluster(
    table: Mapping[str, Any], *, name: str, bases: tuple[str, ...], folder: Path
) -> Cluster:
    check_keys(table, _TOP, where="the cluster")
    _require_device(table, source=bases[-1])
    for key in ("name", "base", "stack", "topology"):
        if not isinstance(table.get(key, ""), str):
            message = f"{key} of the cluster must be text; got {table[key]!r:.60}"
            raise ConfigurationError(message, hint=f'write {key} = "..."')
    if "base" in table:
        table = {**table, "base": _beside(table["base"], folder)}
    base = _load(table["base"], bases=bases) if "base" in table else None
    fields: dict[str, Any] = {}
    tiers: dict[str, dict[str, Any]] = {}
    if base is not None:
        fields = {f.name: getattr(base.device, f.name) for f in dataclasses.fields(base.device)}
        tiers = {t.name: dataclasses.asdict(t) for t in base.fabric.tiers}
    given = table.get("sources", {})
    if not isinstance(given, dict) or not all(isinstance(one, str) for one in given.values()):
        message = f"sources of {name!r} must be a table of texts; got {given!r:.60}"
        raise ConfigurationError(message, hint='write [sources] and key = "where it comes from"')
    stack, stack_sources = _stack(str(table["stack"])) if "stack" in table else ({}, {})
    own = _own_device(table)
    guesses = dict.fromkeys(own, "assumed: the file does not say where it comes from")
    sources = dict(fields.get("sources", ())) | stack_sources | guesses | given
    fields |= stack | own
    entries = table.get("tier", [])
    if not isinstance(entries, list):
        message = f"tier of {name!r} must be tables; got {entries!r:.60}"
        raise ConfigurationError(message, hint="write [[tier]] and its keys below")
    for entry in entries:
        values = read_fields(entry, Tier, where="tier", texts=TEXT_TIER)
        named = str(values.get("name", ""))
        _refuse_beside_links(table, values, name=name)
        # A file's number of GPUs is meant as it stands.
        tiers[named] = tiers.get(named, {}) | ({"tray": 0} if "gpus" in values else {}) | values
    if name in named_clusters():
        fields["gpu"] = name.partition("-")[0]
    fields |= {"name": table.get("name", name), "sources": tuple(sorted(sources.items()))}
    device = build_spec(DeviceSpec, fields, where=f"device {fields['name']!r}")
    topology = _topology(table, name=str(fields["name"]), folder=folder)
    tiers = _with_cards(table, tiers, name=name, topology=topology)
    fabric = _fabric(topology, tiers, name=str(fields["name"]))
    inherited = base.num_gpus if base is not None and topology is None else None
    count = table.get("gpus", inherited if topology is None else topology.num_ranks)
    if count is not None:
        hint = f"the fabric joins at most {fabric.num_gpus}"
        require_whole(f"gpus of cluster {name!r}", count, most=fabric.num_gpus, hint=hint)
    return Cluster(
        name=str(fields["name"]), device=device, fabric=fabric, num_gpus=count, topology=topology
    )


def _own_device(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file says of its device; for another card not its base's name."""
    own = read_fields(table.get("device", {}), DeviceSpec, where="device", texts=TEXT_DEVICE)
    other = {"memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flops"} & set(own)
    return {"hardware": "", **own} if other else own


def _require_device(table: Mapping[str, Any], *, source: str) -> None:
    if describes_graph(table) and not {"base", "device"} & set(table):
        message = f"{source} describes a network, and a plan needs the GPU and its software too"
        raise ConfigurationError(message, hint='add base = "h100-nemo", or another GPU and stack')


def _refuse_beside_links(table: Mapping[str, Any], tier: Mapping[str, Any], *, name: str) -> None:
    told = sorted(key_of(key) for key in tier if key not in {"name", *_REACHED})
    if told and ("topology" in table or describes_graph(table)):
        message = f"tier {tier.get('name')!r} of {name!r} gives {told[0]} beside a topology"
        raise ConfigurationError(message, hint=f"leave out {told[0]}: the links say it")


def _beside(text: str, folder: Path) -> str:
    """Return a file beside the one that names it; what is no file as it is."""
    beside = folder / text
    return str(beside) if beside.is_file() else text


def _topology(table: Mapping[str, Any], *, name: str, folder: Path) -> Topology | None:
    """Return the graph that a file names or describes; None where it has tiers only."""
    described = describes_graph(table)
    if described and "topology" in table:
        message = f"cluster {name!r} names a topology and describes nodes and links besides"
        raise ConfigurationError(message, hint="leave one of the two out")
    if described:
        return topology_from_tables(table, default_name=name)
    return parse_topology(table["topology"], folder=folder) if "topology" in table else None


def _with_cards(
    table: Mapping[str, Any],
    tiers: dict[str, dict[str, Any]],
    *,
    name: str,
    topology: Topology | None,
) -> dict[str, dict[str, Any]]:
    """Return the tiers with what a file says of nodes: GPUs and network cards of each."""
    given = [key for key in ("gpus_per_node", "nic", "nics_per_node") if key in table]
    if not given:
        return tiers
    if topology is not None:
        message = f"cluster {name!r} has {given[0]} beside its own links"
        raise ConfigurationError(message, hint=f"leave out {given[0]}: the links say it all")
    ordered = sorted(tiers.values(), key=lambda tier: int(tier.get("gpus", 0)))
    if len(ordered) != 2:
        message = f"cluster {name!r} has {len(ordered)} tiers, and {given[0]} goes with two"
        raise ConfigurationError(message, hint="give the tiers in full, or a base with two")
    node, outer = ordered
    node |= {"gpus": table["gpus_per_node"], "tray": 0} if "gpus_per_node" in table else {}
    cards = table.get("nics_per_node", gpus := node["gpus"])
    for key, value in (("gpus_per_node", gpus), ("nics_per_node", cards)):
        require_whole(f"{key} of cluster {name!r}", value, hint=f"write {key} = 8")
    outer["gpus"] = max(gpus * 2, int(outer["gpus"]))
    if "nic" in table:
        if any(one.get("name") == outer["name"] and "bandwidth" in one for one in _tiers(table)):
            message = f"cluster {name!r} gives nic and the bandwidth of tier {outer['name']!r}"
            raise ConfigurationError(message, hint="leave one out; a tier's is per GPU")
        rate = parse_bytes_per_s(with_unit(table["nic"], "nic", "_bytes_per_s", where=name))
        outer["bandwidth_bytes_per_s"] = rate * cards / gpus
    elif "nics_per_node" in table:
        message = f"cluster {name!r} says nics_per_node and not what a card carries"
        raise ConfigurationError(message, hint='add nic = "100 Gbit/s"')
    return tiers


def _tiers(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [one for one in table.get("tier", []) if isinstance(one, dict)]


def named_stacks() -> tuple[str, ...]:
    """Return the names of the known software stacks.

    Examples:
        >>> "megatron-bridge-26.02" in named_stacks()
        True
    """
    found = [entry.name for entry in (files("fivefold.strategy") / "stacks").iterdir()]
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def stack_of(name: str) -> StackSpec:
    """Return a known stack."""
    spec: StackSpec = build_spec(StackSpec, _stack(name)[0], where=f"stack {name!r}")
    return spec


def _stack(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return all constants of a known stack, defaults included, and where they come from."""
    require_one_of(name, named_stacks(), f"stack {name!r} is unknown")
    text = (files("fivefold.strategy") / "stacks" / f"{name}.toml").read_text()
    table = tomllib.loads(text)
    sources = dict(table.pop("sources", {}))
    fields = read_fields(table, StackSpec, where=f"stack {name!r}", texts=TEXT_DEVICE)
    return dataclasses.asdict(StackSpec(**{**fields, "stack": name})), sources


def _fabric(
    topology: Topology | None, tiers: Mapping[str, Mapping[str, Any]], *, name: str
) -> FabricSpec:
    """Return the tiers of a topology, if one is named, changed by what the file says of them."""
    if topology is not None:
        return _reached(fabric_from_topology(topology), tiers)
    joined = tuple(
        build_spec(Tier, tier, where=f"tier {tier.get('name', '')!r}") for tier in tiers.values()
    )
    return FabricSpec(name=name, tiers=tuple(sorted(joined, key=lambda tier: tier.gpus)))


def reached_tiers(fabric: FabricSpec, known: FabricSpec) -> FabricSpec:
    """Return a topology's tiers with the share of a link that software reaches, as in ``known``."""
    return _reached(fabric, {tier.name: dataclasses.asdict(tier) for tier in known.tiers})


def _reached(fabric: FabricSpec, known: Mapping[str, Mapping[str, Any]]) -> FabricSpec:
    outermost = max(known.values(), key=lambda tier: int(tier.get("gpus", 0)), default={})
    tiers = []
    for tier in fabric.tiers:
        said = known.get(tier.name, {} if tier.name == "node" else outermost)
        changes = {name: said[name] for name in _REACHED if name in said}
        tiers.append(dataclasses.replace(tier, **changes))
    return dataclasses.replace(fabric, tiers=tuple(tiers))


def _unknown(name: str) -> ConfigurationError:
    known = catalogue()
    network = name.partition(":")[0].replace("-", "_") in {*known.machines, *known.generators}
    if network or file_of(name) is not None:
        return ConfigurationError(
            f"{name!r} is a network, and a plan needs the GPU and its software as well",
            hint=f'write a TOML file with base = "h100-nemo" (or another GPU and stack) and '
            f'topology = "{name}"; every command reads it',
        )
    near = difflib.get_close_matches(name, named_clusters(), n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return ConfigurationError(
        f"cluster {name!r} is unknown",
        hint=f"{meant}give a TOML file or one of {', '.join(named_clusters())}",
    )
