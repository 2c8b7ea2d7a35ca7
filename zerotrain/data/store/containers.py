"""Recognises files that are neither text nor tokens, by their first bytes. Any bytes can be learnt: without a look an
archive, or a database, would be."""

import zlib
from dataclasses import dataclass

_UNPACK = "unpack it, and give what was in it"
_AS_TEXT = "write its text to .txt, .jsonl or .parquet files"
_OF_HUGGING_FACE = "data=huggingface reads a folder that save_to_disk() has written"
_AS_TOKENS = "give a .npy, or a .bin of tokens and nothing else"
_TAR_HEADER_NBYTES = 512
_TAR_CHECKSUM = slice(148, 156)


@dataclass(frozen=True)
class Container:
    """A kind of file that is neither."""

    name: str
    """With its article."""
    for_text: str
    """Remedy if its text is wanted."""
    for_tokens: str = _AS_TOKENS
    """Remedy if its tokens are wanted."""


_TAR = Container("a tar archive", _UNPACK, "unpack it")
_GZIP = Container("a gzip file", "unpack it, or give it a name that ends in .gz", "unpack it")
_ARROW = Container("an arrow file", _OF_HUGGING_FACE)
_PICKLE = Container("a pickle", _AS_TEXT)
_KINDS = {
    b"\x1f\x8b": _GZIP,
    b"\x28\xb5\x2f\xfd": Container("a zstd file", "unpack it, or give it a name that ends in .zst", "unpack it"),
    b"BZh91AY&SY": Container("a bzip2 file", _UNPACK, "unpack it"),
    b"\xfd7zXZ": Container("an xz file", _UNPACK, "unpack it"),
    b"\x04\x22\x4d\x18": Container("an lz4 file", _UNPACK, "unpack it"),
    b"7z\xbc\xaf\x27\x1c": Container("a 7z archive", _UNPACK, "unpack it"),
    b"Rar!\x1a\x07": Container("a rar archive", _UNPACK, "unpack it"),
    b"PK\x03\x04": Container("a zip file (.npz and .pt are such)", _UNPACK),
    b"PK\x05\x06": Container("an empty zip file", _UNPACK),
    b"PAR1": Container("a parquet file", "give it a name that ends in .parquet", "data=text reads its text"),
    b"ARROW1": _ARROW,
    b"FEA1": _ARROW,
    b"Obj\x01": Container("an Avro file", _AS_TEXT),
    b"\x89HDF": Container("an HDF5 file", _AS_TEXT),
    b"\x93NUMPY": Container("a .npy file", "data=tokens reads tokens of it"),
    b"MMIDIDX": Container(
        "the index of a Megatron dataset without the .bin beside it",
        "data=tokens reads the two of them",
        "put it there",
    ),
    b"TNTIDX": Container(
        "the index of an old Megatron dataset", _AS_TEXT, "make it anew with a Megatron that writes MMIDIDX"
    ),
    b"SQLite format 3\0": Container("an SQLite database", _AS_TEXT),
    b"\x80\x04\x95": _PICKLE,
    b"\x80\x05\x95": _PICKLE,
    b"%PDF-": Container("a PDF file", _AS_TEXT),
    b"{\\rtf": Container("an RTF file", _AS_TEXT),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": Container("an old Office file", _AS_TEXT),
}
_UTF_16 = Container("text in UTF-16", "write it in UTF-8: iconv -f UTF-16 -t UTF-8")
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")


def container_of(beginning: bytes) -> Container | None:
    """The kind of a file that begins so; None if it may be text or tokens.

    Args:
        beginning: its first bytes, 512 or more to know a tar archive.
    """
    if _is_tar(beginning):
        return _TAR
    if _is_arrow_stream(beginning):
        return _ARROW
    kind = next((kind for magic, kind in _KINDS.items() if beginning.startswith(magic)), None)
    return _TAR if kind is _GZIP and _is_tar(_unpacked(beginning)) else kind


def container_of_text(beginning: bytes) -> Container | None:
    """As `container_of`, of what is said to be text: with encodings that hold other bytes."""
    return _UTF_16 if beginning.startswith(_BYTE_ORDER_MARKS) else container_of(beginning)


def _is_tar(beginning: bytes) -> bool:
    """Old ones have no magic, but all have a sum of the bytes of their first header."""
    header = beginning[:_TAR_HEADER_NBYTES]
    if len(header) < _TAR_HEADER_NBYTES:
        return False
    try:
        told = int(header[_TAR_CHECKSUM].strip(b" \0"), 8)
    except ValueError:
        return False
    return told == sum(header) - sum(header[_TAR_CHECKSUM]) + 8 * ord(" ") and told > 8 * ord(" ")


def _is_arrow_stream(beginning: bytes) -> bool:
    """Whether save_to_disk() may have written it: the sign of a message, and the length of its schema."""
    return beginning.startswith(b"\xff\xff\xff\xff") and 0 < int.from_bytes(beginning[4:8], "little") < 1 << 24


def _unpacked(beginning: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(beginning, _TAR_HEADER_NBYTES)
    except zlib.error:
        return b""
