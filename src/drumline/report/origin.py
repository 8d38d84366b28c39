"""Where a result comes from: recipe and command, environment, certificate, timeline, fingerprints, interruptions."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from typing import Any

from drumline.config.fields import recipe_fields
from drumline.config.toml import short_literal
from drumline.core.text import counted
from drumline.report.elements import Cell, Child, el, folded, prose, table
from drumline.report.read import RunFacts

EVENTS = 60
SIGNS = {
    "started": "▶ started",
    "resumed": "↻ resumed",
    "removed": "↻ metrics removed",
    "finished": "✓ finished",
    "stopped": "⏸ stopped",
    "failed": "✗ failed",
    "killed": "✗ killed",
    "launcher": "↻ launcher",
    "warning": "⚠ warning",
}


def recipe(run: RunFacts) -> list[Child]:
    """The command, the settings that are not the default, and all of them."""
    parts: list[Child] = []
    if typed := commands(run):
        title = "The command:" if len(typed) == 1 else "The commands:"
        parts += [el("p", title), el("pre", el("code", "\n".join(typed)), tabindex="0")]
    if not run.settings:
        return [*parts, el("p", "recipe.toml is missing or damaged.", class_="none")]
    known = recipe_fields()
    changed = [
        [name, short_literal(value), short_literal(_plain(known[name].default)) if name in known else "–"]
        for name, value in run.settings.items()
        if name not in known or _plain(known[name].default) != value
    ]
    every = [[name, short_literal(value)] for name, value in run.settings.items()]
    return [
        *parts,
        table(
            "Settings that differ from their defaults",
            ["setting", "value", "default"],
            changed,
            numbers=False,
        ),
        folded(f"All {len(every)} settings", table("Recipe", ["setting", "value"], every, numbers=False)),
    ]


def proof(run: RunFacts) -> list[Child]:
    """What the run survived, and what vouches for its bits."""
    return [*events(run), *bits(run), *certificate(run), *timeline(run)]


def commands(run: RunFacts) -> list[str]:
    """The commands that started and resumed the run, as they were typed."""
    started = (each.text.rpartition(" (")[0] or each.text for each in run.events if each.kind == "started")
    if found := list(dict.fromkeys(started)):
        return found
    command = run.environment.get("command")
    return [shlex.join(map(str, command))] if isinstance(command, list) and command else []


def environment(run: RunFacts) -> list[Child]:
    """Versions, devices, and the identity of the data."""
    facts = {name: value for name, value in run.environment.items() if name not in ("command", "model")}
    rows = [[name, value] for name, value in _flat(facts)]
    return [folded("Environment", table("Environment", ["", "value"], rows, numbers=False))] if rows else []


def bits(run: RunFacts) -> list[Child]:
    """The fingerprint of the run."""
    if run.fingerprints is None:
        return []
    step, chain = run.fingerprints
    return [
        el(
            "p",
            "Every gradient, parameter, buffer and optimizer state that this run recorded, up to step ",
            f"{step:,}, is combined into one value: ",
            el("code", chain),
            prose(
                ". A run with the same value has the same bits; `drumline compare` finds the first difference."
            ),
        )
    ]


def certificate(run: RunFacts) -> list[Child]:
    """How the first step compared with plain accumulation in one process."""
    found = run.certificate
    if not found:
        return []
    reports = [each for each in found.values() if isinstance(each, dict) and "same_bits" in each]
    reports += [
        each
        for value in found.values()
        if isinstance(value, list)
        for each in value
        if isinstance(each, dict) and "same_bits" in each
    ]
    rows = [
        [str(each.get("of", "")), *(f"{each.get(name, '–')}" for name in ("total", "same_bits", "wrong"))]
        for each in reports
    ]
    passes = all(not each.get("wrong") for each in reports)
    text = "Before training, one step of this layout was compared with plain accumulation in one process: "
    verdict = "✓ the results are the same." if passes else "✗ the results differ."
    described = found.get("description") or found.get("layout")
    return [
        el("p", text, el("b", verdict), f" ({described})" if isinstance(described, str) else ""),
        table("Certificate", ["compared", "tensors", "same bits", "wrong"], rows) if rows else None,
    ]


def timeline(run: RunFacts) -> list[Child]:
    """The timeline of a step, if the layout has several lanes."""
    if not run.timeline.lstrip().startswith(b"<svg"):
        return []
    data = base64.b64encode(run.timeline).decode()
    image = el(
        "img", src=f"data:image/svg+xml;base64,{data}", alt="Which lane computed which micro-batch when"
    )
    return [
        el("div", image, class_="scroll sheet", tabindex="0", role="region", aria_label="Timeline of a step")
    ]


def events(run: RunFacts) -> list[Child]:
    """What happened to the run, from its log."""
    found = run.events
    starts = sum(each.kind == "started" for each in found)
    kinds = {"killed": "kill", "failed": "failure", "stopped": "stop", "warning": "warning"}
    counts = {word: sum(each.kind == kind for each in found) for kind, word in kinds.items()}
    said = ", ".join(counted(count, word) for word, count in counts.items() if count)
    if starts <= 1 and not said:
        return [el("p", "One start, no interruption, no warning.")]
    shown = found if len(found) <= EVENTS else [*found[: EVENTS // 2], *found[-EVENTS // 2 :]]
    rows: list[list[Cell]] = [
        [each.time, el("span", SIGNS[each.kind], class_=f"event {each.kind}"), each.text] for each in shown
    ]
    again = f"{counted(starts, 'start')}: {said}." if said else f"{counted(starts, 'start')}."
    return [
        el("p", again),
        folded("Events", table("Events, from log.txt", ["time", "event", ""], rows, numbers=False)),
    ]


def _plain(value: Any) -> Any:
    """A default as TOML gives it back."""
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{before}{name}.")
        elif value is not None:
            rows.append(
                (before + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
            )
    return rows
