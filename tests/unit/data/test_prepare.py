"""The tokens that are made of documents: each one's own, whatever it is cut into, with what stands between them."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data.tokenizers_made import END, KINDS, made, sample, saved
from zerotrain.data import TextDataset, prepare, tokenizer as pieces
from zerotrain.data.prepare import Recipe, StoreWriter, write_store
from zerotrain.data.store import TokenStore
from zerotrain.data.text_files import find_sources
from zerotrain.data.tokenizer import TextTokenizer
from zerotrain.files.lock import lock, open_lock

# What is kept of a text is what is read again, or is made anew with a line that says why.


TEXT = "the quick brown fox jumps over the lazy dog\n" * 200
OTHER = TEXT.upper()
"""As long."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One of two files of a text."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/empty line.txt").write_text("\n")
    path = tmp_path / "texts/fox.txt"
    path.write_text(TEXT)
    return path


def store(source: Path, cache: Path) -> Path:
    """The folder with the tokens of the text."""
    dataset = TextDataset(str(source.parent), seq_len=8, cache_dir=str(cache))
    assert dataset.store.read(0, dataset.store.tokens).tobytes() == b"\n" + source.read_bytes()
    return dataset.store.shards[0].path.parent


def rewritten(path: Path, content: bytes) -> None:
    """Other content, under the same time of modification."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


HARMS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "truncated": (
        lambda kept, source: os.truncate(kept / "000000.bin", 4000),
        "it has {less} bytes, and had {nbytes} when it was made",
    ),
    "random bytes of the same length and time": (
        lambda kept, source: rewritten(kept / "000000.bin", os.urandom(8801)),
        "its bytes are not those that were written",
    ),
    "a source of other text, of the same length and time": (
        lambda kept, source: rewritten(source, OTHER.encode()),
        "the text it was made of has changed",
    ),
    "no index": (lambda kept, source: (kept / "index.json").unlink(), "it has no index.json"),
    "no seal": (lambda kept, source: (kept / "seal.json").unlink(), "nothing in it says what it holds"),
    "a seal of something else": (
        lambda kept, source: (kept / "seal.json").write_text('{"sha256": "a"}'),
        "what it holds cannot be read from seal.json",
    ),
}


@pytest.mark.case("data: Text", "a store or its text is written to", "made anew, with a line that says why")
@pytest.mark.parametrize("harm", HARMS)
def test_a_store_that_does_not_fit_is_made_anew_with_a_line_that_says_why(source, cache, capfd, harm: str):
    kept = store(source, cache)
    nbytes = sum(path.stat().st_size for path in kept.iterdir() if path.name not in ("seal.json", "lock"))
    do_harm, reason = HARMS[harm]
    do_harm(kept, source)
    capfd.readouterr()
    assert store(source, cache) == kept
    line, *_ = capfd.readouterr().err.splitlines()
    assert line == f"{kept} is made anew: {reason.format(nbytes=nbytes, less=nbytes - 4801)}"
    store(source, cache)
    assert capfd.readouterr().err == ""


def test_what_was_read_whole_once_is_not_read_again_until_it_was_touched(source, cache, capfd, monkeypatch):
    read: list[str] = []
    sha256_of = prepare.sha256_of
    monkeypatch.setattr(
        prepare, "sha256_of", lambda files: read.extend(file.name for file in files) or sha256_of(files)
    )
    kept = store(source, cache)
    read.clear()
    capfd.readouterr()
    store(source, cache)
    assert read == []
    (kept / "000000.bin").chmod(0o400)  # a copy of a cache has other times of change too
    store(source, cache)
    assert read == ["000000.bin", "documents.bin", "index.json", "empty line.txt", "fox.txt"]
    read.clear()
    store(source, cache)
    assert read == []
    assert capfd.readouterr().err == ""


def test_a_hash_goes_over_all_pieces_of_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "HASHED_NBYTES", 10)
    content = os.urandom(35)
    path = tmp_path / "file"
    hashes = set()
    for place in range(35):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        hashes.add(prepare.sha256_of([path]))
    path.write_bytes(content)
    assert len(hashes | {prepare.sha256_of([path])}) == 36
    assert prepare.sha256_of([path, path]) != prepare.sha256_of([path])


def test_nobody_else_may_read_what_was_made_of_a_text(source, cache):
    before = os.umask(0)
    try:
        kept = store(source, cache)
    finally:
        os.umask(before)
    assert kept.stat().st_mode & 0o777 == 0o700


def begun(cache: Path, name: str, *, days_old: float) -> Path:
    """A store that somebody has begun."""
    folder = cache / name
    folder.mkdir(parents=True)
    for file in ("lock", "000000.bin", "000000.note"):
        (folder / file).write_text("{}")
    changed_s = time.time() - days_old * 86400
    os.utime(folder, (changed_s, changed_s))
    return folder


@pytest.mark.case("data: Text", "unfinished work of killed processes", "continued, or removed once it is of no use")
def test_what_was_begun_and_is_of_no_use_any_more_is_removed(source, cache):
    kept = store(source, cache)
    paths, recipe = kept.name.split("-")[1:3]
    of_changed = begun(cache, f"text-{paths}-{recipe}-{'0' * 16}", days_old=0)
    of_long_ago = begun(cache, f"tokens-{'1' * 16}-{recipe}-{'0' * 16}", days_old=8)
    of_yesterday = begun(cache, f"tokens-{'2' * 16}-{recipe}-{'0' * 16}", days_old=1)
    not_ours = {begun(cache, name, days_old=99) for name in ("my own", "text-2026-11-23")}
    under_way = begun(cache, f"text-{paths}-{recipe}-{'3' * 16}", days_old=0)
    with open_lock(under_way / "lock") as file:
        lock(file)
        store(source, cache)
        assert set(cache.iterdir()) == {kept, of_yesterday, *not_ours, under_way}
    store(source, cache)
    assert not of_changed.exists()
    assert not of_long_ago.exists()
    assert set(cache.iterdir()) == {kept, of_yesterday, *not_ours}


def test_a_change_right_after_the_hash_was_taken_is_seen(source, cache):
    """A file system's clock steps: a file written twice within a step has the same time of change."""
    for text in (OTHER, TEXT, OTHER):
        store(source, cache)
        rewritten(source, text.encode())
        store(source, cache)


def grown(path: Path) -> None:
    with path.open("a") as file:
        file.write("more\n")


def replaced(path: Path) -> None:
    other, before = path.with_suffix(".new"), path.stat()
    other.write_text(OTHER)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "grown": grown,
    "cut short": lambda path: os.truncate(path, 440),
    "removed": lambda path: path.unlink(),
    "replaced by a file of the same size and time": replaced,
    "rewritten with the same size and time": lambda path: rewritten(path, OTHER.encode()),
}
MOMENTS = ("before the hash", "behind the hash", "before the seal")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_text_that_changes_while_it_is_prepared_is_never_taken_for_current(
    source, cache, capfd, monkeypatch, change: str, moment: str
):
    """The stamp was taken behind the writing: it was the changed file's, and fitted ever after."""
    sha256_of = prepare.sha256_of

    def meanwhile(files):
        reads_text = files[-1] == source
        if reads_text and moment == "before the hash":
            CHANGES[change](source)
        digest = sha256_of(files)
        if moment == ("behind the hash" if reads_text else "before the seal"):
            CHANGES[change](source)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "sha256_of", meanwhile)
        with pytest.raises(ValueError, match=f"data.path: {source} was written to while it was read; .* again") as told:
            store(source, cache)
    assert "\n" not in str(told.value)
    if change == "removed":
        source.write_text(OTHER)
    [left] = cache.iterdir()
    assert not {"seal.json", "index.json"} & {path.name for path in left.iterdir()}
    store(source, cache)  # which holds it against the file as it is
    capfd.readouterr()
    store(source, cache)
    assert capfd.readouterr().err == ""


def test_a_store_of_another_recipe_is_made_anew(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []

    def write(folder: Path, made_of: str) -> None:
        written.append(folder)
        (folder / "000000.bin").write_bytes(source.read_bytes())
        (folder / "index.json").write_text("{}")

    for recipe in ("one", "one", "another", "another"):
        prepare.kept_store(tmp_path / "store", [source], recipe, write)
    assert len(written) == 2
    assert "is made anew: it was made with other settings" in capsys.readouterr().err


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


@pytest.mark.case(
    "data: Text", "a stretch in which no cut is exact", "tokenised at once, after a line about the memory it takes"
)
def test_a_stretch_that_cannot_be_cut_is_told_before_it_takes_memory(tmp_path, capsys, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a" * 70_000)
    monkeypatch.setattr("zerotrain.data.prepare._WARNED_NBYTES", 69_000)
    store_of(tmp_path / "texts", tmp_path / "out", saved("Llama 2", tmp_path / "tokenizer"))
    assert "a.txt: 0 MB cannot be cut without changing a token; they are tokenised at once" in (capsys.readouterr().err)


class Killed(BaseException):
    """What no code catches."""


def kill_at(patch: pytest.MonkeyPatch, num_batches: int) -> None:
    """The process ends once so many batches are tokenised."""
    left, tokens_of = [num_batches], Recipe.tokens_of

    def tokens_or_end(self: Recipe, batch: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return tokens_of(self, batch)

    patch.setattr(Recipe, "tokens_of", tokens_or_end)


@pytest.mark.case("data: Text", "killed anywhere while preparing")
@pytest.mark.parametrize("tokenizer", [None, "Llama 2"])
def test_what_was_ended_anywhere_goes_on_and_comes_to_the_same_bits(tokenizer, texts, tmp_path, monkeypatch, capsys):
    folder = None if tokenizer is None else saved(tokenizer, tmp_path / "tokenizer", eos_token=END)
    in_one_shard = store_of(texts, tmp_path / "one shard", folder)
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 900)
    monkeypatch.setattr(prepare, "BATCH_NBYTES", 2500)
    monkeypatch.setattr(prepare, "PIECE_NBYTES", 0)
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 3001)
    recipe = Recipe(find_sources(str(texts)), None if folder is None else TextTokenizer(folder))
    undisturbed = store_of(texts, tmp_path / "undisturbed", folder)
    assert [shard.tokens for shard in undisturbed.shards[:-1]] == [3001] * (in_one_shard.tokens // 3001)
    assert documents_of(undisturbed) == documents_of(in_one_shard)
    said = f"leaves out {(texts / 'b.jsonl').read_text().count(NULL)} rows whose text is null"
    assert said in capsys.readouterr().err
    ended = tmp_path / "ended"
    ended.mkdir()
    numbers_finished = set()
    for attempt in range(100):
        with monkeypatch.context() as patch, suppress(Killed):
            kill_at(patch, 3 + attempt // 4)  # more and more: it goes on behind a row only, and one is long
            write_store(recipe, ended, "sources")
            break
        number = len(list(ended.glob("*.note")))
        numbers_finished.add(number)
        (ended / f"{number:06}.bin").write_bytes(b"without a note")
        (ended / f"{number:06}.bin.0123.tmp").write_bytes(b"cut off")
    assert len(numbers_finished) >= 5
    assert said in capsys.readouterr().err
    assert files_of(ended) == files_of(tmp_path / "undisturbed")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two long documents and three short ones, one of them null, which are read in pieces of 32 bytes."""
    texts = tmp_path / "texts"
    texts.mkdir()
    rows = '{"text": "bee"}\n\n{"text": null}\n{"text": "b"}\n'
    for name, text in {"a.txt": "a" * 70, "b.jsonl": rows, "c.txt": "c" * 70}.items():
        (texts / name).write_text(text)
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 32)
    monkeypatch.setattr(prepare, "_MAX_PIECES", 1)
    monkeypatch.setattr(prepare, "_BATCHES_UNDER_WAY", 1)
    return texts


@pytest.mark.parametrize("end", ["newline", "none"])
def test_killed_behind_any_piece_it_repeats_the_unfinished_shard_alone(
    small_texts: Path, tmp_path: Path, monkeypatch, end: str
):
    """Killed just behind a file it read that file again, and its tokens stood there twice."""
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 24)  # the third ends in the first row of b.jsonl
    recipe = Recipe(find_sources(str(small_texts)), None, end)
    # Behind the last piece of a file stands the next file.
    ends = [(number + (piece.resume_at is None), piece.resume_at or 0) for number, piece in recipe.pieces(0, 0)]
    tokens = np.cumsum([len(recipe.tokens_of([piece])[0]) for _, piece in recipe.pieces(0, 0)]).tolist()
    (tmp_path / "undisturbed").mkdir()
    write_store(recipe, tmp_path / "undisturbed", "sources")
    pieces_from, begun_at = Recipe.pieces, []

    def noted_pieces(self: Recipe, file: int, offset: int) -> Any:
        begun_at.append((file, offset))
        return pieces_from(self, file, offset)

    monkeypatch.setattr(Recipe, "pieces", noted_pieces)
    for killed_at in range(len(ends)):
        out = tmp_path / f"killed at {killed_at}"
        out.mkdir()
        with monkeypatch.context() as patch:
            kill_at(patch, killed_at)
            with pytest.raises(Killed):
                write_store(recipe, out, "sources")
        num_finished = len(list(out.glob("*.note")))
        assert num_finished == ([0, *tokens][killed_at]) // 24
        write_store(recipe, out, "sources")
        before = [place for place, total in zip(ends, tokens, strict=True) if total < num_finished * 24]
        assert begun_at[-1] == (before[-1] if before else (0, 0))
        assert files_of(out) == files_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_how_far_it_is_is_told(is_terminal: bool, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "QUIET_S", 0.0)
    monkeypatch.setattr(prepare, "LINE_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    store_of(texts, tmp_path / "out")
    said = capsys.readouterr().err
    assert re.search(r"preparing: 0\.\d of 0\.\d MB, [\d,]+ tokens, \d+\.\d MB/s, \d+ s left", said)
    assert ("\x1b" in said) == is_terminal


def test_rows_without_any_text_are_refused_with_how_many_there_were(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.jsonl").write_text(f"{NULL}\n{NULL}\n")
    with pytest.raises(ValueError, match="holds no text"):
        store_of(tmp_path / "texts", tmp_path / "out")
    assert "texts: leaves out 2 rows whose text is null\n" in capsys.readouterr().err


# What was noted of a shard: damaged, or of another text, it is not gone on behind.


def write_documents(folder: Path, numbers: range, made_of: str = "made of this") -> StoreWriter:
    """Documents of 65 tokens, in shards of 100, of sources of which each is one document."""
    writer = StoreWriter(folder, np.dtype(np.uint16), made_of)
    for number in numbers:
        writer.write(np.arange(65) + number, starts=True)
        writer.note(number + 1, 0, 65 * number)
    return writer


def replaced_byte(at: int) -> Callable[[Path], object]:
    def replace(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return replace


NOTE_HARMS: dict[str, Callable[[Path], object]] = {
    "the shard cut": lambda note: os.truncate(note.with_suffix(".bin"), 199),
    "the shard gone": lambda note: note.with_suffix(".bin").unlink(),
    "a longer shard": lambda note: note.with_suffix(".bin").write_bytes(bytes(202)),
    "the note gone": Path.unlink,
    "no note": lambda note: note.write_bytes(os.urandom(200)),
    "another hash": replaced_byte(0),
    "another place": replaced_byte(65 + 9),
    "other starts": replaced_byte(-1),
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("harm", NOTE_HARMS)
def test_behind_a_shard_that_is_not_as_it_was_noted_nothing_is_gone_on_from(
    harm: str, number: int, tmp_path: Path, monkeypatch
):
    """Cut short, a file would be filled up with zeros."""
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100)
    write_documents(tmp_path, range(4))
    resumed_at = [(0, 0), (1, 65), (3, 195)]  # without a shard, behind the first, behind the second
    at = StoreWriter(tmp_path, np.dtype(np.uint16), "made of this").resumed_at
    assert (at.file, at.tokens) == resumed_at[2]
    NOTE_HARMS[harm](tmp_path / f"{number:06}.note")
    at = StoreWriter(tmp_path, np.dtype(np.uint16), "made of this").resumed_at
    assert (at.file, at.tokens) == resumed_at[number]
    assert {path.stem for path in tmp_path.iterdir()} == {f"{left:06}" for left in range(number)}
    write_documents(tmp_path, range(at.file, 4)).complete(vocab_size=70, tokenizer=None)
    assert documents_of(TokenStore.open(tmp_path)) == [list(range(first, first + 65)) for first in range(4)]


def test_shards_of_another_text_are_removed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100)
    write_documents(tmp_path, range(4))
    assert StoreWriter(tmp_path, np.dtype(np.uint16), "made of that").resumed_at == prepare.SourcePlace()
    assert list(tmp_path.iterdir()) == []


# What is noted, and what an index names, lies on the disk by then: a power cut leaves no hole in a store.


def test_whatever_is_told_of_tokens_lies_on_the_disk_by_then(tmp_path: Path, monkeypatch):
    """Without these fsyncs no test failed: a power cut left an index of tokens that the disk never got."""
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100)
    fsync, replace, synced_nbytes, calls = os.fsync, os.replace, dict[str, int](), list[str]()

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced_nbytes[path] = os.fstat(descriptor).st_size
        calls.extend(["its name is on the disk"] if path == str(tmp_path) else [])

    def noted_replace(source: Path, target: Path) -> None:
        assert synced_nbytes[str(source)] == os.path.getsize(source)
        calls.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_documents(tmp_path, range(4)).complete(vocab_size=70, tokenizer=None)
    shards = [f"{number:06}.{suffix}" for number in range(3) for suffix in ("bin", "note")]
    names = [*shards, "documents.bin", "index.json"]
    assert calls == [call for name in names for call in (name, "its name is on the disk")]
    store = TokenStore.open(tmp_path)
    assert store.documents is not None
    assert store.documents.tolist() == [0, 65, 130, 195]
