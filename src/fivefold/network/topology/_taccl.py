"""Profiles of TACCL: measured latency and time per chunk of each class of link, as a topology.

A profile gives microseconds for one chunk of a certain size, in some files multiplied by a power of
ten so that integers carry the information; here they become seconds and bytes per second. TACCL
counts a pair of NVLinks as one connection of half the time, so such a connection is one link.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fivefold.errors import (
    ConfigurationError,
    DataError,
    require_number,
    require_one_of,
    require_whole,
)
from fivefold.files import read_json
from fivefold.network.topology._build import Builder, Wire, check_count
from fivefold.network.topology._machines import DGX1_PAIRS
from fivefold.network.topology._topology import Topology
from fivefold.network.topology.arrays import FloatArray
from fivefold.units import parse_bytes

Connections = Mapping[int, Sequence[int]] | Literal["relay", "direct-map", "fully-connected"]
_MICRO = 1e-6
_SOURCE = "microsoft/taccl on GitHub (taccl/examples/topo), NSDI 2023, arXiv 2111.04867"
_LISTS = ("node_betas_list", "node_invbws_list")
_REMOTE = ("remote_alpha", "remote_beta", "remote_invbw")


@dataclass(frozen=True, kw_only=True)
class TacclProfile:
    """One profile, with the keys of TACCL's JSON files and what those leave unsaid.

    Args:
        name: Its name.
        gpus_per_node: GPUs in a box.
        nics_per_node: NICs in a box.
        alpha: Latency inside a box.
        betas: Time of one chunk per GPU pair without latency, ``betas[target][source]``; 0 where
            there is no link.
        steps: The same with latency, as TACCL's solver takes it (``invbw`` in the files).
        remote_alpha: Latency between boxes; None where the profile is of one box.
        remote_beta: Time of one chunk on one NIC, without latency; None as well.
        remote_step: The same with latency; None as well.
        switched: Whether the GPUs sit on a switch: one chunk at a time in and out of each GPU.
        chunk_bytes: Size of the chunk that the times are for.
        time_scale: What the authors multiplied microseconds by.
        source: Where it comes from, in words.

    Examples:
        >>> profile = TacclProfile.load("ndv2_1MB")
        >>> profile.alpha, profile.betas[1][0], profile.chunk_bytes
        (0.3, 23, 1048576)
    """

    name: str
    gpus_per_node: int
    nics_per_node: int
    alpha: float
    betas: tuple[tuple[float, ...], ...]
    steps: tuple[tuple[float, ...], ...]
    remote_alpha: float | None
    remote_beta: float | None
    remote_step: float | None
    switched: bool
    chunk_bytes: int
    time_scale: float = 1.0
    source: str = ""

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any],
        *,
        chunk_bytes: str | float | None = None,
        time_scale: float | None = None,
    ) -> TacclProfile:
        """Load a profile: a published one by name, a JSON file of TACCL's, or its content.

        Args:
            source: A name such as ``ndv2_1MB``, a path, or a mapping.
            chunk_bytes: Size of the chunk that the times are for, such as ``"1 MiB"``; needed
                unless published.
            time_scale: What microseconds were multiplied by; None for 1, or what is known of a
                published one.

        Raises:
            ConfigurationError: The name is unknown, ``chunk_bytes`` is missing, or it or
                ``time_scale`` is not above zero.
            DataError: The file cannot be read, a key is missing, or a matrix has the wrong shape.
        """
        named = isinstance(source, str) and not source.endswith(".json")
        if named and (source in PUBLISHED or not Path(str(source)).exists()):
            require_one_of(source, PUBLISHED, f"there is no published TACCL profile {source!r}")
            keys, own_bytes, own_scale = PUBLISHED[str(source)]
            table: Any = {"name": source, **keys}
            whose = f"TACCL profile {source}: {_SOURCE}"
            chunk_bytes = own_bytes if chunk_bytes is None else chunk_bytes
        else:
            table, own_scale = source, 1.0
            whose = "a TACCL profile" if isinstance(source, Mapping) else f"TACCL profile {source}"
            if not isinstance(source, Mapping):
                table = read_json(Path(source), what="TACCL profile")
            if not isinstance(table, Mapping):
                message = f"TACCL profile {source} is no table of keys"
                raise DataError(message, hint="see its examples/topo")
        if chunk_bytes is None:
            message = "a TACCL profile gives times for one chunk and does not say of what size"
            raise ConfigurationError(message, hint='say it, such as chunk_bytes="1 MiB"')
        remote = _REMOTE if any(key in table for key in _REMOTE) else ()  # else of one box
        for key in ("gpus_per_node", "alpha", *remote):
            _times(table, key)
        if remote and not table["remote_beta"]:
            message = "remote_beta of the TACCL profile is 0: a chunk would take no time"
            raise DataError(message, hint="give its microseconds")
        gpus, nics = table["gpus_per_node"], table.get("nics_per_node", 1)
        for key, count in (("gpus_per_node", gpus), ("nics_per_node", nics)):
            check_count(f"{key} of the TACCL profile", count)
        scale = own_scale if time_scale is None else time_scale
        read = _matrix if "links" in table else _classes
        lists = ("betas", "invbws") if "links" in table else _LISTS
        betas, steps = (read(table, key, gpus) for key in lists)
        return cls(
            name=str(table.get("name", "taccl")),
            gpus_per_node=gpus,
            nics_per_node=nics,
            alpha=float(table["alpha"]),
            betas=betas,
            steps=steps,
            remote_alpha=float(table["remote_alpha"]) if remote else None,
            remote_beta=float(table["remote_beta"]) if remote else None,
            remote_step=float(table["remote_invbw"]) if remote else None,
            switched="links" not in table and len(table[_LISTS[0]]) == 1,
            chunk_bytes=require_whole("chunk_bytes of a TACCL profile", parse_bytes(chunk_bytes)),
            time_scale=require_number("time_scale of a TACCL profile", scale, positive=True),
            source=whose,
        )

    def to_topology(
        self, *, boxes: int = 1, connections: Connections = "relay", as_solved: bool = False
    ) -> Topology:
        """Return the topology of one or several boxes.

        A NIC that serves several connections is divided among them beforehand, as TACCL does
        it: each gets the time of a NIC times connections per NIC.

        Args:
            boxes: Number of boxes.
            connections: Who sends to whom between two boxes, local ranks: a mapping from sender to
                receivers; ``relay`` as in the published sketches (GPU 0 to GPU 1, or odd GPUs to
                the even ones below them where GPUs sit on a switch); ``direct-map``, each to its
                like; or ``fully-connected``.
            as_solved: Take the latency that TACCL's solver sees (time with latency minus time
                without: 0 where the authors left it out) instead of the measured one.

        Raises:
            ConfigurationError: A connection names a GPU that no box has.
            DataError: Several boxes are asked for, and the profile is of one.
        """
        check_count("boxes", boxes)
        builder = Builder()
        rows = [self._add_box(builder, box, boxes, as_solved=as_solved) for box in range(boxes)]
        if boxes > 1:
            self._join_boxes(builder, rows, self._connections(connections), as_solved=as_solved)
        label = f"{self.name}:{boxes}" if boxes > 1 else self.name
        return builder.done(label, source=self.source)

    def _send(self, builder: Builder, ends: tuple[str, str], times: tuple[float, float]) -> None:
        """Add a link of this latency and time of a chunk."""
        latency, beta = (time * _MICRO / self.time_scale for time in times)
        builder.send(*ends, Wire(self.chunk_bytes / beta, latency))

    def _add_box(self, builder: Builder, box: int, boxes: int, *, as_solved: bool) -> list[str]:
        prefix, host = (f"box{box}/" if boxes > 1 else ""), f"box{box}"
        names = builder.row(f"{prefix}gpu", self.gpus_per_node, host=host)
        if self.switched:
            plane = builder.node(f"{prefix}nvswitch0", "nvswitch", host=host)
            beta = self.betas[1][0] if len(names) > 1 else 0.0
            alpha = self.steps[1][0] - beta if as_solved and beta else self.alpha
            # A message passes two links, and the latency is that of the whole connection.
            for name in names if beta else ():
                for ends in ((name, plane), (plane, name)):
                    self._send(builder, ends, (alpha / 2, beta))
            return names
        for target, source in np.argwhere(np.array(self.betas) > 0).tolist():
            beta = self.betas[target][source]
            alpha = self.steps[target][source] - beta if as_solved else self.alpha
            self._send(builder, (names[source], names[target]), (alpha, beta))
        return names

    def _join_boxes(
        self,
        builder: Builder,
        rows: list[list[str]],
        connections: Mapping[int, Sequence[int]],
        *,
        as_solved: bool,
    ) -> None:
        pairs = [(sender, one) for sender, several in connections.items() for one in several]
        if self.remote_alpha is None or self.remote_beta is None or self.remote_step is None:
            message = f"the TACCL profile {self.name} is of one box: it has no remote_alpha"
            hint = "add remote_alpha, remote_beta and remote_invbw, or ask for one box"
            raise DataError(message, hint=hint)
        beta = self.remote_beta * max(len(pairs) / self.nics_per_node, 1.0)
        alpha = self.remote_step - self.remote_beta if as_solved else self.remote_alpha
        for first, second in itertools.permutations(rows, 2):
            for sender, receiver in pairs:
                self._send(builder, (first[sender], second[receiver]), (alpha, beta))

    def _connections(self, wanted: Connections) -> Mapping[int, Sequence[int]]:
        gpus = range(self.gpus_per_node)
        if isinstance(wanted, str):
            known = {
                "relay": {odd: [odd - 1] for odd in gpus[1::2]} if self.switched else {0: [1]},
                "direct-map": {gpu: [gpu] for gpu in gpus},
                "fully-connected": {gpu: list(gpus) for gpu in gpus},
            }
            require_one_of(wanted, known, f"connections is {wanted!r}, and no mapping")
            return known[wanted]
        table = {int(sender): [int(x) for x in receivers] for sender, receivers in wanted.items()}
        for gpu in [*table, *(one for receivers in table.values() for one in receivers)]:
            if gpu not in gpus:
                raise ConfigurationError(
                    f"connections names GPU {gpu}", hint=f"a box has GPUs 0 to {gpus[-1]}"
                )
        return table


def _times(table: Mapping[str, Any], key: str, *shapes: tuple[int, ...]) -> FloatArray:
    """Return what a key holds: one number, or numbers in one of some shapes."""
    try:
        found = np.array(table.get(key))
    except ValueError:  # rows of several lengths
        found = np.array(None)
    kinds = "biuf" if key == "links" else "iuf"
    numbers = found.dtype.kind in kinds and bool((np.isfinite(found) & (found >= 0)).all())
    if not numbers or found.shape not in (shapes or ((),)):
        if not shapes:
            raise DataError(f"the TACCL profile has no number {key}", hint="add the key")
        shown = " or ".join(" rows of ".join(map(str, shape)) for shape in shapes)
        raise DataError(
            f"{key} of the TACCL profile must be {shown} numbers from 0",
            hint="microseconds of a chunk, without infinite ones",
        )
    return found


def _matrix(table: Mapping[str, Any], key: str, size: int) -> tuple[tuple[float, ...], ...]:
    """Return times by target and source, 0 where there is no link."""
    times, links = (_times(table, name, (size, size)) for name in (key, "links"))
    if key == "betas" and ((links != 0) & (times == 0)).any():
        message = "betas of the TACCL profile are 0 where there are links"
        raise DataError(message, hint="give the microseconds of a chunk, or no link")
    return tuple(map(tuple, np.where(links != 0, times, 0).tolist()))


def _classes(table: Mapping[str, Any], key: str, size: int) -> tuple[tuple[float, ...], ...]:
    """Return times of GPUs on a switch, or of an NDv2 box with its double and single links."""
    values = _times(table, key, (1,), (2,)).tolist()
    rows = [[0.0] * size for _ in range(size)]
    if len(values) == 1:
        pairs = [(*ends, 1) for ends in itertools.combinations(range(size), 2)]
    elif size != 1 + max(second for _, second, _ in DGX1_PAIRS):
        raise DataError(f"two classes of links are those of an NDv2 box; got {size} GPUs")
    else:
        pairs = DGX1_PAIRS
    for first, second, count in pairs:
        rows[first][second] = rows[second][first] = values[0 if count == 2 else -1]
    return tuple(map(tuple, rows))


_KEYS = (
    *("gpus_per_node", "nics_per_node", "alpha", *_LISTS),
    *("remote_alpha", "remote_beta", "remote_invbw"),
)


def _keys(*values: Any) -> Mapping[str, Any]:
    return dict(zip(_KEYS, values, strict=True))


# Values of the authors' files; the sizes are inferred (the ratios of the times fit binary sizes),
# and so are the scales (the smaller profiles' alphas are multiples of the 1 MB one's).
PUBLISHED: Mapping[str, tuple[Mapping[str, Any], int, float]] = {
    "dgx2_1KB": (_keys(16, 8, 30, [1], [31], 260, 10.25, 270), 1024, 100),
    "dgx2_1MB": (_keys(16, 8, 0.3, [8], [8], 2.6, 105, 107), 1 << 20, 1),
    "ndv2_1KB": (_keys(8, 1, 30, [2.24, 4.5], [32.25, 34.5], 260, 10.25, 270.25), 1024, 100),
    "ndv2_32KB": (_keys(8, 1, 3, [7.18, 14.38], [10.18, 17.38], 26, 32.8, 59), 32768, 10),
    "ndv2_1MB": (_keys(8, 1, 0.3, [23, 46], [23, 46], 2.6, 105, 107), 1 << 20, 1),
}
