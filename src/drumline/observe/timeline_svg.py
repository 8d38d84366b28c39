"""One step of a pipeline as a picture: which lane computed which micro-batch when, and where it was idle.

Promises: a self-contained SVG with its own background, without scripts or external fonts. The predicted and the
measured step share one time scale, and each starts at 0. Nothing is smoothed. The hue shows the micro-batch, light
and dark show forward and backward, hatching shows idle time. Overlapping spans are drawn in separate rows; spans
without a duration are not drawn. Everything here is pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from drumline.core.text import printable
from drumline.parallel.lanes import Instruction, Op, Span, bubble

COMPUTE = (Op.FORWARD, Op.BACKWARD)
TRANSFERS = (
    (Op.SEND_OUTPUT, Op.SEND_GRADIENT),
    (Op.RECEIVE_INPUT, Op.RECEIVE_GRADIENT),
    (Op.REDUCE,),
)
"""Transfers of data, in the order of display. Waiting is not one of them: it is the lane's idle time."""


@dataclass(frozen=True)
class Step:
    """The predicted or the measured step, from time 0."""

    name: str
    spans: tuple[Span, ...]
    length: float

    def of(self, lane: int, kinds: Iterable[Op]) -> list[Span]:
        """The spans of these kinds in a lane."""
        return [span for span in self.spans if span.lane == lane and span.kind in kinds]


def step_of(name: str, spans: Sequence[Span]) -> Step:
    """Spans sorted and shifted to start at 0."""
    assert spans, f"no {name} spans"
    assert all(0 <= span.end - span.start < math.inf for span in spans), f"{name} spans end before they start"
    zero = min(span.start for span in spans)
    moved = [replace(span, start=span.start - zero, end=span.end - zero) for span in spans]
    moved.sort(key=lambda span: (span.start, span.end))
    return Step(name, tuple(moved), max(span.end for span in moved))


def idle_times(half: Step, lane: int) -> Iterator[tuple[float, float, Span | None]]:
    """The times when a lane does not compute, each with what it computes next."""
    done = 0.0
    for span in half.of(lane, COMPUTE):
        if span.start > done:
            yield done, span.start, span
        done = max(done, span.end)
    if half.length > done:
        yield done, half.length, None


def rows_of(spans: Iterable[Span], slack: float = 0.0) -> list[list[Span]]:
    """Spans, sorted by start, in as few rows as possible. Spans of a row overlap by at most `slack` seconds."""
    rows: list[list[Span]] = []
    for span in spans:
        for row in rows:
            if row[-1].end <= span.start + slack:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def timeline_svg(
    measured: Sequence[Span], predicted: Sequence[Span] | None, title: str, lanes: Sequence[str]
) -> str:
    """The picture: a row for each lane, with the predicted step, if there is one, above the measured step."""
    steps = [step_of("predicted", predicted)] if predicted else []
    return _Picture([*steps, step_of("measured", measured)], lanes).draw(title)


_GRADIENTS = (Op.BACKWARD, Op.SEND_GRADIENT, Op.RECEIVE_GRADIENT)
_WIDTH, _LEFT, _RIGHT, _MARGIN = 1200, 206, 28, 20
_BOX, _STRIP, _BETWEEN = 30, 5, 11
_LETTER = 0.56
"""The width of a letter in system fonts, relative to its size: a little above the average."""

_STYLE = """\
text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#16202c}
.title{font-size:17px;font-weight:600}.half{font-size:14px;font-weight:600}
.lane{font-size:12px;font-weight:600;text-anchor:end}.part{font-size:11px;fill:#45525f;text-anchor:end}
.say{font-size:12px;fill:#35424f}.tick{font-size:11px;fill:#45525f;text-anchor:middle}
.f,.b{font-size:11px;text-anchor:middle;pointer-events:none}.b{fill:#fff}.small{font-size:8.5px}
.box{stroke:#fcfdfe;stroke-width:.7}.panel{fill:#fcfdfe;stroke:#cfd7e1}.grid{stroke:#dde3ea}
.end{stroke:#b4531a;stroke-width:1.2;stroke-dasharray:4 3}.idle{fill:url(#bubble);stroke:#c3ccd6;stroke-width:.6}
.line{fill:none;stroke:#8fa3b5}.swap{fill:#3c4856}.foot{fill:#16202c;opacity:.75}.foot.dark{fill:#fff;opacity:.85}"""

_BUBBLE = (
    '<pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f1f4f7"/><rect width="1.6" height="6" fill="#b9c3ce"/></pattern>'
)


class _Picture:
    """Collects the elements from top to bottom."""

    def __init__(self, steps: Sequence[Step], lanes: Sequence[str]) -> None:
        spans = [span for step in steps for span in step.spans]
        assert all(0 <= span.lane < len(lanes) for span in spans), "a span's lane has no name"
        self.steps, self.lanes, self.spans = steps, lanes, spans
        self.micro_batches = max(1, *(span.micro + 1 for span in spans))
        self.length = max(step.length for step in steps) or 1e-6
        self.unit = _unit(self.length)
        stages: dict[int, set[int]] = defaultdict(set)
        for span in spans:
            stages[span.lane].add(span.stage)
        self.turn = {
            (lane, stage): turn for lane, own in stages.items() for turn, stage in enumerate(sorted(own))
        }
        self.out: list[str] = []
        self.y = float(_MARGIN)

    def draw(self, title: str) -> str:
        self.text(_MARGIN, self.y + 16, "title", _short(title, _WIDTH - 2 * _MARGIN, 20))
        self.y += 36
        for half in self.steps:
            self.half(half)
        self.legend()
        height = round(self.y + _MARGIN)
        said = "; ".join(self.heading(half) for half in reversed(self.steps))
        colours = "".join(
            f"\n.f{micro}{{fill:{light}}}.b{micro}{{fill:{dark}}}"
            for micro in range(self.micro_batches)
            for light, dark in [shades(micro, self.micro_batches)]
        )
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
                f'height="{height}" role="img" aria-labelledby="title desc">',
                f'<title id="title">{_xml(title)}</title>',
                f'<desc id="desc">{_xml(said)}</desc>',
                f"<style>\n{_STYLE}{colours}\n</style>",
                f"<defs>{_BUBBLE}</defs>",
                f'<rect class="panel" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>',
                *self.out,
                "</svg>\n",
            )
        )

    def heading(self, half: Step) -> str:
        said = f"{half.name}: {_time(half.length)}, bubble {100 * bubble(half.spans):.1f} %"
        other = self.steps[0]
        if other is half or not other.length:
            return said
        return f"{said} ({100 * (half.length / other.length - 1):+.1f} % against the prediction)"

    def half(self, half: Step) -> None:
        self.text(_MARGIN, self.y + 14, "half", self.heading(half))
        self.y += 26
        begin = len(self.out)
        top = self.y
        for lane in range(len(self.lanes)):
            self.lane(half, lane)
        self.out[begin:begin] = self.grid(top, self.y)
        end = _number(self.x(half.length))
        self.out.append(
            f'<path class="end" d="M{end} {_number(top - 6)}V{_number(self.y)}"><title>the step ends</title></path>'
        )
        self.y += 34

    def grid(self, top: float, bottom: float) -> list[str]:
        step = _round_step(self.length / 11)
        lines = []
        for index in range(math.floor(self.length / step * (1 + 1e-9)) + 1):
            x = _number(self.x(index * step))
            label = f"{index * step * self.unit[1]:.10g}" + (f" {self.unit[0]}" if index else "")
            lines.append(f'<path class="grid" d="M{x} {_number(top - 6)}V{_number(bottom)}"/>')
            lines.append(f'<text class="tick" x="{x}" y="{_number(bottom + 13)}">{label}</text>')
        return lines

    def lane(self, half: Step, lane: int) -> None:
        self.name(self.lanes[lane])
        slack = self.length / _WIDTH  # one pixel: device clocks round, so that neighbours seem to overlap
        for start, end, following in idle_times(half, lane):
            until = f"before {_called(following)}" if following else "until the step's end"
            self.box("idle", start, end, self.y, _BOX, f"idle for {_time(end - start)} {until}")
        computed = rows_of(half.of(lane, COMPUTE), slack)
        for index, row in enumerate(computed):
            for span in row:
                self.compute(span, self.y + index * _BOX / len(computed), _BOX / len(computed))
        self.y += _BOX + 2
        for kinds in TRANSFERS:
            for row in rows_of((span for span in half.of(lane, kinds) if span.end > span.start), slack):
                for span in row:
                    colour = "swap" if span.kind is Op.REDUCE else _shade(span)
                    self.box(colour, span.start, span.end, self.y, _STRIP, self.label(span))
                self.y += _STRIP + 1
        self.y += _BETWEEN

    def compute(self, span: Span, y: float, height: float) -> None:
        self.box(f"box {_shade(span)}", span.start, span.end, y, height, self.label(span))
        left, width = self.x(span.start), self.x(span.end) - self.x(span.start)
        dark = span.kind is Op.BACKWARD
        turn = self.turn[span.lane, span.stage]
        for line in range(turn if width > 1.5 else 0):
            self.out.append(
                f'<rect class="foot{" dark" if dark else ""}" x="{_number(left + 0.7)}" '
                f'y="{_number(y + height - 4 - 3 * line)}" width="{_number(width - 1.4)}" height="1.6"/>'
            )
        number = str(span.micro)
        for style, size in (("", 11.0), (" small", 8.5)):
            if width >= len(number) * size * 0.6 + 2.5 and height >= size + 3 * turn:
                middle = y + (height - 3 * turn) / 2 + 0.36 * size
                self.text(left + width / 2, middle, f"{'b' if dark else 'f'}{style}", number)
                break

    def name(self, name: str) -> None:
        """The text before the bracket in bold, and below it the text inside, one line for each part."""
        head, _, rest = name.partition(" (")
        parts = rest.removesuffix(")").split("; ", 1) if rest else []
        room = _LEFT - _MARGIN - 12
        y = self.y + (19, 13, 10)[len(parts)]
        self.out.append(f"<g><title>{_xml(name)}</title>")
        self.text(_LEFT - 12, y, "lane", _short(head, room, 13))
        for line, part in enumerate(parts, start=1):
            self.text(_LEFT - 12, y + 1 + 12.5 * line, "part", _short(part, room, 11))
        self.out.append("</g>")

    def legend(self) -> None:
        """The legend, with only what the picture shows."""
        kinds = {span.kind for span in self.spans if span.end > span.start}
        at = self.hues(_MARGIN)
        items = [
            ("f0", "f0", 14, "forward"),
            ("b0", "b0", 14, "backward"),
            ("idle", "idle", 14, "bubble (idle)"),
        ]
        if kinds & {*TRANSFERS[0], *TRANSFERS[1]}:
            items.append(("f0", "b0", _STRIP, "transfer (outputs, gradients)"))
        if Op.REDUCE in kinds:
            items.append(("swap", "swap", _STRIP, "gradient exchange"))
        if any(self.turn.values()):
            items.append(("foot", "foot", 2, "a rank's second stage"))
        for left, right, height, said in items:
            width = 28 + len(said) * 12 * _LETTER
            if at + width > _WIDTH - _MARGIN:
                at, self.y = _MARGIN, self.y + 24
            y = _number(self.y + 7 - height / 2)
            for x, style in ((at, left), (at + 11, right)) if left != right else ((at, left),):
                swatch = 11 if left != right else 22
                self.out.append(
                    f'<rect class="{style}" x="{_number(x)}" y="{y}" width="{swatch}" height="{height}"/>'
                )
            self.text(at + 28, self.y + 11, "say", said)
            at += width + 18
        self.y += 16

    def hues(self, at: float) -> float:
        """Draws a cell for each micro-batch. Returns the position of the next item."""
        self.text(at, self.y + 11, "say", "micro-batch")
        at += 12 * _LETTER * 12
        width = min(20.0, 320 / self.micro_batches)
        for micro in range(self.micro_batches):
            x, y = at + micro * width, self.y - 2
            for style, top, height in (("f", y, 13), ("b", y + 13, 5)):
                self.out.append(
                    f'<rect class="box {style}{micro}" x="{_number(x)}" y="{_number(top)}" '
                    f'width="{_number(width)}" height="{height}"/>'
                )
            if width >= 16:
                self.text(x + width / 2, y + 10.5, "f", str(micro))
        at += self.micro_batches * width + 5
        if width < 16:
            self.text(at, self.y + 11, "say", f"0 to {self.micro_batches - 1}")
            at += 60
        return at + 14

    def x(self, time: float) -> float:
        return _LEFT + time / self.length * (_WIDTH - _LEFT - _RIGHT)

    def box(self, style: str, start: float, end: float, y: float, height: float, said: str) -> None:
        left, width = self.x(start), self.x(end) - self.x(start)
        self.out.append(
            f'<rect class="{style}" x="{_number(left)}" y="{_number(y)}" width="{_number(width)}" '
            f'height="{_number(height)}"><title>{_xml(said)}</title></rect>'
        )

    def text(self, x: float, y: float, style: str, said: str) -> None:
        self.out.append(f'<text class="{style}" x="{_number(x)}" y="{_number(y)}">{_xml(said)}</text>')

    def label(self, span: Span) -> str:
        return f"{_called(span)}: {_time(span.end - span.start)}, from {_time(span.start, self.unit)}"


def _called(span: Span) -> str:
    return str(Instruction(span.kind, span.stage, span.micro))


def _shade(span: Span) -> str:
    return f"{'b' if span.kind in _GRADIENTS else 'f'}{max(0, span.micro)}"


def _unit(seconds: float) -> tuple[str, float]:
    """The name of a time unit, and how many of it make a second."""
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)


def _time(seconds: float, unit: tuple[str, float] | None = None) -> str:
    """0.04132 -> `41.3 ms`: three significant digits, or more for whole numbers."""
    name, per_second = unit or _unit(seconds)
    value = seconds * per_second
    digits = max(0, 2 - math.floor(math.log10(value))) if value >= 0.01 else 0 if not value else 3
    return f"{value:.{digits}f} {name}"


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20 ... (or 0.5, 0.2 ...) that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * round_one for round_one in (1, 2, 5, 10) if power * round_one >= least * (1 - 1e-9))


def _number(value: float) -> str:
    """A coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _short(text: str, room: float, size: float) -> str:
    """Shortened in the middle to fit: the beginning and the end of a name say most."""
    letters = int(room / (size * _LETTER))
    if len(text) <= letters:
        return text
    return f"{text[: (letters - 1) // 2]}…{text[len(text) - letters // 2 :]}"


def _xml(text: str) -> str:
    """Escaped for XML. Control characters, which XML cannot represent, are spelled out."""
    return escape(printable(text))


def shades(index: int, count: int) -> tuple[str, str]:
    """The light and the dark shade of one of `count` evenly spread hues, as #rrggbb. Dark text on the light shade and
    white text on the dark one are readable (contrast 4.5 to 1). Neighbours differ in hue and in lightness, so that
    colour-blind readers can tell them apart."""
    # Blue first: of two hues, the other one is orange, a pair that every reader can tell apart.
    hue = math.radians(255 + 360 * index / count)
    odd = index % 2
    return _oklch(0.875 - 0.075 * odd, 0.085, hue), _oklch(0.54 - 0.09 * odd, 0.12, hue)


def _oklch(light: float, chroma: float, hue: float) -> str:
    """An OKLCH colour (even steps look even) as #rrggbb, clipped to what a screen can show."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    cones = (
        (light + 0.3963377774 * a + 0.2158037573 * b) ** 3,
        (light - 0.1055613458 * a - 0.0638541728 * b) ** 3,
        (light - 0.0894841775 * a - 1.2914855480 * b) ** 3,
    )
    to_rgb = (
        (4.0767416621, -3.3077115913, 0.2309699292),
        (-1.2684380046, 2.6097574011, -0.3413193965),
        (-0.0041960863, -0.7034186147, 1.7076147010),
    )
    linear = (sum(weight * cone for weight, cone in zip(row, cones, strict=True)) for row in to_rgb)
    shown = (12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in linear)
    return "#" + "".join(f"{round(255 * min(1.0, max(0.0, v))):02x}" for v in shown)
