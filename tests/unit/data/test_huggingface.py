"""Datasets of Hugging Face, from disk: skipped where the package `datasets` is not installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zerotrain.data import HuggingFaceDataset
from zerotrain.data.items import first_batches, require_next_tokens, require_taken
from zerotrain.models import GPT

ROWS = [
    {"tokens": list(range(row, row + length)), "kind": "x"} for row, length in enumerate((3, 9, 4, 5, 6, 7, 2, 5, 4, 8))
]


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(
        ImportError, match=r"needs datasets, which is not installed; pip install 'zerotrain\[datasets\]'"
    ):
        HuggingFaceDataset("rows.jsonl")


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    package.disable_progress_bars()
    return package


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def test_tokens_are_cut_and_padded_and_the_labels_are_the_next_ones(datasets: Any, file: str) -> None:
    data = HuggingFaceDataset(file, column="tokens", seq_len=4, vocab_size=32, validation_fraction=0.2)
    assert (len(data.train), len(data.validation)) == (8, 2)
    assert [part.tolist() for part in data.train[0]] == [[0, 1, 0, 0], [1, 2, -100, -100]]
    assert [part.tolist() for part in data.train[1]] == [[1, 2, 3, 4], [2, 3, 4, 5]]
    model = GPT(vocab_size=32, max_seq_len=4, num_layers=1, num_heads=1, hidden_size=8)
    batches = first_batches(data.train, "data.train")
    require_taken(batches, "data.train", model)
    require_next_tokens(batches, "data.train", model="GPT", vocab_size=32)
    with pytest.raises(ValueError, match=r"^the token 5 is not below data\.vocab_size=5$"):
        HuggingFaceDataset(file, column="tokens", seq_len=4, vocab_size=5).train[1]


def test_a_folder_of_splits_labels_of_their_own_and_all_columns(datasets: Any, tmp_path: Path) -> None:
    rows = {"ids": [[1, 2, 3], [4, 5, 6]], "labels": [[-100, 2, 3], [-100, -100, 6]]}
    splits = {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(rows)}
    datasets.DatasetDict(splits).save_to_disk(folder := str(tmp_path / "saved"))
    masked = HuggingFaceDataset(folder, column="ids", labels_column="labels", seq_len=2)
    assert [part.tolist() for part in masked.train[1]] == [[4, 5], [-100, 6]]
    assert len(masked.validation) == 2
    item = HuggingFaceDataset(folder).train[1]
    assert {name: part.tolist() for name, part in item.items()} == {"ids": [4, 5, 6], "labels": [-100, -100, 6]}
    assert all(isinstance(part, torch.Tensor) for part in item.values())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"column": "text"}, r"^data\.column=text: there is no such column; there are tokens, kind$"),
        ({"split": "all"}, r"^data\.split=all: data\.path=.* has no such split; it has train$"),
        ({"validation_split": "train"}, r"^data\.validation_split=train is what is trained on"),
        ({"tokenizer": "nowhere"}, r"^data\.column=null reads all columns as they are; give data\.column"),
        ({"path": "no/such"}, r"^data\.path=no/such does not exist"),
        ({"path": str(Path(__file__).parent)}, r"is a folder that save_to_disk\(\) has not written"),
        ({"path": __file__}, r"is no file that can be read: its name must end in \.json, "),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    datasets: Any, file: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=problem):
        HuggingFaceDataset(**{"path": file} | settings)


def test_text_without_a_tokenizer_says_what_makes_tokens_of_it(datasets: Any, file: str) -> None:
    with pytest.raises(ValueError, match=r"^data\.column=kind holds a str and not a list of tokens; data\.tokenizer"):
        HuggingFaceDataset(file, column="kind").train[0]
