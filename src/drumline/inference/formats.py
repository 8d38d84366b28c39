"""Predictions as a table, CSV, JSON, or a page of pictures.

Promises: names from files and archives cannot control a terminal or add markup to a page. The page is one file
without scripts and without links to a network. Bytes of a name that are not valid text are escaped.
"""

from __future__ import annotations

import base64
import csv
import html
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from PIL import Image

from drumline.core.text import counted, printable
from drumline.data.image.decode import decode
from drumline.inference.predict import PredictedImage

Watch = Callable[[Sequence[PredictedImage]], Iterable[PredictedImage]]

MAX_PICTURES = 1000
"""Pictures on a page; the page says how many images it leaves out."""
_SIDE = 160
"""Pixels of the longer side of a picture."""


def table_line(found: PredictedImage, width: int) -> str:
    """One image as a line: its name, padded to `width`, and its classes."""
    best = ", ".join(f"{printable(each.label)} {each.probability:.1%}" for each in found.best)
    return f"{printable(found.image.name):<{width}}  {best or f'error: {printable(found.error)}'}"


def json_rows(results: Iterable[PredictedImage]) -> list[dict[str, Any]]:
    """A dictionary for each image. With several classes for each image, `top` lists them all."""
    return [_json_row(found) for found in results]


def _json_row(found: PredictedImage) -> dict[str, Any]:
    row: dict[str, Any] = {"path": _text(found.image.name), "label": None, "probability": None}
    if not found.best:
        return row | {"error": _text(found.error)}
    top = [{"label": each.label, "probability": each.probability} for each in found.best]
    return row | top[0] | ({"top": top} if len(top) > 1 else {})


def csv_text(results: Iterable[PredictedImage], top: int) -> str:
    """A header, and a row for each image."""
    text = io.StringIO()
    ranks = ["", *(f"_{rank}" for rank in range(2, top + 1))]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["path", *(f"{name}{rank}" for rank in ranks for name in ("label", "probability")), "error"]
    )
    for found in results:
        cells = [str(cell) for each in found.best for cell in (each.label, each.probability)]
        empty = [""] * (2 * len(ranks) - len(cells))
        writer.writerow([_text(found.image.name), *cells, *empty, _text(found.error)])
    return text.getvalue()


def _text(name: str) -> str:
    """A name as valid Unicode: bytes of a file name that are not UTF-8 become `\\udcff` and the like."""
    return name.encode("utf-8", "backslashreplace").decode()


def page(results: Sequence[PredictedImage], model: str, watch: Watch = iter) -> str:
    """A page of pictures with their predictions. Reads the images again to draw them; `watch` shows the progress."""
    shown = results[:MAX_PICTURES]
    left_out = len(results) - len(shown)
    summary = counted(len(results), "image") + (f"; the first {len(shown):,} are shown" if left_out else "")
    cards = "\n".join(map(_card, watch(shown)))
    return _PAGE.format(model=html.escape(_text(model)), summary=summary, cards=cards)


def _card(found: PredictedImage) -> str:
    name = html.escape(_text(found.image.name))
    bars = "".join(
        f'<li><span>{html.escape(each.label)}</span><meter min="0" max="1" value="{each.probability:.4f}"></meter>'
        f"<b>{each.probability:.1%}</b></li>"
        for each in found.best
    )
    if not found.best:
        error = html.escape(_text(found.error))
        return f'<figure><p class="none">error: {error}</p><figcaption>{name}</figcaption></figure>'
    label = html.escape(found.best[0].label, quote=True)
    return (
        f'<figure><img src="data:image/jpeg;base64,{_thumbnail(found)}" alt="{label}" loading="lazy">'
        f"<ol>{bars}</ol><figcaption>{name}</figcaption></figure>"
    )


def _thumbnail(found: PredictedImage) -> str:
    image = decode(found.image.read(), found.image.name, "apply")
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=75)
    return base64.b64encode(file.getvalue()).decode()


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Predictions of {model}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }}
h1 {{ font-size: 1.3rem; margin: 0; }}
main {{ display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(13.5rem, 1fr));
  margin-top: 1.5rem; }}
figure {{ border: 1px solid color-mix(in srgb, currentColor 20%, transparent); border-radius: 8px; margin: 0;
  padding: .6rem; break-inside: avoid; }}
img {{ display: block; height: 160px; margin: 0 auto; max-width: 100%; object-fit: contain; }}
ol {{ list-style: none; margin: .6rem 0 .3rem; padding: 0; }}
li {{ align-items: center; display: grid; gap: .4rem; font-size: .88rem; grid-template-columns: 1fr 2.4rem 3rem; }}
li span {{ overflow-wrap: anywhere; }}
li b {{ font-variant-numeric: tabular-nums; font-weight: 500; text-align: right; }}
meter {{ width: 100%; }}
figcaption {{ font-size: .8rem; opacity: .75; overflow-wrap: anywhere; }}
.none {{ align-content: center; height: 160px; margin: 0; text-align: center; }}
</style>
</head>
<body>
<h1>Predictions of {model}</h1>
<p>{summary}</p>
<main>
{cards}
</main>
</body>
</html>
"""
