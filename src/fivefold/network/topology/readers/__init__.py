"""Topologies as other programs write them: which file is of which, by what stands in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import ConfigurationError, DataError, FivefoldError, require_one_of
from fivefold.files import read_text
from fivefold.network.topology._topology import Topology
from fivefold.network.topology.readers import astra_sim, hwloc, nccl, nvidia_smi, taccl
from fivefold.network.topology.readers.boxes import OPTIONS, Source, root_tag
from fivefold.reading import Reading

__all__ = [
    "FORMATS",
    "FileText",
    "Format",
    "file_of",
    "format_of",
    "read_other",
    "unknown_file",
]

_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Format:
    """A program's files: how they are known, read, and which options they take."""

    name: str
    what: str
    recognises: Callable[[str], bool]
    read: Callable[..., Topology]
    options: tuple[str, ...]


FORMATS: tuple[Format, ...] = (
    Format(
        "NCCL topology", "XML of NCCL_TOPO_DUMP_FILE, also RCCL's", nccl.recognises, nccl.read,
        nccl.OPTIONS,
    ),
    Format(
        "nvidia-smi matrix", "text of nvidia-smi topo -m", nvidia_smi.recognises, nvidia_smi.read,
        nvidia_smi.OPTIONS,
    ),
    Format("hwloc topology", "XML of lstopo", hwloc.recognises, hwloc.read, hwloc.OPTIONS),
    Format(
        "ASTRA-sim network", "YAML with topology, npus_count, bandwidth, latency",
        astra_sim.recognises, astra_sim.read, astra_sim.OPTIONS,
    ),
    Format(
        "TACCL topology", "JSON of its examples/topo", taccl.recognises, taccl.read, taccl.OPTIONS,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class FileText:
    """A line of text that names a file: ``PATH``, ``PATH:BOXES`` or ``PATH,key=value,...``."""

    path: Path
    boxes: int
    told: Mapping[str, str]


def file_of(text: str, *, folder: Path | None = None) -> FileText | None:
    """Return what a line of text that names an existing file says; None where it names none.

    Args:
        text: The line.
        folder: Where a relative path may lie, besides the working directory.

    Raises:
        ConfigurationError: A part after the path is no ``key=value``, or stands twice.
    """
    head, *pairs = text.split(",")
    path, colon, boxes = head.rpartition(":")
    counted = path if colon and boxes.isdecimal() else ""
    for place, number, rest in ((text, "1", []), (head, "1", pairs), (counted, boxes, pairs)):
        for root in (Path(), folder):
            if place and root is not None and _is_file(root / place):
                return FileText(root / place, _count(number, text), _told(rest, text))
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a NUL
        return False


def _count(text: str, whole: str) -> int:
    if len(text) > 6 or int(text) < 1:
        raise ConfigurationError(
            f"{text:.20} in {whole!r:.60} is no number of boxes", hint="write FILE:2"
        )
    return int(text)


def _told(pairs: list[str], whole: str) -> dict[str, str]:
    told: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise ConfigurationError(
                f"{pair!r:.40} in {whole!r:.80} has no key or no value",
                hint="write FILE,nic=400Gbit/s",
            )
        if key in told:
            raise ConfigurationError(f"{whole!r:.80} says its {key} twice", hint="say it once")
        told[key] = value
    return told


def format_of(path: Path) -> Format | None:
    """Return the kind of a file of another program, by what is in it; None where it is none."""
    text = _text(path)
    return next((form for form in FORMATS if form.recognises(text)), None)


def _text(path: Path) -> str:
    text = read_text(path, what="topology file")
    if len(text) > _MOST_BYTES:
        message = f"topology file {path} is too large: at most {_MOST_BYTES >> 20} MiB"
        raise DataError(message, hint="is it the file that you mean?")
    return text


def read_other(file: FileText, form: Format) -> tuple[Topology, Reading]:
    """Read a file of another program.

    Returns:
        The topology, and the account of what was read, assumed and left out.

    Raises:
        DataError: It is damaged.
        ConfigurationError: An option is unknown, or of another kind of file; or something that
            only a guess could fill is not told.
    """
    reading = Reading(str(file.path))
    source = Source(reading, _parsed(file.told, form), file.boxes)
    topology = form.read(_text(file.path), source, name=file.path.stem)
    source.finish()
    return topology, reading


def _parsed(told: Mapping[str, str], form: Format) -> dict[str, Any]:
    values = {}
    for key, text in told.items():
        require_one_of(key, form.options, f"a file of the kind {form.name} takes no {key!r}")
        try:
            values[key] = OPTIONS[key].parse(text)
        except FivefoldError as error:
            raise type(error)(f"{key}=: {error.message}", hint=error.hint) from None
    return values


def unknown_file(path: Path) -> FivefoldError:
    """Return the error for a file of none of the kinds, with what it looks like."""
    text = _text(path)
    known = "; ".join(f"{form.name} ({form.what})" for form in FORMATS)
    hint = f"known are {known}; a Lingjun table as lingjun:{path}; and fivefold's own TOML"
    if root_tag(text) == "graphs":
        message = f"{path} is NCCL's graph dump, which has its rings and no links"
        return DataError(message, hint="give the file of NCCL_TOPO_DUMP_FILE instead")
    if root_tag(text) == "algo":
        return DataError(f"{path} is an algorithm in MSCCL's XML, and no topology", hint=hint)
    return DataError(f"topology file {path} is of no kind that is known", hint=hint)
