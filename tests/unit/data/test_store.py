import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from zerotrain.data import store as shards_module
from zerotrain.data.store import Shard, TokenStore, write_index


def write_store(folder, sizes, dtype="uint16", documents=None, **given):
    """A store of numbered tokens in shards of these sizes."""
    folder.mkdir(exist_ok=True)
    tokens = np.arange(sum(sizes)).astype(dtype)
    names = [f"{number:06d}.bin" for number in range(len(sizes))]
    for name, part in zip(names, np.split(tokens, np.cumsum(sizes)[:-1]), strict=True):
        part.astype(np.dtype(dtype).newbyteorder("<")).tofile(folder / name)
    starts = None if documents is None else np.array(documents)
    pairs = list(zip(names, sizes, strict=True))
    write_index(folder, dtype=dtype, shards=pairs, documents=starts, **{"vocab_size": 70_000, **given})
    return tokens


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("sizes", [[7], [3, 4], [1, 0, 5, 0, 1], [0, 300, 0, 2]])
def test_any_part_of_the_row_is_read_whatever_shards_it_lies_in(tmp_path, dtype, sizes):
    tokens = write_store(tmp_path, sizes, dtype)
    store = TokenStore.open(tmp_path)
    assert (store.tokens, store.dtype.name, store.documents) == (len(tokens), dtype, None)
    for start in range(0, len(tokens) + 1, 1 + len(tokens) // 40):
        for stop in range(start, len(tokens) + 1, 1 + len(tokens) // 30):
            assert store.read(start, stop).tolist() == tokens[start:stop].tolist()
    assert store.read_parts(np.array([2, 0, 5]), np.array([2, 0, 2])).tolist() == tokens[[2, 3, 5, 6]].tolist()


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 8), (8, 8), (5, 4)])
def test_what_lies_outside_of_the_row_is_not_read(tmp_path, start, stop):
    write_store(tmp_path, [3, 4])
    with pytest.raises(IndexError, match="of 7"):
        TokenStore.open(tmp_path).read(start, stop)


def test_documents_tokenizer_and_vocabulary_come_back(tmp_path):
    write_store(tmp_path, [3, 4], documents=[0, 2, 2, 6], tokenizer="abc", vocab_size=300)
    store = TokenStore.open(tmp_path)
    assert store.documents.tolist() == [0, 2, 2, 6]
    assert (store.tokenizer, store.vocab_size) == ("abc", 300)
    assert (tmp_path / "documents.bin").read_bytes() == np.array([0, 2, 2, 6], dtype="<u8").tobytes()
    assert json.loads((tmp_path / "index.json").read_text()) == {
        "format": 1,
        "dtype": "uint16",
        "vocab_size": 300,
        "tokenizer": "abc",
        "shards": [{"name": "000000.bin", "tokens": 3}, {"name": "000001.bin", "tokens": 4}],
        "documents": "documents.bin",
        "num_documents": 4,
    }
    assert sorted(os.listdir(tmp_path)) == ["000000.bin", "000001.bin", "documents.bin", "index.json"]
    mask = os.umask(0o077)
    os.umask(mask)
    assert (tmp_path / "index.json").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_store_can_be_pickled_and_read_by_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "MAX_OPEN_FILES", 2)
    tokens = write_store(tmp_path, [50] * 8)
    store = pickle.loads(pickle.dumps(TokenStore.open(tmp_path)))
    num_open = len(os.listdir("/proc/self/fd"))

    def read(seed):
        starts = np.random.default_rng(seed).integers(0, 390, 300).tolist()
        return [at for at in starts if store.read(at, at + 10).tolist() != list(range(at, at + 10))]

    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(read, range(4)))
    assert store.read(0, 400).tolist() == tokens.tolist()
    assert len(os.listdir("/proc/self/fd")) <= num_open + 2


def test_an_index_is_only_written_of_shards_that_are_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"000000.bin is missing"):
        write_index(tmp_path, dtype="uint16", shards=[("000000.bin", 5)], vocab_size=300)
    (tmp_path / "000000.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"000000.bin has 3 bytes, but .* says 10 \(5 tokens of uint16\)"):
        write_index(tmp_path, dtype="uint16", shards=[("000000.bin", 5)], vocab_size=300)
    assert os.listdir(tmp_path) == ["000000.bin"]
    with pytest.raises(ValueError, match=r"dtype: got .int16.; it must be one of uint8"):
        write_index(tmp_path, dtype="int16", shards=[], vocab_size=300)
    with pytest.raises(ValueError, match=r"documents.bin does not hold the starts of documents in 3 tokens"):
        write_index(tmp_path, dtype="uint8", shards=[("000000.bin", 3)], vocab_size=300, documents=np.array([0, 2, 1]))


@pytest.mark.case("data: Files of tokens", "A header, an array or an index that does not fit its file")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2, and this zerotrain reads format 1"),
        ({"dtype": "float32"}, "dtype: got 'float32'; it must be one of .*uint32; make the store"),
        ({"vocab_size": None}, "vocab_size: got null; it must be a whole number"),
        ({"vocab_size": 10**12}, "vocab_size: got 1000000000000; it must be a whole number <= 4294967296"),
        ({"num_documents": -1}, "num_documents: got -1; it must be a whole number >= 0"),
        ({"num_documents": 2}, "num_documents: got 2 without documents"),
        ({"num_documents": 3, "documents": ...}, "documents is missing"),
        ({"shards": [{"name": "000000.bin", "tokens": 3}] * 2}, "shards: a file is named twice"),
        ({"shards": [{"name": "index.json", "tokens": 0}]}, "shards: a file is named twice"),
        ({"tokenizer": 5}, r"tokenizer: got 5; it must be a text or null"),
        (
            {"shards": [{"name": "../secret", "tokens": 1}]},
            r"shards\[0\]\.name: got ../secret; it must be the name of a file in this folder",
        ),
        ({"shards": {}}, "shards: got a mapping; it must be a list"),
        ({"documents": "/etc/passwd"}, "documents: got /etc/passwd; it must be the name of a file"),
        (
            {"shards": [{"name": "000000.bin", "tokens": 4}]},
            r"000000.bin has 6 bytes, but .* says 8 \(4 tokens of uint16\)",
        ),
        (
            {"shards": [{"name": "000009.bin", "tokens": 4}]},
            r"000009.bin is missing, and index.json beside it names it",
        ),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, change, message):
    write_store(tmp_path, [3])
    index = json.loads((tmp_path / "index.json").read_text())
    index = {name: value for name, value in (index | change).items() if value is not ...}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe"])
def test_what_is_no_index_is_refused(tmp_path, content):
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"index.json (is no index of a store|does not describe a store)"):
        TokenStore.open(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no index.json; .* this one is not complete"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize("documents", [[], [1, 2], [0, 4], [0, 2, 1]])
def test_a_file_of_documents_that_does_not_fit_is_refused(tmp_path, documents):
    write_store(tmp_path, [3], documents=[0])
    np.array(documents, dtype="<u8").tofile(tmp_path / "documents.bin")
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "num_documents": len(documents)}))
    with pytest.raises(ValueError, match=r"documents.bin does not hold the starts of documents in 3 tokens"):
        _ = TokenStore.open(tmp_path).documents


@pytest.mark.parametrize("change", [-3, -8, -16, -24, 5, 8])
def test_a_file_of_documents_that_was_cut_or_has_grown_is_refused(tmp_path, change: int):
    """Without its last bytes it gave other documents, and so another split."""
    write_store(tmp_path, [9], documents=[0, 3, 6])
    store, file = TokenStore.open(tmp_path), tmp_path / "documents.bin"
    file.write_bytes((file.read_bytes() + bytes(8))[: 24 + change])
    said = rf"documents.bin has {24 + change} bytes, but index.json beside it says 24 \(3 documents\)"
    with pytest.raises(ValueError, match=said):
        TokenStore.open(tmp_path)
    with pytest.raises(ValueError, match=said):  # since it was opened
        _ = store.documents


def overwrite(file):
    with file.open("r+b") as opened:
        opened.write(b"\1\2\3")
    os.utime(file, ns=(0, 1_700_000_000_000_000_000))


@pytest.mark.case(
    "data: Files of tokens",
    "A file is rewritten, cut short or grows during a run",
    "the run ends with its name, its size then and now, and the token that was to be read",
)
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path):
    """A changed file was read on in silence, a cut one ended the process with SIGBUS (A8, B4)."""
    write_store(tmp_path, [50, 50])
    second = tmp_path / "000001.bin"
    content = second.read_bytes()

    def opened():
        second.write_bytes(content)
        store = TokenStore.open(tmp_path)
        assert store.read(40, 60).tolist() == list(range(40, 60))
        return store

    for change, message in {
        overwrite: "was changed since it was opened: it had 100 bytes, .* and has 100 bytes, last written 2023-11-1",
        lambda file: os.truncate(file, 30): "was cut short since .* it had 100 bytes, .* and has 30 bytes",
        lambda file: file.write_bytes(content + b"12"): "has grown since .* it had 100 bytes, .* and has 102 bytes",
    }.items():
        store = opened()
        change(second)
        assert store.read(0, 50).tolist() == list(range(50))  # of the other file
        for _ in range(2):
            with pytest.raises(OSError, match=f"000001.bin {message}.*; the run needs its token 30"):
                store.read(80, 90)


@pytest.mark.case(
    "data: Files of tokens",
    "A file is replaced or removed during a run",
    "the one that is open is read on; one that is not open is named",
)
def test_a_file_that_is_put_in_the_place_of_another_is_not_read(tmp_path):
    write_store(tmp_path, [50, 50])
    store = TokenStore.open(tmp_path)
    store.read(0, 1)
    replacement = tmp_path / "new"
    replacement.write_bytes(b"\0" * 100)
    os.replace(replacement, tmp_path / "000000.bin")
    assert store.read(0, 50).tolist() == list(range(50))  # the one that was open
    (tmp_path / "000001.bin").unlink()
    with pytest.raises(
        OSError, match=r"000001.bin is gone; it had 100 bytes when it was opened, and the run needs its token 3: keep"
    ):
        store.read(53, 54)


def test_a_header_is_passed_over(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"head" + np.arange(5, dtype="<u2").tobytes())
    store = TokenStore([Shard(tmp_path / "a.bin", 5, first_byte=4)], np.dtype("<u2"))
    assert store.read(0, 5).tolist() == [0, 1, 2, 3, 4]
    assert store.where(3) == f"{tmp_path / 'a.bin'}, token 3"


def nbytes_read() -> int:
    """What this process has had read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


@pytest.mark.case(
    "data: Files of tokens",
    "Rows at random places of a file that is not in memory",
    "little more is read than the rows",
)
def test_rows_at_random_places_bring_little_else_from_the_disk(tmp_path):
    """By a memory map 100 rows of 2 kB brought 64 MB of 64 MB (D2)."""
    if not Path("/proc/self/io").exists():
        pytest.skip("no /proc/self/io here")
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    store = TokenStore([Shard(path, 1 << 25)], np.dtype("<u2"))
    starts = np.random.default_rng(0).integers(0, (1 << 25) - 1024, 100)
    before = nbytes_read()
    store.read_parts(starts, np.full(100, 1024))
    num_read = nbytes_read() - before
    if num_read == 0:
        pytest.skip("this file system has no disk")
    assert num_read < 4_000_000


def test_a_file_is_closed_where_the_end_of_python_has_taken_modules_away(tmp_path, monkeypatch):
    (tmp_path / "shard").touch()
    opened = shards_module._OpenFile(tmp_path / "shard")
    descriptor = opened.descriptor
    monkeypatch.setattr(shards_module, "os", None)
    opened.__del__()
    del opened.descriptor
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
