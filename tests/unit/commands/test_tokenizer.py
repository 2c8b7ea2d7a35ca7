"""`zerotrain tokenizer`: a tokenizer of one's own text, that a run takes by its folder."""

import json
from pathlib import Path

import pytest

from zerotrain.commands.tokenizer import END_OF_TEXT, main
from zerotrain.data import TextDataset

TEXT = "the quick brown fox jumps over the lazy dog, and naïve 狐 too\n" * 50


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    return folder


def test_a_tokenizer_of_a_text_is_taken_by_a_run_and_is_the_same_again(texts: Path, capsys) -> None:
    for out in ("one", "two"):
        assert main(["data.path=texts", "--vocab-size", "300", "--out", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "data.path=texts: reads 2 files (1 .txt, 1 .jsonl)",
        "300 tokens: one",
        "train with it: python launch.py data.path=texts data.tokenizer=one data.vocab_size=null",
    ]
    assert Path("one/tokenizer.json").read_bytes() == Path("two/tokenizer.json").read_bytes()
    data = TextDataset("texts", seq_len=8, vocab_size=None, tokenizer="one", cache_dir="cache")
    assert data.vocab_size == 300
    assert data.decode(data.encode(TEXT + "\x00\U0001f98a")) == TEXT + "\x00\U0001f98a"  # no text is unknown to it
    assert data.decode([data.end_of_text]) == END_OF_TEXT


def test_it_reads_the_same_share_of_each_file(texts: Path, capsys) -> None:
    for name in ("c.txt", "d.txt"):
        (texts / name).write_text(f"{name[0] * 6} " * 40_000 + "unread " * 40_000)
    assert main(["data.path=texts/?.txt", "--vocab-size", "280", "--max-mb", "0.2", "--out", "own"]) == 0
    vocabulary = json.loads(Path("own/tokenizer.json").read_text())["model"]["vocab"]
    assert {"Ġcccccc", "Ġdddddd"} < vocabulary.keys()
    assert "Ġun" not in vocabulary


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--vocab-size", "256", "--out", "own"], "--vocab-size: got 256; it must be 257 or more"),
        (["--max-mb", "nan", "--out", "own"], "--max-mb: got nan; it must be above 0"),
        (["--out", "texts"], "--out: got texts, where something lies already; give a new folder"),
        (["--out", "texts/a.txt"], "--out: got texts/a.txt, where something lies already; give a new folder"),
        (
            ["data.path=nowhere", "--out", "own"],
            "data.path=nowhere does not exist; give a file, a folder or a glob pattern, or null for the standard "
            "library of the running Python",
        ),
        (
            ["data=synthetic", "--out", "own"],
            "data._target_: got zerotrain.data.SyntheticTokens, which reads no text; choose data=text or "
            "data=tokenized",
        ),
        (["zero.stge=1", "--out", "own"], "zero.stge: there is no such setting; did you mean zero.stage?"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(arguments: list[str], line: str, texts: Path, capsys) -> None:
    settings = ["data.path=texts"] * ("data" not in arguments[0])
    assert main([*settings, *arguments]) == 2
    assert capsys.readouterr().err.splitlines() == [line]
    assert sorted(path.name for path in Path().iterdir()) == ["texts"]
