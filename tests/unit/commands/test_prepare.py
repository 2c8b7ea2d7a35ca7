"""`zerotrain prepare`: a store of its own, or what a run will find in the cache."""

import re
from pathlib import Path

import pytest

from tests.unit.data.tokenizers_made import END, saved
from zerotrain.commands.prepare import main
from zerotrain.data import TextDataset, TokenFiles

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200


@pytest.fixture
def texts(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(TEXT)
    return folder


@pytest.fixture
def answer(capsys):
    """(arguments of the command) -> exit code, lines on stdout, lines on stderr."""

    def run(*arguments: str) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    return run


def test_what_is_prepared_beforehand_is_trained_on_as_tokens(texts, tmp_path, answer):
    tokenizer = saved("bytes, GPT-2", tmp_path / "tokenizer", eos_token=END)
    code, out, err = answer("data.path=texts", f"data.tokenizer={tokenizer}", "--out", "tokens")
    data = TextDataset("texts", seq_len=8, vocab_size=None, tokenizer=tokenizer, cache_dir="cache")
    assert code == 0
    assert out == [
        f"{data.store.tokens:,} tokens of uint16, vocab_size {data.vocab_size}, in 2 documents: tokens",
        f"train on them: python launch.py data=tokens data.path=tokens data.vocab_size={data.vocab_size}",
    ]
    assert err == ["data.path=texts: reads 2 files (2 .txt)"]
    tokens = TokenFiles("tokens", seq_len=8, vocab_size=data.vocab_size, cache_dir="cache")
    assert len(tokens.train) == len(data.train)
    assert tokens.train[3][0].tolist() == data.train[3][0].tolist()
    assert answer("data.path=texts", f"data.tokenizer={tokenizer}", "--out", "tokens") == (0, out, [])


def test_without_a_folder_it_fills_the_cache_of_the_run(texts, answer):
    code, [line], _ = answer("data.path=texts", "data.cache_dir=cache", "data.seq_len=8", "zero.stage=3")
    assert (code, line.split(":")[0]) == (0, "17,600 tokens of uint8, vocab_size 256, in 2 documents")
    made = {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*")}
    TextDataset("texts", seq_len=8, cache_dir="cache")
    assert {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*")} == made


def test_a_single_file_of_bytes_needs_no_room_in_the_cache(texts, answer):
    code, [line], err = answer("data.path=texts/a.txt", "data.cache_dir=cache")
    assert (code, line, err) == (0, "8,800 tokens of uint8, vocab_size 256, in 1 documents: texts", [])
    assert not Path("cache").exists()


def test_what_is_written_is_not_read(texts, answer):
    for out in ("texts/tokens", "texts/tokens again"):
        code, [line, _], _ = answer("data.path=texts", "data.cache_dir=texts/cache", "--out", out)
        assert (code, line.split(":")[0]) == (0, "17,600 tokens of uint8, vocab_size 256, in 2 documents")
        Path(out, "note.txt").write_text("text in there")
        answer("data.path=texts", "data.cache_dir=texts/cache")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data.pth=texts"], ["data.pth: there is no such setting; did you mean data.path?"]),
        (["data.path=nowhere"], ["data.path=nowhere does not exist; give a file"]),
        (["data.path=texts", "data.document_end=eos"], ["data.document_end=eos: bytes have no such token; choose new"]),
        (["data=synthetic"], ["data._target_: got zerotrain.data.SyntheticTokens, which reads no text"]),
        (["zero.stage=7", "train.max_steps=0"], ["zero.stage: got 7; it must be 0", "train.max_steps: got 0; "]),
        (["data.path=texts", "--out", "texts"], ["--out=texts holds other files; give a folder that is empty"]),
        (["data.path=texts", "--out", "texts/a.txt"], ["--out=texts/a.txt cannot take the prepared text ([Errno 20]"]),
        (["data.path=texts", "--config-dir", "no"], ["--config-dir: got no; there is no such folder in "]),
        (
            ["data=tokenized", "data.path=texts"],
            ["data.tokenizer: got ${model.name_or_path}; Interpolation key 'model.name_or_path' "],
        ),
    ],
)
def test_what_is_wrong_is_told_in_one_line_each_with_exit_code_2(texts, answer, arguments, said):
    code, out, err = answer(*arguments)
    assert (code, out, len(err)) == (2, [], len(said))
    for line, beginning in zip(sorted(err), sorted(said), strict=True):
        assert line.startswith(beginning)


def test_a_folder_of_other_tokens_is_not_overwritten_and_one_of_changed_text_is_made_anew(texts, answer):
    assert answer("data.path=texts", "--out", "tokens")[0] == 0
    before = Path("tokens/000000.bin").read_bytes()
    code, _, err = answer("data.path=texts", "data.document_end=none", "data.text_field=body", "--out", "tokens")
    assert (code, err) == (2, ["--out=tokens holds tokens that were made with other settings; give another folder"])
    assert Path("tokens/000000.bin").read_bytes() == before
    (texts / "a.txt").write_text(TEXT.upper())
    code, _, err = answer("data.path=texts", "--out", "tokens")
    assert (code, err[0]) == (0, "tokens is made anew: the text it was made of has changed")
    assert Path("tokens/000000.bin").read_bytes() == (TEXT.upper() + TEXT).encode()


def test_a_folder_of_yamls_may_have_any_name(texts, tmp_path, answer):
    folder = tmp_path / "it's, {mine}"
    (folder / "data").mkdir(parents=True)
    of_text = Path(__file__).parents[3] / "conf/data/text.yaml"
    (folder / "data/one_text.yaml").write_text(re.sub("(?m)^path: .*", "path: texts/a.txt", of_text.read_text()))
    code, [line], _ = answer("data=one_text", "--config-dir", str(folder), "data.cache_dir=cache")
    assert (code, line) == (0, "8,800 tokens of uint8, vocab_size 256, in 1 documents: texts")
