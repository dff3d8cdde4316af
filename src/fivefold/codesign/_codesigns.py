"""The four co-designs, as what the planners may know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from itertools import product

_LETTERS = {"vertical": "V", "horizontal": "H", "intra_inter": "II", "host_net": "HN"}


@dataclass(frozen=True, kw_only=True)
class CoDesigns:
    """Which information may cross which boundary.

    Args:
        vertical: Layers of one job tell each other intent and cost.
        horizontal: Jobs, and tasks of one job, know of each other.
        intra_inter: Links inside hosts and the fabric are planned as one network.
        host_net: Work may be given to switches that sum.

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
        """Nothing is exchanged: today's stack of layers."""
        return cls()

    @classmethod
    def all(cls) -> CoDesigns:
        """Everything is exchanged."""
        return cls(vertical=True, horizontal=True, intra_inter=True, host_net=True)

    @classmethod
    def combinations(cls) -> Iterator[CoDesigns]:
        """All sixteen, from none to all."""
        for flags in sorted(product((False, True), repeat=4), key=sum):
            names = (field.name for field in fields(cls))
            yield cls(**dict(zip(names, flags, strict=True)))

    def __contains__(self, other: CoDesigns) -> bool:
        """Return whether all that the other lets through is let through here as well."""
        return all(mine or not its for mine, its in zip(astuple(self), astuple(other), strict=True))
