"""What readers of other programs' files share: what people tell beside a file, and several boxes.

A file describes one machine (or what a program calls so). What it does not say is told by options,
or assumed and named; what only a guess could fill is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fivefold.errors import ConfigurationError, DataError, require_one_of
from fivefold.network.topology._build import Builder, Wire
from fivefold.network.topology._topology import Topology
from fivefold.reading import Reading
from fivefold.units import format_bytes_per_s, parse_bytes, parse_bytes_per_s

_T = TypeVar("_T")
_MOST_BOXES = 10_000


def _whole(text: str) -> int:
    if not text.isdecimal() or not 0 < len(text) < 10:
        raise ConfigurationError(f"{text!r:.40} is no whole number", hint="write such as 8")
    return int(text)


def _yes(text: str) -> bool:
    require_one_of(text, ("yes", "no"), f"{text!r:.40} is neither yes nor no")
    return text == "yes"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split("+") if name)


def _one_of(*known: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        require_one_of(text, known, f"{text!r:.40} is not known")
        return text

    return parse


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{text!r:.40} is no number", hint="write such as 10") from None


@dataclass(frozen=True)
class Option:
    """What a person may tell beside a file, as ``FILE,key=value``."""

    key: str
    example: str
    help: str
    parse: Callable[[str], Any]


OPTIONS: Mapping[str, Option] = {
    option.key: option
    for option in (
        Option("nvlink", "25 GB/s", "rate of one NVLink and direction", parse_bytes_per_s),
        Option("nvlinks", "12", "NVLinks of each GPU to one NVSwitch plane", _whole),
        Option("nvswitch", "yes", "whether NVLinks end at an NVSwitch", _yes),
        Option("pcie", "32 GB/s", "rate of the PCIe links", parse_bytes_per_s),
        Option("socket", "16 GB/s", "rate between processor sockets", parse_bytes_per_s),
        Option("nic", "400 Gbit/s", "rate of each network adapter", parse_bytes_per_s),
        Option("nics", "mlx5_0+mlx5_3", "adapters that lead to other boxes", _names),
        Option("ibstat", "FILE", "text of ibstat: rates of the adapters", str),
        Option(
            "network", "rails", "between boxes: one switch, or rails", _one_of("switch", "rails")
        ),
        Option("chunk", "1 MiB", "size of the chunk that times are for", parse_bytes),
        Option("time_scale", "10", "what microseconds were multiplied by", _number),
        Option(
            "connections", "direct-map", "who sends to whom between boxes",
            _one_of("relay", "direct-map", "fully-connected"),
        ),
    )
}  # fmt: skip


@dataclass
class Source:
    """A file that is being read: its account, and what is told beside it.

    Args:
        reading: The account.
        told: Values of options, parsed.
        boxes: How many such machines there are.
    """

    reading: Reading
    told: Mapping[str, Any] = field(default_factory=dict)
    boxes: int = 1
    _assumed: dict[str, Any] = field(default_factory=dict)

    def told_or(
        self, key: str, value: _T, why: str, *, name: str = "", decisive: bool = False
    ) -> _T:
        """Return what an option says; else a value that is noted as assumed, once a name."""
        if key in self.told:
            if f"{key}=" not in self.reading.names():
                self.reading.take(f"{key}=", f"{_shown(self.told[key], key)}, as told")
            return self.told[key]  # type: ignore[no-any-return]
        known = self._assumed.setdefault(name or key, value)
        if (name or key) not in self.reading.names():
            hint = f"; {key}= says another" if key in OPTIONS else ""
            self.reading.assume(name or key, _shown(value, key), f"{why}{hint}", decisive=decisive)
        return known  # type: ignore[no-any-return]

    def question(self, key: str, what: str) -> ConfigurationError:
        """Return the error for what the file does not say and nobody should guess."""
        option = OPTIONS[key]
        return ConfigurationError(
            f"{self.reading.source} does not say {what}",
            hint=f"tell it ({option.help}): {self.reading.source},{key}={option.example}",
        )

    def finish(self) -> None:
        """Refuse options that changed nothing: whoever gave them expects that they do."""
        names = self.reading.names()
        idle = [key for key in self.told if f"{key}=" not in names]
        if idle:
            raise ConfigurationError(
                f"{idle[0]}= changes nothing for {self.reading.source}: the file says it itself, "
                "or has no such part",
                hint=f"leave {idle[0]}= out",
            )


def root_tag(text: str) -> str:
    """Return the tag of the first element of XML; empty where a text is none."""
    if not text.lstrip().startswith("<"):
        return ""
    bare = re.sub(r"<!--.*?-->|<\?.*?\?>", "", text[:65536], flags=re.DOTALL)
    found = re.search(r"<([A-Za-z][\w.-]*)", bare)
    return found[1] if found else ""


def _shown(value: object, key: str) -> str:
    """Return an option's value as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    rate = OPTIONS[key].parse is parse_bytes_per_s
    return format_bytes_per_s(value) if rate and isinstance(value, int | float) else str(value)


@dataclass
class Port:
    """A port of a network adapter: where it is, its rate (None: not said) and latency."""

    nic: str
    name: str
    rate_bytes_per_s: float | None
    latency_s: float = 0.0


def joined(source: Source, box: Builder, ports: Sequence[Port], *, name: str) -> Topology:
    """Return the topology of a machine, or of several that its adapters join.

    Args:
        source: The file.
        box: Nodes and links of one machine.
        ports: What leads to other machines.
        name: What to call it.
    """
    reading = source.reading
    if source.boxes == 1:
        return _done(box, source, name)
    if source.boxes > _MOST_BOXES:
        raise ConfigurationError(f"there are {source.boxes} boxes", hint=f"at most {_MOST_BOXES}")
    used = _ports(source, ports)
    network = source.told_or(
        "network", "switch", "a fabric that joins every adapter to every other"
    )
    builder = Builder()
    hosts = list(dict.fromkeys(node.host for node in box.nodes if node.host is not None))
    middles = [builder.node("fabric", "tor")] if network == "switch" else []
    middles = middles or builder.row("rail", len(used), kind="tor")
    for number in range(source.boxes):
        names = {node.name: f"box{number}/{node.name}" for node in box.nodes}
        for node in box.nodes:
            host = f"box{number}" if len(hosts) < 2 else f"box{number}/{node.host}"
            builder.node(names[node.name], node.kind, host=host if node.host else None)
        for link in box.links:
            ends = names[link.source], names[link.target]
            builder.links.append(replace(link, source=ends[0], target=ends[1]))
        for place, (port, rate) in enumerate(used):
            wire = Wire(rate, port.latency_s / 2)
            builder.join(names[port.nic], middles[place % len(middles)], wire)
    if len(builder.links) > 1_000_000:
        raise ConfigurationError(f"{reading.source} has too many links", hint="give fewer boxes")
    return _done(builder, source, f"{name}:{source.boxes}")


def _ports(source: Source, ports: Sequence[Port]) -> list[tuple[Port, float]]:
    """Return the ports that lead to other boxes, with their rates."""
    if not ports:
        message = (
            f"{source.reading.source} has no network adapter, and there are {source.boxes} boxes"
        )
        raise DataError(message, hint="dump it where the adapters are up, or describe one box")
    known = [port.name for port in ports]
    for name in source.told.get("nics", ()):
        require_one_of(name, known, f"{source.reading.source} has no adapter {name!r}")
    wanted = source.told_or("nics", tuple(known), "all adapters of the file lead to other boxes")
    used = []
    for port in ports:
        if port.name not in wanted:
            continue
        rate = source.told.get("nic", port.rate_bytes_per_s)
        if rate is None:
            raise source.question("nic", f"what the adapter {port.name} carries")  # noqa: EM101 - a key
        used.append((port, rate))
    if "nic" in source.told:
        source.told_or("nic", 0.0, "")
    return used


def _done(builder: Builder, source: Source, name: str) -> Topology:
    assumed = "; ".join(f"{note.name} = {note.value}" for note in source.reading.assumed)
    where = source.reading.source
    return builder.done(name, source=f"{where}. Assumed: {assumed}" if assumed else where)
