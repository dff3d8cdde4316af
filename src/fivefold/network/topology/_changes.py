"""Parts of a topology that were made from another: which nodes and links, with what changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fivefold.errors import ConfigurationError
from fivefold.network.topology._elements import Link, Node


def changed_links(
    links: Sequence[Link],
    ends: tuple[str, str],
    *,
    both_ways: bool,
    values: Mapping[str, float | int | None],
) -> list[Link]:
    """The same links, those between two nodes with other values (None keeps a value).

    Raises:
        ConfigurationError: No link joins the two nodes.
    """
    wanted = {ends, ends[::-1]} if both_ways else {ends}
    new = {key: value for key, value in values.items() if value is not None}
    found = [(link.source, link.target) for link in links]
    if not wanted & set(found):
        raise ConfigurationError(
            f"there is no link {ends[0]!r} -> {ends[1]!r} to change",
            hint="name two nodes that a link joins",
        )
    return [
        replace(link, **new) if pair in wanted else link  # type: ignore[arg-type]
        for link, pair in zip(links, found, strict=True)
    ]


def scaled_links(links: Iterable[Link], *, bandwidth: float, latency: float) -> list[Link]:
    """All bandwidths and all latencies times a factor each."""
    return [
        replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * bandwidth,
            latency_s=link.latency_s * latency,
        )
        for link in links
    ]


def renamed_links(links: Iterable[Link], names: Mapping[str, str]) -> list[Link]:
    """Links whose ends have other names."""
    return [
        replace(
            link,
            source=names.get(link.source, link.source),
            target=names.get(link.target, link.target),
        )
        for link in links
    ]


def joined_names(ranks: Iterable[Node], links: Sequence[Link]) -> set[str]:
    """Names that a rank can reach and that can reach a rank."""
    reached = [{node.name for node in ranks} for _ in range(2)]
    for seen, forward in zip(reached, (True, False), strict=True):
        onward: dict[str, list[str]] = {}
        for link in links:
            ends = (link.source, link.target)
            onward.setdefault(ends[not forward], []).append(ends[forward])
        frontier = list(seen)
        while frontier:
            found = {name for name in onward.get(frontier.pop(), ()) if name not in seen}
            seen.update(found)
            frontier += found
    return reached[0] & reached[1]
