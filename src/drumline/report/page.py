"""The page of a run, or of several side by side: one HTML file without anything to load.

Promises: opens from disk, works without its script, prints, and never asks the network for anything, which its own
content policy forbids. Made from the run folders alone. Text from a run folder is never read as HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from drumline.core.files import write_text
from drumline.report import learning, origin, quality, versus
from drumline.report.elements import Child, el, html, prose
from drumline.report.origin import section
from drumline.report.read import RunFacts, now, read_run
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
    write_text(file, page([read_run(run)]))
    return file


def page(runs: Sequence[RunFacts], live: bool = False) -> str:
    """The page. With `live`, it fetches itself again from time to time."""
    first = runs[0]
    title = first.name if len(runs) == 1 else " · ".join(versus.names(runs))
    sections = [each for each in (_single(first) if len(runs) == 1 else _several(runs)) if each is not None]
    links = [el("a", each.findtext("h2", ""), href=f"#{each.get('id')}") for each in sections]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
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
            el("script", (_HERE / "script.js").read_text(encoding="utf-8")),
            data_live="" if live else None,
        ),
        lang="en",
    )
    return html(root)


def _head(runs: Sequence[RunFacts]) -> Element:
    if len(runs) == 1:
        return el("div", learning.head(runs[0]), id="summary", class_="head")
    text = f"{len(runs)} runs side by side. Each has the same colour, dashes and marker in every chart."
    return el("div", el("h1", "Comparison"), el("p", text, class_="lead"), id="summary", class_="head")


def _single(run: RunFacts) -> list[Element | None]:
    report = run.report
    seen: list[Child] = []
    if run.batch is not None:
        text = f"The first images of the batch of step {run.batch.step + 1:,}, as the model sees them."
        seen = [el("p", text), quality.pictures(run.batch, mistakes=False)]
    wrong: list[Child] = []
    if report is not None and run.mistakes is not None and run.mistakes.step == run.evaluation_step:
        text = (
            "Wrong predictions of which the model is most certain. Labels that are wrong often show up here."
        )
        wrong = [el("p", text), quality.pictures(run.mistakes, mistakes=True)]
    return [
        section("Learning", "learning", el("div", learning.curves(run), class_="charts"))
        if run.train or run.evals
        else None,
        section("Speed", "speed", speed(run)),
        section("Confusions", "confusions", quality.confusion(report)) if report else None,
        section("Worst mistakes", "mistakes", wrong),
        section("Classes", "classes", quality.classes(report)) if report else None,
        section("Confidence", "confidence", quality.calibration(report)) if report else None,
        section("Teacher", "teacher", quality.teacher(run)),
        section("Training images", "images", seen),
        section(
            "Proof",
            "proof",
            origin.events(run),
            origin.bits(run),
            origin.certificate(run),
            origin.timeline(run),
        ),
        section("Recipe", "recipe", origin.recipe(run), origin.environment(run)),
    ]


def _several(runs: Sequence[RunFacts]) -> list[Element | None]:
    return [
        section("Results", "results", versus.results(runs)),
        section("Curves", "learning", el("div", versus.curves(runs), class_="charts")),
        section("Settings", "settings", versus.settings(runs)),
        section("Classes", "classes", versus.by_class(runs)),
    ]


def _origin(run: RunFacts) -> list[Child]:
    packages = run.environment.get("packages")
    version = packages.get("drumline", "") if isinstance(packages, dict) else ""
    still = " while the run went on; `drumline report RUN` writes it again" * (run.summary.state == "running")
    return prose(f"Written by drumline {version} at {now()}{still}.")


def read_runs(folders: Sequence[Path]) -> list[RunFacts]:
    """The runs in the order given."""
    return [read_run(folder) for folder in folders]
