"""Files of text as documents: plain text, .jsonl and .parquet, each also compressed as .gz or .zst."""

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from zerotrain.data.files.pieces import AnyPlace, Cut, cut_text
from zerotrain.files.terminal import package
from zerotrain.files.untrusted import UntrustedFileError, parse_json, printable

JSONL = (".jsonl", ".ndjson")
COMPRESSED = (".gz", ".zst")
_ROWS = 256
_ARRAY = "begins a JSON array; write each object in a line of its own, or choose data=huggingface, which reads arrays"
_SKIPPED_NBYTES = 1 << 20


@dataclass(frozen=True)
class TextPiece:
    """Part of a document."""

    text: bytes
    starts: bool
    """A document starts with it."""
    ends: bool
    """A document ends with it."""
    after: int | None
    """Offset in its file from which reading can go on behind it; None if it cannot."""
    reached: int
    """How many bytes of the file on the disk have been read."""
    is_null: bool = False
    """In place of a document: its row has null for a text."""


def is_parquet(path: Path) -> bool:
    """Whether a file is a parquet file, by its name."""
    return path.suffix.lower() == ".parquet"


def is_plain(path: Path) -> bool:
    """Whether a file is text as it lies there: one document."""
    return not is_parquet(path) and path.suffix.lower() not in (*JSONL, *COMPRESSED)


def inner_suffix(path: Path) -> str:
    """The end of a file's name, of what is compressed in it."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def beginning(path: Path, nbytes: int) -> bytes:
    """The first bytes of a file, of what is compressed in it; those of the file itself where that cannot be read."""
    try:
        with ExitStack() as stack:
            return _opened(path, stack)[0].read(nbytes)
    except Exception:  # it is broken, or a package is missing: said when it is read for its text
        with path.open("rb") as file:
            return b"" if path.suffix.lower() in COMPRESSED else file.read(nbytes)


def read_pieces(path: Path, *, field: str, start: int = 0, cut: Cut | None = None) -> Iterator[TextPiece]:
    """The documents of a file in pieces: a plain file is one document, a line of .jsonl and a row of .parquet each one.
    A row whose text is null has none, and is told by a piece of its own.

    Args:
        field: of a .jsonl object, or column of a .parquet file, that holds the text.
        start: where to start, an `after` of an earlier reading; with the same `cut` the pieces are the same.
        cut: where documents may be cut; by default anywhere.

    Raises:
        ImportError: a package that reads this kind of file is not installed.
        ValueError: the file is broken, or has no such field.
        OSError: it cannot be read.
    """
    cut = AnyPlace() if cut is None else cut
    try:
        with ExitStack() as stack:
            if is_parquet(path):
                yield from _parquet(path, field, start, cut)
                return
            file, reached = _opened(path, stack)
            _skip(file, start)
            if inner_suffix(path) in JSONL:
                yield from _lines(file, path, field, start, cut, reached)
            else:
                starts = start == 0
                for text, place in cut_text(file.read, cut):
                    if text:
                        yield TextPiece(
                            text, starts, place is None, None if place is None else start + place, reached()
                        )
                    starts = False
    except Exception as error:
        if not isinstance(error, _broken()) or (isinstance(error, OSError) and error.errno is not None):  # of the disk
            raise
        said = printable((str(error).splitlines() or [type(error).__name__])[0], keep="")
        raise ValueError(f"data.path: {path} is broken: {said}; copy it again, or leave it out") from error


def _broken() -> tuple[type[Exception], ...]:
    """Exceptions of readers for files that are truncated or of another format."""
    errors: list[type[Exception]] = [EOFError, OSError, zlib.error]
    for module, name in (("zstandard", "ZstdError"), ("pyarrow", "ArrowException")):
        try:
            errors.append(getattr(__import__(module), name))
        except ImportError:
            continue
    return tuple(errors)


def _opened(path: Path, stack: ExitStack) -> tuple[BinaryIO, Callable[[], int]]:
    """(a file's content, decompressed; a function that tells how many bytes of the file were read)."""
    raw = stack.enter_context(path.open("rb"))
    opened: Any = raw
    if path.suffix.lower() == ".gz":
        opened = stack.enter_context(gzip.GzipFile(fileobj=raw))
    if path.suffix.lower() == ".zst":
        zstandard = package("zstandard", extra="zstd", needed_by=f"data.path: {path}")
        stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        opened = stack.enter_context(io.BufferedReader(stream))
    return opened, raw.tell


def _skip(file: BinaryIO, nbytes: int) -> None:
    """Go forward, also in a file that is compressed."""
    if isinstance(file, io.BufferedReader) and isinstance(file.raw, io.FileIO):
        file.seek(nbytes)
        return
    while nbytes and (skipped := file.read(min(nbytes, _SKIPPED_NBYTES))):
        nbytes -= len(skipped)


def _lines(
    file: BinaryIO, path: Path, field: str, start: int, cut: Cut, reached: Callable[[], int]
) -> Iterator[TextPiece]:
    position = start
    for line in file:
        position += len(line)
        said = line.decode("utf-8-sig" if position == len(line) else "utf-8", "replace")
        if said.strip():
            try:
                text = _text_of(_row_of(said), field)
            except ValueError as error:
                number = _line_number(path, position - len(line))
                raise ValueError(f"data.path: {path}, line {number}, {error}") from error
            yield from _document(text, cut, position, reached())


def _row_of(line: str) -> Any:
    try:
        return parse_json(line, Any)
    except UntrustedFileError as error:
        problem = f"{str(error).removeprefix('it ')}; mend it, or leave the file out"
        raise ValueError(_ARRAY if line.lstrip().startswith("[") else problem) from error


def _line_number(path: Path, start: int) -> int:
    """The number of the line that starts at a byte of the content; lines are counted only for a message."""
    num_lines = 1
    with ExitStack() as stack:
        file = _opened(path, stack)[0]
        while start and (read := file.read(min(start, _SKIPPED_NBYTES))):
            num_lines, start = num_lines + read.count(b"\n"), start - len(read)
    return num_lines


def _text_of(row: Any, field: str) -> str | None:
    """The text of a row; None where it is null, as rows of a dataset are that have none."""
    if isinstance(row, dict) and isinstance(text := row.get(field, 0), str | None):
        return text
    if isinstance(row, list) and row and isinstance(row[0], dict):
        raise ValueError(_ARRAY)
    given = f"is a {type(row).__name__}"
    if isinstance(row, dict):
        given = f"has the fields {printable(', '.join(map(str, row))[:200], keep='')}"
        given = f"has a {type(row[field]).__name__} there" if field in row else given
    raise ValueError(
        f"has no text in the field {field!r}: it {given}; give data.text_field, or a path without this file"
    )


def _document(text: str | None, cut: Cut, after: int, reached: int) -> Iterator[TextPiece]:
    """The pieces of a document that lies in memory. One may go on behind it only."""
    if text is None:
        yield TextPiece(b"", starts=False, ends=False, after=after, reached=reached, is_null=True)
        return
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # JSON can hold half a character
        encoded = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
    starts = True
    for piece, place in cut_text(io.BytesIO(encoded).read, cut) if encoded else ():
        yield TextPiece(piece, starts, place is None, after if place is None else None, reached)
        starts = False


def _parquet(path: Path, field: str, start: int, cut: Cut) -> Iterator[TextPiece]:
    parquet = package("pyarrow.parquet", extra="parquet", needed_by=f"data.path: {path}")
    nbytes = os.path.getsize(path)
    with parquet.ParquetFile(path) as file:
        names, total = file.schema_arrow.names, max(1, file.metadata.num_rows)
        if field not in names:
            raise ValueError(
                f"data.path: {path} has no column {field!r}: it has {', '.join(names)[:200]}; give data.text_field, or "
                "a path without this file"
            )
        row = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows <= start:
                row += rows
                continue
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[field]):
                for value in batch.column(0):
                    row += 1
                    if row > start:
                        try:
                            text = _text_of({field: value.as_py()}, field)
                        except ValueError as error:
                            raise ValueError(f"data.path: {path}, row {row}, {error}") from error
                        yield from _document(text, cut, row, nbytes * row // total)
