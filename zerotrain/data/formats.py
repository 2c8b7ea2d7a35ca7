"""Readers of the files of tokens that people have: each finds where in a file its tokens lie, and of which dtype.

.npy            a one-dimensional array of integers
llm.c           256 int32 (magic, version, number of tokens, zeros), then uint16 of GPT-2 or uint32 of Llama 3;
                modded-nanogpt's FineWeb shards are such
Megatron        tokens in a .bin, and beside it an .idx that says where documents start
anything else   tokens and nothing else, of the dtype that the user says
"""

import codecs
import glob
import os
import re
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from zerotrain.data.store import INDEX_NAME, Shard, TokenStore
from zerotrain.files.untrusted import printable

# The real content of a file of tokens is guessed. Without a look, text, or tokens of another
# size, would be learnt.


_SAMPLE_NBYTES = 1 << 13
"""Bytes looked at in each file, of which there may be 50,000."""
_MIN_NUM_WORDS = 32
"""Fewer say nothing about the rest."""


def _guess_content(sample: bytes, dtype: np.dtype, vocab_size: int | None) -> str | None:
    if dtype.itemsize == 1 or len(sample) < _MIN_NUM_WORDS * dtype.itemsize:
        return None
    if _is_text(sample):
        return "text; choose data=text"
    for wider in ("uint64", "uint32"):
        if dtype.itemsize < np.dtype(wider).itemsize and _holds_wider_words(wider, sample):
            return f"{wider} tokens, not {dtype.name}: the upper half of each is 0 or small; set data.dtype={wider}"
    words = _numbers_in(sample, dtype)
    if vocab_size is None or int(words.max()) < vocab_size:
        return None
    if int(words.byteswap().max()) < vocab_size:
        return (
            f"big-endian {dtype.name}: all tokens are below data.vocab_size={vocab_size} only if they are read so; "
            f"write them with numpy's astype('<u{dtype.itemsize}')"
        )
    if dtype.itemsize > 2 and int(_numbers_in(sample, np.dtype("<u2")).max()) < vocab_size:
        return f"uint16 tokens, not {dtype.name}; set data.dtype=uint16"
    return None


def _numbers_in(sample: bytes, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(sample[: len(sample) // dtype.itemsize * dtype.itemsize], dtype=dtype.newbyteorder("<"))


def _holds_wider_words(dtype: str, sample: bytes) -> bool:
    """Whether these are words of a wider dtype: their upper halves are as small as only those of tokens are."""
    halves = _numbers_in(sample, np.dtype(f"<u{np.dtype(dtype).itemsize // 2}"))
    halves = halves[: len(halves) // 2 * 2]
    lower, upper = halves[::2], halves[1::2]
    if len(upper) < _MIN_NUM_WORDS // 2:
        return False
    # All zero, or one of the few a vocabulary of a million tokens has, beside lower halves that are not small.
    return bool((upper.max() == 0 and len(np.unique(lower)) >= 8) or (upper.max() < 16 and lower.max() >= 256))


def _is_text(sample: bytes) -> bool:
    """Whether it is UTF-8 without control characters, or nearly all printable ASCII."""
    values = np.frombuffer(sample, dtype=np.uint8)
    is_printable = ((values >= 32) & (values < 127)) | ((values >= 9) & (values <= 13))
    if is_printable.mean() > 0.95:
        return True
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False
    return re.search(r"[\x00-\x08\x0e-\x1f\x7f]", text) is None


PLAIN_DTYPES = ("uint8", "uint16", "uint32", "uint64")
_LLM_C_HEADER_NBYTES = 1024
_LLM_C = {struct.pack("<i", 20240520): (1, "<u2"), struct.pack("<i", 20240801): (7, "<u4")}
"""Magic: version and dtype."""
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the dtype, number of sequences, number of documents; then for each sequence its tokens,
int32, and its first byte, int64; then for each document its first sequence, int64."""
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class TokenFile:
    """A file and how it is to be read."""

    shard: Shard
    dtype: np.dtype
    documents: Callable[[], np.ndarray] | None = None
    """Reads where in the file each document starts, (num_documents,) int64; None where nobody knows."""


def open_files(files: Sequence[Path], *, dtype: str, vocab_size: int | None, source: str) -> TokenStore:
    """The tokens of some files, one file after the other.

    Args:
        dtype: of files that do not say themselves of which they are; one of `PLAIN_DTYPES`.
        vocab_size: tokens the model knows, if it is known.
        source: the setting that names the files, as the user wrote it ("data.path=corpus").

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is of another format, damaged or empty, or two are of different dtypes.
    """
    if dtype not in PLAIN_DTYPES:
        raise ValueError(f"data.dtype={dtype} is none of {', '.join(PLAIN_DTYPES)}")
    names = [source if len(files) == 1 else f"{source}: {file}" for file in files]
    plain = np.dtype(dtype).newbyteorder("<")
    parts = [_token_file(file, plain, vocab_size, name) for file, name in zip(files, names, strict=True)]
    for part, name in zip(parts, names, strict=True):
        if part.dtype != parts[0].dtype:
            raise ValueError(
                f"{name} holds {part.dtype.name} and {parts[0].shard.path} {parts[0].dtype.name}; all files must "
                "have one dtype: choose files that do"
            )
    documents = partial(_join_documents, parts) if any(part.documents for part in parts) else None
    return TokenStore([part.shard for part in parts], parts[0].dtype, documents=documents)


def _join_documents(parts: Sequence[TokenFile]) -> np.ndarray:
    """The starts of documents in all files; a file whose starts are unknown counts as one document."""
    offsets = np.cumsum([0, *(part.shard.tokens for part in parts)])
    starts = [np.zeros(1, dtype=np.int64) if part.documents is None else part.documents() for part in parts]
    return np.concatenate([start + offset for start, offset in zip(starts, offsets, strict=False)])


def _token_file(path: Path, plain: np.dtype, vocab_size: int | None, name: str) -> TokenFile:
    if not os.access(path, os.R_OK):
        raise ValueError(f"{name} cannot be read; give it read permission or choose another file")
    with path.open("rb") as file:
        beginning = file.read(_SAMPLE_NBYTES)
    kind, index = kind_of(beginning), path.with_suffix(".idx")
    if kind is not None and kind.read is not None:
        return kind.read(path, beginning, name)
    if path.suffix == ".bin" and is_megatron_index(index):
        return _read_megatron(path, index, name)
    if kind is not None:
        raise ValueError(f"{name} is {kind.name}; {kind.for_tokens}")
    if (content := _guess_content(beginning, plain, vocab_size)) is not None:
        raise ValueError(f"{name} looks like {content}")
    nbytes = path.stat().st_size
    if nbytes == 0 or nbytes % plain.itemsize:
        raise ValueError(
            f"{name} has {nbytes} bytes; a file of {plain.name} tokens has a multiple of {plain.itemsize}, and at "
            "least one token"
        )
    return TokenFile(Shard(path, nbytes // plain.itemsize), plain)


def _read_npy(path: Path, _: bytes, name: str) -> TokenFile:
    try:
        array = np.load(path, mmap_mode="r")  # reads the header alone
    except Exception as error:  # its header is Python: TokenError, SyntaxError, TypeError, MemoryError
        problem = printable(str(error), keep="")
        raise ValueError(f"{name} is a damaged .npy file: {problem}; write it anew") from error
    if array.ndim != 1 or array.dtype.kind not in "ui" or len(array) == 0:
        raise ValueError(
            f"{name} holds an array of {array.dtype} with shape {array.shape}; give one dimension of "
            "integers, the tokens"
        )
    return TokenFile(Shard(path, len(array), first_byte=array.offset), array.dtype)


def _read_llm_c(path: Path, beginning: bytes, name: str) -> TokenFile:
    magic, (version, tokens) = beginning[:4], struct.unpack("<2i", beginning[4:12].ljust(8, b"\0"))
    supported_version, dtype = _LLM_C[magic]
    if version != supported_version:
        raise ValueError(
            f"{name} is an llm.c file of version {version}, but only {supported_version} is supported; give "
            "a .npy, or a .bin of tokens and nothing else"
        )
    nbytes, needed = path.stat().st_size, _LLM_C_HEADER_NBYTES + tokens * np.dtype(dtype).itemsize
    if nbytes != needed or tokens < 1:
        raise ValueError(
            f"{name} has {nbytes} bytes, but its header says {needed}, with {tokens} tokens; copy it again or write "
            "it again"
        )
    return TokenFile(Shard(path, tokens, first_byte=_LLM_C_HEADER_NBYTES), np.dtype(dtype))


def is_megatron_index(path: Path) -> bool:
    """Whether a file is there and begins as the index of a Megatron dataset."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MEGATRON_MAGIC)) == _MEGATRON_MAGIC
    except OSError:
        return False


def _read_megatron(path: Path, index: Path, name: str) -> TokenFile:
    with index.open("rb") as file:
        header = file.read(_MEGATRON_HEADER.size)
        if len(header) < _MEGATRON_HEADER.size:
            raise ValueError(f"{name}: its index {index} is cut short; copy it again")
        _, version, code, num_sequences, num_documents = _MEGATRON_HEADER.unpack(header)
        if version != 1 or code not in _MEGATRON_DTYPES:
            raise ValueError(
                f"{name}: its index {index} is of version {version} and dtype code {code}; only version 1 and "
                "integers are supported"
            )
        dtype = np.dtype(_MEGATRON_DTYPES[code])
        pointers_at = _MEGATRON_HEADER.size + 4 * num_sequences
        if index.stat().st_size < pointers_at + 8 * num_sequences + 8 * num_documents or num_sequences == 0:
            raise ValueError(f"{name}: its index {index} has no sequences, or is cut short; copy it again")
        # The last sequence tells where the tokens end: the lengths of all may be gigabytes.
        file.seek(pointers_at - 4)
        length = int.from_bytes(file.read(4), "little")
        file.seek(pointers_at + 8 * (num_sequences - 1))
        nbytes = int.from_bytes(file.read(8), "little") + length * dtype.itemsize
    if path.stat().st_size != nbytes or nbytes == 0:
        raise ValueError(
            f"{name} has {path.stat().st_size} bytes, but its index {index} says {nbytes}; they are from different "
            "datasets, or one is damaged: copy both again"
        )
    tokens = nbytes // dtype.itemsize
    documents = partial(
        _read_megatron_documents, index, pointers_at, num_sequences, num_documents, dtype.itemsize, tokens
    )
    return TokenFile(Shard(path, tokens), dtype, documents)


def _read_megatron_documents(
    index: Path, pointers_at: int, num_sequences: int, num_documents: int, itemsize: int, tokens: int
) -> np.ndarray:
    pointers = np.fromfile(index, dtype="<i8", count=num_sequences, offset=pointers_at)
    sequences = np.fromfile(index, dtype="<i8", count=num_documents, offset=pointers_at + 8 * num_sequences)
    # The last document's end is listed as the start of one more; a writer may list no start at all.
    starts = pointers[sequences[(sequences >= 0) & (sequences < num_sequences)]] // itemsize
    if len(starts) == 0 or starts[0] != 0:
        starts = np.concatenate([[0], starts])
    if (starts[1:] < starts[:-1]).any() or starts[-1] > tokens:
        raise ValueError(f"{index} does not list documents in the order of their tokens; write it anew")
    return starts


# Kinds of files, told by their first bytes. Any bytes can be learnt: without a look an archive, or a database, would
# be.


_UNPACK = "unpack it, and give what was in it"
_AS_TEXT = "write its text to .txt, .jsonl or .parquet files"
_READS_TOKENS = "data=tokens reads tokens of it"


@dataclass(frozen=True)
class FileKind:
    """A kind of file that is neither text nor tokens and nothing else."""

    name: str
    """With its article."""
    for_text: str
    """Remedy if its text is wanted."""
    for_tokens: str = "give a .npy, or a .bin of tokens and nothing else"
    """Remedy if its tokens are wanted, and it cannot be read."""
    read: Callable[[Path, bytes, str], TokenFile] | None = None
    """Reads its tokens: of (its path, its first bytes, its name in messages)."""


_TAR = FileKind("a tar archive", _UNPACK, "unpack it")
_GZIP = FileKind("a gzip file", "unpack it, or give it a name that ends in .gz", "unpack it")
_ARROW = FileKind("an arrow file", "data=huggingface reads a folder that save_to_disk() has written")
_PICKLE = FileKind("a pickle", _AS_TEXT)
_KINDS = {
    b"\x1f\x8b": _GZIP,
    b"\x28\xb5\x2f\xfd": FileKind("a zstd file", "unpack it, or give it a name that ends in .zst", "unpack it"),
    b"BZh91AY&SY": FileKind("a bzip2 file", _UNPACK, "unpack it"),
    b"\xfd7zXZ": FileKind("an xz file", _UNPACK, "unpack it"),
    b"\x04\x22\x4d\x18": FileKind("an lz4 file", _UNPACK, "unpack it"),
    b"7z\xbc\xaf\x27\x1c": FileKind("a 7z archive", _UNPACK, "unpack it"),
    b"Rar!\x1a\x07": FileKind("a rar archive", _UNPACK, "unpack it"),
    b"PK\x03\x04": FileKind("a zip file (.npz and .pt are such)", _UNPACK),
    b"PAR1": FileKind("a parquet file", "give it a name that ends in .parquet", "data=text reads its text"),
    b"ARROW1": _ARROW,
    b"FEA1": _ARROW,
    b"Obj\x01": FileKind("an Avro file", _AS_TEXT),
    b"\x89HDF": FileKind("an HDF5 file", _AS_TEXT),
    b"\x93NUMPY": FileKind("a .npy file", _READS_TOKENS, read=_read_npy),
    **dict.fromkeys(_LLM_C, FileKind("an llm.c file", _READS_TOKENS, read=_read_llm_c)),
    struct.pack("<i", 20240522): FileKind(
        "an llm.c file of multiple-choice questions", _AS_TEXT, "give a file of tokens"
    ),
    _MEGATRON_MAGIC: FileKind(
        "the index of a Megatron dataset without the .bin beside it",
        "data=tokens reads the two of them",
        "put it there",
    ),
    b"SQLite format 3\0": FileKind("an SQLite database", _AS_TEXT),
    b"\x80\x04\x95": _PICKLE,
    b"\x80\x05\x95": _PICKLE,
    b"%PDF-": FileKind("a PDF file", _AS_TEXT),
    b"{\\rtf": FileKind("an RTF file", _AS_TEXT),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": FileKind("an old Office file", _AS_TEXT),
}
_BYTE_ORDER_MARKS = {b"\xff\xfe\0\0": 32, b"\0\0\xfe\xff": 32, b"\xff\xfe": 16, b"\xfe\xff": 16}
"""The bits of a unit, by the beginning of a file; UTF-32's little-endian one begins with UTF-16's."""


def kind_of(beginning: bytes, *, is_named_text: bool = False) -> FileKind | None:
    """The kind of a file that begins so; None if it may be text or tokens and nothing else.

    Args:
        beginning: its first bytes, 512 or more to know a tar archive.
        is_named_text: whether it is read as text: then an encoding with other bytes is a kind too.
    """
    for mark, bits in _BYTE_ORDER_MARKS.items() if is_named_text else ():
        if beginning.startswith(mark):
            return FileKind(f"text in UTF-{bits}", f"write it in UTF-8: iconv -f UTF-{bits} -t UTF-8")
    if _is_tar(beginning):
        return _TAR
    # save_to_disk() may have written it: the sign of a message, and the length of its schema.
    if beginning.startswith(b"\xff\xff\xff\xff") and 0 < int.from_bytes(beginning[4:8], "little") < 1 << 24:
        return _ARROW
    kind = next((kind for magic, kind in _KINDS.items() if beginning.startswith(magic)), None)
    if kind is _GZIP:
        with suppress(zlib.error):
            if _is_tar(zlib.decompressobj(wbits=31).decompress(beginning, tarfile.BLOCKSIZE)):
                return _TAR
    return kind


def _is_tar(beginning: bytes) -> bool:
    """Old ones have no magic, but all have a sum of the bytes of their first header."""
    try:
        tarfile.TarInfo.frombuf(beginning[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:  # also where it is too short
        return False
    return True


# The files of tokens behind a path, and those for validation among them.


SUFFIXES = (".bin", ".npy")
"""Suffixes of the files to read in a folder."""


@dataclass(frozen=True)
class TokenPaths:
    """The paths behind a path: files of tokens, or a store's folder alone."""

    train: tuple[Path, ...]
    """Sorted; all but those for validation."""
    validation: tuple[Path, ...] = ()
    """Named so; usually none."""


def find_token_paths(path: str, source: str) -> TokenPaths:
    """The files of tokens that `path` names, each once whatever links lead to it.

    Args:
        path: a file; a folder of a store, or with train.bin and, if it likes, val.bin, or with other .bin and .npy
            files; a glob pattern, where `**` matches any depth; or what Megatron calls a prefix: the path of a .bin and
            .idx without suffix. Files called `val` go to validation if the others are called `train`:
            fineweb_train_000001.bin, fineweb_val_000000.bin.
        source: the setting, as the user wrote it ("data.path=corpus").

    Raises:
        FileNotFoundError: nothing is there, or no file matches.
        ValueError: nobody can say which of the files are for training.
    """
    expanded = os.path.expanduser(path)
    # A file of exactly this name comes first: "a[1].bin" is a legal file name and a pattern too.
    if os.path.isfile(expanded):
        return TokenPaths((_data_of(Path(expanded)),))
    if os.path.isdir(expanded):
        return _find_in_folder(Path(expanded), source)
    if is_megatron_index(Path(f"{expanded}.idx")) and os.path.isfile(f"{expanded}.bin"):
        return TokenPaths((Path(f"{expanded}.bin"),))
    remedy = "give a file of tokens, a folder of such files or of a store, or a glob pattern"
    return _sort_by_name(_each_once(files_matching(expanded, source, remedy)), source)


def files_matching(pattern: str, source: str, remedy: str) -> list[Path]:
    """The files that a glob pattern matches.

    Args:
        source: the setting, as the user wrote it ("data.path=corpus").
        remedy: what to do where the pattern is the path of nothing.

    Raises:
        FileNotFoundError: no file matches, or it is no pattern.
    """
    if not glob.has_magic(pattern):
        what = "is neither a file nor a folder" if os.path.exists(pattern) else "does not exist"
        raise FileNotFoundError(f"{source} {what}; {remedy}")
    files = [Path(match) for match in glob.glob(pattern, recursive=True) if os.path.isfile(match)]
    if not files:
        raise FileNotFoundError(f"{source} matches no file; give a pattern that does, or a file or a folder")
    return files


def _data_of(path: Path) -> Path:
    """The .bin where its .idx is named."""
    data_file = path.with_suffix(".bin")
    return data_file if path.suffix == ".idx" and data_file.is_file() and is_megatron_index(path) else path


def _find_in_folder(folder: Path, source: str) -> TokenPaths:
    if (folder / INDEX_NAME).is_file():
        return TokenPaths((folder,))
    if (train := folder / "train.bin").is_file():
        return TokenPaths((train,), tuple(file for file in (folder / "val.bin",) if file.is_file()))
    candidates = (file for file in folder.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    files = _each_once(file for file in candidates if file.is_file())
    if not files:
        raise FileNotFoundError(
            f"{source} is a folder without .bin or .npy files and without {INDEX_NAME}; give a file of tokens, a "
            "folder of such files or of a store, or a glob pattern"
        )
    return _sort_by_name(files, source)


def _each_once(files: Iterable[Path]) -> list[Path]:
    """Sorted by name; a file that links lead to under its first name."""
    by_place: dict[tuple[int, int], Path] = {}
    for file in sorted(_data_of(file) for file in files):
        by_place.setdefault(place_on_disk(file.stat()), file)
    return list(by_place.values())


def place_on_disk(status: os.stat_result) -> tuple[int, int]:
    """The same for all links to a file."""
    return status.st_dev, status.st_ino


def _sort_by_name(files: list[Path], source: str) -> TokenPaths:
    words = {file: set(re.findall(r"[a-z]+", file.stem.lower())) for file in files}
    validation = tuple(file for file in files if words[file] & {"val", "valid", "validation"})
    train = tuple(file for file in files if words[file] & {"train", "training"} and file not in validation)
    if not validation or len(validation) == len(files):  # all of one kind: the user has named the files to read
        return TokenPaths(tuple(files))
    unmarked = [file.name for file in files if file not in validation and file not in train]
    if unmarked:
        raise ValueError(
            f"{source} has {validation[0].name}, which is for validation by its name, and {unmarked[0]}, which has "
            "neither train nor val in its name; give a glob pattern that leaves one out, and data.validation_path"
        )
    return TokenPaths(train, validation)
