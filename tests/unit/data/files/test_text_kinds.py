"""What is neither text nor tokens is refused by its bytes, whatever its name, with what to use."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable

import numpy as np
import pytest

from zerotrain.data import TextDataset, TokenFiles
from zerotrain.data.text_files import find_sources

TEXT = "the quick brown fox jumps over the lazy dog\n" * 100
ROW = json.dumps({"text": TEXT[:440]})


def tar(mode: str, format: int = tarfile.PAX_FORMAT) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode, format=format) as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(TEXT)
        archive.addfile(member, io.BytesIO(TEXT.encode()))
    return made.getvalue()


def without_magic(archive: bytes) -> bytes:
    """As tar of 1979 wrote it."""
    header = bytearray(archive[:512])
    header[257:265] = bytes(8)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + archive[512:]


def zipped() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return made.getvalue()


def arrow(way: str) -> bytes:
    pyarrow, made = pytest.importorskip("pyarrow"), io.BytesIO()
    table = pyarrow.table({"text": [TEXT] * 3})
    with getattr(pyarrow.ipc, way)(made, table.schema) as writer:
        writer.write_table(table)
    return made.getvalue()


def parquet_bytes() -> bytes:
    made = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table({"text": [TEXT]}), made)
    return made.getvalue()


def numpy_file(save: Callable[..., None]) -> bytes:
    made = io.BytesIO()
    save(made, np.arange(1000))
    return made.getvalue()


def sqlite() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table texts (text)")
    connection.execute("insert into texts values (?)", (TEXT,))
    connection.commit()
    return connection.serialize()


UNPACK = "; unpack it"
KINDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a.tar": (lambda: tar("w"), f"a tar archive{UNPACK}"),
    "a.txt": (lambda: tar("w", tarfile.USTAR_FORMAT), f"a tar archive{UNPACK}"),
    "old.tar": (lambda: without_magic(tar("w", tarfile.USTAR_FORMAT)), f"a tar archive{UNPACK}"),
    "a.tar.gz": (lambda: tar("w:gz"), f"a tar archive{UNPACK}"),
    "a.tgz": (lambda: tar("w:gz"), f"a tar archive{UNPACK}"),
    "a.tar.xz": (lambda: tar("w:xz"), f"an xz file{UNPACK}"),
    "a.zip": (zipped, r"a zip file \(.npz and .pt are such\)" + UNPACK),
    "a.txt.gz.gz": (lambda: gzip.compress(gzip.compress(TEXT.encode())), "a gzip file"),
    "gzipped": (lambda: gzip.compress(TEXT.encode()), "a gzip file; unpack it, or give it a name that ends in .gz"),
    "a.txt.bz2": (lambda: bz2.compress(TEXT.encode()), f"a bzip2 file{UNPACK}"),
    "a.txt.xz": (lambda: lzma.compress(TEXT.encode()), f"an xz file{UNPACK}"),
    "saved.arrow": (lambda: arrow("new_stream"), "an arrow file; data=huggingface reads"),
    "a.feather": (lambda: arrow("new_file"), "an arrow file; data=huggingface reads"),
    "a.pq": (parquet_bytes, "a parquet file; give it a name that ends in .parquet"),
    "a.npy": (lambda: numpy_file(np.save), "a .npy file; data=tokens reads tokens"),
    "a.npz": (lambda: numpy_file(np.savez), "a zip file"),
    "a.pdf": (lambda: b"%PDF-1.7\n" + TEXT.encode(), "a PDF file; write its text to"),
    "a.db": (sqlite, "an SQLite database; write its text to"),
    "a.pkl": (lambda: pickle.dumps([TEXT]), "a pickle; write its text to"),
    "wide.txt": (lambda: TEXT.encode("utf-16"), "text in UTF-16; write it in UTF-8"),
    "tokens.bin": (lambda: np.arange(300, 2300, dtype="<u4").tobytes(), "binary: of its first 8,000 bytes"),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_text_is_refused_by_name_and_left_out_of_folders_with_what_to_use(tmp_path, capfd, name: str):
    """All of these were learnt as they lay there, byte for byte."""
    content, said = KINDS[name]
    verb = "holds" if name.endswith(".gz") else "is"
    (tmp_path / "texts").mkdir()
    path = tmp_path / "texts" / name
    path.write_bytes(content())
    with pytest.raises(ValueError, match=rf"^data.path={path} {verb} {said}") as told:
        find_sources(str(path))
    assert "\n" not in str(told.value)
    for pattern in (tmp_path / "texts", tmp_path / "texts/*"):
        with pytest.raises(ValueError, match=r"holds no text; .*\(left out: 1 binary"):
            find_sources(str(pattern))
    (tmp_path / "texts/b.txt").write_text(TEXT)
    dataset = TextDataset(str(tmp_path / "texts"), seq_len=8, cache_dir=str(tmp_path / "cache"))
    assert dataset.store.read(0, dataset.store.tokens).tobytes() == TEXT.encode()
    kind = {"tokens.bin": "", "wide.txt": ": text in UTF-16"}.get(name, ": a")
    assert f"{tmp_path / 'texts'}: reads 1 files (1 .txt); leaves out 1 binary{kind}" in capfd.readouterr().err


@pytest.mark.parametrize(
    "name", ["a.tar", "old.tar", "a.tgz", "saved.arrow", "a.feather", "a.pdf", "a.db", "a.txt.bz2"]
)
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_what_is_no_row_of_tokens_is_not_read_as_one(tmp_path, name: str, dtype: str):
    content = KINDS[name][0]()
    (tmp_path / name).write_bytes(content + bytes(len(content) % 2))
    with pytest.raises(ValueError, match=rf"^data.path={tmp_path / name} is an? .*; (unpack it|give a .npy)"):
        TokenFiles(str(tmp_path / name), seq_len=8, vocab_size=65_536, dtype=dtype, cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "start", ["BZh, a bug", "ORCHESTRA", "PARIS", "Rar!", "ARROW", "%PDF", "PK", "\ufeffRésumé", "{}"]
)
def test_text_that_begins_like_something_else_is_text(tmp_path, start: str):
    path = tmp_path / "a.txt"
    path.write_text(start + TEXT)
    assert find_sources(str(path)).files == find_sources(str(tmp_path)).files == [path]


def test_a_log_with_a_zero_byte_is_text_where_it_is_named(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(TEXT.encode() + b"\0\0\n")
    assert find_sources(str(path)).files == [path]


ROWS = {
    "array.json": json.dumps([{"id": 1, "text": TEXT}] * 3),
    "indented.json": "\ufeff\n" + json.dumps([{"id": 1, "text": TEXT}] * 3, indent=2),
    "lines.json": f"{ROW}\n{ROW}\n",
    "one.json": json.dumps({"title": "a", "text": TEXT}, indent=1),
    "lines.json.gz": f"{ROW}\n{ROW}\n",
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("way", ["file", "folder", "pattern"])
def test_rows_of_json_are_not_learnt_with_their_brackets(tmp_path, name: str, way: str):
    path, content = tmp_path / name, ROWS[name].encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (tmp_path / "a.txt").write_text(TEXT)
    given = {"file": path, "folder": tmp_path, "pattern": tmp_path / "**/*"}[way]
    with pytest.raises(
        ValueError, match=rf"{path} is JSON with its text in the field 'text'; write each object in a"
    ) as told:
        find_sources(str(given))
    assert "\n" not in str(told.value)
    assert path in find_sources(str(tmp_path), text_field="body").files


@pytest.mark.parametrize("content", ["[1, 2, 3]", '[{"a": 1}]', '{"a": [1, 2]}', "[" * 5000, "{", '{"text": 1}', "[]"])
def test_other_json_is_text_as_source_code_is_but_an_array_that_is_named(tmp_path, content: str):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert find_sources(str(tmp_path)).files == [path]
    if content.startswith("["):
        with pytest.raises(ValueError, match=r"a.json is a JSON array, and its brackets would be trained on"):
            find_sources(str(path))
    else:
        assert find_sources(str(path)).files == [path]


@pytest.mark.parametrize("given", ["saved", "saved/train", "saved/**/*.json", ".", "saved/train/state.json"])
def test_what_save_to_disk_has_written_is_refused_with_what_reads_it(tmp_path, given: str):
    """Its few lines of metadata were learnt."""
    train = tmp_path / "saved/train"
    train.mkdir(parents=True)
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    (train / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string"}}}')
    (train / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (train / "data-00000-of-00001.arrow").write_bytes(b"\xff\xff\xff\xff\x70\0\0\0" + bytes(500))
    with pytest.raises(ValueError, match=r"saved(/train)? was written by save_to_disk\(\) .* choose data=huggingface"):
        find_sources(str(tmp_path / given))


def test_a_file_called_state_json_alone_is_text(tmp_path):
    for name in ("state.json", "dataset_dict.json"):
        (tmp_path / name).write_text('{"a": 1}')
    assert len(find_sources(str(tmp_path)).files) == 2
