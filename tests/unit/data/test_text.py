import os
import threading
from pathlib import Path

import pytest
import torch

from zerotrain.data import TextDataset

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT)
    return path


def test_sequences_are_the_bytes_of_the_text(text_file, cache):
    dataset = TextDataset(str(text_file), seq_len=44, cache_dir=str(cache))
    ids, labels = dataset.train[0]
    assert dataset.decode(ids) == TEXT[:44]
    assert dataset.decode(labels) == TEXT[1:45]


def test_files_are_joined_in_sorted_order(tmp_path, cache):
    (tmp_path / "texts").mkdir()
    for name in "cab":
        (tmp_path / "texts" / name).write_text(name * 50)
    dataset = TextDataset(str(tmp_path / "texts"), seq_len=4, cache_dir=str(cache))
    assert dataset.token_file.read_text() == "a" * 50 + "b" * 50 + "c" * 50


def test_a_second_use_reads_the_joined_file_of_the_first(text_file, cache):
    first = TextDataset(str(text_file), seq_len=8, cache_dir=str(cache))
    written = first.token_file.stat()
    second = TextDataset(str(text_file), seq_len=16, cache_dir=str(cache))
    assert second.token_file == first.token_file
    assert second.token_file.stat().st_ino == written.st_ino
    assert {path.name for path in cache.iterdir()} == {first.token_file.name, first.token_file.stem + ".json"}


def test_a_changed_source_is_read_anew(text_file, cache):
    before = TextDataset(str(text_file), seq_len=8, cache_dir=str(cache))
    text_file.write_text(TEXT.upper())
    os.utime(text_file, ns=(0, before.token_file.stat().st_mtime_ns + 1))
    after = TextDataset(str(text_file), seq_len=8, cache_dir=str(cache))
    assert after.decode(after.train[0][0]) == TEXT[:8].upper()


def test_ranks_that_join_the_files_at_the_same_time_leave_one_whole_file(text_file, cache):
    together = threading.Barrier(4)
    datasets = []

    def open_dataset():
        together.wait()
        datasets.append(TextDataset(str(text_file), seq_len=8, cache_dir=str(cache)))

    threads = [threading.Thread(target=open_dataset) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(datasets) == 4
    assert [path.read_text() for path in cache.iterdir() if path.suffix != ".json"] == [TEXT]


def test_the_default_cache_is_the_users(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert TextDataset(str(text_file), seq_len=8).token_file.parent == tmp_path / "xdg" / "zerotrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TextDataset(str(text_file), seq_len=8).token_file.parent == tmp_path / ".cache" / "zerotrain"


def test_a_cache_that_cannot_be_written_is_refused_by_name(text_file):
    with pytest.raises(ValueError, match=f"data.cache_dir={text_file} cannot take the joined text"):
        TextDataset(str(text_file), seq_len=8, cache_dir=str(text_file))


def test_encoding_and_decoding_give_the_text_back(text_file, cache):
    dataset = TextDataset(str(text_file), seq_len=8, cache_dir=str(cache))
    assert dataset.decode(dataset.encode("grün €")) == "grün €"
    assert dataset.encode("a\n").tolist() == [97, 10]


def test_decoding_shows_what_is_no_text(text_file, cache):
    dataset = TextDataset(str(text_file), seq_len=8, vocab_size=300, cache_dir=str(cache))
    assert dataset.decode(torch.tensor([104, 0xFF, 105, 299])) == "h\ufffdi"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seq_len", 0, "data.seq_len=0 is too small; it must be at least 1"),
        ("seq_len", 100_000, r"data.path=.*fox.txt holds 8800 tokens; with data.seq_len=100000"),
        ("vocab_size", 255, "data.vocab_size=255 is too small; bytes of text need 256"),
        ("vocab_size", None, "data.tokenizer=null, and data.vocab_size=null is as many tokens as it has"),
        ("validation_fraction", 1.0, "data.validation_fraction=1.0 is out of range"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(text_file, cache, name, value, message):
    with pytest.raises(ValueError, match=message):
        TextDataset(str(text_file), **{"seq_len": 8, "cache_dir": str(cache), name: value})


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with a tokenizer of the nine words of the text and one for all others."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = ["[UNK]", *sorted(set(TEXT.split()))]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, "[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


def test_with_a_tokenizer_the_tokens_are_its_own(text_file, cache, tokenizer, monkeypatch):
    monkeypatch.setattr("zerotrain.data.tokenizer.READ_NUM_CHARACTERS", 100)
    dataset = TextDataset(str(text_file), seq_len=9, vocab_size=None, tokenizer=tokenizer, cache_dir=str(cache))
    assert dataset.vocab_size == 9
    ids, labels = dataset.train[0]
    assert dataset.decode(ids).split() == TEXT.split()[:9]
    assert dataset.decode(labels).split() == TEXT.split()[1:10]
    assert dataset.encode("lazy fox").tolist() == ids[[7, 3]].tolist()
    assert dataset.train.store.tokens == len(TEXT.split())


def test_bytes_and_each_tokenizer_have_a_cached_file_of_their_own(text_file, cache, tokenizer):
    plain = TextDataset(str(text_file), seq_len=8, cache_dir=str(cache))
    tokens = TextDataset(str(text_file), seq_len=8, tokenizer=tokenizer, cache_dir=str(cache))
    again = TextDataset(str(text_file), seq_len=8, tokenizer=tokenizer, cache_dir=str(cache))
    assert plain.token_file != tokens.token_file == again.token_file


def test_a_tokenizer_that_is_not_there_or_too_large_is_refused(text_file, cache, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"data\.vocab_size=5 is too small; the tokenizer of .* needs 9"):
        TextDataset(str(text_file), seq_len=8, vocab_size=5, tokenizer=tokenizer, cache_dir=str(cache))
    with pytest.raises(ValueError, match=r"data\.tokenizer=.* is neither a folder with a tokenizer nor one that"):
        TextDataset(str(text_file), seq_len=8, tokenizer=str(tmp_path / "nothing"), cache_dir=str(cache))
