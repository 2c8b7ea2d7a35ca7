"""Curves out of metrics.jsonl: some hundred points of any file, at the steps, tokens and seconds where they belong."""

import json
import math
from pathlib import Path

import pytest

from zerotrain.report import rows as curves
from zerotrain.report.rows import read_curves, thinned


def written(folder: Path, *lines: dict) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_an_evaluation_lies_at_the_tokens_and_seconds_of_its_step(tmp_path: Path):
    trained = [{"step": step, "train_loss": 1.0, "tokens": 100 * step, "train_s": float(step)} for step in (10, 20)]
    evaluated = [{"step": step, "val_loss": 2.0} for step in (0, 15, 20, 25)]
    _, val = read_curves(written(tmp_path, *trained, *evaluated))
    assert list(val.step) == [0, 15, 20, 25]
    assert list(val.tokens) == [0, 1500, 2000, 2000]
    assert list(val.train_s) == [0, 15, 20, 20]


def test_a_loss_that_is_no_number_is_nan_and_in_its_place(tmp_path: Path):
    train, _ = read_curves(written(tmp_path, {"step": 1, "train_loss": 3.0}, {"step": 2, "train_loss": None}))
    assert train.loss[0] == 3.0
    assert math.isnan(train.last)
    assert train.over("tokens") == []
    assert [step for step, _ in train.over("step")] == [1, 2]


def test_steps_that_come_a_second_time_are_left_out(tmp_path: Path):
    lines = [{"step": step, "train_loss": float(step)} for step in (1, 2, 3, 2, 3, 4)]
    train, _ = read_curves(written(tmp_path, *lines))
    assert list(train.step) == [1, 2, 3, 3, 4]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"step": "1", "train_loss": 2}',
        "\0" * 99,
        '{"step": 1e999, "train_loss": 2}',
        '{"train_loss": 1}',
        f'{{"step": {10**400}, "train_loss": 2}}',
        f'{{"step": 1, "train_loss": {10**400}}}',
    ],
)
def test_lines_that_are_none_of_ours_are_passed_over(tmp_path: Path, content: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{content}\n{{"step": 3, "train_loss": 2.0}}\n{content}')
    train, val = read_curves(path)
    assert (list(train.step), list(train.loss), len(val.step)) == ([3], [2.0], 0)


def test_no_file_and_a_folder_in_its_place_are_no_curve(tmp_path: Path):
    assert len(read_curves(tmp_path / "none")[0].step) == 0
    assert len(read_curves(tmp_path)[0].step) == 0


def test_of_a_long_file_a_part_is_read_from_its_first_line_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, num = tmp_path / "metrics.jsonl", 200_000
    line = '{"step": %9d, "train_loss": 2.0, "tokens": %12d}\n'
    with path.open("w") as file:
        for start in range(0, num, 1000):
            file.write("".join(line % (step, 100 * step) for step in range(start, start + 1000)))
    seen = []
    parse = curves.parse_json
    monkeypatch.setattr(curves, "parse_json", lambda text, schema: seen.append(text) or parse(text, schema))
    train, _ = read_curves(path)
    assert len(seen) <= curves.MAX_POINTS
    assert len(train.step) == curves.MAX_POINTS
    assert (train.step[0], train.step[-1]) == (0, num - 1)
    assert max(b - a for a, b in zip(train.step, train.step[1:])) < 2 * num / curves.NUM_WINDOWS  # noqa: B905


def test_a_file_of_one_line_without_end_costs_its_windows_alone(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(b'{"step": 1, "train_loss": 1, "x": "')
        file.truncate(10**10)
    assert len(read_curves(path)[0].step) == 0


def test_the_first_and_the_last_are_among_some():
    assert thinned(list(range(10)), 4) == [0, 3, 6, 9]
    assert thinned([1, 2], 4) == [1, 2]
