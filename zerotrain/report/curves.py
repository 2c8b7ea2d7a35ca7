"""The losses of a run over its steps, out of metrics.jsonl: some hundred points, however long the file is."""

import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from zerotrain.files.untrusted import UntrustedFileError, only_regular, parse_json
from zerotrain.report.values import number

MAX_POINTS = 200
"""Points of a curve."""
NUM_WINDOWS, WINDOW_NBYTES = 128, 2**14
"""So many windows of a long file are read, at equal distances."""
AXES = ("step", "tokens", "train_s")


class _PlottedLine(TypedDict, total=False):
    step: float | None
    tokens: float | None
    train_s: float | None
    train_loss: float | None
    val_loss: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A loss over the steps of a run. All are of one length; nan is what is not known, and a loss that is no number."""

    step: "array[float]"
    tokens: "array[float]"
    train_s: "array[float]"
    loss: "array[float]"

    def over(self, axis: str, max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
        """(x, loss) of the points, or of as many at equal distances, over one of `AXES`."""
        pairs = zip(getattr(self, axis), self.loss, strict=True)
        return thinned([pair for pair in pairs if math.isfinite(pair[0])], max_points)

    @property
    def last(self) -> float:
        """The last loss; nan where there is none, too."""
        return self.loss[-1] if self.loss else math.nan


NO_CURVE = Curve(step=array("d"), tokens=array("d"), train_s=array("d"), loss=array("d"))


def read_curves(path: Path) -> tuple[Curve, Curve]:
    """The training loss and the validation loss of a metrics.jsonl; without points where it cannot be read."""
    kinds: dict[str, list[bytes]] = {"train_loss": [], "val_loss": []}
    try:
        for line in _lines(path):
            for kind, lines in kinds.items():
                if f'"{kind}"'.encode() in line:
                    lines.append(line)
    except OSError:
        pass
    train, val = (list(_points(thinned(lines, MAX_POINTS), kind)) for kind, lines in kinds.items())
    return _curve(train), _curve([_placed(point, train) for point in val])


def thinned(items: list[Any], most: int) -> list[Any]:
    """So many of the items at most, at equal distances, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; of a long one those that lie whole in one of the windows."""
    with open(path, "rb", opener=only_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= NUM_WINDOWS * WINDOW_NBYTES:
            yield from file.read(NUM_WINDOWS * WINDOW_NBYTES).split(b"\n")
            return
        for window in range(NUM_WINDOWS):
            file.seek(round(window * (size - WINDOW_NBYTES) / (NUM_WINDOWS - 1)))
            yield from file.read(WINDOW_NBYTES).split(b"\n")[1 if window else 0 : -1]


def _points(lines: list[bytes], kind: str) -> Iterator[tuple[float, ...]]:
    """(step, tokens, seconds, loss) of each line, in the order of steps: a run that went on has come back to some."""
    before = -math.inf
    for line in lines:
        try:
            said = parse_json(line, _PlottedLine)
        except UntrustedFileError:  # it is cut off, or of somebody else
            continue
        values = [number(said.get(name)) for name in (*AXES, kind)]
        point = tuple(math.nan if value is None else float(value) for value in values)
        if point[0] >= before:
            before = point[0]
            yield point


def _placed(point: tuple[float, ...], train: list[tuple[float, ...]]) -> tuple[float, ...]:
    """A point of an evaluation, whose line has no tokens and no seconds, with those of the training at its step."""
    step, loss = point[0], point[3]
    after = bisect_left(train, step, key=lambda each: each[0])
    if after == len(train):
        return (step, train[-1][1], train[-1][2], loss) if train else point
    left = train[after - 1] if after else (0.0, 0.0, 0.0)
    right = train[after]
    part = (step - left[0]) / (right[0] - left[0]) if right[0] > left[0] else 1.0
    return (step, *(left[axis] + part * (right[axis] - left[axis]) for axis in (1, 2)), loss)


def _curve(points: list[tuple[float, ...]]) -> Curve:
    step, tokens, train_s, loss = (array("d", (point[axis] for point in points)) for axis in range(4))
    return Curve(step=step, tokens=tokens, train_s=train_s, loss=loss)
