"""Elements of a page: a tree that is written as HTML, never text pasted into text.

Promises: text from outside (names, paths, values) stays text, whatever it contains: the standard library's writer
escapes it, and characters that no document may contain are spelled out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from drumline.core.text import message

Child = Element | str | None
Cell = Child | Iterable[Child]
_SAME_NAME = {"class_": "class", "for_": "for"}


def el(tag: str, *children: Cell, **attributes: str | float | None) -> Element:
    """An element. `class_` is the attribute `class`, `stroke_width` is `stroke-width`; None leaves one out."""
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            made.set(_SAME_NAME.get(name) or name.replace("_", "-"), message(_text(value)))
    for child in children:
        add(made, child)
    return made


def add(parent: Element, child: Cell) -> None:
    """Appends an element, text, or several of them."""
    if child is None:
        return
    if isinstance(child, Element):
        parent.append(child)
    elif isinstance(child, str):
        if len(parent):
            parent[-1].tail = (parent[-1].tail or "") + message(child)
        else:
            parent.text = (parent.text or "") + message(child)
    else:
        for each in child:
            add(parent, each)


def table(
    caption: str,
    header: Sequence[Cell],
    rows: Iterable[Sequence[Cell]],
    class_: str | None = None,
    numbers: bool = True,
) -> Element:
    """A table whose rows are named by their first cell. It scrolls on its own where the screen is narrow."""
    head = el("tr", [el("th", each, scope="col") for each in header])
    body = [
        el("tr", el("th", first, scope="row"), [el("td", each) for each in rest]) for first, *rest in rows
    ]
    kind = " ".join(filter(None, [class_, "numbers" if numbers else None])) or None
    made = el("table", el("caption", caption), el("thead", head), el("tbody", body), class_=kind)
    return el("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def folded(title: str, *content: Cell, open_: bool = False) -> Element:
    """Content that opens on request, with the keyboard, too."""
    return el("details", el("summary", title), *content, open="" if open_ else None)


def prose(text: str) -> list[Child]:
    """The text with its `code` as such."""
    return [el("code", part) if number % 2 else part for number, part in enumerate(text.split("`"))]


def html(root: Element) -> str:
    """The document."""
    return "<!doctype html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"


def _text(value: str | float) -> str:
    """Coordinates need no more than two decimals."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
