"""Readers of the files of tokens that people have: each tells where in a file its tokens lie, and of which dtype.

.npy            a one-dimensional array of integers
llm.c           256 int32 (magic, version, number of tokens, zeros), then uint16 of GPT-2 or uint32 of Llama 3;
                modded-nanogpt's FineWeb shards are such
Megatron        tokens in a .bin, and beside it an .idx that says where documents start
anything else   tokens and nothing else, of the dtype that the user says
"""

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from zerotrain.data.store.guess import require_plain_tokens
from zerotrain.data.store.shards import Shard
from zerotrain.data.store.store import TokenStore
from zerotrain.files.untrusted import printable

PLAIN_DTYPES = ("uint8", "uint16", "uint32", "uint64")
_NPY_MAGIC = b"\x93NUMPY"
_LLM_C_HEADER_NBYTES = 1024
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Magic: version and dtype."""
_LLM_C_QUESTIONS = 20240522
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
        source: what names the files, as the user wrote it ("data.path=corpus").

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
    before = np.cumsum([0, *(part.shard.tokens for part in parts)])
    starts = [np.zeros(1, dtype=np.int64) if part.documents is None else part.documents() for part in parts]
    return np.concatenate([start + offset for start, offset in zip(starts, before, strict=False)])


def _token_file(path: Path, plain: np.dtype, vocab_size: int | None, name: str) -> TokenFile:
    if not os.access(path, os.R_OK):
        raise ValueError(f"{name} cannot be read; give it read permission or choose another file")
    with path.open("rb") as file:
        header = file.read(_LLM_C_HEADER_NBYTES)
    if header.startswith(_NPY_MAGIC):
        return _npy(path, name)
    magic = int.from_bytes(header[:4], "little")
    if len(header) == _LLM_C_HEADER_NBYTES and (magic in _LLM_C or magic == _LLM_C_QUESTIONS):
        return _llm_c(path, header, name)
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and is_megatron_index(index):
        return _megatron(path, index, name)
    nbytes = path.stat().st_size
    if nbytes:
        require_plain_tokens(path, plain, vocab_size=vocab_size, name=name)
    if nbytes == 0 or nbytes % plain.itemsize:
        raise ValueError(
            f"{name} has {nbytes} bytes; a file of {plain.name} tokens has a multiple of {plain.itemsize}, and at "
            "least one token"
        )
    return TokenFile(Shard(path, nbytes // plain.itemsize), plain)


def _npy(path: Path, name: str) -> TokenFile:
    try:
        array = np.load(path, mmap_mode="r")  # reads the header alone
    except Exception as error:  # its header is Python: TokenError, SyntaxError, TypeError, MemoryError
        said = printable(str(error), keep="")
        raise ValueError(f"{name} is a damaged .npy file: {said}; write it anew") from error
    if array.ndim != 1 or array.dtype.kind not in "ui" or len(array) == 0:
        raise ValueError(
            f"{name} holds an array of {array.dtype} with shape {array.shape}; give one dimension of "
            "integers, the tokens"
        )
    return TokenFile(Shard(path, len(array), first_byte=array.offset), array.dtype)


def _llm_c(path: Path, header: bytes, name: str) -> TokenFile:
    magic, version, tokens = (int(field) for field in np.frombuffer(header, dtype="<i4", count=3))
    if magic == _LLM_C_QUESTIONS:
        raise ValueError(f"{name} is an llm.c file of multiple-choice questions; give a file of tokens")
    known, dtype = _LLM_C[magic]
    if version != known:
        raise ValueError(
            f"{name} is an llm.c file of version {version}, but only {known} is supported; give a .npy, or a "
            ".bin of tokens and nothing else"
        )
    nbytes, needed = path.stat().st_size, _LLM_C_HEADER_NBYTES + tokens * np.dtype(dtype).itemsize
    if nbytes != needed or tokens < 1:
        raise ValueError(
            f"{name} has {nbytes} bytes, but its header says {needed}, with {tokens} tokens; copy it again or write "
            "it again"
        )
    return TokenFile(Shard(path, tokens, first_byte=_LLM_C_HEADER_NBYTES), np.dtype(dtype))


def is_megatron_index(path: Path) -> bool:
    """Whether a file is there and says that it is the index of a Megatron dataset."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MEGATRON_MAGIC)) == _MEGATRON_MAGIC
    except OSError:
        return False


def _megatron(path: Path, index: Path, name: str) -> TokenFile:
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
    documents = partial(_megatron_documents, index, pointers_at, num_sequences, num_documents, dtype.itemsize, tokens)
    return TokenFile(Shard(path, tokens), dtype, documents)


def _megatron_documents(
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
