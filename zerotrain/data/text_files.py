"""Files of text as documents: plain text, .jsonl and .parquet, each also compressed as .gz or .zst."""

import glob
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from zerotrain.data.formats import FileKind, files_matching, kind_of, place_on_disk
from zerotrain.data.tokenizer import Cut, cut_anywhere, cut_text
from zerotrain.files import lock, terminal, untrusted

JSONL = (".jsonl", ".ndjson")
COMPRESSED = (".gz", ".zst")
COLUMNS = PARQUET, ARROW = ".parquet", ".arrow"
CHAT_FIELDS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})
"""The fields by which a row is known to be a chat."""
CHAT_HINT = "; data=chat reads chats and instructions"
_ROWS = 256
_ARRAY = "begins a JSON array; write each object in a line of its own, or choose data=huggingface, which reads arrays"
_SKIPPED_NBYTES = 1 << 20
_ARRAY_NBYTES = 1 << 30
"""Bytes of a .json file that are read for its rows."""


@dataclass(frozen=True)
class TextPiece:
    """Part of a document."""

    text: bytes
    starts: bool
    """A document starts with it."""
    ends: bool
    """A document ends with it."""
    resume_at: int | None
    """Offset in its file from which reading can go on behind it; None if it cannot."""
    reached: int
    """How many bytes of the file on the disk have been read."""
    is_null: bool = False
    """In place of a document: its row has null for a text."""
    spans: Sequence[tuple[int, int]] = ()
    """Begin and end of each answer, in characters, where it is a chat."""


def is_parquet(path: Path) -> bool:
    """Whether a file is a parquet file, by its name."""
    return path.suffix.lower() == PARQUET


def is_plain(path: Path) -> bool:
    """Whether a file is text as it lies there: one document."""
    return not is_parquet(path) and path.suffix.lower() not in (*JSONL, *COMPRESSED)


def inner_suffix(path: Path) -> str:
    """The end of a file's name, without that of its compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def beginning(path: Path, nbytes: int) -> bytes:
    """The first bytes of a file, decompressed; those of the file itself where that is not possible."""
    try:
        with ExitStack() as stack:
            return _open_content(path, stack)[0].read(nbytes)
    except Exception:  # it is broken, or a package is missing: said when it is read for its text
        with path.open("rb") as file:
            return b"" if path.suffix.lower() in COMPRESSED else file.read(nbytes)


class FileRow(NamedTuple):
    """A line of .jsonl, or a row of .parquet or .arrow."""

    value: Any
    place: Callable[[], str]
    """Says where it stands in its file, such as "line 3"."""
    resume_at: int
    reached: int
    """As of a `TextPiece`."""


def read_pieces(path: Path, *, field: str, start: int = 0, cut: Cut = cut_anywhere) -> Iterator[TextPiece]:
    """The documents of a file in pieces: a plain file is one document, a line of .jsonl and a row of .parquet each one.
    A row whose text is null has none, and is told by a piece of its own.

    Args:
        field: of a .jsonl object, or column of a .parquet file, that holds the text.
        start: where to start, a `resume_at` of an earlier reading; with the same `cut` the pieces are the same.
        cut: where documents may be cut; by default anywhere.

    Raises:
        ImportError: a package that reads this kind of file is not installed.
        ValueError: the file is broken, or has no such field.
        OSError: it cannot be read.
    """
    if is_parquet(path) or inner_suffix(path) in JSONL:
        for row in read_rows(path, start=start, column=field):
            with naming_row(path, row.place):
                text = _text_of(row.value, field)
            yield from _cut_document(text, cut, row.resume_at, row.reached)
        return
    with _naming_broken(path), ExitStack() as stack:
        file, reached = _open_content(path, stack)
        _go_to(file, start)
        starts = start == 0
        for piece, place in cut_text(file.read, cut):
            if piece:
                yield TextPiece(piece, starts, place is None, None if place is None else start + place, reached())
            starts = False


def read_rows(path: Path, *, start: int = 0, column: str | None = None) -> Iterator[FileRow]:
    """The rows of a .jsonl, .json, .parquet or .arrow file.

    Args:
        start: where to start, a `resume_at` of an earlier reading.
        column: the only one that is read of .parquet; None: all.

    Raises: as `read_pieces`.
    """
    with _naming_broken(path), ExitStack() as stack:
        if path.suffix.lower() in COLUMNS:
            yield from _read_columns(path, column, start, stack)
            return
        file, reached = _open_content(path, stack)
        if inner_suffix(path) == ".json":
            try:
                rows = untrusted.parse_json(file.read(_ARRAY_NBYTES), Any)
            except untrusted.UntrustedFileError as error:
                problem = f"{error}; more than 1 GiB must be .jsonl"
                raise ValueError(f"data.path: {path} cannot be read: {problem}") from error
            rows = rows if isinstance(rows, list) else [rows]
            for number, value in enumerate(rows[start:], start=start + 1):
                yield FileRow(value, f"row {number}".format, number, reached())
        else:
            _go_to(file, start)
            yield from _read_lines(file, path, start, reached)


@contextmanager
def naming_row(path: Path, place: Callable[[], str]) -> Iterator[None]:
    """Inside, a ValueError is one of a row, which its message then names."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"data.path: {path}, {place()}, {error}") from error


@contextmanager
def _naming_broken(path: Path) -> Iterator[None]:
    """Inside, an error of a reader is one of a broken file, which its message then names."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, _reader_errors()) or (
            isinstance(error, OSError) and error.errno is not None
        ):  # of the disk
            raise
        problem = untrusted.printable((str(error).splitlines() or [type(error).__name__])[0], keep="")
        raise ValueError(f"data.path: {path} is broken: {problem}; copy it again, or leave it out") from error


def _reader_errors() -> tuple[type[Exception], ...]:
    """Exceptions of readers for truncated files and other formats."""
    errors: list[type[Exception]] = [EOFError, OSError, zlib.error]
    for module, name in (("zstandard", "ZstdError"), ("pyarrow", "ArrowException")):
        try:
            errors.append(getattr(__import__(module), name))
        except ImportError:
            continue
    return tuple(errors)


def _open_content(path: Path, stack: ExitStack) -> tuple[BinaryIO, Callable[[], int]]:
    """(a file's content, decompressed; a function for the number of bytes read of the file)."""
    raw = stack.enter_context(path.open("rb"))
    opened: Any = raw
    if path.suffix.lower() == ".gz":
        opened = stack.enter_context(gzip.GzipFile(fileobj=raw))
    if path.suffix.lower() == ".zst":
        zstandard = terminal.package("zstandard", extra="zstd", needed_by=f"data.path: {path}")
        stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        opened = stack.enter_context(io.BufferedReader(stream))
    return opened, raw.tell


def _go_to(file: BinaryIO, start: int) -> None:
    if file.seekable():
        file.seek(start)
    else:
        _skip(file, start)


def _skip(file: BinaryIO, nbytes: int) -> int:
    """Read forward; return the number of lines."""
    num_lines = 0
    while nbytes and (skipped := file.read(min(nbytes, _SKIPPED_NBYTES))):
        num_lines, nbytes = num_lines + skipped.count(b"\n"), nbytes - len(skipped)
    return num_lines


def _read_lines(file: BinaryIO, path: Path, start: int, reached: Callable[[], int]) -> Iterator[FileRow]:
    position = start
    for line in file:
        place = partial(_place_of_line, path, position)
        position += len(line)
        line_text = line.decode("utf-8-sig" if position == len(line) else "utf-8", "replace")
        if line_text.strip():
            with naming_row(path, place):
                try:
                    value = untrusted.parse_json(line_text, Any)
                except untrusted.UntrustedFileError as error:
                    problem = f"{str(error).removeprefix('it ')}; mend it, or leave the file out"
                    raise ValueError(_ARRAY if line_text.lstrip().startswith("[") else problem) from error
            yield FileRow(value, place, position, reached())


def _place_of_line(path: Path, offset: int) -> str:
    with ExitStack() as stack:
        return f"line {1 + _skip(_open_content(path, stack)[0], offset)}"


def _text_of(row: Any, field: str) -> str | None:
    """The text of a row; None where it is null, as rows of a dataset are that have none."""
    if isinstance(row, dict) and isinstance(text := row.get(field, 0), str | None):
        return text
    if isinstance(row, list) and row and isinstance(row[0], dict):
        raise ValueError(_ARRAY)
    finding = f"is a {type(row).__name__}"
    if isinstance(row, dict):
        finding = f"has the fields {untrusted.printable(', '.join(map(str, row))[:200], keep='')}"
        finding = f"has a {type(row[field]).__name__} there" if field in row else finding
    hint = CHAT_HINT if isinstance(row, dict) and is_chat(row) else ""
    raise ValueError(
        f"has no text in the field {field!r}: it {finding}; give data.text_field, or a path without this file{hint}"
    )


def is_chat(names: Iterable[str]) -> bool:
    """Whether these are the fields of a chat or an instruction."""
    return any(fields <= {*names} for fields in CHAT_FIELDS)


def _cut_document(text: str | None, cut: Cut, resume_at: int, reached: int) -> Iterator[TextPiece]:
    """The pieces of a document in memory. One may go on behind it only."""
    if text is None:
        yield TextPiece(b"", starts=False, ends=False, resume_at=resume_at, reached=reached, is_null=True)
        return
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # JSON can hold half a character
        encoded = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
    starts = True
    for piece, place in cut_text(io.BytesIO(encoded).read, cut) if encoded else ():
        yield TextPiece(piece, starts, place is None, resume_at if place is None else None, reached)
        starts = False


def _read_columns(path: Path, column: str | None, start: int, stack: ExitStack) -> Iterator[FileRow]:
    """The rows of .parquet, and of an .arrow file as save_to_disk() of Hugging Face writes them; `start` is the number
    of a row."""
    is_arrow = path.suffix.lower() == ARROW
    kind = terminal.package(
        "pyarrow" if is_arrow else "pyarrow.parquet", extra="parquet", needed_by=f"data.path: {path}"
    )
    batches = _arrow_batches(kind, path, stack) if is_arrow else _parquet_batches(kind, path, column, start, stack)
    for first_row, batch, reached in batches:
        for number in range(max(0, start - first_row), len(batch)):
            row = first_row + number + 1
            value = {name: batch.column(name)[number].as_py() for name in batch.schema.names}
            yield FileRow(value, f"row {row}".format, row, reached(row))


def _arrow_batches(arrow: Any, path: Path, stack: ExitStack) -> Iterator[tuple[int, Any, Callable[[int], int]]]:
    """(rows before a batch, the batch, bytes of the file read with a row)."""
    file, first_row = stack.enter_context(path.open("rb")), 0
    for batch in arrow.ipc.open_stream(file):
        yield first_row, batch, lambda _: file.tell()
        first_row += len(batch)


def _parquet_batches(
    parquet: Any, path: Path, column: str | None, start: int, stack: ExitStack
) -> Iterator[tuple[int, Any, Callable[[int], int]]]:
    file, nbytes = stack.enter_context(parquet.ParquetFile(path)), os.path.getsize(path)
    names, total, first_row = file.schema_arrow.names, max(1, file.metadata.num_rows), 0
    if column is not None and column not in names:
        raise ValueError(
            f"data.path: {path} has no column {column!r}: it has {', '.join(names)[:200]}; give data.text_field, or a "
            f"path without this file{CHAT_HINT if is_chat(names) else ''}"
        )
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if first_row + num_rows > start:
            columns = None if column is None else [column]
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
                yield first_row, batch, lambda row: nbytes * row // total
                first_row += len(batch)
        else:
            first_row += num_rows


# Files that are text, and those that only look so: datasets that would be learnt as they are written.


BINARY = "binary"
SNIFFED_NBYTES = 8192
_JSON_NBYTES = 1 << 20
"""Bytes of a .json file for its first row."""
_MIN_NBYTES, _MAX_ZEROS = 512, 0.01
"""Text has no zero bytes, a log that was cut off perhaps some; a token of two bytes has one more often than that."""
_SAVED_DATASET_NAMES = {"dataset_info.json", "state.json"}


def _sniff(path: Path) -> tuple[bytes, FileKind | None]:
    """(the beginning of a file, its kind by that); nothing of an unreadable file or of .parquet."""
    if is_parquet(path) or not os.access(path, os.R_OK):
        return b"", None
    sample = beginning(path, SNIFFED_NBYTES)
    return sample, kind_of(sample, is_named_text=True)


def why_left(path: Path) -> str | None:
    """Why a file that was found in a folder is no text; None where it is, or cannot be read, to be reported by name.

    As git decides it: by a zero byte near the beginning of the decompressed content. Known kinds of files are named.
    """
    sample, kind = _sniff(path)
    if kind is not None:
        return f"{BINARY}: {kind.name}; {kind.for_text}"
    return BINARY if b"\0" in sample else None


def require_text(path: Path, source: str) -> None:
    """Refuse a file named by the user if it cannot be text.

    Args:
        source: the setting, as the user wrote it ("data.path=book.txt").

    Raises:
        ValueError: it is something else, with a remedy.
    """
    sample, kind = _sniff(path)
    if kind is not None:
        verb = "holds" if path.suffix.lower() in COMPRESSED else "is"
        raise ValueError(f"{source} {verb} {kind.name}; {kind.for_text}")
    if len(sample) >= _MIN_NBYTES and sample.count(0) > _MAX_ZEROS * len(sample):
        raise ValueError(
            f"{source} is binary: of its first {len(sample):,} bytes {sample.count(0):,} are zero; data=tokens reads "
            "tokens, and any bytes as tokens by data.dtype=uint8 data.vocab_size=256"
        )


def require_no_dataset(path: Path, text_field: str, source: str, *, is_named: bool = False) -> None:
    """Check that a file of text is not one of a dataset, of which the brackets and names would be learnt too.

    Args:
        text_field: where the text is in its rows.
        is_named: by the user itself, and not found in a folder.

    Raises:
        ValueError: it is.
    """
    if inner_suffix(path) != ".json" or not os.access(path, os.R_OK):
        return
    if _is_saved_dataset(path):
        raise ValueError(
            f"{source}: {path.parent} was written by save_to_disk() of Hugging Face; choose data=huggingface "
            f"data.path={path.parent} data.column={text_field}, or a path without it"
        )
    text = beginning(path, _JSON_NBYTES).decode("utf-8-sig", "replace").lstrip()
    if not text.startswith(("{", "[")):
        return
    try:
        # The first object, of the lines or of the outermost array.
        row = json.JSONDecoder().raw_decode(text[1:].lstrip() if text.startswith("[") else text)[0]
    except (ValueError, RecursionError):  # no JSON, or longer than the text that was read of it
        row = None
    if isinstance(row, dict) and is_chat(row):
        raise ValueError(f"{source}: {path} is JSON{CHAT_HINT}")
    if isinstance(row, dict) and isinstance(row.get(text_field), str):
        raise ValueError(
            f"{source}: {path} is JSON with its text in the field {text_field!r}; "
            "write each object in a line of its own and call the file .jsonl, or choose data=huggingface; another "
            "data.text_field reads it as it is"
        )
    if is_named and text.startswith("["):
        raise ValueError(
            f"{source} is a JSON array, and its brackets would be trained on; write each object in a line of its own "
            "and call the file .jsonl, or choose data=huggingface"
        )


def _is_saved_dataset(path: Path) -> bool:
    folder, name = path.parent, path.name
    if name == "dataset_dict.json":
        return any(folder.glob("*/dataset_info.json"))
    has_arrow = name == "dataset_info.json" and any(folder.glob("*.arrow"))
    return name in _SAVED_DATASET_NAMES and (
        has_arrow or all((folder / other).exists() for other in _SAVED_DATASET_NAMES)
    )


# The files of a text dataset.


STDLIB_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
"""Other people's packages, and tests, which only some distributions of Python install."""
_OWN_FILES = (("multirun.yaml",), ("ranks", "config.yaml"), ("lock", "seal.json"))
_OF_RUNS = "of runs and caches"


@dataclass
class Sources:
    """The files of a text."""

    path: str
    """Names them in messages, as the user wrote it: "data.path=docs"."""
    files: list[Path] = field(default_factory=list)
    """Sorted, each with at least one byte, and each once whatever links lead to it."""
    omissions: Counter[str] = field(default_factory=Counter)
    """The number of files left out, by the reason."""
    is_default: bool = False
    """They are read because the user named none."""

    @property
    def leaves_data(self) -> bool:
        """Whether the user may have meant a file left out."""
        return any(reason.startswith(BINARY) for reason in self.omissions)

    def describe_omissions(self) -> str:
        """The numbers of files left out, by reason; empty where there are none."""
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.omissions.items()) if count)

    def __str__(self) -> str:
        """One line: the files read, and those left out."""
        kinds = Counter("".join(file.suffixes[-2:]) or file.name for file in self.files).most_common()
        listing = ", ".join(f"{count} {kind}" for kind, count in kinds[:4]) + (", ..." if len(kinds) > 4 else "")
        omitted = self.describe_omissions()
        return f"{self.path}: reads {len(self.files)} files ({listing})" + (
            f"; leaves out {omitted}" if omitted else ""
        )


def find_sources(path: str | None, without: Sequence[Path] = (), *, text_field: str = "text") -> Sources:
    """The files named by `path`.

    A folder gives all its text files and those of its folders: plain text, .jsonl and .parquet, also compressed
    (see `zerotrain.data.text_files`). It
    leaves hidden and binary files, and the folders of runs: a run writes to its own
    between the moment it is checked and the moment its ranks read. A glob skips the same files as a
    folder. A file that is named itself is refused if it is known not to be text.

    Args:
        path: a file; a folder; a glob pattern, where `**` matches any depth; or None for the standard library of the
            running Python.
        without: folders that are left out, such as the one that is written to.
        text_field: where the text is in an object of .jsonl.

    Raises:
        FileNotFoundError: nothing is there, or no file matches.
        ValueError: the files hold no text, a file cannot be read, or it is a dataset that would be learnt as it is
            written: rows of JSON, or what Hugging Face's `save_to_disk` writes.
    """
    if path is None:
        folder = sysconfig.get_path("stdlib")
        sources = Sources(f"data.path=null (the standard library in {folder})", is_default=True)
        files = _walk(folder, lambda inner: inner.name in STDLIB_SKIPPED_FOLDERS, sources)
        return add_files((file for file in files if file.suffix == ".py"), sources)
    sources, expanded = Sources(f"data.path={path}"), os.path.expanduser(path)
    # A file of exactly this name comes first: "a[1].txt" is a legal file name and a pattern too.
    if os.path.isfile(expanded):
        require_text(file := Path(expanded), sources.path)
        require_no_dataset(file, text_field, sources.path, is_named=True)
        return add_files([file], sources)
    own = {folder.resolve() for folder in without}

    @cache
    def is_own(folder: Path) -> bool:
        """Whether a folder is left out, or is that of a run, on this machine or another, of a sweep, or of prepared
        tokens."""
        if folder.resolve() in own or any(all((folder / name).exists() for name in names) for names in _OWN_FILES):
            return True
        # The lock of a run, or of tokens that are prepared, is there before anything else; other programs' locks say
        # something else.
        return any(lock.read_note(folder / name, lock.Holder) is not None for name in (".lock", "lock"))

    if os.path.isdir(expanded):
        return add_files(_text_files(_walk(expanded, is_own, sources), sources, text_field), sources)
    remedy = "give a file, a folder or a glob pattern, or null for the standard library of the running Python"
    matches = files_matching(expanded, sources.path, remedy)
    # The folder before the first wildcard was named by the user, even if it is that of a run; those below were not.
    parts = Path(expanded).parts
    root = Path(*parts[: next(number for number, part in enumerate(parts) if glob.has_magic(part))])
    readable = [
        match
        for match in matches
        if not any(is_own(folder) for folder in match.parents if folder != root and folder.is_relative_to(root))
    ]
    sources.omissions[_OF_RUNS] += len(matches) - len(readable)
    return add_files(_text_files(readable, sources, text_field), sources)


def _walk(folder: str, is_skipped: Callable[[Path], bool], sources: Sources) -> Iterator[Path]:
    """All files below a folder but hidden ones and those in skipped folders."""
    for parent, folders, names in os.walk(folder):
        # In place: os.walk reads this very list to know where to go next.
        visible = [name for name in folders if not name.startswith(".")]
        folders[:] = [name for name in visible if not is_skipped(Path(parent, name))]
        sources.omissions["folders " + _OF_RUNS] += len(visible) - len(folders)
        sources.omissions["hidden"] += sum(name.startswith(".") for name in names)
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _text_files(files: Iterable[Path], sources: Sources, text_field: str) -> Iterator[Path]:
    for file in files:
        if not file.is_file():
            sources.omissions["links to nothing and other files that hold no text"] += 1
        elif (reason := why_left(file)) is None:
            require_no_dataset(file, text_field, sources.path)
            yield file
        else:
            sources.omissions[reason] += 1


def add_files(files: Iterable[Path], sources: Sources) -> Sources:
    """Add all but empty files and further links to one. A ValueError where none is left, or one cannot be read."""
    places: set[tuple[int, int]] = set()
    for file in sorted(files):
        status = file.stat()
        if status.st_size == 0:
            sources.omissions["empty"] += 1
        elif (place := place_on_disk(status)) in places:
            sources.omissions["links to files that are read"] += 1
        else:
            places.add(place)
            sources.files.append(file)
    if not sources.files:
        omitted = sources.describe_omissions()
        raise ValueError(
            f"{sources.path} holds no text; give a file, folder or pattern with at least one non-empty file"
            + (f" (left out: {omitted})" if omitted else "")
        )
    for file in sources.files:
        if not os.access(file, os.R_OK):
            raise ValueError(f"{sources.path}: {file} cannot be read; give it read permission or choose other files")
    return sources
