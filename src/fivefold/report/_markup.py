"""HTML and SVG elements; all text is escaped but what is an element already."""

from __future__ import annotations

import html


class Markup(str):
    """Text that is markup."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element.

    Attributes that are None or False are left out, True stands without a value; ``cls`` is the
    class, and an underscore is a hyphen.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = "class" if key == "cls" else key.replace("_", "-")
        plain = f"{value:g}" if isinstance(value, float) else str(value)
        written.append(f" {attribute}" if value is True else f' {attribute}="{_escaped(plain)}"')
    start = f"<{name}{''.join(written)}>"
    if name in ("br", "img", "meta"):
        return Markup(start)
    return Markup(f"{start}{join(children)}</{name}>")


def join(children: tuple[str, ...] | list[str]) -> Markup:
    """Return elements and escaped text, one behind the other."""
    return Markup(
        "".join(child if isinstance(child, Markup) else _escaped(child) for child in children)
    )


def _escaped(text: str) -> str:
    """Return text that may stand between tags, and between double quotes."""
    return html.escape(text, quote=False).replace('"', "&quot;")
