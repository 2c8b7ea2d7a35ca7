"""The tokens that are made of documents: each one's own, whatever it is cut into, with what stands between them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.tokenizers_made import END, KINDS, REPOSITORY, made, sample, saved
from zerotrain.data import prepare as prepare_lock
from zerotrain.data import tokenizer as pieces
from zerotrain.data.prepare import Recipe, sole_writer, write_store
from zerotrain.data.store import TokenStore
from zerotrain.data.text_files import find_sources, read_pieces
from zerotrain.data.tokenizer import TextTokenizer

PARAGRAPHS = sample()[:60_000].split("\n\n")
NULL = '{"text": null}'


def store_of(folder: Path, out: Path, tokenizer: str | None = None, end: str | None = None) -> TokenStore:
    recipe = Recipe(find_sources(str(folder)), None if tokenizer is None else TextTokenizer(tokenizer), end)
    out.mkdir()
    write_store(recipe, out, "sources")
    return TokenStore.open(out)


def documents_of(store: TokenStore) -> list[list[int]]:
    starts = [0] if store.documents is None else store.documents.tolist()
    return [store.read(*each).tolist() for each in zip(starts, [*starts[1:], store.tokens], strict=True)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Long and short documents of all kinds of files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(sample()[:20_000].encode() + b"\r\nends with a line\r\n")
    rows = [json.dumps({"text": each}) + "\n" + NULL for each in PARAGRAPHS if each]
    (folder / "b.jsonl").write_text("\n".join(rows))
    (folder / "c.md").write_bytes(b"half \xff character, " * 300)
    return folder


def whole_documents(folder: Path) -> list[str]:
    """Read in the plainest way; newlines are kept."""
    with (folder / "b.jsonl").open() as file:
        rows = [json.loads(line)["text"] for line in file if line.strip() != NULL]
    return [
        (folder / "a.txt").read_bytes().decode(errors="replace"),
        *rows,
        (folder / "c.md").read_bytes().decode(errors="replace"),
    ]


@pytest.mark.case(
    "data: Text",
    "documents in plain files, lines of .jsonl, rows of .parquet, of .gz and .zst too",
    "each has the tokens of a document tokenised alone, and the separator of `data.document_end`; CR LF stays",
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_has_the_tokens_it_has_alone_and_the_end_of_text(kind: str, texts, tmp_path, monkeypatch):
    """Documents were glued, cut every 2**20 characters where some tokenizers begin a word, and CR LF became LF."""
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 900)
    special = {"eos_token": END} if kind != "WordPiece" else {"unk_token": "[UNK]"}
    folder = saved(kind, tmp_path / "tokenizer", **special)
    store = store_of(texts, tmp_path / "out", folder)
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokens = [tokenizer.encode(text, add_special_tokens=False).ids for text in whole_documents(texts)]
    end = [tokenizer.token_to_id(END)] if kind != "WordPiece" else []  # which has no token for a newline either
    assert documents_of(store) == [each + end for each in tokens]


@pytest.mark.case("data: Text", "documents in plain files, lines of .jsonl, rows of .parquet, of .gz and .zst too")
@pytest.mark.parametrize(
    ("end", "before", "after"),
    [("eos", [], [0]), ("bos", [1], []), ("none", [], []), (None, [], [0]), ("newline", [], ["\n"])],
)
def test_what_stands_between_documents_is_what_was_asked_for(end, before, after, tmp_path):
    (tmp_path / "texts").mkdir()
    for name, text in {"a": "The cat sat", "b": "A dog ran"}.items():
        (tmp_path / "texts" / name).write_text(text)
    folder = saved("bytes, GPT-2", tmp_path / "tokenizer", eos_token=END, bos_token="<|bos|>")
    tokenizer = TextTokenizer(folder)
    marks = {0: tokenizer.end_of_text, 1: tokenizer.beginning_of_text, "\n": tokenizer.tokens_of("\n")[0]}
    assert documents_of(store_of(tmp_path / "texts", tmp_path / "out", folder, end)) == [
        [*(marks[each] for each in before), *tokenizer.tokens_of(text), *(marks[each] for each in after)]
        for text in ("The cat sat", "A dog ran")
    ]


def test_what_a_tokenizer_does_not_have_is_refused(texts, tmp_path):
    word_piece = TextTokenizer(saved("WordPiece", tmp_path / "tokenizer"))
    sources = find_sources(str(texts))
    for end, said in {
        "bos": "data.document_end=bos: the tokenizer of .* has no such token; choose newline or none",
        "newline": "data.document_end=newline: the tokenizer makes no token of a newline; choose eos, bos or none",
    }.items():
        with pytest.raises(ValueError, match=said):
            Recipe(sources, word_piece, end)
    assert Recipe(sources, word_piece).ending.name == "none"


@pytest.mark.case("data: Text", "a tokenizer that was saved with truncation or padding", "nothing is lost or filled up")
def test_a_tokenizer_that_was_saved_with_a_limit_loses_and_fills_up_nothing(tmp_path):
    transformers = pytest.importorskip("transformers")
    backend = made("bytes, GPT-2")
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "tokenizer")
    tokenizer, text = TextTokenizer(str(tmp_path / "tokenizer")), "The cat sat on the mat and looked at the dog"
    backend.no_truncation()
    backend.no_padding()
    assert tokenizer.tokens_of(text) == backend.encode(text).ids
    assert tokenizer.encode_batch([text, "a"])[0].tolist() == backend.encode(text).ids


def test_a_text_longer_than_the_model_reads_is_tokenised_without_an_alarm(tmp_path, caplog, monkeypatch):
    """Transformers warned of "indexing errors" each time a text was prepared."""
    logging = pytest.importorskip("transformers").utils.logging
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text(sample()[:5000])
    folder = saved("bytes, GPT-2", tmp_path / "tokenizer", eos_token=END, model_max_length=64)
    store_of(tmp_path / "texts", tmp_path / "out", folder)
    assert caplog.messages == []
    TextTokenizer(folder)._tokenizer.encode(sample()[:5000])
    assert "indexing errors" in caplog.text


@pytest.mark.case(
    "data: Text", "a long line or document, with byte-level BPE, Metaspace, Llama 2's, Unigram and WordPiece tokenizers"
)
def test_no_piece_that_is_tokenised_is_longer_than_64_kb(tmp_path):
    """150 bytes of memory for each byte of a line: a line of 200 MB would have taken 30 GB."""
    (tmp_path / "line.txt").write_text(sample().replace("\n", " ") * 8)
    tokenizer = TextTokenizer(saved("Llama 2", tmp_path / "tokenizer"))
    lengths = [
        len(piece.text)
        for piece in read_pieces(tmp_path / "line.txt", field="text", cut=pieces.ExactPlace(tokenizer.tokens_of))
    ]
    assert sum(lengths) > 400_000
    assert max(lengths) <= 1 << 16


@pytest.mark.case(
    "data: Text", "a stretch in which no cut is exact", "tokenised at once, after a line about the memory it takes"
)
def test_a_stretch_that_cannot_be_cut_is_told_before_it_takes_memory(tmp_path, capsys, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a" * 70_000)
    monkeypatch.setattr("zerotrain.data.prepare._WARNED_NBYTES", 69_000)
    store_of(tmp_path / "texts", tmp_path / "out", saved("Llama 2", tmp_path / "tokenizer"))
    assert "a.txt: 0 MB cannot be cut without changing a token; they are tokenised at once" in (capsys.readouterr().err)


def test_shards_are_cut_at_the_same_tokens_and_nothing_is_lost_between_them(texts, tmp_path, monkeypatch):
    tokenizer = saved("bytes, GPT-2", tmp_path / "tokenizer", eos_token=END)
    whole = store_of(texts, tmp_path / "whole", tokenizer)
    monkeypatch.setattr("zerotrain.data.prepare.SHARD_TOKENS", 1000)
    cut = store_of(texts, tmp_path / "cut", tokenizer)
    assert [shard.tokens for shard in cut.shards[:-1]] == [1000] * (whole.tokens // 1000)
    assert np.array_equal(cut.read(0, cut.tokens), whole.read(0, whole.tokens))
    assert np.array_equal(cut.documents, whole.documents)


class Killed(BaseException):
    """What no code catches."""


@pytest.mark.case("data: Text", "killed anywhere while preparing")
@pytest.mark.parametrize("tokenizer", [None, "Llama 2"])
def test_what_was_ended_anywhere_goes_on_and_comes_to_the_same_bits(tokenizer, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 900)
    monkeypatch.setattr("zerotrain.data.prepare.BATCH_NBYTES", 2500)
    monkeypatch.setattr("zerotrain.data.prepare.PIECE_NBYTES", 0)
    monkeypatch.setattr("zerotrain.data.prepare.SHARD_TOKENS", 7000)
    monkeypatch.setattr("zerotrain.data.prepare.NOTE_S", 0.0)
    folder = None if tokenizer is None else saved(tokenizer, tmp_path / "tokenizer", eos_token=END)
    made_of = None if folder is None else TextTokenizer(folder)
    recipe = Recipe(find_sources(str(texts)), made_of)
    undisturbed = store_of(texts, tmp_path / "undisturbed", folder)
    said = f"leaves out {(texts / 'b.jsonl').read_text().count(NULL)} rows whose text is null"
    assert said in capsys.readouterr().err
    ended = tmp_path / "ended"
    ended.mkdir()
    tokens_of, left, places = Recipe.tokens_of, [0], set()

    def tokens_or_end(self, batch):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return tokens_of(self, batch)

    monkeypatch.setattr(Recipe, "tokens_of", tokens_or_end)
    for attempt in range(100):
        left[0] = 3 + attempt // 4  # more and more: it goes on behind a row only, and one is long
        try:
            write_store(recipe, ended, "sources")
            break
        except Killed:
            places.add((ended / "preparing.json").read_text())
            with (ended / "000000.bin").open("ab") as file:  # written, and not noted
                file.write(b"cut off")
    assert len(places) >= 5
    assert said in capsys.readouterr().err
    again = TokenStore.open(ended)
    assert [shard.tokens for shard in again.shards] == [shard.tokens for shard in undisturbed.shards]
    for name in sorted(path.name for path in (tmp_path / "undisturbed").iterdir()):
        assert name == "preparing.json" or (ended / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


def test_what_was_begun_of_other_text_is_begun_anew(texts, tmp_path, monkeypatch):
    recipe = Recipe(find_sources(str(texts)), None)
    out = tmp_path / "out"
    out.mkdir()
    write_store(recipe, out, "sources")
    (out / "000000.bin").write_bytes(bytes((out / "000000.bin").stat().st_size))
    write_store(recipe, out, "sources, rewritten")
    store = TokenStore.open(out)
    assert store.read(0, 20).tobytes() == (texts / "a.txt").read_bytes()[:20]


@pytest.mark.case("data: Text", "several prepare the same")
def test_who_waits_says_for_whom_and_a_dead_holder_frees_the_lock(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(prepare_lock, "REMINDER_S", 0.2)
    program = (
        "import sys, time; from pathlib import Path; from zerotrain.data.prepare import sole_writer\n"
        "with sole_writer(Path(sys.argv[1]), private=True):\n    print('mine', flush=True); time.sleep(3600)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "store")],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "mine\n"
    polls = []

    def poll(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 5:
            holder.kill()
            holder.wait()
        os.sched_yield()
        real_sleep(seconds)

    real_sleep = prepare_lock.time.sleep
    monkeypatch.setattr(prepare_lock.time, "sleep", poll)
    with sole_writer(tmp_path / "store", private=True):
        pass
    holder.stdout.close()
    said = capfd.readouterr().err.splitlines()
    assert said
    assert all(line.startswith(f"waits for pid {holder.pid} on ") and "prepares" in line for line in said)


def test_a_lock_that_is_a_link_empties_no_other_file(tmp_path):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "store").mkdir()
    (tmp_path / "store/lock").symlink_to("../mine")
    with pytest.raises(OSError, match="Too many levels"), sole_writer(tmp_path / "store", private=True):
        raise AssertionError
    assert (tmp_path / "mine").read_text() == "kept"


def test_rows_without_any_text_are_refused_with_how_many_there_were(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.jsonl").write_text(f"{NULL}\n{NULL}\n")
    with pytest.raises(ValueError, match="holds no text"):
        store_of(tmp_path / "texts", tmp_path / "out")
    assert "texts: leaves out 2 rows whose text is null\n" in capsys.readouterr().err
