"""Each kind of file gives its documents, in pieces, from anywhere."""

import contextlib
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotrain.data.text_files import find_sources, read_pieces

DOCUMENTS = ["The cat sat", "A dog ran.\r\nFar\n", "grün € 🙂", "half \ufffd", "x" * 200_000]


def zst(path: Path, content: bytes) -> None:
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2  # two frames, as of two files put together
    compressor = zstandard.ZstdCompressor()
    path.write_bytes(compressor.compress(content[:half]) + compressor.compress(content[half:]))


def parquet(path: Path, rows: list[str | None]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"id": range(len(rows)), "text": rows}), path, row_group_size=2
    )


LINES = "\n".join(json.dumps({"id": 1, "text": text}) for text in [*DOCUMENTS[:3], "half \ud800", "", DOCUMENTS[4]])
WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_text(LINES + "\n\n"),
    "a.ndjson": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES.encode()),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "a.jsonl.zst": lambda path: zst(path, LINES.encode()),
    "a.parquet": lambda path: parquet(path, [*DOCUMENTS[:3], None, DOCUMENTS[3], DOCUMENTS[4]]),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_row_whose_text_is_null_is_left_out_of_every_kind_of_file_and_told(tmp_path: Path, name: str):
    """It was refused in .jsonl and left out of .parquet without a word."""
    texts, path = ["The cat", None, None, "A dog", None], tmp_path / name
    rows = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    {".jsonl": Path.write_bytes, ".gz": lambda path, rows: path.write_bytes(gzip.compress(rows)), ".parquet":
        lambda path, _: parquet(path, texts)}[path.suffix](path, rows)  # fmt: skip
    pieces = list(read_pieces(path, field="text"))
    assert [piece.text.decode() for piece in pieces if not piece.is_null] == ["The cat", "A dog"]
    assert [piece.is_null for piece in pieces] == [text is None for text in texts]
    for number, piece in enumerate(pieces):
        assert list(read_pieces(path, field="text", start=piece.after)) == pieces[number + 1 :]


def test_a_line_behind_which_reading_went_on_is_told_by_its_number_too(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": 1}\n')
    [_, second] = list(_until_broken(path))
    with pytest.raises(ValueError, match=r"a.jsonl, line 4, has no text in the field 'text': it has a int there"):
        list(read_pieces(path, field="text", start=second.after))


def _until_broken(path: Path):
    with contextlib.suppress(ValueError):
        yield from read_pieces(path, field="text")


@pytest.mark.parametrize("name", ["A.JSONL", "A.JSONL.GZ"])
def test_the_case_of_a_name_tells_nothing(tmp_path: Path, name: str):
    path = tmp_path / name
    rows = b'{"text": "The cat"}\n'
    path.write_bytes(gzip.compress(rows) if name.endswith("GZ") else rows)
    assert documents_of(path) == ["The cat"]


def documents_of(path: Path, start: int = 0) -> list[str]:
    documents: list[bytes] = []
    for piece in read_pieces(path, field="text", start=start):
        if piece.is_null:
            continue
        documents += [b""] if piece.starts else []
        documents[-1] += piece.text
    return [document.decode() for document in documents]


@pytest.mark.case("data: Text", "documents in plain files, lines of .jsonl, rows of .parquet, of .gz and .zst too")
@pytest.mark.parametrize("name", WRITERS)
def test_a_line_of_jsonl_and_a_row_of_parquet_is_a_document(tmp_path: Path, name: str):
    path = tmp_path / name
    WRITERS[name](path)
    assert documents_of(path) == DOCUMENTS
    assert find_sources(str(tmp_path)).files == [path]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_a_plain_file_is_one_document_with_every_byte_of_it(tmp_path: Path, name: str):
    path, content = tmp_path / name, "".join(DOCUMENTS).encode() + b"\xff\r"
    {"txt": Path.write_bytes, "gz": lambda path, text: path.write_bytes(gzip.compress(text)), "zst": zst}[
        name.split(".")[-1]
    ](path, content)
    assert b"".join(piece.text for piece in read_pieces(path, field="text")) == content
    assert [piece.starts for piece in read_pieces(path, field="text")].count(True) == 1
    assert find_sources(str(tmp_path)).files == [path]


@pytest.mark.parametrize("name", [*WRITERS, "a.txt", "a.txt.gz"])
def test_reading_goes_on_where_a_piece_says_one_may(tmp_path: Path, name: str):
    path, content = tmp_path / name, "".join(DOCUMENTS).encode()
    writers = {"a.txt": lambda path: path.write_bytes(content), "a.txt.gz": lambda path: path.write_bytes(
        gzip.compress(content)
    )}  # fmt: skip
    (WRITERS | writers)[name](path)
    pieces = list(read_pieces(path, field="text"))
    places = [number for number, piece in enumerate(pieces) if piece.after is not None]
    assert places
    for number in places:
        rest = list(read_pieces(path, field="text", start=pieces[number].after))
        assert [(each.text, each.starts, each.ends) for each in rest] == [
            (each.text, each.starts, each.ends) for each in pieces[number + 1 :]
        ]


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (
        lambda path: path.with_suffix(".jsonl").write_text('{"text": "a"}\n\n{"text":'),
        "x.jsonl, line 3, is no JSON: ",
    ),
    "no JSON far behind, compressed": (
        lambda path: path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 200_000 + b"{")),
        "x.jsonl.gz, line 200001, is no JSON: ",
    ),
    "an array in one line": (
        lambda path: path.with_suffix(".jsonl").write_text('[{"text": "a"}, {"text": "b"}]'),
        "x.jsonl, line 1, begins a JSON array; write each object in a line of its own, or choose data=huggingface",
    ),
    "an array in lines": (
        lambda path: path.with_suffix(".jsonl").write_text('\n[\n {"text": "a"},\n {"text": "b"}\n]'),
        "x.jsonl, line 2, begins a JSON array; write each object in a line of its own, or choose data=huggingface",
    ),
    "a number in parquet": (
        lambda path: pytest.importorskip("pyarrow") and parquet(path.with_suffix(".parquet"), [1, 2]),
        "x.parquet, row 1, has no text in the field 'text': it has a int there",
    ),
    "another field": (
        lambda path: path.with_suffix(".jsonl").write_text('{"content": "a", "id": 1}'),
        "has no text in the field 'text': it has the fields content, id; give data.text_field",
    ),
    "no text": (lambda path: path.with_suffix(".jsonl").write_text('{"text": 1}'), "it has a int there"),
    "no object": (lambda path: path.with_suffix(".jsonl").write_text("[1]"), "it is a list"),
    "a gz cut short": (
        lambda path: path.with_suffix(".gz").write_bytes(gzip.compress(bytes(range(256)) * 99)[:-40]),
        "is broken: ",
    ),
    "no gz": (lambda path: path.with_suffix(".gz").write_bytes(b"something else"), "is broken: Not a gzipped file"),
    "no zst": (
        lambda path: pytest.importorskip("zstandard") and path.with_suffix(".zst").write_bytes(b"something else"),
        "is broken: ",
    ),
    "no parquet": (
        lambda path: pytest.importorskip("pyarrow") and path.with_suffix(".parquet").write_bytes(b"something else"),
        "is broken: ",
    ),
}


@pytest.mark.case(
    "data: Text",
    "a broken file, a field that is not there, a package that is not installed",
    "refused before any rank starts, by name",
)
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_told_by_name_in_one_line(tmp_path: Path, what: str):
    write, said = BROKEN[what]
    write(tmp_path / "x")
    [path] = tmp_path.iterdir()
    with pytest.raises(ValueError, match=f"data.path: {path}") as told:
        list(read_pieces(path, field="text"))
    assert said in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.case("data: Text", "a broken file, a field that is not there, a package that is not installed")
@pytest.mark.parametrize(
    ("name", "module", "extra"), [("a.parquet", "pyarrow", "parquet"), ("a.zst", "zstandard", "zstd")]
)
def test_a_package_that_is_missing_is_told_with_what_to_install(tmp_path, monkeypatch, name, module, extra):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, f"{module}.{extra}", None)
    with pytest.raises(ImportError, match=rf"{name} needs {module}, .* pip install 'zerotrain\[{extra}\]'"):
        list(read_pieces(tmp_path / name, field="text"))


def test_a_column_that_is_not_there_is_told_with_those_that_are(tmp_path):
    parquet(tmp_path / "a.parquet", ["a"])
    with pytest.raises(ValueError, match=r"has no column 'body': it has id, text; give data.text_field"):
        list(read_pieces(tmp_path / "a.parquet", field="body"))
