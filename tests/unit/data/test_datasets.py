import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from zerotrain.data import SyntheticTokens, TextDataset, TokenFiles
from zerotrain.data.fetch import RowError, fetch_rows
from zerotrain.data.formats import open_files
from zerotrain.data.store import write_index

SETTINGS = {"seq_len": 16, "vocab_size": 50, "num_sequences": 200}


def test_sequences_count_by_their_stride_around_the_vocabulary():
    for ids, labels in (SyntheticTokens(**SETTINGS).train[index] for index in range(200)):
        tokens = torch.cat([ids, labels[-1:]])
        strides = tokens.diff() % 50
        assert len(strides.unique()) == 1
        assert 1 <= strides[0] <= 8
        assert torch.equal(tokens[1:], labels)
        assert tokens.min() >= 0
        assert tokens.max() < 50


def test_a_sequence_is_the_same_whenever_it_is_made_and_its_labels_may_be_masked_in_place():
    first, second = SyntheticTokens(**SETTINGS), SyntheticTokens(**SETTINGS | {"num_sequences": 300})
    ids, labels = first.train[7]
    labels[:] = -100
    assert torch.equal(ids, second.train[7][0])


@pytest.mark.parametrize(("name", "minimum"), [("seq_len", 1), ("vocab_size", 2), ("num_sequences", 1)])
def test_a_wrong_argument_or_number_of_made_up_sequences_is_refused(name, minimum):
    with pytest.raises(ValueError, match=f"data.{name}={minimum - 1} is too small; it must be at least {minimum}"):
        SyntheticTokens(**SETTINGS | {name: minimum - 1})
    with pytest.raises(IndexError, match="sequence 200 of 200"):
        SyntheticTokens(**SETTINGS).train[200]


def test_validation_has_other_sequences():
    dataset = SyntheticTokens(**SETTINGS | {"vocab_size": 50_000})
    assert (len(dataset.train), len(dataset.validation)) == (200, 20)
    starts = {int(dataset.train[index][0][0]) for index in range(200)}
    assert not starts & {int(dataset.validation[index][0][0]) for index in range(20)}


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


def test_the_default_cache_is_the_users(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert TextDataset(str(folder), seq_len=8).store.shards[0].path.parents[1] == tmp_path / "xdg" / "zerotrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TextDataset(str(folder), seq_len=8).store.shards[0].path.parents[1] == tmp_path / ".cache" / "zerotrain"


def test_text_is_encoded_and_decoded_and_what_is_no_text_is_shown(text_file, cache):
    dataset = TextDataset(str(text_file), seq_len=8, vocab_size=300, cache_dir=str(cache))
    assert dataset.decode(dataset.encode("grün €")) == "grün €"
    assert dataset.encode("a\n").tolist() == [97, 10]
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
    with pytest.raises(
        ValueError,
        match=r"data\.tokenizer=.* \(where unset, model\.name_or_path\) is neither a folder with a tokenizer nor one",
    ):
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


VOCAB_SIZE = 50257


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch) -> Path:
    """A cache of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zerotrain"


def token_files(path, **given) -> TokenFiles:
    return TokenFiles(str(path), **{"seq_len": 9, "vocab_size": VOCAB_SIZE, **given})


def numbered(num_tokens: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + num_tokens) % VOCAB_SIZE


def write_tokens(path: Path, num_tokens: int, first: int = 0, dtype: str = "<u2") -> str:
    numbered(num_tokens, first).astype(dtype).tofile(path)
    return str(path)


def write_llm_c(path: Path, tokens: np.ndarray, magic=20240520, version=1, num_tokens=None) -> str:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if num_tokens is None else num_tokens
    path.write_bytes(header.tobytes() + tokens.astype("<u4" if magic == 20240801 else "<u2").tobytes())
    return str(path)


def write_megatron(prefix: Path, documents: list[list[int]], dtype: str = "<i4", code: int = 4, extra: int = 1) -> str:
    """One sequence a document, as its preprocess_data.py writes them."""
    lengths = np.array([len(document) for document in documents])
    firsts = np.cumsum(lengths) - lengths
    tokens = np.array([token for document in documents for token in document], dtype=dtype)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    prefix.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(documents), len(documents) + extra)
        + lengths.astype("<i4").tobytes()
        + (firsts * tokens.itemsize).astype("<i8").tobytes()
        + np.arange(len(documents) + extra).astype("<i8").tobytes()
    )
    return str(prefix)


@pytest.mark.case(
    "data: Files of tokens",
    "`train.bin` and `val.bin`; `fineweb_train_*.bin` and `fineweb_val_*.bin` in one folder or glob",
    "the first are trained on, the others are validation",
)
def test_validation_is_a_file_or_is_split_off(tmp_path):
    write_tokens(tmp_path / "train.bin", 1000)
    own_file = write_tokens(tmp_path / "other.bin", 100, first=40_000)
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04")
    split_off, of_own_file = token_files(tmp_path), token_files(tmp_path, validation_path=own_file)
    assert (len(split_off.train), len(split_off.validation)) == (99, 11)
    write_tokens(tmp_path / "val.bin", 100, first=40_000)
    for dataset in (of_own_file, token_files(tmp_path)):
        assert (len(dataset.train), len(dataset.validation)) == (111, 11)
        assert dataset.validation[0][0].tolist() == list(range(40_000, 40_009))


def as_plain(dtype):
    def write(folder, tokens):
        tokens.astype(dtype).tofile(folder / "a.bin")
        return folder / "a.bin", {"dtype": np.dtype(dtype).name}

    return write


def as_npy(dtype):
    def write(folder, tokens):
        np.save(folder / "a.npy", tokens.astype(dtype))
        return folder / "a.npy", {}

    return write


def as_llm_c(magic, version):
    return lambda folder, tokens: (write_llm_c(folder / "a.bin", tokens, magic, version), {})


def as_megatron(suffix, dtype="<i4", code=4):
    def write(folder, tokens):
        parts = [part.tolist() for part in np.array_split(tokens, 10)]
        return write_megatron(folder / "corpus", parts, dtype, code) + suffix, {}

    return write


def as_store(dtype):
    def write(folder, tokens):
        for name, part in zip(("000000.bin", "000001.bin"), np.split(tokens, [77]), strict=True):
            part.astype(dtype).tofile(folder / name)
        shards = [("000000.bin", 77), ("000001.bin", len(tokens) - 77)]
        write_index(folder, dtype=np.dtype(dtype).name, shards=shards, vocab_size=VOCAB_SIZE)
        return folder, {"vocab_size": None}

    return write


def as_shards(name, path):
    def write(folder, tokens):
        for number, part in enumerate(np.split(tokens, [100, 101, 700])):
            part.astype("<u2").tofile(folder / name.format(number))
        return folder / path, {}

    return write


FORMATS = {
    "uint16": as_plain("<u2"),
    "uint32": as_plain("<u4"),
    "npy uint16": as_npy("<u2"),
    "npy int32": as_npy("<i4"),
    "npy big-endian": as_npy(">u4"),
    "llm.c, GPT-2": as_llm_c(20240520, 1),
    "llm.c, Llama 3": as_llm_c(20240801, 7),
    "Megatron's prefix": as_megatron(""),
    "Megatron's .bin": as_megatron(".bin"),
    "Megatron's .idx, uint16": as_megatron(".idx", "<u2", 8),
    "a store of uint16": as_store("<u2"),
    "a folder": as_shards("part_{:03}.bin", ""),
    "a folder of train files": as_shards("fineweb_train_{:06}.bin", ""),
    "a glob": as_shards("part_{:03}.bin", "part_*.bin"),
    "a deep glob": as_shards("part_{:03}.dat", "../**/part_*"),
}


@pytest.mark.case(
    "data: Files of tokens",
    "`.bin` of uint8 to uint64, llm.c's header, `.npy`, Megatron's `.bin` and `.idx`, folders, globs, stores",
    "the same tokens",
)
@pytest.mark.parametrize("name", FORMATS)
def test_all_that_people_have_gives_the_same_tokens(tmp_path, name):
    """uint32, int32 and .npy files were read as uint16, and the header of llm.c as tokens (A4, C5)."""
    folder = tmp_path / "data"
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 3000)
    path, given = FORMATS[name](folder, tokens)
    dataset = token_files(path, validation_fraction=0.01, **given)
    assert dataset.vocab_size == VOCAB_SIZE
    store = dataset.train.store
    assert store.read(0, store.tokens).astype(int).tolist() == tokens.tolist()
    ids, labels = dataset.train.rows([3, 1])
    assert ids.tolist() == [tokens[27:36].tolist(), tokens[9:18].tolist()]
    assert labels.tolist() == [tokens[28:37].tolist(), tokens[10:19].tolist()]


@pytest.mark.case(
    "data: Files of tokens",
    "`train.bin` and `val.bin`; `fineweb_train_*.bin` and `fineweb_val_*.bin` in one folder or glob",
)
@pytest.mark.parametrize("path", ["", "fineweb_*.bin"])
def test_files_called_val_are_for_validation(tmp_path, path):
    folder = tmp_path / "fineweb10B"
    folder.mkdir()
    write_llm_c(folder / "fineweb_train_000002.bin", numbered(500, first=500))
    write_llm_c(folder / "fineweb_train_000001.bin", numbered(500))
    write_llm_c(folder / "fineweb_val_000000.bin", numbered(100, first=30_000))
    dataset = token_files(folder / path)
    assert (len(dataset.train), len(dataset.validation)) == (111, 11)
    assert dataset.train[110][0].tolist() == list(range(990, 999))
    assert dataset.validation[0][0][0] == 30_000
    write_llm_c(folder / "other.bin", numbered(500))
    (folder / "fineweb_more.bin").symlink_to(folder / "other.bin")
    with pytest.raises(
        ValueError, match=r"has fineweb_val_000000.bin, .* and (fineweb_more|other).bin, which has neither"
    ):
        token_files(folder / path)


def test_megatrons_documents_are_split_whole(tmp_path):
    rng = np.random.default_rng(0)
    documents = [[number] * length for number, length in enumerate(rng.integers(0, 40, 400).tolist())]
    for extra in (1, 0):
        dataset = token_files(write_megatron(tmp_path / f"corpus{extra}", documents, extra=extra))
        assert dataset.train.store.documents.tolist() == [sum(map(len, documents[:at])) for at in range(400)]
        assert dataset.train.split == "by document, 0.1"
        read = [set(side.rows(range(len(side)))[0].flatten().tolist()) for side in (dataset.train, dataset.validation)]
        assert not read[0] & read[1]


def test_a_file_without_documents_is_one_beside_files_with_documents(tmp_path):
    write_megatron(tmp_path / "a", [[1, 2], [3]])
    np.save(tmp_path / "b.npy", np.arange(5, dtype="<i4"))
    write_megatron(tmp_path / "c", [[6], [7]])
    files = [tmp_path / "a.bin", tmp_path / "b.npy", tmp_path / "c.bin"]
    store = open_files(files, dtype="uint16", vocab_size=100, source="data.path=all")
    assert store.documents.tolist() == [0, 2, 3, 8, 9]


@pytest.mark.case("data: Files of tokens", "A file of several names or links in a folder", "read once")
def test_a_file_is_read_once_whatever_links_lead_to_it(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_tokens(folder / "b.bin", 1000)
    (folder / "a.bin").symlink_to(folder / "b.bin")
    os.link(folder / "b.bin", folder / "c.bin")
    assert token_files(folder).train.store.tokens == 1000


PROSE = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 5
LIKE = {
    "ASCII text": (PROSE.encode(), {}, "looks like text; choose data=text"),
    "Russian text": (("Был холодный ясный апрельский день\n" * 9).encode(), {}, "looks like text; choose data=text"),
    "uint32": (numbered(500).astype("<u4"), {}, "looks like uint32 tokens, .*; set data.dtype=uint32"),
    "int64": (numbered(500).astype("<i8"), {}, "looks like uint64 tokens, .*; set data.dtype=uint64"),
    "uint16 as uint32": (
        numbered(500, 30).astype("<u2"),
        {"dtype": "uint32"},
        "looks like uint16 tokens, not uint32; .*=uint16",
    ),
    "big-endian": (numbered(500).astype(">u2"), {}, "looks like big-endian uint16: .*below data.vocab_size=50257"),
    "gzip": (b"\x1f\x8b" + bytes(98), {}, "is a gzip file; unpack it"),
    "parquet": (b"PAR1" + bytes(96), {}, "is a parquet file; data=text reads its text"),
    "an .idx alone": (b"MMIDIDX\0\0" + bytes(91), {}, "is the index of a Megatron dataset without the .bin beside it"),
}


@pytest.mark.case(
    "data: Files of tokens",
    "Text, tokens of another size or byte order, compressed files, other formats",
    "refused before any rank starts, with the setting to change",
)
@pytest.mark.parametrize("name", LIKE)
def test_what_looks_like_something_else_is_refused_with_what_to_set(tmp_path, name):
    """Text, uint32 and int32 tokens were learnt as uint16 ones without a word (A4)."""
    content, given, message = LIKE[name]
    if not isinstance(content, bytes):
        content = content.tobytes()
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"data.path=.*a.bin {message}"):
        token_files(tmp_path / "a.bin", **given)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_tokens(folder / "a.bin", 500, dtype=given.get("dtype", "<u2"))
    (folder / "b.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"data.path=.*folder: .*b.bin {message}"):
        token_files(folder, **given)


@pytest.mark.case(
    "data: Files of tokens",
    "small vocabularies, bytes, zeros, which look odd and are right",
    "read",
    under="Text, tokens of another size or byte order, compressed files, other formats",
)
def test_tokens_that_are_as_they_should_be_are_not_taken_for_something_else(tmp_path):
    rng = np.random.default_rng(0)
    for vocab_size, dtype in ((2, "u2"), (12, "u2"), (256, "u2"), (300, "u2"), (50_257, "u2"), (65_536, "u2")):
        for tokens in (rng.integers(0, vocab_size, 20_000), (rng.pareto(1, 20_000) * 9).astype(int) % vocab_size):
            tokens.astype(dtype).tofile(tmp_path / "a.bin")
            token_files(tmp_path / "a.bin", vocab_size=vocab_size)
            tokens.astype("u4").tofile(tmp_path / "a.bin")
            token_files(tmp_path / "a.bin", vocab_size=vocab_size, dtype="uint32")
    np.frombuffer(PROSE.encode(), np.uint8).tofile(tmp_path / "a.bin")
    token_files(tmp_path / "a.bin", vocab_size=256, dtype="uint8")
    np.zeros(500, "u2").tofile(tmp_path / "a.bin")
    token_files(tmp_path / "a.bin")


@pytest.mark.case(
    "data: Files of tokens", "A header, an array or an index that does not fit its file", "refused, with both sizes"
)
def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    for given, message in {
        (20240520, 2, 50): "is an llm.c file of version 2, but only 1 is supported",
        (20240522, 1, 50): "is an llm.c file of multiple-choice questions",
        (20240520, 1, 51): "has 1124 bytes, but its header says 1126, with 51 tokens",
        (20240520, 1, 0): "has 1124 bytes, but its header says 1024, with 0 tokens",
    }.items():
        write_llm_c(path, numbered(50), *given)
        with pytest.raises(ValueError, match=f"data.path=.*a.bin {message}"):
            token_files(path)
    for array in (np.zeros((3, 4), "u2"), np.zeros(9), np.zeros(0, "u2")):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(ValueError, match=r"holds an array of .*; give one dimension of integers"):
            token_files(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.zeros(900, "u2"))
    os.truncate(tmp_path / "a.npy", 500)
    with pytest.raises(ValueError, match=r"a.npy is a damaged .npy file"):
        token_files(tmp_path / "a.npy")


@pytest.mark.case("data: Files of tokens", "A header, an array or an index that does not fit its file")
def test_a_megatron_index_that_does_not_fit_is_refused(tmp_path):
    path = write_megatron(tmp_path / "a", [[1, 2, 3], [4]])
    index = tmp_path / "a.idx"
    content = index.read_bytes()
    for change, message in {
        content[:20]: "is cut short",
        content[:-1]: "has no sequences, or is cut short",
        content[:9] + b"\2" + content[10:]: "is of version 2 and dtype code 4",
        content[:17] + b"\6" + content[18:]: "is of version 1 and dtype code 6",
        content[:17]
        + b"\10"
        + content[18:]: "a has 16 bytes, but its index .* says 14; they are from different datasets",
    }.items():
        index.write_bytes(change)
        with pytest.raises(ValueError, match=message):
            token_files(path)
    index.write_bytes(content[:-24] + np.array([1, 0, 2], "<i8").tobytes())
    with pytest.raises(ValueError, match=r"a.idx does not list documents in the order of their tokens"):
        token_files(path)


@pytest.mark.case(
    "data: Files of tokens",
    "`data.validation_path` that is the training file, a link to it, or a folder or glob with it",
    "refused",
)
@pytest.mark.parametrize("case", ["the file", "a link to it", "another name of it", "a glob", "its folder"])
def test_validation_must_not_be_training(tmp_path, case):
    """It was accepted (A12)."""
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "a.bin"
    write_tokens(path, 1000)
    (tmp_path / "link.bin").symlink_to(path)
    os.link(path, tmp_path / "hard.bin")
    validation_path = {
        "the file": path,
        "a link to it": tmp_path / "link.bin",
        "another name of it": tmp_path / "hard.bin",
        "a glob": f"{folder}/*.bin",
        "its folder": folder,
    }[case]
    with pytest.raises(ValueError, match=r"data.validation_path=.* reads .*bin, which data.path reads too: validation"):
        token_files(path, validation_path=str(validation_path))


@pytest.mark.case(
    "data: Files of tokens",
    "A token beyond the vocabulary, anywhere",
    "refused when it is read, with its rows, file and number, before the model gets it",
)
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4", ">i8"])
def test_a_token_beyond_the_vocabulary_is_refused_with_its_place_when_it_is_read(dtype, tmp_path):
    """Files were read whole before a run to find it."""
    tokens = np.zeros(1000, dtype)
    is_signed = np.dtype(dtype).kind == "i"
    tokens[[105, 108, 300]] = -3 if is_signed else 60_000
    path, named = tmp_path / "all.npy", r"data.path=(.*all.npy) holds"
    np.save(path, tokens)
    dataset = token_files(path)
    dataset.train.rows([10, 13])
    said = f"{named} -3" if is_signed else f"{named} the token 60000"
    with pytest.raises(RowError, match=rf"^data.train: rows 1, 11 \(epoch 0, step 7\) .*: {said} \(\1, token 105\)"):
        fetch_rows(dataset.train, [1, 11], seed=0, epochs=[0, 0], step=7)
    if not is_signed:
        with pytest.raises(ValueError, match=r"; tokens must be below data.vocab_size=50257: set .* at least 60001$"):
            dataset.train[11]
        assert token_files(path, vocab_size=60_001).train[11][0].max() == 60_000
    validation = token_files(write_tokens(tmp_path / "a.bin", 900), validation_path=str(path)).validation
    with pytest.raises(ValueError, match=r"data.validation_path=.*all.npy holds .* token 108"):
        validation[12]
    plain = token_files(write_tokens(tmp_path / "plain.bin", 1000), vocab_size=500)
    with pytest.raises(ValueError, match=r"plain.bin holds the token 500 \(.*plain.bin, token 500\)"):
        plain.train[55]


def test_a_file_of_20_gb_is_opened_without_reading_it(tmp_path):
    import resource

    path = tmp_path / "large.bin"
    path.touch()
    os.truncate(path, 20_000_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = open_files([path], dtype="uint16", vocab_size=VOCAB_SIZE, source="data.path=large.bin")
    assert store.tokens == 10**10
    assert store.read(10**10 - 5, 10**10).tolist() == [0] * 5
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 50_000, sys.platform


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        ("all.bin", {"dtype": "int16"}, "data.dtype=int16 is none of uint8, uint16, uint32, uint64"),
        ("all.bin", {"vocab_size": None}, "data.vocab_size=null takes the size from a store, and data.path=.*is no"),
        ("all.bin", {"seq_len": 0}, "data.seq_len=0 is too small"),
        ("all.bin", {"validation_path": "no.bin"}, "data.validation_path=no.bin does not exist"),
        ("all.bin", {"validation_path": "5.bin"}, "data.validation_path=5.bin holds 5 tokens; data.seq_len=9 needs"),
        ("empty.bin", {}, "data.path=empty.bin has 0 bytes; a file of uint16 tokens has a multiple of 2, and at least"),
        ("odd.bin", {}, "data.path=odd.bin has 3 bytes; a file of uint16 tokens has a multiple of 2, and at least"),
        ("short.bin", {}, "holds 20 tokens; with data.seq_len=9 and data.validation_fraction=0.1 it needs at least 92"),
        ("no.bin", {}, "data.path=no.bin does not exist; give a file of tokens"),
        ("void", {}, "data.path=void is a folder without .bin or .npy files"),
        ("void/*.bin", {}, r"data.path=void/\*.bin matches no file"),
        ("/dev/null", {}, "data.path=/dev/null is neither a file nor a folder"),
        ("mixed", {}, "data.path=mixed: mixed/b.npy holds uint32 and mixed/a.bin uint16; all files must"),
    ],
)
def test_files_and_settings_that_are_wrong_are_refused(tmp_path, monkeypatch, path, given, message):
    monkeypatch.chdir(tmp_path)
    for name, num_tokens in {"all.bin": 1000, "5.bin": 5, "short.bin": 20, "empty.bin": 0}.items():
        write_tokens(Path(name), num_tokens)
    Path("odd.bin").write_bytes(b"abc")
    Path("void").mkdir()
    Path("mixed").mkdir()
    write_tokens(Path("mixed/a.bin"), 100)
    np.save("mixed/b.npy", numbered(100).astype("u4"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        token_files(path, **given)


def test_a_summary_says_what_there_is(tmp_path):
    path = write_tokens(tmp_path / "a.bin", 400_000)
    assert token_files(path, seq_len=1000).summary() == (
        "1 file, 400 k tokens, 359 rows of 1,000 (0.2 % unused), validation 40 rows (by chunk, 0.1)"
    )
    write_tokens(tmp_path / "b.bin", 1001)
    assert token_files(path, seq_len=1000, validation_path=str(tmp_path / "b.bin")).summary() == (
        "2 files, 401 k tokens, 399 rows of 1,000 (0.2 % unused), validation 1 rows (files of its own)"
    )


def test_a_fingerprint_is_equal_for_equal_data_and_for_no_other(tmp_path):
    def fingerprint(folder="a", tokens=None, name="x.bin", **given):
        (tmp_path / folder).mkdir(exist_ok=True)
        (numbered(3000) if tokens is None else tokens).astype("<u2").tofile(tmp_path / folder / name)
        return token_files(tmp_path / folder / name, **given).fingerprint()

    first = fingerprint()
    assert first == fingerprint("elsewhere")
    assert all(isinstance(value, int | str) for value in first.values())
    others = [
        fingerprint("b", numbered(3001)),
        fingerprint("b", numbered(3000, first=1)),
        fingerprint(name="y.bin"),
        fingerprint(seq_len=8),
        fingerprint(vocab_size=VOCAB_SIZE + 1),
        fingerprint(validation_fraction=0.2),
        fingerprint(validation_path=write_tokens(tmp_path / "v.bin", 100)),
    ]
    assert first not in others
    assert len({str(other) for other in others}) == len(others)
