"""What a run learned: its summary in a sentence, its key figures, and its curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from drumline.core.text import counted, duration, loss_text, rate
from drumline.report.charts import LOG_FROM, Axis, Point, Series, line_chart
from drumline.report.elements import Child, el, prose
from drumline.report.read import RunFacts

STATES = {
    "running": "●",
    "finished": "✓",
    "stopped": "⏸",
    "failed": "✗",
    "killed": "✗",
}
"""The states of a run, each with its sign."""
_KNOWN = ("time", "kind", "step", "epoch", "loss", "top1", "lr", "images_per_s", "data_share", "nonfinite")
FEW_CLASSES = 11
"""Below this number of classes, top-5 says nothing."""


def summary_sentence(run: RunFacts) -> str:
    """What was trained, on what, how good it is, how long it took and how it ended."""
    settings, facts, best = run.settings, run.facts, run.best
    model = str(settings.get("model.name", "a model"))
    if parameters := facts.get("parameters"):
        model += f" ({_short(parameters)} parameters)"
    verb = "is learning" if run.summary.state == "running" else "learned"
    text = f"{model} {verb}"
    if run.classes:
        text += f" {counted(len(run.classes), 'class', 'classes')}"
    text += f" of {data_name(run)}"
    if samples := facts.get("train_samples"):
        text += f" from {samples:,} images"
    if teacher := teacher_name(run):
        text += f", with {teacher} as its teacher"
    text += "."
    if best:
        top1 = run.score(best, "top1")
        images = f"{best['samples']:,} images" if isinstance(best.get("samples"), int) else "images"
        if top1 is not None:
            text += f" At its best, after epoch {best['epoch']:g}, it is right on {top1:.1%} of {images}"
            text += " that it was not trained on."
    else:
        text += " It has not been evaluated yet."
    return text + " " + _ending(run)


def _ending(run: RunFacts) -> str:
    took, state = duration(run.summary.seconds), run.summary.state
    epochs = run.facts.get("epochs")
    at = f"epoch {run.summary.epoch:.3g}" + (f" of {epochs:g}" if isinstance(epochs, int | float) else "")
    where = f" on {machine(run)}" if machine(run) else ""
    if state == "finished":
        return f"It finished {at} in {took}{where}."
    if state == "running":
        return f"It is at {at} after {took}{where}."
    ends = {"stopped": "was stopped", "failed": "failed", "killed": "was killed"}
    return f"It {ends.get(state, state)} at {at} after {took}{where}; `drumline resume` continues it."


def data_name(run: RunFacts) -> str:
    """The data set as a person calls it."""
    path = str(run.settings.get("data.path", ""))
    return Path(path).name or str(run.facts.get("source") or run.settings.get("data.source", "its data"))


def teacher_name(run: RunFacts) -> str:
    """The teacher; empty if there is none."""
    weights = run.settings.get("distill.teacher_weights") or []
    models = run.settings.get("distill.teacher") or []
    named = [str(each).rstrip("/").removesuffix("/weights/best.safetensors") for each in weights or models]
    return " and ".join(Path(each).name for each in named)


def machine(run: RunFacts) -> str:
    """The processes and the device."""
    count = run.environment.get("processes")
    device = str(run.environment.get("device", ""))
    processes = counted(count, "process", "processes") if isinstance(count, int) else ""
    return ", ".join(filter(None, [processes, device]))


def figures(run: RunFacts) -> Element:
    """The key figures."""
    best = run.best
    tiles: list[tuple[str, str, str]] = []
    if best:
        epoch = f"epoch {best['epoch']:g}"
        top1, top5, loss = (run.score(best, name) for name in ("top1", "top5", "loss"))
        if top1 is not None:
            tiles.append(("top-1", f"{top1:.1%}", f"best, {epoch}"))
        if top5 is not None and len(run.classes) >= FEW_CLASSES:
            tiles.append(("top-5", f"{top5:.1%}", epoch))
        if loss is not None:
            tiles.append(("loss", loss_text(loss), f"evaluation, {epoch}"))
    if run.report is not None:
        tiles.append(("calibration error", f"{run.report.calibration_error:.1%}", "ECE"))
    tiles.append(("time", duration(run.summary.seconds), f"{run.summary.step:,} steps"))
    if intervals := run.evidence.intervals:
        speed = intervals[-1].images_per_s
        ranks = intervals[-1].ranks
        tiles.append(("speed", rate(speed, "img"), counted(ranks, "process", "processes")))
    return el(
        "dl",
        [
            el("div", el("dt", name), el("dd", el("b", value), el("small", note)))
            for name, value, note in tiles
        ],
        class_="tiles",
    )


def points(lines: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """The values of a metric by epoch."""
    return [
        (float(line["epoch"]), float(line[name]))
        for line in lines
        if isinstance(line.get(name), int | float) and not isinstance(line[name], bool)
    ]


def loss_axis(values: Sequence[float]) -> Axis:
    """Logarithmic if the values differ by powers of ten."""
    positive = [value for value in values if value > 0]
    wide = bool(positive) and max(positive) > LOG_FROM * min(positive)
    return Axis("loss", _loss, log=wide)


def best_mark(run: RunFacts) -> tuple[float, str] | None:
    """Where the best evaluation is."""
    best = run.best
    return (float(best["epoch"]), f"★ best: epoch {best['epoch']:g}") if best.get("best") else None


def curves(run: RunFacts) -> list[Element]:
    """The charts of a run."""
    train, evals, best = run.train, run.evals, best_mark(run)
    losses = [
        Series("training", points(train, "loss"), 1),
        Series("evaluation", points(evals, "loss"), 2, 1, marked=True),
        Series("evaluation, averaged weights", points(evals, "average_loss"), 3, 2, marked=True),
    ]
    accuracy = [
        Series("training top-1", points(train, "top1"), 1),
        Series("top-1", points(evals, "top1"), 2, 1, marked=True),
        Series("top-1, averaged weights", points(evals, "average_top1"), 3, 2, marked=True),
    ]
    if len(run.classes) >= FEW_CLASSES:
        accuracy.append(Series("top-5", points(evals, "top5"), 4, 3, marked=True))
    accuracy.append(Series("agreement with the teacher", points(evals, "agreement"), 5, 4, marked=True))
    axis = loss_axis([y for each in losses for _, y in each.points])
    taught = "teacher_agreement"
    accuracy.append(Series("agreement in training", points(train, taught), 7, 6))
    terms = sorted(
        {
            name
            for line in train
            for name, value in line.items()
            if name not in (*_KNOWN, taught) and isinstance(value, float)
        }
    )
    named = [Series(name, points(train, name), 1 + number % 8, number) for number, name in enumerate(terms)]
    charts = [
        line_chart("Loss" + ", logarithmic" * axis.log, losses, axis, best=best),
        line_chart("Accuracy", accuracy, Axis("accuracy", "{:.0%}".format), best=best),
        line_chart(
            "Learning rate",
            [Series("learning rate", points(train, "lr"), 6)],
            Axis("learning rate", "{:.2g}".format),
        ),
        line_chart("Terms of the loss", named, Axis("loss", _loss)),
    ]
    return [chart for chart in charts if chart is not None]


def title(run: RunFacts) -> Element:
    """The name of a run and its state."""
    state = run.summary.state
    return el("h1", run.name, " ", el("span", f"{STATES.get(state, '')} {state}", class_=f"state {state}"))


def head(run: RunFacts) -> list[Child]:
    """The opening of the page of one run."""
    return [el("p", prose(summary_sentence(run)), class_="lead"), figures(run)]


def _loss(value: float) -> str:
    return f"{value:.3g}"


def _short(number: object) -> str:
    """11181642 -> `11.2 M`."""
    if not isinstance(number, int):
        return str(number)
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
