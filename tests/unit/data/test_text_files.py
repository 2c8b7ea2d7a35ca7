"""Each kind of file gives its documents, in pieces, from anywhere."""

import bz2
import gzip
import io
import json
import os
import pickle
import re
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zerotrain.data import TextDataset
from zerotrain.data.text_files import Sources, find_sources, read_pieces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {
        "b.txt": b"bee",
        "a.md": b"ay",
        "deep/er/c.py": b"see",
        "empty.txt": b"",
        "picture.bin": b"\x00\x01",
        ".hidden": b"hidden",
        ".git/config": b"hidden",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def names(sources: Sources, folder: Path) -> list[str]:
    return [str(source.relative_to(folder)) for source in sources.files]


@pytest.mark.case(
    "data: Text",
    "a glob beside a folder; links to a file that is read",
    "the glob skips the files that the folder skips; a file is read once; one line says what was read and skipped",
)
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", ["a.md", "b.txt", "deep/er/c.py"]),
        ("*", ["a.md", "b.txt"]),
        ("**/*.py", ["deep/er/c.py"]),
        ("picture.bin", ["picture.bin"]),  # named by the user
        ("deep/a[1].txt", ["deep/a[1].txt"]),  # a file of exactly this name comes before a pattern
    ],
)
def test_a_folder_a_pattern_and_a_file_give_text_files_in_sorted_order(folder, monkeypatch, path, expected):
    if path.startswith("deep"):
        (folder / path).write_text("brackets")
    monkeypatch.setenv("HOME", str(folder))
    for beginning in (str(folder), "~"):
        assert names(find_sources(f"{beginning}/{path}"), folder) == expected


def test_nothing_given_is_the_standard_library_without_tests_and_other_packages():
    sources = find_sources(None).files
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert stdlib / "argparse.py" in sources
    assert sum(source.stat().st_size for source in sources) > 5_000_000
    assert not {"site-packages", "dist-packages", "test", "tests"} & {
        part for source in sources for part in source.relative_to(stdlib).parts
    }
    assert sources == sorted(sources)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nothing.txt", "does not exist; give a file, a folder or"),
        ("fifo.txt", "is neither a file nor a folder; give a file"),
        ("*.rs", "matches no file"),
        ("empty.txt", "holds no text; give a file, folder or pattern"),
        ("void", "holds no text; give a file, folder or pattern"),
    ],
)
def test_what_gives_no_file_with_text_is_refused(folder, path, problem):
    (folder / "void").mkdir()
    os.mkfifo(folder / "fifo.txt")
    with pytest.raises((FileNotFoundError, ValueError), match=re.escape(f"data.path={folder / path} {problem}")):
        find_sources(str(folder / path))


@pytest.mark.case("data: Text", "a glob beside a folder; links to a file that is read")
def test_what_was_taken_and_left_is_told_in_one_line(folder):
    (folder / "link.txt").symlink_to(folder / "b.txt")
    (folder / "again.txt").hardlink_to(folder / "b.txt")
    (folder / "gone.txt").symlink_to(folder / "nothing")
    assert str(find_sources(str(folder))) == (
        f"data.path={folder}: reads 3 files (1 .md, 1 .txt, 1 .py); leaves out 1 binary, 1 empty, 1 hidden, 2 links to "
        "files that are read, 1 links to nothing and other files that hold no text"
    )


def run_in(folder: Path, *, lock: bool) -> None:
    """What a run has in its folder, on the machine that started it and on another."""
    (folder / "ranks").mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 1")
    (folder / "ranks/0.log").write_text("step 1")
    if lock:
        (folder / ".lock").write_text(json.dumps({"pid": 1, "host": "here", "started": "now"}) + "\n")


@pytest.mark.case("data: Text", "`data.path=.` with the outputs of this run and others, or the cache, in it")
@pytest.mark.parametrize("path", ["", "**/*"])
def test_the_folders_of_runs_and_of_the_cache_are_left_out(folder, path: str):
    before = names(find_sources(str(folder / path)), folder)
    run_in(folder / "outputs/day/time", lock=True)
    run_in(folder / "outputs/day/of another machine", lock=False)
    (folder / "multirun/day").mkdir(parents=True)
    (folder / "multirun/day/multirun.yaml").write_text("hydra: 1")
    (folder / "cache").mkdir()
    (folder / "cache/kept.txt").write_text("kept")
    sources = find_sources(str(folder / path), without=[folder / "cache"])
    assert names(sources, folder) == before
    assert sum(count for reason, count in sources.omissions.items() if "of runs and caches" in reason) >= 4


@pytest.mark.case(
    "data: Text",
    "`data.path=.` with the outputs of this run and others, or the cache, in it",
    "skipped; the check sees the files that the ranks read",
)
def test_at_the_moment_a_run_is_checked_its_folder_is_known_too(folder):
    """It holds nothing yet but its lock: what is read then is what the ranks read later."""
    own = folder / "outputs/now"
    own.mkdir(parents=True)
    (own / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": "here", "started": "now"}))
    before = names(find_sources(str(folder)), folder)
    run_in(own / "more", lock=False)
    (own / "config.yaml").write_text("seed: 1")
    assert names(find_sources(str(folder)), folder) == before


def test_a_lock_of_something_else_is_no_run(folder):
    (folder / "deep/.lock").write_text("12345")
    assert "deep/er/c.py" in names(find_sources(str(folder)), folder)


def test_a_folder_of_runs_is_read_where_it_is_what_was_named(folder):
    run_in(folder / "run", lock=True)
    assert names(find_sources(str(folder / "run")), folder) == ["run/config.yaml", "run/ranks/0.log"]
    assert names(find_sources(str(folder / "run/*.yaml")), folder) == ["run/config.yaml"]


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
    "A.JSONL.GZ": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
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
        assert list(read_pieces(path, field="text", start=piece.resume_at)) == pieces[number + 1 :]


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
    places = [number for number, piece in enumerate(pieces) if piece.resume_at is not None]
    assert places
    for number in places:
        rest = list(read_pieces(path, field="text", start=pieces[number].resume_at))
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
    "a number in parquet": (
        lambda path: pytest.importorskip("pyarrow") and parquet(path.with_suffix(".parquet"), [1, 2]),
        "x.parquet, row 1, has no text in the field 'text': it has a int there",
    ),
    "another field": (
        lambda path: path.with_suffix(".jsonl").write_text('{"content": "a", "id": 1}'),
        "has no text in the field 'text': it has the fields content, id; give data.text_field",
    ),
    "a chat": (
        lambda path: path.with_suffix(".jsonl").write_text('{"messages": []}'),
        "or a path without this file; data=chat reads chats and instructions",
    ),
    "instructions in parquet": (
        lambda path: pytest.importorskip("pyarrow.parquet").write_table(
            pytest.importorskip("pyarrow").table({"instruction": ["a"], "output": ["b"]}), path.with_suffix(".parquet")
        ),
        "it has instruction, output; give data.text_field, or a path without this file; data=chat reads",
    ),
    "no text": (lambda path: path.with_suffix(".jsonl").write_text('{"text": 1}'), "it has a int there"),
    "no object": (lambda path: path.with_suffix(".jsonl").write_text("[1]"), "it is a list"),
    "a gz cut short": (
        lambda path: path.with_suffix(".gz").write_bytes(gzip.compress(bytes(range(256)) * 99)[:-40]),
        "is broken: ",
    ),
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


# What is neither text nor tokens is refused by its bytes, whatever its name, with what to use.


TEXT = "the quick brown fox jumps over the lazy dog\n" * 100
ROW = json.dumps({"text": TEXT[:440]})


def tar(mode: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(TEXT)
        archive.addfile(member, io.BytesIO(TEXT.encode()))
    return made.getvalue()


def arrow(way: str) -> bytes:
    pyarrow, made = pytest.importorskip("pyarrow"), io.BytesIO()
    table = pyarrow.table({"text": [TEXT] * 3})
    with getattr(pyarrow.ipc, way)(made, table.schema) as writer:
        writer.write_table(table)
    return made.getvalue()


def numpy_file() -> bytes:
    made = io.BytesIO()
    np.save(made, np.arange(1000))
    return made.getvalue()


UNPACK = "; unpack it"
KINDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a.tar": (lambda: tar("w"), f"a tar archive{UNPACK}"),
    "a.tgz": (lambda: tar("w:gz"), f"a tar archive{UNPACK}"),
    "a.tar.xz": (lambda: tar("w:xz"), f"an xz file{UNPACK}"),
    "a.zip": (lambda: b"PK\x03\x04" + bytes(600), r"a zip file \(.npz and .pt are such\)" + UNPACK),
    "a.txt.gz.gz": (lambda: gzip.compress(gzip.compress(TEXT.encode())), "a gzip file"),
    "gzipped": (lambda: gzip.compress(TEXT.encode()), "a gzip file; unpack it, or give it a name that ends in .gz"),
    "a.txt.bz2": (lambda: bz2.compress(TEXT.encode()), f"a bzip2 file{UNPACK}"),
    "saved.arrow": (lambda: arrow("new_stream"), "an arrow file; data=huggingface reads"),
    "a.feather": (lambda: arrow("new_file"), "an arrow file; data=huggingface reads"),
    "a.pq": (lambda: b"PAR1" + bytes(600), "a parquet file; give it a name that ends in .parquet"),
    "a.npy": (numpy_file, "a .npy file; data=tokens reads tokens"),
    "a.pdf": (lambda: b"%PDF-1.7\n" + TEXT.encode(), "a PDF file; write its text to"),
    "a.db": (lambda: b"SQLite format 3\0" + bytes(600), "an SQLite database; write its text to"),
    "a.pkl": (lambda: pickle.dumps([TEXT]), "a pickle; write its text to"),
    "wide.txt": (lambda: TEXT.encode("utf-16"), "text in UTF-16; write it in UTF-8: iconv -f UTF-16 -t UTF-8"),
    "wider.txt": (lambda: TEXT.encode("utf-32"), "text in UTF-32; write it in UTF-8: iconv -f UTF-32 -t UTF-8"),
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
    kinds = {"tokens.bin": "", "wide.txt": ": text in UTF-16", "wider.txt": ": text in UTF-32"}
    kind = kinds.get(name, ": a")
    assert f"{tmp_path / 'texts'}: reads 1 files (1 .txt); leaves out 1 binary{kind}" in capfd.readouterr().err


@pytest.mark.parametrize(
    "start", ["BZh, a bug", "ORCHESTRA", "PARIS", "Rar!", "ARROW", "%PDF", "PK", "\ufeffRésumé", "{}"]
)
def test_text_that_begins_like_something_else_is_text(tmp_path, start: str):
    path = tmp_path / "a.txt"
    path.write_text(start + TEXT)
    assert find_sources(str(path)).files == find_sources(str(tmp_path)).files == [path]
    path.write_bytes(TEXT.encode() + b"\0\0\n")  # as a log that was cut off
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
    path, state = tmp_path / "a.json", tmp_path / "state.json"
    path.write_text(content)
    state.write_text('{"a": 1}')  # not beside what save_to_disk() writes
    assert find_sources(str(tmp_path)).files == [path, state]
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


def test_an_array_of_instructions_is_no_text(tmp_path):
    (tmp_path / "a.json").write_text('[{"instruction": "a", "output": "b"}]')
    for path in (tmp_path, tmp_path / "a.json"):
        with pytest.raises(ValueError, match=r"a.json is JSON; data=chat reads chats and instructions$"):
            find_sources(str(path))
