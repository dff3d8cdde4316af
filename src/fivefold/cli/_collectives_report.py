"""The page of a synthesized collective."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.collectives.algorithms import available_algorithms, build_algorithm
from fivefold.collectives.schedules import (
    Schedule,
    Timing,
    draw_schedule,
    evaluate,
    lower_bound,
    named_collective,
)
from fivefold.collectives.schedules.bounds import Bound
from fivefold.collectives.schedules.timing import CostModel
from fivefold.collectives.synthesis import Synthesis
from fivefold.errors import FivefoldError
from fivefold.network.topology import Topology, draw_topology
from fivefold.report.columns import Column, record_of, row_table
from fivefold.report.format import UNKNOWN, format_percent, format_ratio, format_seconds
from fivefold.report.page import (
    Curve,
    CurveChart,
    DataTable,
    Page,
    PageSection,
    SideBySide,
    TextBlock,
    picture_of,
)
from fivefold.units import format_bytes, format_bytes_per_s, format_duration_s

_LEAST_BYTES, _MOST_BYTES = 1e3, 1e9
_POINTS, _FEW_POINTS = 25, 9
_MANY = 300_000  # transfers of all algorithms together beyond which there are few points
_TOO_MANY = 3_000_000  # transfers of all algorithms together; no more are compared
_EQUAL = 1e-6  # relative: closer than that is a draw


@dataclass(frozen=True)
class Price:
    """Times of one algorithm, by message size."""

    name: str
    kind: str  # library, synthesized or bound
    times_s: tuple[float, ...]


@dataclass(frozen=True)
class Prices:
    """Times by message size; the synthesized algorithm and the bound come last."""

    sizes_bytes: tuple[float, ...]
    curves: tuple[Price, ...]


def price_sizes(
    found: Schedule, network: Topology, size_bytes: float, *, model: CostModel = "serial"
) -> Prices:
    """Price the found schedule, the library's and the lower bound over six decades of sizes."""
    rivals = _rivals(found, network)
    work = found.num_transfers + sum(schedule.num_transfers for schedule in rivals.values())
    sizes = _sizes(size_bytes, _POINTS if work <= _MANY else _FEW_POINTS)

    def priced(name: str, kind: str, schedule: Schedule) -> Price:
        times = (evaluate(schedule, network, size_bytes=size, model=model) for size in sizes)
        return Price(name.replace("_", " "), kind, tuple(float(one.total_s) for one in times))

    curves = [priced(name, "library", schedule) for name, schedule in rivals.items()]
    label = f"{found.name}, chosen for {format_bytes(size_bytes)}"
    curves += [priced(label, "synthesized", found), *_bound(found, network, sizes)]
    return Prices(sizes, tuple(curves))


def fastest_ranges(prices: Prices, *kinds: str) -> tuple[tuple[str, str], ...]:
    """Return which algorithm is fastest in which range of sizes; curves cross at the limits."""
    rivals = [price for price in prices.curves if price.kind in kinds]
    rivals.sort(key=lambda price: price.kind != "synthesized")  # a draw is the synthesized one's
    if not rivals:
        return ()
    limits: list[tuple[float, Price]] = []
    for place, size in enumerate(prices.sizes_bytes):
        # The first that is as fast as any; rounding decides nothing.
        least_s = min(price.times_s[place] for price in rivals) * (1 + _EQUAL)
        winner = next(price for price in rivals if price.times_s[place] <= least_s)
        if not limits:
            limits.append((size, winner))
        elif winner is not limits[-1][1]:
            limits.append((_crossing(prices, limits[-1][1], winner, place), winner))
    ends = [limit for limit, _ in limits[1:]] + [prices.sizes_bytes[-1]]
    return tuple(
        (f"{format_bytes(start)} to {format_bytes(end)}", winner.name)
        for (start, winner), end in zip(limits, ends, strict=True)
    )


def _crossing(prices: Prices, before: Price, after: Price, place: int) -> float:
    """Return the size at which the second becomes as fast as the first, times being powers."""
    low, high = prices.sizes_bytes[place - 1 : place + 1]
    ahead, behind = (math.log(after.times_s[i] / before.times_s[i]) for i in (place - 1, place))
    return float(low * (high / low) ** (ahead / (ahead - behind)))


def _sizes(size_bytes: float, points: int) -> tuple[float, ...]:
    low = min(_LEAST_BYTES, size_bytes) if size_bytes > 0 else _LEAST_BYTES
    high = max(_MOST_BYTES, size_bytes)
    grid = {low * (high / low) ** (place / (points - 1)) for place in range(points - 1)} | {high}
    return tuple(sorted(grid | ({float(size_bytes)} if size_bytes > 0 else set())))


def _rivals(found: Schedule, network: Topology) -> dict[str, Schedule]:
    """Return the library's algorithms that fit, but for the one that was found."""
    asked = found.collective
    root = 0 if asked.root is None else asked.root
    try:
        plain = named_collective(asked.name, asked.num_ranks, root=root)
    except FivefoldError:  # an uneven or a custom one has no plain form
        plain = asked
    rivals: dict[str, Schedule] = {}
    left = _TOO_MANY - found.num_transfers
    for name in available_algorithms(plain):
        if asked.num_ranks**2 > left:
            break  # some have as many transfers as there are pairs
        try:
            schedule = build_algorithm(name, plain, network)
        except FivefoldError:
            continue
        same = schedule.name == found.name and schedule.num_transfers == found.num_transfers
        if not same and schedule.num_transfers <= left:
            rivals[name] = schedule
            left -= schedule.num_transfers
    return rivals


def _bound(found: Schedule, network: Topology, sizes: tuple[float, ...]) -> list[Price]:
    # Exact cuts at so many sizes would take longer than all else on a large network.
    exact = None if network.num_ranks <= 32 else False
    try:
        bounds = [lower_bound(found.collective, network, size, exact=exact) for size in sizes]
    except FivefoldError:  # connected one way only: there is no bound
        return []
    return [Price("lower bound", "bound", tuple(float(bound.seconds) for bound in bounds))]


_PROVED = 1e-9  # relative: so close to the bound is on it
_LOOKS: dict[str, dict[str, Any]] = {  # of the curves that are not the library's
    "synthesized": {"colour": "#d55e00", "width": 3.4},
    "bound": {"colour": "#7d858f", "width": 1.6, "dash": "2 4"},
}
_FEW_TICKS = (1, 1.1, 1.2, 1.5, 2, 3, 5)
_MORE_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_MANY_TICKS = tuple(10**power for power in range(10))
_MOST_NAMES = 6
_RUN_BY_BACKEND = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
_ARGUMENTS = {
    "latency": "Latency:",
    "ends": "What comes from or goes afar:",
    "rounds": "Rounds of messages:",
    "cut": "What must cross a cut:",
    "messages": "Messages that each byte needs:",
    "chunks": "Whole chunks:",
}
_NO_LATENCY = (
    "No link of this topology has a latency. Times of small messages are too good to be true, and "
    "algorithms with few steps look no better than those with many."
)
_BACKEND = """\
from pathlib import Path

import torch.distributed as dist
from fivefold.collectives.execution import configure, register_algorithm
from fivefold.collectives.schedules import Schedule

register_algorithm("mine", Schedule.from_json(Path("{file}").read_text()))
configure(algorithms={{"{collective}": "mine"}})
dist.init_process_group("fivefold")"""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question as it was typed; ``words`` are the command without its --output."""

    collective: str
    size_bytes: float
    method: str
    time_limit: str
    model: str
    output: Path | None
    words: Sequence[str]

    @property
    def name(self) -> str:
        """Return the collective as it is written in text."""
        return self.collective.replace("_", "-")

    def command(self, output: str) -> str:
        """Return the command that makes a file of the answer."""
        return shlex.join([*self.words, "--output", output])


def used_shares(network: Topology, timing: Timing) -> NDArray[np.float64]:
    """Return the share of every link's capacity that is in use from start to end."""
    most_bytes = network.capacities_bytes_per_s * timing.total_s
    shares = timing.link_bytes / np.maximum(most_bytes, np.finfo(np.float64).tiny)
    return np.asarray(np.minimum(shares, 1.0))


def loads_title(network: Topology, timing: Timing) -> str:
    """Return what the picture of the links shows."""
    shares = used_shares(network, timing)
    busiest = f", the busiest carries {format_bytes(float(timing.link_bytes.max(initial=0.0)))}"
    return (
        f"{network.name}: use of the links in {format_duration_s(timing.total_s)}\n"
        f"{int((shares > 0).sum())} of {network.num_links} links are used{busiest}"
    )


def collective_page(found: Synthesis, network: Topology, asked: Asked) -> Page:
    """Return the page of a synthesized algorithm and how good it is."""
    model: CostModel = asked.model  # type: ignore[assignment]
    timing = evaluate(found.schedule, network, size_bytes=asked.size_bytes, model=model)
    what = f"{asked.name} of {format_bytes(asked.size_bytes)} on {network.name}"
    bound_s = found.bound.seconds
    return Page(
        title=f"collectives: {what}",
        finding=_finding(found, what),
        tiles=_tiles(found),
        caveats=(_NO_LATENCY,) if network.num_links and not network.latencies_s.any() else (),
        sections=(
            PageSection(
                heading="Asked and found",
                parts=(
                    SideBySide(
                        parts=(
                            _words(("", ""), _question(network, asked, timing), "Asked"),
                            _words(("", ""), _answer(found, network, timing), "Found"),
                        )
                    ),
                ),
            ),
            PageSection(
                heading=f"Why nothing can be faster than {format_seconds(bound_s)}",
                how="The bound is computed apart from the search, from the topology alone. A gap "
                "above it may be the algorithm's fault or the bound's.",
                parts=(TextBlock(_reason(found.bound, network) or "No bound is known."),),
            ),
            _methods(found),
            *_pictures(found, network, timing),
            _sizes_section(
                price_sizes(found.schedule, network, asked.size_bytes, model=model), found
            ),
            PageSection(heading="How to run it", parts=_recipes(asked)),
        ),
    )


def _tiles(found: Synthesis) -> tuple[tuple[str, str, str], ...]:
    tiles = [(format_seconds(found.time_s), "predicted time", "in the cost model")]
    if found.bound.seconds > 0:
        bound = format_seconds(found.bound.seconds)
        tiles.append((bound, "lower bound", "nothing can be faster"))
        gap = _gap(found, found.time_s)
        more = "optimal, and proved to be" if gap == "0 %" else "the optimum lies in between"
        tiles.append((gap, "above the bound", more))
    library = [one.time_s for one in found.log if one.method == "library" and one.time_s]
    if library and found.time_s > 0:
        ratio = format_ratio(library[0] / found.time_s)
        tiles.append((ratio, "the speed", "of the library's best"))
    return tuple(tiles)


def _gap(found: Synthesis, time_s: float | None) -> str:
    """Write the share by which a time is above the bound."""
    if time_s is None or found.bound.seconds <= 0:
        return format_percent(None)
    gap = max(time_s / found.bound.seconds - 1.0, 0.0)
    return "0 %" if gap < _PROVED else format_percent(gap)


def _words(names: tuple[str, str], facts: tuple[tuple[str, str], ...], caption: str) -> DataTable:
    return DataTable.of(names, facts, caption=caption, text_columns=(1,))


_ATTEMPT_COLUMNS = (
    Column("method", "method", str, lambda attempt, _: attempt.method),
    Column("time_s", "predicted time", format_seconds, lambda attempt, _: attempt.time_s),
    Column("gap", "above the bound", str, lambda attempt, found: _gap(found, attempt.time_s)),
    Column("spent_s", "searched for", format_seconds, lambda attempt, _: attempt.spent_s,
           "Wall-clock time of the search"),
    Column("note", "algorithm, or why there is none", str, lambda attempt, _:
           attempt.note.replace("_", " ") if attempt.time_s else attempt.note, words=True),
)  # fmt: skip


def _methods(found: Synthesis) -> PageSection:
    chosen = [n for n, attempt in enumerate(found.log) if attempt.method == found.method]
    table = row_table(
        _ATTEMPT_COLUMNS, [record_of(_ATTEMPT_COLUMNS, attempt, found) for attempt in found.log],
        blank=UNKNOWN, marked=tuple(chosen), badges=tuple((n, "chosen") for n in chosen),
    )  # fmt: skip
    return PageSection(
        heading="Methods tried",
        how="In this order, until one meets the bound or time is over. Every algorithm was "
        "verified, transfer by transfer, before it counted.",
        parts=(table,),
    )


def _sizes_section(prices: Prices, found: Synthesis) -> PageSection:
    names = ("message size", "fastest")
    textbook = ("library", "synthesized") if found.method == "library" else ("library",)
    caption = "Fastest of all, by message size; each limit is where two curves cross"
    tables = (
        _words(names, fastest_ranges(prices, "synthesized", "library"), caption),
        _words(names, fastest_ranges(prices, *textbook), "Fastest of the library alone"),
    )
    return PageSection(
        heading="Other message sizes",
        how="Predicted in the same cost model: a message costs the latency of its way and its "
        "bytes over the capacity of the links. The chosen algorithm was made for one size; the "
        "library's have their plain number of chunks.",
        parts=(SideBySide(parts=_size_charts(prices)), SideBySide(parts=tables)),
    )


def _size_charts(prices: Prices) -> tuple[CurveChart, ...]:
    """Draw times, and times over the lower bound where there is one."""
    times = [time for price in prices.curves for time in price.times_s if time > 0]
    if not times:
        return ()  # one rank alone takes no time at any size
    bound = next((price for price in prices.curves if price.kind == "bound"), None)
    charts = [
        _size_chart(prices, None, _decades(times, format_duration_s), "Time. Lower is faster.")
    ]
    if bound is not None and min(bound.times_s) > 0:
        most = max(
            t / b for p in prices.curves for t, b in zip(p.times_s, bound.times_s, strict=True)
        )
        ticks = _FEW_TICKS if most < 8 else _MORE_TICKS if most < 500 else _MANY_TICKS
        named = tuple((float(tick), f"{tick:g}") for tick in ticks)
        caption = "Time over the lower bound. 1 cannot be beaten; curves cross where another "
        caption += "algorithm becomes better."
        charts.append(_size_chart(prices, bound, named, caption))
    return tuple(charts)


def _size_chart(
    prices: Prices, bound: Price | None, y_ticks: tuple[tuple[float, str], ...], caption: str
) -> CurveChart:
    curves = []
    # What was synthesized is drawn last, on top.
    for price in sorted(prices.curves, key=lambda price: price.kind == "synthesized"):
        if price is bound:
            continue
        least_s = (1.0,) * len(price.times_s) if bound is None else bound.times_s
        points, texts = [], []
        for size, time_s, least in zip(prices.sizes_bytes, price.times_s, least_s, strict=True):
            if time_s > 0:
                share = "" if bound is None else f"\n{time_s / least:.2f} of the bound"
                points.append((size, time_s / least))
                texts.append(f"{format_bytes(size)}: {format_duration_s(time_s)}{share}")
        looks = _LOOKS.get(price.kind, {})
        curves.append(Curve.through(price.name, points, texts=tuple(texts), **looks))
    return CurveChart(
        key="collective-time" if bound is None else "collective-gap",
        x_name="message size",
        y_name="time" if bound is None else "time over the lower bound",
        curves=tuple(curves),
        caption=caption,
        x_log=True,
        y_log=True,
        x_ticks=_decades(prices.sizes_bytes, format_bytes),
        y_ticks=y_ticks,
    )


def _decades(
    values: Sequence[float], write: Callable[[float], str]
) -> tuple[tuple[float, str], ...]:
    """Return powers of ten around some values; the curves' ends may lie a little beyond."""
    least, most = min(values) / 10, max(values) * 10
    return tuple(
        (tick, write(tick)) for tick in (10.0**power for power in range(-10, 16))
        if least <= tick <= most
    )  # fmt: skip


def _finding(found: Synthesis, what: str) -> str:
    took, least = format_duration_s(found.time_s), format_duration_s(found.bound.seconds)
    by = f"The {what} takes {took} by {found.schedule.name.replace('_', ' ')}"
    if found.optimal:
        return f"{by}. That is proved to be optimal: it meets the lower bound."
    if found.bound.seconds <= 0:
        return f"{by}. There is no lower bound to compare it with."
    share = f"{100 * found.gap:.1f} %" if found.gap < 10 else f"{1 + found.gap:.1f} times"
    return f"{by}. Nothing can take less than {least}: it is within {share} of the optimum."


def _reason(bound: Bound, network: Topology) -> str:
    """Return the bound's certificate in words."""
    if not bound.reason:
        return ""
    reason = bound.reason[0].lower() + bound.reason[1:]
    text = f"{_ARGUMENTS.get(bound.kind, '')} {reason}.".strip()
    if bound.kind == "cut" and 1 < len(bound.certificate) < network.num_nodes:
        names = [network.nodes[node].name for node in bound.certificate]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        text += f" On the sending side are {', '.join(names[:_MOST_NAMES])}{more}."
    if bound.optimal_cut:
        text += " No other cut gives a higher bound."
    return text[0].upper() + text[1:]


def _question(network: Topology, asked: Asked, timing: Timing) -> tuple[tuple[str, str], ...]:
    rates = sorted(set(network.capacities_bytes_per_s.tolist()))
    shown = ", ".join(format_bytes_per_s(rate) for rate in rates[:4])
    latencies = network.latencies_s
    spread = sorted({float(latencies.min(initial=math.inf)), float(latencies.max(initial=0.0))})
    return (
        ("collective", asked.name),
        ("message", format_bytes(asked.size_bytes)),
        ("topology", network.name),
        ("ranks", f"{network.num_ranks:,}"),
        ("forwarding nodes", f"{network.num_nodes - network.num_ranks:,}"),
        ("directed links", f"{network.num_links:,}"),
        ("link rates", shown + (", ..." if len(rates) > 4 else "")),
        ("link latencies", " to ".join(format_duration_s(v) for v in spread if v < math.inf)),
        ("cost model", timing.model),
        ("method", asked.method),
        ("time limit", asked.time_limit),
    )


def _answer(found: Synthesis, network: Topology, timing: Timing) -> tuple[tuple[str, str], ...]:
    schedule, link = found.schedule, timing.busiest_link
    facts = [
        ("algorithm", schedule.name.replace("_", " ")),
        ("method", found.method),
        ("predicted time", format_duration_s(found.time_s)),
        ("algorithm bandwidth", f"{format_bytes(timing.bandwidth_bytes_per_s)}/s"),
        ("chunks", f"{schedule.collective.num_chunks:,}"),
        ("transfers", f"{schedule.num_transfers:,}"),
        ("found in", format_duration_s(sum(attempt.spent_s for attempt in found.log))),
    ]
    if not math.isfinite(timing.bandwidth_bytes_per_s):
        del facts[3]
    if link is not None and timing.total_s > 0:
        share = timing.link_busy_s[link] / timing.total_s
        ends = f"{network.links[link].source} \N{RIGHTWARDS ARROW} {network.links[link].target}"
        facts.append(("busiest link", f"{ends}, busy {share:.0%} of the time"))
    return tuple(facts)


def _pictures(
    found: Synthesis, network: Topology, timing: Timing
) -> tuple[PageSection, PageSection]:
    links = draw_topology(
        network, link_loads=used_shares(network, timing), title=loads_title(network, timing)
    )
    chart = draw_schedule(found.schedule, timing, topology=network)
    return (
        PageSection(
            heading="What the links carry",
            how="Share of each link's capacity in use over the whole time: what is dark all "
            "through is the bottleneck.",
            parts=(picture_of(links, "What the links carry"),),
        ),
        PageSection(
            heading="The schedule",
            how="What each link does over time: sums in browns, copies in blues. A bar is one "
            "transfer; where there are thousands, the depth of the colour is how busy a link is.",
            parts=(picture_of(chart, "The schedule"),),
        ),
    )


def _recipes(asked: Asked) -> tuple[TextBlock, ...]:
    stem = asked.collective if asked.output is None else asked.output.name.partition(".")[0]
    file, xml = shlex.quote(f"{stem}.json"), shlex.quote(f"{stem}.xml")
    keep = [f"fivefold collectives verify {file}", f"fivefold collectives run {file}"]
    if asked.output is None or asked.output.name != f"{stem}.json":
        keep.insert(0, asked.command(f"{stem}.json"))
    msccl = [
        asked.command(f"algorithms/{stem}.xml"),
        "MSCCL_ALGO_DIR=$PWD/algorithms torchrun ... train.py  # msccl-executor-nccl",
        asked.command(f"{stem}.xml") + " --target msccl",
        f"MSCCL_XML_FILES={xml} NCCL_ALGO=MSCCL,RING,TREE torchrun ... train.py  # msccl",
    ]
    recipes = [
        ("Keep it, prove it again, execute it on this machine's CPU", "\n".join(keep)),
        ("As MSCCL XML, with an NCCL that has MSCCL", "\n".join(msccl)),
        ("As an execution plan of MSCCL++", asked.command(f"{stem}.plan.json")),
    ]
    if asked.collective in _RUN_BY_BACKEND:
        text = _BACKEND.format(file=f"{stem}.json", collective=asked.collective)
        recipes.append(("Under torch.distributed, in the training script", text))
    return tuple(TextBlock(text, heading=name, verbatim=True) for name, text in recipes)
