"""A step as a picture and as a trace: every span where its time says, and nothing that a viewer would refuse."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from drumline.observe.timeline import perfetto
from drumline.observe.timeline_svg import shades, timeline_svg
from drumline.parallel.lanes import Op, Span, StageTimes, bubble, simulate
from drumline.parallel.pipeline.schedule import instruction_lists

SVG = "{http://www.w3.org/2000/svg}"
LANES = ("rank 0: stage 0 (conv1 .. layer2.1)", "rank 1: stage 1 (layer3.0 .. fc)")
MS = 2.0**-10
"""About a millisecond, and sums of it are exact."""


def step(
    schedule: str,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    reduces: bool = False,
    transfer: float = MS,
) -> tuple[Span, ...]:
    stages = ranks * chunks
    forward, backward = [4 * MS] * stages, [8 * MS] * stages
    times = StageTimes(forward, backward, [transfer] * (stages - 1), [16 * MS] * stages)
    return simulate(instruction_lists(schedule, ranks, chunks, micro_batches, reduces), times)


def names(ranks: int) -> list[str]:
    return [f"rank {rank}: stage {rank}" for rank in range(ranks)]


def boxes(svg: str, said: str) -> list[Element]:
    """The boxes whose tooltip begins so, in the picture's order (predicted above measured)."""
    root = ElementTree.fromstring(svg)
    return [box for box in root.iter(f"{SVG}rect") if (box.findtext(f"{SVG}title") or "").startswith(said)]


def texts(svg: str, style: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [text.text or "" for text in root.iter(f"{SVG}text") if text.get("class", "").split()[0] == style]


def number(box: Element, name: str) -> float:
    return float(box.attrib[name])


# ---- the picture


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_every_span_is_a_box_with_a_tooltip(schedule: str, chunks: int) -> None:
    spans = step(schedule, 2, 4, chunks, reduces=True)
    svg = timeline_svg(spans, spans, "t", LANES)
    for kind in (Op.FORWARD, Op.BACKWARD, Op.SEND_OUTPUT, Op.SEND_GRADIENT, Op.REDUCE):
        assert len(boxes(svg, str(kind))) == 2 * sum(span.kind is kind for span in spans)
    assert boxes(svg, "forward of stage 1, micro-batch 3: 3.91 ms, from ")


def test_predicted_stands_above_measured_on_the_same_time_scale() -> None:
    predicted = step("1f1b", 2, 4)
    measured = [replace(span, start=2 * span.start, end=2 * span.end) for span in predicted]
    svg = timeline_svg(measured, predicted, "t", LANES)
    assert [heading.split(":")[0] for heading in texts(svg, "half")] == ["predicted", "measured"]
    for span in predicted:
        if span.kind not in (Op.FORWARD, Op.BACKWARD):
            continue
        above, below = boxes(svg, f"{span.kind} of stage {span.stage}, micro-batch {span.micro}:")
        assert number(above, "y") < number(below, "y")
        assert number(below, "width") == pytest.approx(2 * number(above, "width"), abs=0.03)
        left = number(boxes(svg, "forward of stage 0, micro-batch 0")[0], "x")
        assert number(below, "x") - left == pytest.approx(2 * (number(above, "x") - left), abs=0.03)


def test_the_heading_has_the_time_the_bubble_and_the_error_of_the_prediction() -> None:
    predicted = step("gpipe", 2, 1, transfer=0)
    measured = [replace(span, start=1.1 * span.start, end=1.1 * span.end) for span in predicted]
    assert texts(timeline_svg(measured, predicted, "t", LANES), "half") == [
        "predicted: 23.4 ms, bubble 50.0 %",
        "measured: 25.8 ms, bubble 50.0 % (+10.0 % against the prediction)",
    ]


def test_measured_alone_is_drawn_alone() -> None:
    spans = step("gpipe", 2, 2, transfer=0)
    assert texts(timeline_svg(spans, None, "t", LANES), "half") == ["measured: 35.2 ms, bubble 33.3 %"]


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_what_is_hatched_is_the_bubble_of_the_heading(schedule: str, chunks: int) -> None:
    spans = step(schedule, 4, 8, chunks, reduces=True)
    svg = timeline_svg(spans, None, "t", names(4))
    idle = sum(number(box, "width") for box in boxes(svg, "idle for"))
    computed = sum(
        number(box, "width") for kind in ("forward", "backward") for box in boxes(svg, f"{kind} of")
    )
    assert idle / (idle + computed) == pytest.approx(bubble(spans), abs=1e-3)


def test_the_idle_time_says_what_the_lane_waits_for() -> None:
    svg = timeline_svg(step("gpipe", 2, 1), None, "t", LANES)
    assert [box.findtext(f"{SVG}title") for box in boxes(svg, "idle")] == [
        "idle for 13.7 ms before backward of stage 0, micro-batch 0",
        "idle for 4.88 ms before forward of stage 1, micro-batch 0",
        "idle for 8.79 ms until the step's end",
    ]


def test_a_step_begins_at_0_for_any_clock() -> None:
    spans = step("1f1b", 2, 4, reduces=True)
    later = [replace(span, start=span.start + 1024, end=span.end + 1024) for span in spans]
    assert timeline_svg(later, spans, "t", LANES) == timeline_svg(spans, spans, "t", LANES)
    assert perfetto(later, spans, LANES) == perfetto(spans, spans, LANES)


def test_forward_is_light_backward_dark_and_each_micro_batch_has_its_hue() -> None:
    svg = timeline_svg(step("1f1b", 2, 4), None, "t", LANES)
    for micro in range(4):
        for kind, letter, shade in (("forward", "f", 0), ("backward", "b", 1)):
            box = boxes(svg, f"{kind} of stage 1, micro-batch {micro}:")[0]
            assert f"{letter}{micro}" in box.attrib["class"].split()
            assert f".{letter}{micro}{{fill:{shades(micro, 4)[shade]}}}" in svg


def test_numbers_stand_in_boxes_that_hold_them_and_in_no_others() -> None:
    assert texts(timeline_svg(step("1f1b", 2, 4), None, "t", LANES), "b") == [*"0123"] * 2
    assert texts(timeline_svg(step("1f1b", 2, 256), None, "t", LANES), "b") == []


def test_transfers_are_thin_and_below_their_lane_and_overlapping_ones_below_each_other() -> None:
    spans = [
        Span(0, Op.FORWARD, 0, 0, 0.0, 1.0),
        Span(0, Op.SEND_OUTPUT, 0, 0, 1.0, 3.0),
        Span(0, Op.SEND_OUTPUT, 0, 1, 2.0, 4.0),
        Span(0, Op.SEND_OUTPUT, 0, 2, 3.0, 5.0),
        Span(1, Op.FORWARD, 1, 0, 3.0, 4.0),
    ]
    svg = timeline_svg(spans, None, "t", LANES)
    computed, following = boxes(svg, "forward")
    first, second, third = (boxes(svg, f"send output of stage 0, micro-batch {n}:")[0] for n in range(3))
    assert number(first, "height") < number(computed, "height") / 4
    assert number(computed, "y") + number(computed, "height") < number(first, "y") == number(third, "y")
    assert number(first, "y") + number(first, "height") < number(second, "y")
    assert number(second, "y") + number(second, "height") < number(following, "y")


def test_computing_that_overlaps_is_drawn_in_two_rows_but_a_clock_s_rounding_is_not() -> None:
    first = Span(0, Op.FORWARD, 0, 0, 0.0, 1.0)
    for start, rows in ((0.5, 2), (0.9999, 1)):
        svg = timeline_svg([first, Span(0, Op.FORWARD, 0, 1, start, 2.0)], None, "t", ["rank 0"])
        one, other = boxes(svg, "forward")
        assert len({number(one, "y"), number(other, "y")}) == rows
        assert number(one, "height") == 30 / rows


def test_what_took_no_time_is_not_drawn() -> None:
    svg = timeline_svg(step("gpipe", 2, 2, transfer=0), None, "t", LANES)
    assert not boxes(svg, "send")
    assert "transfer (outputs, gradients)" not in texts(svg, "say")


@pytest.mark.parametrize(
    ("seconds", "first", "last"),
    [(8.7, "1 s", "8 s"), (0.0413, "5 ms", "40 ms"), (0.001, "0.1 ms", "1 ms"), (3.1e-5, "5 µs", "30 µs")],
)
def test_ticks_are_round(seconds: float, first: str, last: str) -> None:
    svg = timeline_svg([Span(0, Op.FORWARD, 0, 0, 0.0, seconds)], None, "t", ["rank 0"])
    assert texts(svg, "tick")[:2] == ["0", first]
    assert texts(svg, "tick")[-1] == last


def test_names_from_outside_are_text_not_markup() -> None:
    title = '<script>alert("1")</script> & \x1b[31m\x00\ud800'
    svg = timeline_svg(step("gpipe", 2, 2), None, title, ["a < b && c (<x> .. </g>; ]]>)", "\x07"])
    svg.encode("utf-8")
    assert f"{SVG}script" not in {element.tag for element in ElementTree.fromstring(svg).iter()}
    assert r"\x1b[31m\x00\ud800" in texts(svg, "title")[0]
    assert texts(svg, "lane") == ["a < b && c", r"\x07"]
    assert texts(svg, "part") == ["<x> .. </g>", "]]>"]


def test_long_names_are_shortened_and_complete_in_their_tooltip() -> None:
    name = "rank 0: stage 0 (" + "blocks." * 20 + "0)"
    svg = timeline_svg(step("gpipe", 1, 2), None, "long " * 100, [name])
    assert len(texts(svg, "part")[0]) < 40
    assert len(texts(svg, "title")[0]) < 120
    tooltips = {title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")}
    assert {name, "long " * 100} <= tooltips


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    svg = timeline_svg(step("1f1b", 2, 4, reduces=True), None, "t", LANES)
    assert not re.search(r"script|href|@import|@font-face|foreignObject|\bon\w+=", svg)
    assert set(re.findall(r"url\(([^)]*)\)", svg)) == {"#bubble"}
    assert set(re.findall(r"https?://[^\"]*", svg)) == {"http://www.w3.org/2000/svg"}


def test_nothing_stands_outside_the_picture() -> None:
    spans = step("interleaved", 8, 64, 2, reduces=True)
    slower = [replace(span, start=2 * span.start, end=2 * span.end) for span in spans]
    root = ElementTree.fromstring(timeline_svg(slower, spans, "t", names(8)))
    width, height = number(root, "width"), number(root, "height")
    for element in root.iter():
        if element.tag in (f"{SVG}rect", f"{SVG}text"):
            left, top = (float(element.get(name, 0)) for name in "xy")
            assert 0 <= left <= left + float(element.get("width", 0)) <= width
            assert 0 <= top <= top + float(element.get("height", 0)) <= height
    assert height < 1300


def test_64_micro_batches_on_8_lanes_stay_below_a_megabyte() -> None:
    spans = step("1f1b", 8, 64, reduces=True)
    assert len(timeline_svg(spans, spans, "t", names(8))) < 1_000_000


def test_a_rank_s_second_stage_is_marked_and_the_legend_says_so() -> None:
    marked = re.compile(r'class="foot')
    assert not marked.search(timeline_svg(step("1f1b", 2, 4), None, "t", LANES))
    svg = timeline_svg(step("interleaved", 2, 4, 2), None, "t", LANES)
    assert len(marked.findall(svg)) == 2 * 4 * 2 + 1
    assert "a rank's second stage" in texts(svg, "say")


def test_the_example_in_docs_is_what_the_code_draws() -> None:
    maker = example_maker()
    assert maker.PICTURE.read_text(encoding="utf-8") == maker.picture(), (
        "docs/images/timeline-1f1b.svg is stale: run `python docs/make_timeline_example.py`"
    )


def example_maker() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "make_timeline_example.py"
    spec = importlib.util.spec_from_file_location("make_timeline_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- colours

DEUTERANOPIA = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
PROTANOPIA = (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
)
ORDINARY = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def linear(colour: str) -> list[float]:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def lab(colour: str, eye: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as such an eye sees it."""
    red, green, blue = (
        min(1.0, max(0.0, sum(w * v for w, v in zip(row, linear(colour), strict=True)))) for row in eye
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    f, g, h = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * g - 16, 500 * (f - g), 200 * (g - h)


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_text_is_readable_on_every_shade(count: int) -> None:
    for index in range(count):
        light, dark = shades(index, count)
        assert (luminance(light) + 0.05) / (luminance("#16202c") + 0.05) > 4.5
        assert 1.05 / (luminance(dark) + 0.05) > 4.5


@pytest.mark.parametrize("eye", [ORDINARY, DEUTERANOPIA, PROTANOPIA])
@pytest.mark.parametrize("count", [2, 3, 4, 8, 16, 64])
def test_neighbours_and_directions_differ_for_colour_blind_readers(
    count: int, eye: tuple[tuple[float, ...], ...]
) -> None:
    seen = [tuple(lab(shade, eye) for shade in shades(index, count)) for index in range(count)]
    for one, other in pairwise(seen):
        for shade in range(2):
            apart = sum((a - b) ** 2 for a, b in zip(one[shade], other[shade], strict=True)) ** 0.5
            assert apart > 5  # about 2 is the least that is seen side by side
    assert min(light[0] for light, _ in seen) - max(dark[0] for _, dark in seen) > 15


# ---- the trace


def trace(*args: Any) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(perfetto(*args))
    return loaded


def test_the_trace_follows_the_trace_event_format() -> None:
    spans = step("1f1b", 2, 4, reduces=True)
    written = trace(spans, spans, LANES)
    assert written.keys() == {"displayTimeUnit", "traceEvents"}
    assert written["displayTimeUnit"] in ("ms", "ns")
    for event in written["traceEvents"]:
        assert {type(event[key]) for key in ("pid", "tid")} == {int}
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            kind = re.fullmatch(r"(?:process|thread)_(name|sort_index)", event["name"])
            assert kind is not None
            assert isinstance(event["args"][kind[1]], str if kind[1] == "name" else int)
        else:
            assert event["ph"] == "X"
            assert event.keys() == {"ph", "pid", "tid", "ts", "dur", "name", "cat", "args"}
            assert isinstance(event["ts"], float)
            assert event["ts"] >= 0
            assert event["dur"] >= 0


def test_the_trace_has_a_process_for_each_half_and_two_threads_for_each_lane() -> None:
    spans = step("1f1b", 2, 4)
    named = defaultdict(list)
    for event in trace(spans, spans, LANES)["traceEvents"]:
        if event["name"] in ("process_name", "thread_name"):
            named[event["pid"]].append(event["args"]["name"])
    threads = [name for lane in LANES for name in (lane, f"{lane}, transfers")]
    assert sorted(named.values()) == [["measured", *threads], ["predicted", *threads]]
    assert not any(e["args"].get("name") == "predicted" for e in trace(spans, None, LANES)["traceEvents"])


def test_the_trace_has_every_span_in_microseconds() -> None:
    spans = step("1f1b", 2, 4, reduces=True)
    events = [event for event in trace(spans, None, LANES)["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(spans)
    found = {(e["cat"], e["args"]["stage"], e["args"].get("micro-batch", -1)): e for e in events}
    for span in spans:
        event = found[str(span.kind), span.stage, span.micro]
        assert event["ts"] == pytest.approx(span.start * 1e6, abs=0.13)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6, abs=0.13)


def test_no_two_events_of_a_thread_overlap_not_even_by_a_viewer_s_rounding() -> None:
    spans = list(step("1f1b", 2, 8, reduces=True, transfer=0.0123))
    spans += [replace(span, start=span.start + 0.004, end=span.end + 0.004) for span in spans]
    spans = [replace(span, start=span.start / 3, end=span.end / 3) for span in spans]
    threads = defaultdict(list)
    for event in trace(spans, None, LANES)["traceEvents"]:
        if event["ph"] == "X":
            start, length = (int(event[key] * 1000.0) for key in ("ts", "dur"))
            assert (start, length) == (event["ts"] * 1000, event["dur"] * 1000)
            threads[event["tid"]].append((start, start + length))
    assert len(threads) > 4
    for events in threads.values():
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(events)))
