"""The sketches that TACCL was published with, in our form.

Source: microsoft/taccl on GitHub (taccl/examples/sketch), arXiv 2111.04867.
"""

from __future__ import annotations

from fivefold.collectives.synthesis._sketch import Policy, Sketch, SwitchSketch
from fivefold.errors import ConfigurationError

_BOX = 16  # GPUs of a DGX-2


def published_sketch(name: str) -> Sketch:
    """One of TACCL's published sketches.

    Args:
        name: One of ``published_sketch_names``.

    Raises:
        ConfigurationError: The name is unknown.

    Examples:
        >>> sketch = published_sketch("sk1-ndv2-n2")
        >>> sketch.boxes, sketch.connections, sketch.symmetry
        (2, {0: (1,)}, ((8, 16),))
    """
    if name not in _PUBLISHED:
        hint = f"they are {', '.join(_PUBLISHED)}"
        raise ConfigurationError(f"there is no published sketch {name!r}", hint=hint)
    return _PUBLISHED[name]


def published_sketch_names() -> tuple[str, ...]:
    """Names of the published sketches.

    Examples:
        >>> len(published_sketch_names())
        11
    """
    return tuple(_PUBLISHED)


def _ndv2(name: str, boxes: int, connections: object) -> Sketch:
    symmetry = ((8, 8 * boxes),) if boxes > 1 else ()
    return Sketch(name=name, boxes=boxes, connections=connections, symmetry=symmetry)  # type: ignore[arg-type]


def _plane(policy: Policy) -> tuple[SwitchSketch, ...]:
    return (SwitchSketch(ranks=tuple(range(_BOX)), policy=policy),)


def _all() -> tuple[Sketch, ...]:
    pairs = range(1, _BOX, 2)
    relay = Sketch(
        name="sk1-dgx2-n2",
        boxes=2,
        chunks=2,
        switches=_plane("uc-min"),
        connections={odd: (odd - 1,) for odd in pairs},
        senders={odd: (odd - 1, odd) for odd in pairs},
        own_chunks_first=True,
        symmetry=((2, _BOX), (_BOX, 2 * _BOX)),
    )
    rails = Sketch(
        name="sk2-dgx2-n2",
        boxes=2,
        switches=_plane("uc-max"),
        connections="direct-map",
        senders={rank: (rank,) for rank in range(_BOX)},
        symmetry=((2, _BOX), (_BOX, 2 * _BOX)),
    )
    return (
        Sketch(name="sk-dgx2-n1", chunks=2, switches=_plane("uc-min"), symmetry=((2, _BOX),)),
        Sketch(name="sk1-dgx2-n1", switches=_plane("uc-min"), symmetry=((2, _BOX),)),
        relay,
        rails,
        Sketch(name="sk-ndv2-n1-cUp6", chunks=6),
        _ndv2("sk1-ndv2-n1", 1, "all"),
        _ndv2("sk1-ndv2-n2", 2, {0: (1,)}),
        _ndv2("sk1-ndv2-n4", 4, {0: (1,)}),
        _ndv2("sk2-ndv2-n2", 2, "fully-connected"),
        _ndv2("sk2-ndv2-n4", 4, "fully-connected"),
        _ndv2("sk3-ndv2-n2", 2, "direct-map"),
    )


_PUBLISHED = {sketch.name: sketch for sketch in _all()}
