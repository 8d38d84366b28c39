"""Where the time of a run went: the verdict of `drumline why`, the parts of a step, throughput and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from xml.etree.ElementTree import Element

from drumline.core.account import PARTS
from drumline.core.text import percent, rate
from drumline.diagnosis.evidence import Evidence, Interval, merged
from drumline.diagnosis.figures import Figures
from drumline.diagnosis.slowdown import Slowdown
from drumline.diagnosis.verdict import MEANINGS, time_parts
from drumline.report.charts import Axis, Series, line_chart, parts_legend, stacked_columns, thinned
from drumline.report.elements import Child, el, folded, prose, table
from drumline.report.learning import points
from drumline.report.read import RunFacts

LOOKS = {
    "compute": "p-forward",
    "forward": "p-forward",
    "backward": "p-backward",
    "teacher": "p-teacher",
    "optimizer": "p-optimizer",
    "exchange": "p-exchange wait",
    "data": "p-data wait",
    "copy": "p-copy wait",
    "late": "p-late wait",
    "other": "p-other",
    "evaluation": "p-evaluation",
    "checkpoint": "p-saving",
}
"""The parts of the time in the order of a bar, and the look of each. Waiting is hatched."""
NAMES = MEANINGS | {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "guards, logs, the rest",
}
"""What each is called, as `drumline why` calls it. On a CPU, computing is shown in its parts."""
REST = ("compute", "guards", "log", "other")
"""The parts of `core/account.py` that are the rest."""
RANKS = 32
COLUMNS = 48


def speed(run: RunFacts) -> list[Child]:
    """The section."""
    intervals = run.evidence.intervals
    if not intervals:
        return [el("p", "No times are recorded yet.", class_="none")]
    shown: list[Child] = [verdict(run.slowdowns)]
    charts: list[Child] = [over_time(run.evidence)]
    axis = Axis("images per second", "{:,.0f}".format, low=0.0)
    charts.append(
        line_chart(
            "Throughput, img/s",
            [Series("images per second", points(run.train, "images_per_s"), 3)],
            axis,
        )
    )
    charts += resources(intervals)
    return [*shown, per_rank(run.evidence), el("div", charts, class_="charts")]


def verdict(found: Sequence[Slowdown] | None) -> Element | None:
    """What `drumline why` says."""
    if found is None:
        return None
    if not found:
        return el(
            "p",
            el("b", "Nothing stands out. "),
            prose("`drumline why` found no reason why this run is slow."),
            class_="verdict",
        )
    items = []
    for each in found:
        change = f"Try `{each.flag}`. " if each.flag else ""
        change += f"{_sentence(each.fix)} " if each.fix else ""
        if each.saving:
            change += (
                f"Predicted: {rate(each.images_per_s, 'img')} → {rate(each.predicted_images_per_s, 'img')}, "
                f"{percent(each.saving)} of the time saved."
            )
        said = el("p", prose(_sentence(each.text)))
        items.append(el("li", said, el("p", prose(change), class_="change") if change else None))
    return el("div", el("h3", "What would make it faster"), el("ol", items), class_="verdict")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def parts_of(evidence: Evidence, rank: int) -> dict[str, float]:
    """Milliseconds of a rank's mean step by part, with evaluations and saves. `evidence` has one interval."""
    figures = Figures(evidence)
    if figures.on_gpu:
        found = time_parts(figures, rank)
    else:
        found = {part: figures.get(f"host_{part}_ms")[rank] for part in LOOKS if part in PARTS}
        found["other"] = sum(figures.get(f"host_{part}_ms")[rank] for part in REST)
        del found["compute"]
    return {part: max(0.0, found[part]) for part in LOOKS if part in found}


def mean_parts(evidence: Evidence) -> dict[str, float]:
    """The mean over the ranks."""
    every = [parts_of(evidence, rank) for rank in range(Figures(evidence).ranks)]
    return {part: sum(each[part] for each in every) / len(every) for part in every[0]}


def per_rank(evidence: Evidence) -> Element:
    """A row for each process: a bar of the parts of its mean step, and its memory."""
    whole = Figures(evidence).whole
    every = {rank: parts_of(replace(evidence, intervals=[whole]), rank) for rank in range(whole.ranks)}
    longest = max(sum(parts.values()) for parts in every.values()) or 1.0
    used = {kind: LOOKS[kind] for kind in every[0] if any(parts[kind] > 0 for parts in every.values())}
    memory = "memory_mb" in whole.values
    rows = []
    for rank in thinned(list(every), RANKS):
        parts = every[rank]
        bar = el(
            "div",
            [
                el(
                    "i",
                    class_=f"seg {class_}",
                    style=f"width:{100 * parts[kind] / longest:.2f}%",
                    title=f"{NAMES[kind]}: {parts[kind]:.1f} ms",
                )
                for kind, class_ in used.items()
                if parts[kind] / longest > 0.001
            ],
            class_="bar",
            aria_hidden="true",
        )
        cells: list[Child] = [f"{rank}", bar, f"{sum(parts.values()):.1f}"]
        rows.append([*cells, *([f"{whole.get('memory_mb')[rank]:,.0f}"] if memory else [])])
    header = ["rank", "mean step", "ms", *(["memory, MiB"] if memory else [])]
    left_out = ", without the first interval" if len(evidence.intervals) > 1 else ""
    bars = table(f"Mean step of each process{left_out}", header, rows, class_="ranks")
    exact = [
        [NAMES[kind], *(f"{every[rank][kind]:.2f}" for rank in thinned(list(every), RANKS))] for kind in used
    ]
    numbers = table("Milliseconds by part and rank", ["part", *map(str, thinned(list(every), RANKS))], exact)
    legend = parts_legend({NAMES[kind]: class_ for kind, class_ in used.items()})
    return el("div", legend, bars, folded("Numbers", numbers), class_="card")


def over_time(evidence: Evidence) -> Element:
    """A column for each interval, or for several."""
    columns = []
    for group in map(merged, grouped(evidence.intervals)):
        parts = mean_parts(replace(evidence, intervals=[group]))
        columns.append((f"{group.epoch:.3g}", {NAMES[part]: value for part, value in parts.items()}))
    axis = Axis("milliseconds", lambda value: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}")
    kinds = {NAMES[part]: look for part, look in LOOKS.items() if NAMES[part] in columns[0][1]}
    return stacked_columns("Step over time, ms (colours as above)", columns, kinds, axis, "epoch")


def grouped(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """Neighbours together, so that there are not too many groups and none is much shorter than the others: an
    evaluation would look long beside few steps."""
    least = max(max(each.steps for each in intervals) / 2, sum(each.steps for each in intervals) / COLUMNS)
    groups: list[list[Interval]] = [[]]
    for each in intervals:
        if groups[-1] and sum(one.steps for one in groups[-1]) >= least:
            groups.append([])
        groups[-1].append(each)
    if len(groups) > 1 and sum(one.steps for one in groups[-1]) < least:
        short = groups.pop()
        groups[-1] += short
    return groups


def resources(intervals: Sequence[Interval]) -> list[Child]:
    """Memory and cores over time: the highest and the lowest rank where there are several."""
    charts: list[Child] = []
    names = {
        "gpu_use": ("Use of a GPU", "{:.0%}"),
        "memory_mb": ("Memory of a process, MiB", "{:,.0f}"),
        "gpu_memory_mb": ("GPU memory, MiB", "{:,.0f}"),
        "own_cores": ("Cores used by a process", "{:.2g}"),
    }
    for name, (title, form) in names.items():
        having = [each for each in intervals if name in each.values]
        if not having:
            continue
        lines = [
            Series("highest rank", [(each.epoch, max(each.get(name))) for each in having], 1, 0, marked=True)
        ]
        if having[-1].ranks > 1:
            lowest = [(each.epoch, min(each.get(name))) for each in having]
            lines.append(Series("lowest rank", lowest, 2, 1, marked=True))
        charts.append(line_chart(title, lines, Axis(title, form.format, low=0.0)))
    return charts
