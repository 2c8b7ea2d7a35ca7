import threading
from pathlib import Path

import pytest
import torch

from zerotrain.data import TextDataset
from zerotrain.data import prepare as prepared_module

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files; only two end with a line."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, end in {"c": "", "a": "", "b": "\n"}.items():
        (folder / name).write_text(name * 50 + end)
    return folder


JOINED = "a" * 50 + "\n" + "b" * 50 + "\n" + "c" * 50 + "\n"


def text_of(dataset: TextDataset) -> str:
    return dataset.decode(dataset.store.read(0, dataset.store.tokens).astype("int64").tolist())


def test_files_are_documents_in_sorted_order_each_of_which_ends_its_line(folder, cache):
    dataset = TextDataset(str(folder), seq_len=4, cache_dir=str(cache))
    assert text_of(dataset) == JOINED
    assert dataset.store.documents.tolist() == [0, 51, 102]
    joined = TextDataset(str(folder), seq_len=4, document_end="none", cache_dir=str(cache))
    assert text_of(joined) == "a" * 50 + "b" * 50 + "\n" + "c" * 50


@pytest.mark.case("data: Text", "one file as bytes", "read where it lies")
def test_a_single_file_of_bytes_is_read_where_it_lies(text_file, cache):
    dataset = TextDataset(str(text_file), seq_len=8, cache_dir=str(cache))
    assert [shard.path for shard in dataset.store.shards] == [text_file]
    assert text_of(dataset) == TEXT
    assert not cache.exists()


def test_a_second_use_reads_the_store_of_the_first(folder, cache):
    first = TextDataset(str(folder), seq_len=8, cache_dir=str(cache))
    written = first.store.shards[0].path.stat()
    second = TextDataset(str(folder), seq_len=12, cache_dir=str(cache))
    assert second.store.shards[0].path.stat().st_ino == written.st_ino
    assert len(list(cache.iterdir())) == 1


def test_a_changed_source_is_read_anew(folder, cache):
    TextDataset(str(folder), seq_len=4, cache_dir=str(cache))
    (folder / "a").write_text("A" * 50)
    after = TextDataset(str(folder), seq_len=4, cache_dir=str(cache))
    assert text_of(after) == "A" * 50 + JOINED[50:]


def test_who_makes_a_store_at_the_same_time_waits_for_the_first(folder, cache, monkeypatch):
    writes = []
    write = prepared_module.write_store
    monkeypatch.setattr(prepared_module, "write_store", lambda *given: writes.append(given) or write(*given))
    together = threading.Barrier(4)
    datasets = []

    def open_dataset():
        together.wait()
        datasets.append(TextDataset(str(folder), seq_len=8, cache_dir=str(cache)))

    threads = [threading.Thread(target=open_dataset) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [text_of(dataset) for dataset in datasets] == [JOINED] * 4
    assert len(writes) == 1


def test_the_default_cache_is_the_users(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert TextDataset(str(folder), seq_len=8).store.shards[0].path.parents[1] == tmp_path / "xdg" / "zerotrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TextDataset(str(folder), seq_len=8).store.shards[0].path.parents[1] == tmp_path / ".cache" / "zerotrain"


def test_a_cache_that_cannot_be_written_is_refused_by_name(folder, text_file):
    with pytest.raises(ValueError, match=f"data.cache_dir={text_file} cannot take the prepared text"):
        TextDataset(str(folder), seq_len=8, cache_dir=str(text_file))


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
        ("vocab_size", None, "data.vocab_size=null takes the size from the tokenizer, and data.tokenizer=null; give"),
        ("validation_fraction", 1.0, "data.validation_fraction=1.0 is out of range"),
        ("document_end", "eot", "data.document_end=eot is not known; it must be eos, bos, newline, none or null"),
        ("document_end", "eos", "data.document_end=eos: bytes have no such token; choose newline or none"),
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


def test_with_a_tokenizer_the_tokens_are_its_own(text_file, cache, tokenizer):
    dataset = TextDataset(str(text_file), seq_len=9, vocab_size=None, tokenizer=tokenizer, cache_dir=str(cache))
    assert dataset.vocab_size == 9
    ids, labels = dataset.train[0]
    assert dataset.decode(ids).split() == TEXT.split()[:9]
    assert dataset.decode(labels).split() == TEXT.split()[1:10]
    assert dataset.encode("lazy fox").tolist() == ids[[7, 3]].tolist()
    assert dataset.store.tokens == len(TEXT.split())


def test_bytes_and_each_tokenizer_have_a_store_of_their_own(folder, cache, tokenizer):
    (folder / "b").write_text(TEXT)
    for given in (None, tokenizer, tokenizer):
        TextDataset(str(folder), seq_len=1, tokenizer=given, cache_dir=str(cache))
    assert len(list(cache.iterdir())) == 2


def test_a_tokenizer_that_is_not_there_or_too_large_is_refused(text_file, cache, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"data\.vocab_size=5 is too small; the tokenizer of .* needs 9"):
        TextDataset(str(text_file), seq_len=8, vocab_size=5, tokenizer=tokenizer, cache_dir=str(cache))
    with pytest.raises(ValueError, match=r"data\.tokenizer=.* is neither a folder with a tokenizer nor one that"):
        TextDataset(str(text_file), seq_len=8, tokenizer=str(tmp_path / "nothing"), cache_dir=str(cache))


def test_the_summary_counts_the_files_of_the_text_also_where_training_is_wrapped(folder, cache):
    dataset = TextDataset(str(folder), seq_len=4, cache_dir=str(cache))
    said, known = dataset.summary(), dataset.fingerprint()
    assert said.startswith("3 files, 153 tokens, ")  # with a newline behind each
    dataset.train = [dataset.train[row] for row in range(3)]
    assert (dataset.summary(), dataset.fingerprint()) == (said, known)


def test_a_token_is_told_by_the_file_that_it_was_read_from_and_its_place_there(folder, text_file, cache):
    of_files = TextDataset(str(folder), seq_len=4, cache_dir=str(cache)).store
    origins = [of_files.origin(position) for position in range(of_files.tokens)]
    for position, origin in enumerate(origins):
        path, _, number = origin.rpartition(", token ")
        text = Path(path).read_bytes()
        if int(number) < len(text):  # else it stands between documents
            assert of_files.read(position, position + 1)[0] == text[int(number)]
    assert [Path(each.rpartition(",")[0]).name for each in origins] == ["a"] * 51 + ["b"] * 51 + ["c"] * 51
    one_file = TextDataset(str(text_file), seq_len=44, cache_dir=str(cache)).store
    assert one_file.origin(1000) == f"{text_file}, token 1000"
    (folder / "d.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n')
    of_lines = TextDataset(str(folder), seq_len=4, cache_dir=str(cache)).store
    assert of_lines.origin(153 + 6 + 2).startswith(f"document 4 of {cache}")
    assert of_lines.origin(153 + 6 + 2).endswith(", token 2")
