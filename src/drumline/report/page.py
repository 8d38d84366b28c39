"""The report on a run, or on several side by side: one self-contained HTML file.

Promises: opens from disk, works without its script, prints, and never asks the network for anything. Its own content
policy forbids that, and any script but its own. Made from the run folders alone. Text from a run folder is never read
as HTML.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from drumline.core.files import write_text
from drumline.report import learning, origin, quality, versus
from drumline.report.elements import Child, el, html, prose
from drumline.report.read import ODD, RunFacts, now, read_run
from drumline.report.speed import speed

PAGE = "report.html"
_HERE = Path(__file__).parent
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E"
    "%3Cpath d='M0 7h8M1 6V3M3 6V1M5 6V4M7 6V2' stroke='%230072b2' fill='none'/%3E%3C/svg%3E"
)
"""Without one, a browser asks the server for it."""


def write_page(run: Path) -> Path:
    """Writes the page of a run into its folder. Returns the file."""
    file = run / PAGE
    write_text(file, page([read_run(run)]), durable=False)
    return file


def page(runs: Sequence[RunFacts], live: bool = False) -> str:
    """The page. With `live`, it fetches itself again from time to time."""
    first = runs[0]
    title = first.name if len(runs) == 1 else " · ".join(versus.names(runs))
    sections = [each for each in (_single(first) if len(runs) == 1 else _several(runs)) if each is not None]
    links = [el("a", each.findtext("h2", ""), href=f"#{each.get('id')}") for each in sections]
    script = (_HERE / "script.js").read_text(encoding="utf-8")
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
    root = el(
        "html",
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", http_equiv="Content-Security-Policy", content=policy + "; connect-src 'self'" * live),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", name="color-scheme", content="light dark"),
            el("title", f"{title} – drumline"),
            el("link", rel="icon", href=ICON),
            el("style", (_HERE / "style.css").read_text(encoding="utf-8")),
        ),
        el(
            "body",
            el("a", "Skip to the content", href="#content", class_="skip"),
            el(
                "header",
                el("span", "drumline", class_="brand"),
                el("nav", links, aria_label="Sections"),
                el("span", "● live", class_="live") if live else None,
                el("button", "Theme", type="button", id="theme", hidden=""),
            ),
            el("main", _head(runs), sections, id="content"),
            el("footer", _origin(first)),
            el("script", script),
            data_live="" if live else None,
        ),
        lang="en",
    )
    return html(root)


def _head(runs: Sequence[RunFacts]) -> Element:
    if len(runs) == 1:
        return el(
            "div",
            learning.title(runs[0]),
            _shown(lambda: learning.head(runs[0])),
            id="summary",
            class_="head",
        )
    text = f"{len(runs)} runs side by side. Each run has the same colour, dashes and marker in every chart."
    return el("div", el("h1", "Comparison"), el("p", text, class_="lead"), id="summary", class_="head")


def _single(run: RunFacts) -> list[Element | None]:
    return [
        _section("Learning", "learning", lambda: [el("div", learning.curves(run), class_="charts")])
        if run.train or run.evals
        else None,
        _section("Speed", "speed", lambda: speed(run)),
        _section("Confusions", "confusions", lambda: quality.confusion(run)),
        _section("Worst mistakes", "mistakes", lambda: quality.mistakes(run)),
        _section("Classes", "classes", lambda: quality.classes(run)),
        _section("Confidence", "confidence", lambda: quality.calibration(run)),
        _section("Teacher", "teacher", lambda: quality.teacher(run)),
        _section("Training images", "images", lambda: quality.batch(run)),
        _section("Proof", "proof", lambda: origin.proof(run)),
        _section("Recipe", "recipe", lambda: [*origin.recipe(run), *origin.environment(run)]),
    ]


def _several(runs: Sequence[RunFacts]) -> list[Element | None]:
    return [
        _section("Results", "results", lambda: [versus.results(runs)]),
        _section("Curves", "learning", lambda: [el("div", versus.curves(runs), class_="charts")]),
        _section("Settings", "settings", lambda: [versus.settings(runs)]),
        _section("Classes", "classes", lambda: versus.by_class(runs)),
    ]


def _section(title: str, name: str, content: Callable[[], Sequence[Child]]) -> Element | None:
    """A section; None if it is empty."""
    made = _shown(content)
    if not any(each is not None for each in made):
        return None
    return el("section", el("h2", title), made, id=name, aria_label=title)


def _shown(content: Callable[[], Sequence[Child]]) -> Sequence[Child]:
    """The content. What a damaged or foreign file does not allow costs this part of the page alone."""
    try:
        return content()
    except ODD as error:
        text = f"This cannot be shown: a file of the run has odd content ({type(error).__name__}: {error})."
        return [el("p", text, class_="none")]


def _origin(run: RunFacts) -> list[Child]:
    packages = run.environment.get("packages")
    version = packages.get("drumline", "") if isinstance(packages, dict) else ""
    still = " while the run was training; `drumline report RUN` writes it again" * (
        run.summary.state == "running"
    )
    return prose(f"Written by drumline {version} at {now()}{still}.")


def read_runs(folders: Sequence[Path]) -> list[RunFacts]:
    """The runs in the order given."""
    return [read_run(folder) for folder in folders]
