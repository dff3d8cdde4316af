"""What the page of a synthesized collective shows, as plain data.

Who makes the page fills these in; nothing here knows what a schedule or a topology is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """What one method of the search came to.

    Args:
        name: The method.
        note: Its algorithm, or why it has none.
        time_s: Time of its best algorithm; None where there is none.
        solver_s: Seconds that it took.
        chosen: Whether the answer is its.

    Examples:
        >>> MethodRow(name="trees", note="spanning trees", time_s=1e-3, solver_s=2.0).chosen
        False
    """

    name: str
    note: str
    time_s: float | None
    solver_s: float
    chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class SizeCurve:
    """Predicted times of one algorithm by message size.

    Args:
        name: The algorithm.
        sizes_bytes: Message sizes, rising.
        times_s: A time for each.
        kind: "synthesized", "library" or "bound" (what nothing can beat).

    Examples:
        >>> SizeCurve(name="ring", sizes_bytes=(1e3, 1e6), times_s=(1e-5, 1e-3)).kind
        'library'
    """

    name: str
    sizes_bytes: tuple[float, ...]
    times_s: tuple[float, ...]
    kind: str = "library"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing, to be put into the page itself.

    Args:
        title: What it is, in a few words.
        caption: How to read it.
        content: The file.
        media_type: Such as ``image/svg+xml`` or ``image/png``.

    Examples:
        >>> Picture(title="links", caption="", content=b"<svg/>").media_type
        'image/svg+xml'
    """

    title: str
    caption: str
    content: bytes
    media_type: str = "image/svg+xml"


@dataclass(frozen=True, kw_only=True)
class CollectivePage:
    """A synthesized algorithm and how good it is.

    Args:
        title: Title of the page.
        finding: The result in a sentence or two.
        time_s: Predicted time of the algorithm.
        bound_s: What nothing can beat; 0 where nothing is known.
        bound_reason: Why nothing can beat it.
        caveats: What a reader must know to believe the right things.
        asked: What was asked: names and values.
        answer: What was found: names and values.
        methods: What each method came to, in the order in which they were asked.
        curves: Times by message size; may be empty.
        fastest: Ranges of message sizes and what is fastest there.
        fastest_of_library: The same among the library's algorithms alone.
        pictures: The drawings.
        recipes: Ways to run it: a heading and the text to type.

    Examples:
        >>> page = CollectivePage(title="all-gather", finding="1 ms.", time_s=1e-3, bound_s=1e-3)
        >>> page.gap
        0.0
    """

    title: str
    finding: str
    time_s: float
    bound_s: float
    bound_reason: str = ""
    caveats: tuple[str, ...] = ()
    asked: tuple[tuple[str, str], ...] = ()
    answer: tuple[tuple[str, str], ...] = ()
    methods: tuple[MethodRow, ...] = ()
    curves: tuple[SizeCurve, ...] = ()
    fastest: tuple[tuple[str, str], ...] = ()
    fastest_of_library: tuple[tuple[str, str], ...] = ()
    pictures: tuple[Picture, ...] = ()
    recipes: tuple[tuple[str, str], ...] = ()

    @property
    def gap(self) -> float | None:
        """Share by which the time is above the bound; None where there is no bound."""
        return self.gap_of(self.time_s)

    def gap_of(self, time_s: float | None) -> float | None:
        """Share by which a time is above the bound; None where one of them is not known."""
        if time_s is None or self.bound_s <= 0:
            return None
        return max(time_s / self.bound_s - 1.0, 0.0)
