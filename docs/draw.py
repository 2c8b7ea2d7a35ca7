"""The pictures that are drawn from data: `python docs/draw.py PICTURE ...` writes docs/images/PICTURE.svg.

bars                       ms a step beside the peers, from the table of results/summary.md; a test says when it is old
timeline STAGE_1 STAGE_3   a step of each stage, from profile/rank0.json of two runs with train.profile=true
terminal OUTPUT            a run in a terminal: make train > OUTPUT with FORCE_COLOR=1 COLUMNS=82; a test compares the
                           words of a run
loss_fp8, loss_state_in_bf16 NAME=RUN,RUN,... NAME=RUN,RUN,...
                           validation losses of runs from their metrics.jsonl, and how much those of the second name lie
                           above those of the first: the runs of both have the same seeds, in the same order
report FOLDER              images/report.png: the report of a sweep, one half light and one dark, by chromium; a test
                           says when the page has changed since; shown is
                           python launch.py -m optimizer.lr=3e-4,1e-3,3e-3,1e-2 zero.stage=1,3 train.max_steps=60
                           train.eval_every=10 train.log_every=5 launch.nproc_per_node=2 model.num_layers=2
                           model.hidden_size=64
"""

import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parent
STYLE = """<style>
text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #24292f }
.small { font-size: 12px } .bold { font-weight: 600 }
.paper { fill: #ffffff; stroke: #d0d7de } .line { stroke: #8c959f } .ours { fill: #1f6feb } .peer { fill: #afb8c1 }
.root { fill: #8c959f } .b0 { fill: #0969da } .b1 { fill: #1a7f37 } .b2 { fill: #bc4c00 } .b3 { fill: #8250df }
.update { fill: #cf222e } .inside { fill: #ffffff; font-size: 12px }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .paper { fill: #0d1117; stroke: #30363d } .line { stroke: #8b949e } .peer { fill: #6e7681 }
.ours { fill: #388bfd } .inside { fill: #ffffff } }
</style>"""
"""GitHub shows a picture on white or on black; these colours and sizes are read on both."""


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A picture on a sheet of its own."""
    size = f'viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    sheet = f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, sheet, *parts, "</svg>", ""])


def label(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A bar, whose title a browser shows."""
    where = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {where} rx="1.5"><title>{escape(title)}</title></rect>'


# ---- bars


def bars() -> str:
    """Bars of the table of the summary: two columns of milliseconds, loopback and link."""
    rows = re.findall(
        r"^\| ([^|]+) \| ([\d,.]+) \| ([\d,.]+) \|", (DOCS / "results/summary.md").read_text(), re.MULTILINE
    )
    parts = [label(16, 26, "Milliseconds a step, 2 ranks, fp32, 13.9 M parameters: less is better", "bold")]
    for column, head in enumerate(("one host (loopback)", "two hosts, 1 Gbit/s link")):
        left = 190 + column * 385
        values = [float(row[1 + column].replace(",", "")) for row in rows]
        parts.append(label(left, 52, head))
        for number, ((name, *_), value) in enumerate(zip(rows, values, strict=True)):
            y, width = 62 + 24 * number, 310 * value / max(values)
            parts.append(
                box(left, y, width, 17, "ours" if name.startswith("zerotrain") else "peer", f"{name}: {value} ms")
            )
            parts.append(label(left + width + 5, y + 13, f"{value:.0f}", "small"))
            if not column:
                parts.append(label(182, y + 13, name, "small", "end"))
    return svg(960, 74 + 24 * len(rows), "Milliseconds a step of each engine", parts)


# ---- timeline


def block_of(name: str) -> str:
    """The colour of a unit, bucket or range."""
    found = re.search(r"blocks\.(\d+)", name)
    return f"b{found[1]}" if found else "root"


def ranges_of(trace: Path) -> tuple[list[tuple[str, float, float]], float]:
    """(name, from, to) of each named range of a step and of the update before it, in ms; how long they take."""
    events = json.loads(trace.read_text())["traceEvents"]
    steps = {event["name"]: event for event in events if event.get("name", "").startswith("ProfilerStep#")}
    before, step = [steps[name] for name in sorted(steps)[:2]]
    norms = [event["ts"] for event in events if event.get("name") == "norm of the gradient"]
    begin = max(ts for ts in norms if ts < step["ts"] and ts > before["ts"])
    named = [
        (event["name"], (event["ts"] - begin) / 1000, (event["ts"] + event["dur"] - begin) / 1000)
        for event in events
        if event.get("cat") == "user_annotation" and event["ts"] >= begin and event["tid"] == step["tid"]
    ]
    return sorted(named, key=lambda each: each[1]), (step["ts"] + step["dur"] - begin) / 1000


def under_way(ranges: list[tuple[str, float, float]], verb: str) -> list[tuple[str, float, float]]:
    """(bucket, issued, taken) of each collective: from when it is issued to when its result is waited for no more."""
    open_since, found = {}, []
    for name, start, end in ranges:
        if name.startswith(f"{verb} "):
            open_since[name.removeprefix(f"{verb} ")] = start
        bucket = name.removeprefix(f"wait for {verb} ")
        if name.startswith(f"wait for {verb} ") and bucket in open_since:
            found.append((bucket, open_since.pop(bucket), end))
    return found


def rows_of(bars: list[tuple[str, float, float]]) -> list[tuple[int, tuple[str, float, float]]]:
    """Each bar with the first row that is free when it begins."""
    free, placed = [], []
    for each in sorted(bars, key=lambda bar: bar[1]):
        row = next((number for number, end in enumerate(free) if end <= each[1]), len(free))
        free[row : row + 1] = [each[2]]
        placed.append((row, each))
    return placed


def compute_of(ranges: list[tuple[str, float, float]], total: float) -> list[tuple[str, str, float, float]]:
    """(what, colour, from, to) of the main thread: forwards, backwards by the gradients they leave, the two updates."""
    norms = [start for name, start, _ in ranges if name == "norm of the gradient" and start < total]
    forwards = [each for each in ranges if each[0].startswith("forward ") and each[1] < total]
    found = [
        (
            "update",
            "update",
            norms[0],
            max(end for name, start, end in ranges if start < forwards[0][1] - 1 and "optim" in name),
        )
    ]
    found += [(name.removeprefix("forward blocks."), block_of(name), start, end) for name, start, end in forwards]
    moved: dict[str, float] = defaultdict(float)
    for name, _, end in ranges:
        if name.startswith("move gradient blocks") and end < total:
            moved[block_of(name)] = max(moved[block_of(name)], end)
    start = forwards[-1][2]
    for block, end in sorted(moved.items(), key=lambda each: each[1]):
        found.append((block[1:], block, start, end))
        start = end
    return [*found, ("update", "update", norms[1], total)]


def lanes(trace: Path, top: float, title: str) -> tuple[list[str], float]:
    """The picture of one step from `top` on, and where it ends."""
    ranges, total = ranges_of(trace)
    scale, left = 800 / total, 130
    parts = [label(16, top + 16, title, "bold")]
    y = top + 28
    parts.append(label(left - 8, y + 15, "main thread", "small", "end"))
    for name, kind, start, end in compute_of(ranges, total):
        parts.append(box(left + start * scale, y, (end - start) * scale, 22, kind, f"{name}: {end - start:.1f} ms"))
        if (end - start) * scale > 12 and kind != "update":
            parts.append(label(left + (start + end) / 2 * scale, y + 15, name, "inside", "middle"))
    y += 30
    for verb, name in (("gather", "gathers"), ("reduce", "reductions")):
        bars = [(bucket, start, min(end, total)) for bucket, start, end in under_way(ranges, verb) if start < total]
        placed = rows_of(bars)
        parts.append(label(left - 8, y + 10, name, "small", "end"))
        for row, (bucket, start, end) in placed:
            parts.append(
                box(left + start * scale, y + 9 * row, (end - start) * scale, 7, block_of(bucket), f"{verb} {bucket}")
            )
        y += 9 * (1 + max(row for row, _ in placed)) + 9
    for ms in range(0, int(total) + 1, 100):
        x = left + ms * scale
        parts.append(f'<line class="line" x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}"/>')
        parts.append(label(x, y + 16, f"{ms} ms", "small", "middle"))
    return parts, y + 30


def timeline(stage_1: str, stage_3: str) -> str:
    """A step at stage 1 over one at stage 3."""
    note = "Numbers and colours are blocks; grey is the root, red the update. A collective lasts from issue to use."
    first, y = lanes(Path(stage_1), 34, "stage 1: gathers follow the update, the forward takes them")
    second, y = lanes(Path(stage_3), y, "stage 3: each unit is gathered in the forward, and again in the backward")
    return svg(960, int(y), "A step at stages 1 and 3", [label(16, 24, note, "small"), *first, *second])


# ---- terminal


def terminal(output: str) -> str:
    """The start, the last line of progress and the end of a run."""
    lines = Path(output).read_text().splitlines()
    kept: list[str] = []
    for line in lines:
        last = line.split("\r")[-1] if "\r" in line else line
        last = re.sub(r"\x1b\[\?25[lh]|\x1b\[\d*[KA]", "", last.split("\x1b[2K")[-1])
        kept.append(last)
    start = kept[: next(number for number, line in enumerate(kept) if re.match(r" *0/\d+", line))]
    progress = [line for line in kept if "tok/s" in line][-1:]
    saved = [re.sub(r"^\s*", "", line) for line in kept if "saved checkpoints" in line][-1:]
    table = kept[next(number for number, line in enumerate(kept) if "train loss" in line) :]
    console = Console(record=True, width=82, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text("$ make train", style="bold"))
    for line in [*start, *progress, *saved, "", *table[:9]]:
        console.print(Text.from_ansi(line.rstrip()), overflow="crop", no_wrap=True)
    without_fonts = re.sub(r" *@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # of other hosts
    return console.export_svg(title="zerotrain", code_format=without_fonts, unique_id="zerotrain")


# ---- losses

STROKES = """<style>
.curve { fill: none; stroke-width: 1.5 } .peer.curve { stroke: #6e7781 } .ours.curve { stroke: #1f6feb }
.zero { stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) { .peer.curve { stroke: #afb8c1 } .ours.curve { stroke: #58a6ff } }
</style>"""


def losses(title: str, base: str, other: str) -> str:
    """Two panels over the steps: the losses of each run, and the other's minus the base's of the same seed."""
    names, runs = zip(*(each.split("=") for each in (base, other)), strict=True)
    curves = [[losses_of(Path(run)) for run in each.split(",")] for each in runs]
    above = [
        [(step, loss - before) for (step, loss), (_, before) in zip(*pair, strict=False)]  # as far as both are
        for pair in zip(curves[1], curves[0], strict=True)
    ]
    parts = [STROKES, label(16, 26, title, "bold")]
    parts += panel(60, "validation loss", {"peer": curves[0], "ours": curves[1]})
    parts += panel(545, f"{names[1]} minus {names[0]}, each of the same seed", {"ours": above})
    for name, kind, x in zip(names, ("peer", "ours"), (300, 390), strict=True):
        parts += [f'<path class="{kind} curve" d="M{x} 49h18"/>', label(x + 24, 53, name, "small")]
    return svg(960, 330, title, parts)


def losses_of(run: Path) -> list[tuple[int, float]]:
    """(step, validation loss) of a run, without the evaluation before its first step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["val_loss"]) for line in lines if line["step"] and "val_loss" in line]


def panel(left: int, title: str, curves: dict[str, list[list[tuple[int, float]]]]) -> list[str]:
    """Axes, and the curves of each kind."""
    points = [point for group in curves.values() for curve in group for point in curve]
    last, low, high = max(step for step, _ in points), min(y for _, y in points), max(y for _, y in points)
    tick = next(tick for tick in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if (high - low) / tick <= 6)
    low, high = tick * (low // tick), tick * -(-high // tick)
    width, height, top = 385, 215, 65

    def place(step: float, y: float) -> tuple[float, float]:
        return left + width * step / last, top + height * (high - y) / (high - low)

    parts = [label(left, 53, title, "small")]
    for number in range(round((high - low) / tick) + 1):
        x, y = place(0, low + number * tick)
        kind = "line zero" if abs(low + number * tick) < tick / 2 else "paper"
        parts.append(f'<path class="{kind}" d="M{x:.1f} {y:.1f}h{width}"/>')
        parts.append(label(x - 6, y + 4, f"{low + number * tick:.{2 if tick > 0.005 else 3}f}", "small", "end"))
    for number in range(5):
        x, y = place(last * number / 4, low)
        parts.append(label(x, y + 18, f"{last * number // 4:,}", "small", "middle"))
    parts.append(label(left + width / 2, top + height + 36, "steps", "small", "middle"))
    for kind, group in curves.items():
        for curve in group:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
            parts.append(f'<polyline class="{kind} curve" points="{path}"/>')
    return parts


# ---- report

WIDTH, HEIGHT = 1280, 1140
HALVES = """<!doctype html><style>
body { margin: 0 } iframe { position: absolute; inset: 0; width: 100%; height: 100%; border: 0 }
.half1 { clip-path: polygon(56% 0, 100% 0, 100% 100%, 44% 100%) }
</style>"""


def report(folder: str) -> bytes:
    """The upper part of a sweep's page, one half in the light mode and one in the dark one."""
    page = (Path(folder) / "report.html").read_text()
    modes = re.findall(r":root \{[^}]*\}", page)[:2]
    fixed = page.replace("@media (prefers-color-scheme: dark)", "@media not all")
    pages = [escape(fixed.replace("</style>", f"{colours}</style>", 1)) for colours in modes]
    halves = [f'<iframe class="half{number}" srcdoc="{each}"></iframe>' for number, each in enumerate(pages)]
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-sync"
    with tempfile.TemporaryDirectory() as place:
        Path(place, "halves.html").write_text(HALVES + "".join(halves))
        files = (f"--user-data-dir={place}/profile", f"--screenshot={place}/report.png", f"file://{place}/halves.html")
        command = [browser, *options.split(), f"--window-size={WIDTH},{HEIGHT}", *files]
        subprocess.run(command, check=True, capture_output=True)
        png = Path(place, "report.png").read_bytes()
    # A picture has its end in the last 12 bytes; before it, a text says what the page was made of.
    chunk = b"tEXt" + b"page\0" + sources_of_report().encode()
    return png[:-12] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + png[-12:]


def sources_of_report() -> str:
    """The hash of the files that say how the page of a report looks."""
    folder = DOCS.parent / "zerotrain/report"
    sources = [*sorted(folder.glob("page.*")), folder / "plots.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


PICTURES: dict[str, Any] = {
    "bars": bars,
    "timeline": timeline,
    "terminal": terminal,
    "report": report,
    "loss_fp8": partial(losses, "Products in fp8 beside bf16"),
    "loss_state_in_bf16": partial(losses, "AdamW's state in bf16 beside fp32"),
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    drawn = PICTURES[name](*arguments)
    if isinstance(drawn, bytes):
        (DOCS / "images" / f"{name}.png").write_bytes(drawn)
    else:
        (DOCS / "images" / f"{name}.svg").write_text(drawn)
