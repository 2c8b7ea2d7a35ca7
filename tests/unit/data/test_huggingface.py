"""Datasets of Hugging Face, from disk: skipped where the package `datasets` is not installed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.data.tokenizers_made import END, saved
from zerotrain.data import HuggingFaceDataset
from zerotrain.data.items import first_batches, require_next_tokens, require_taken
from zerotrain.data.tokenizer import TextTokenizer
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


@pytest.mark.case(
    "losses", "Datasets of Hugging Face on disk", "cut, padded, labels shifted; a missing column or file is named"
)
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


def test_at_a_fraction_of_nought_all_rows_are_to_train_on(datasets: Any, file: str) -> None:
    data = HuggingFaceDataset(file, column="tokens", seq_len=4, vocab_size=32, validation_fraction=0.0)
    assert (len(data.train), len(data.validation)) == (10, 0)
    assert data.summary().startswith("10 rows, 0 to validate")
    with pytest.raises(ValueError, match=r"data.validation_fraction=1.0 is out of range; it must be 0 or between"):
        HuggingFaceDataset(file, column="tokens", seq_len=4, vocab_size=32, validation_fraction=1.0)


def test_a_folder_of_splits_labels_of_their_own_and_all_columns(datasets: Any, tmp_path: Path) -> None:
    rows = {"ids": [[1, 2, 3], [4, 5, 6]], "labels": [[-100, 2, 3], [-100, -100, 6]]}
    splits = {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(rows)}
    datasets.DatasetDict(splits).save_to_disk(folder := str(tmp_path / "saved"))
    masked = HuggingFaceDataset(folder, column="ids", labels_column="labels", seq_len=2)
    assert [part.tolist() for part in masked.train[1]] == [[4, 5], [-100, 6]]
    assert len(masked.validation) == 2
    splits["test"] = datasets.Dataset.from_dict({"ids": rows["ids"]})
    datasets.DatasetDict(splits).save_to_disk(unlike := str(tmp_path / "unlike"))
    with pytest.raises(ValueError, match=r"^data\.labels_column=labels: there is no such column; there are ids$"):
        HuggingFaceDataset(unlike, column="ids", labels_column="labels", seq_len=2)
    item = HuggingFaceDataset(folder).train[1]
    assert {name: part.tolist() for name, part in item.items()} == {"ids": [4, 5, 6], "labels": [-100, -100, 6]}
    assert all(isinstance(part, torch.Tensor) for part in item.values())


@pytest.mark.case("losses", "Datasets of Hugging Face on disk")
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"column": "text"}, r"^data\.column=text: there is no such column; there are tokens, kind$"),
        (
            {"column": "tokens", "labels_column": "x"},
            r"^data\.labels_column=x: there is no such column; there are tokens, kind$",
        ),
        ({"split": "all"}, r"^data\.split=all: data\.path=.* has no such split; it has train$"),
        ({"validation_split": "train"}, r"^data\.validation_split=train is the split to train on"),
        ({"document_end": "eos"}, r"^data.document_end=eos ends texts, and data.tokenizer=null reads none"),
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


def test_a_fifo_is_not_waited_for(datasets: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.parquet")
    with pytest.raises(FileNotFoundError, match=r"rows\.parquet is neither a file nor a folder; give a folder"):
        HuggingFaceDataset(str(tmp_path / "rows.parquet"))


def test_text_without_a_tokenizer_says_what_makes_tokens_of_it(datasets: Any, file: str) -> None:
    with pytest.raises(ValueError, match=r"^data\.column=kind holds a str and not a list of tokens; data\.tokenizer"):
        HuggingFaceDataset(file, column="kind").train[0]


TEXTS = ["The cat sat", None, "A dog ran and looked at the cat, and at the dog", "", "The dog\n", None]


@pytest.mark.parametrize(
    ("given", "before", "after"),
    [(None, [], ["eos"]), ("eos", [], ["eos"]), ("bos", ["bos"], []), ("newline", [], ["\n"]), ("none", [], [])],
)
def test_text_ends_as_in_every_other_dataset_and_null_is_left_out(datasets: Any, tmp_path: Path, given, before, after):
    """Nothing told the model where a text ends, and a row of null ended the run."""
    folder = saved("bytes, GPT-2", tmp_path / "tokenizer", eos_token=END, bos_token="<|bos|>")
    tokenizer = TextTokenizer(folder)
    marks = {"eos": [tokenizer.end_of_text], "bos": [tokenizer.beginning_of_text], "\n": tokenizer.tokens_of("\n")}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    data = HuggingFaceDataset(str(path), column="text", tokenizer=folder, seq_len=12, document_end=given)
    texts = [text for text in TEXTS if text is not None]
    rows = [*data.train, *data.validation]
    assert len(rows) == len(texts)
    for (ids, labels), text in zip(rows, texts, strict=True):
        ended = [] if after == ["\n"] and text.endswith("\n") else after
        tokens = [*(each for mark in before for each in marks[mark]), *tokenizer.tokens_of(text)]
        tokens = [*tokens, *(each for mark in ended for each in marks[mark])][:13]
        assert ids[: max(0, len(tokens) - 1)].tolist() == tokens[:-1]
        assert labels[labels != -100].tolist() == tokens[1:]
    assert data.summary() == "3 rows, 1 to validate; cut at data.seq_len=12: 1 of 3 rows; left out, since null: 2"


def test_how_many_rows_are_cut_is_said_of_a_part_where_there_are_many(datasets: Any, file: str, monkeypatch) -> None:
    data = HuggingFaceDataset(file, column="tokens", seq_len=4, vocab_size=32)
    assert data.summary() == "9 rows, 1 to validate; cut at data.seq_len=4: 3 of 9 rows"
    monkeypatch.setattr("zerotrain.data.huggingface._LOOKED_AT_ROWS", 5)
    assert data.summary() == "9 rows, 1 to validate; cut at data.seq_len=4: 1 of 5 rows looked at"
    assert HuggingFaceDataset(file, column="tokens", seq_len=9, vocab_size=32).summary() == "9 rows, 1 to validate"


@pytest.mark.parametrize(("name", "content"), [("a.json", '{"text'), ("a.parquet", "no"), ("a.jsonl", "[[[[")])
def test_a_broken_file_is_said_in_one_line(datasets: Any, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(
        ValueError, match=rf"^data.path={tmp_path / name} cannot be read as a dataset: .*; write it"
    ) as told:
        HuggingFaceDataset(str(tmp_path / name))
    assert "\n" not in str(told.value)
