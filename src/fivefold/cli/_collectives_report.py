"""The page of a synthesized collective: gathers what `fivefold.report` shows, as plain data."""

from __future__ import annotations

import io
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fivefold.cli._collectives_sizes import fastest_ranges, price_sizes
from fivefold.units import format_bytes, format_bytes_per_s, format_duration_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fivefold.collectives.schedules import Bound, CostModel, Timing
    from fivefold.collectives.synthesis import Synthesis
    from fivefold.network.topology import Topology
    from fivefold.report import CollectivePage, Picture

_MOST_SVG_BYTES = 400_000  # beyond, the same picture in pixels is smaller and draws faster
_MOST_NAMES = 6
_RUN_BY_BACKEND = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
_ARGUMENTS = {
    "latency": "Latency:",
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
    """The question as it was typed."""

    collective: str
    topology: str
    size: str
    size_bytes: float
    method: str
    time_limit: str
    bandwidth: str | None
    latency: str | None
    output: Path | None
    model: str = "serial"
    root: int = 0
    chunks: int | None = None
    sketch: str | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """The collective as it is written in text."""
        return self.collective.replace("_", "-")

    def command(self, output: str) -> str:
        """The command that makes a file of the answer."""
        words = ["fivefold", "collectives", "synthesize", self.collective, self.topology]
        words += ["--size", self.size, "--method", self.method, "--time-limit", self.time_limit]
        words += ["--model", self.model] * (self.model != "serial")
        more = {
            "--root": self.root, "--chunks": self.chunks, "--sketch": self.sketch,
            "--seed": self.seed, "--bandwidth": self.bandwidth, "--latency": self.latency,
        }  # fmt: skip
        words += [str(word) for pair in more.items() if pair[1] for word in pair]
        return shlex.join([*words, "--output", output])


def used_shares(network: Topology, timing: Timing) -> NDArray[np.float64]:
    """Share of every link's capacity that is in use from start to end."""
    most_bytes = network.capacities_bytes_per_s * timing.total_s
    shares = timing.link_bytes / np.maximum(most_bytes, np.finfo(np.float64).tiny)
    return np.asarray(np.minimum(shares, 1.0))


def loads_title(network: Topology, timing: Timing) -> str:
    """What the picture of the links shows."""
    shares = used_shares(network, timing)
    busiest = f", the busiest carries {format_bytes(float(timing.link_bytes.max(initial=0.0)))}"
    return (
        f"{network.name}: use of the links in {format_duration_s(timing.total_s)}\n"
        f"{int((shares > 0).sum())} of {network.num_links} links are used{busiest}"
    )


def write_report(path: Path, found: Synthesis, network: Topology, *, asked: Asked) -> None:
    """Write the page."""
    from fivefold.report import write_collective_html  # noqa: PLC0415 - keeps --help fast

    write_collective_html(_page(found, network, asked), path)


def _page(found: Synthesis, network: Topology, asked: Asked) -> CollectivePage:
    from fivefold.collectives.schedules import evaluate  # noqa: PLC0415 - keeps --help fast
    from fivefold.report import CollectivePage, MethodRow, SizeCurve  # noqa: PLC0415 - as above

    model: CostModel = asked.model  # type: ignore[assignment]
    timing = evaluate(found.schedule, network, size_bytes=asked.size_bytes, model=model)
    prices = price_sizes(found.schedule, network, asked.size_bytes, model=model)
    textbook = ("library", "synthesized") if found.method == "library" else ("library",)
    what = f"{asked.name} of {format_bytes(asked.size_bytes)} on {network.name}"
    return CollectivePage(
        title=what,
        finding=_finding(found, what),
        time_s=found.time_s,
        bound_s=found.bound.seconds,
        bound_reason=_reason(found.bound, network),
        caveats=_caveats(network),
        asked=_question(network, asked, timing),
        answer=_answer(found, network, timing),
        methods=tuple(
            MethodRow(
                name=attempt.method,
                note=attempt.note.replace("_", " ") if attempt.time_s else attempt.note,
                time_s=attempt.time_s,
                solver_s=attempt.spent_s,
                chosen=attempt.method == found.method,
            )
            for attempt in found.log
        ),
        curves=tuple(
            SizeCurve(
                name=price.name,
                sizes_bytes=prices.sizes_bytes,
                times_s=price.times_s,
                kind=price.kind,
            )
            for price in prices.curves
        ),
        fastest=fastest_ranges(prices, "synthesized", "library"),
        fastest_of_library=fastest_ranges(prices, *textbook),
        pictures=_pictures(found, network, timing),
        recipes=_recipes(asked),
    )


def _finding(found: Synthesis, what: str) -> str:
    took, least = format_duration_s(found.time_s), format_duration_s(found.bound.seconds)
    by = f"The {what} takes {took} by {found.schedule.name.replace('_', ' ')}"
    if found.optimal:
        return f"{by}. That is proved to be optimal: it meets the lower bound."
    if found.bound.seconds <= 0:
        return f"{by}. There is no lower bound to compare it with."
    share = f"{100 * found.gap:.1f} %" if found.gap < 10 else f"{1 + found.gap:.1f} times"
    return f"{by}. Nothing can take less than {least}: it is within {share} of the optimum."


def _caveats(network: Topology) -> tuple[str, ...]:
    if network.num_links and not network.latencies_s.any():
        return (_NO_LATENCY,)
    return ()


def _reason(bound: Bound, network: Topology) -> str:
    """The bound's certificate in words."""
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


def _pictures(found: Synthesis, network: Topology, timing: Timing) -> tuple[Picture, ...]:
    from fivefold.collectives.schedules import draw_schedule  # noqa: PLC0415 - keeps --help fast
    from fivefold.network.topology import draw_topology  # noqa: PLC0415 - as above

    links = draw_topology(
        network, link_loads=used_shares(network, timing), title=loads_title(network, timing)
    )
    chart = draw_schedule(found.schedule, timing, topology=network)
    return (
        _picture(
            links,
            "What the links carry",
            "Share of each link's capacity in use over the whole time: what is dark all through "
            "is the bottleneck.",
        ),
        _picture(
            chart,
            "The schedule",
            "What each link does over time: sums in browns, copies in blues. A bar is one "
            "transfer; where there are thousands, the depth of the colour is how busy a link is.",
        ),
    )


def _picture(figure: Any, title: str, caption: str) -> Picture:
    import matplotlib as mpl  # noqa: PLC0415 - heavy and optional

    from fivefold.report import Picture  # noqa: PLC0415 - keeps --help fast

    content = io.BytesIO()
    # The same picture is the same file: no date, and ids that do not depend on the run.
    with mpl.rc_context({"svg.hashsalt": "fivefold"}):
        figure.savefig(content, format="svg", bbox_inches="tight", metadata={"Date": None})
    if content.tell() <= _MOST_SVG_BYTES:
        return Picture(title=title, caption=caption, content=content.getvalue())
    content = io.BytesIO()
    figure.savefig(content, format="png", bbox_inches="tight", dpi=150)
    return Picture(title=title, caption=caption, content=content.getvalue(), media_type="image/png")


def _recipes(asked: Asked) -> tuple[tuple[str, str], ...]:
    stem = asked.collective if asked.output is None else asked.output.name.partition(".")[0]
    file, xml = shlex.quote(f"{stem}.json"), shlex.quote(f"{stem}.xml")
    keep = [f"fivefold collectives verify {file}", f"fivefold collectives run {file}"]
    if asked.output is None or asked.output.name != f"{stem}.json":
        keep.insert(0, asked.command(f"{stem}.json"))
    msccl = [
        asked.command(f"{stem}.xml"),
        f"MSCCL_XML_FILES={xml} NCCL_ALGO=MSCCL,RING,TREE torchrun ... train.py",
    ]
    recipes = [
        ("Keep it, prove it again, execute it on this machine's CPU", "\n".join(keep)),
        ("As MSCCL XML, with an NCCL that has MSCCL", "\n".join(msccl)),
        ("As an execution plan of MSCCL++", asked.command(f"{stem}.plan.json")),
    ]
    if asked.collective in _RUN_BY_BACKEND:
        text = _BACKEND.format(file=f"{stem}.json", collective=asked.collective)
        recipes.append(("Under torch.distributed, in the training script", text))
    return tuple(recipes)
