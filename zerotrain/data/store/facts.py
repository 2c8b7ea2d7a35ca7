"""Facts about a dataset of tokens: one line for people, and values that must be equal on all machines."""

import hashlib
from pathlib import Path

from zerotrain.data.store.shards import Shard
from zerotrain.data.store.store import TokenStore
from zerotrain.data.store.windows import TokenWindows

_END_NBYTES = 1 << 12
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def describe_tokens(train: TokenWindows, validation: TokenWindows, num_files: int | None = None) -> str:
    """Like "3 files, 1.2 G tokens, 1.1 M rows of 1,024 (0.1 % unused), validation 0.1 M rows (by chunk, 0.1)".

    Args:
        num_files: that the tokens were made of; None: those they lie in.
    """
    stores = _stores(train, validation)
    if num_files is None:
        num_files = sum(len(store.shards) for store in stores)
    tokens = sum(store.tokens for store in stores)
    unused = 1 - (train.layout.num_used + validation.layout.num_used) / tokens
    how = "files of its own" if len(stores) == 2 else train.split
    validated = f"validation {_count(len(validation))} rows ({how})" if len(validation) else "no validation"
    return (
        f"{num_files:,} file{'s' * (num_files != 1)}, {_count(tokens)} tokens, {_count(len(train))} rows of "
        f"{train.seq_len:,} ({unused:.1%} unused), {validated}"
    ).replace("%", " %")


def fingerprint_tokens(train: TokenWindows, validation: TokenWindows) -> dict[str, int | str]:
    """Values that are equal on machines with equal data, whatever folder it lies in, and hardly ever with other data.
    They depend only on the first and last tokens of each file.

    Raises:
        OSError: a file cannot be read.
    """
    stores = _stores(train, validation)
    return {
        "rows": len(train),
        "validation_rows": len(validation),
        "seq_len": train.seq_len,
        "tokens": sum(store.tokens for store in stores),
        "vocab_size": train.vocab_size,
        "dtype": " ".join(store.dtype.name for store in stores),
        "tokenizer": " ".join(store.tokenizer or "unknown" for store in stores),
        "files": _hash_of_files(stores),
        "split": f"{train.split} {_hash_of_rows(train, validation)}",
    }


def _stores(train: TokenWindows, validation: TokenWindows) -> list[TokenStore]:
    return [train.store] if train.store is validation.store else [train.store, validation.store]


def _count(number: int) -> str:
    """Up to four digits as they are, and three of a larger number: 950, 1,100, 12.0 k, 1.2 M, 123 M."""
    if number < 10_000:
        return f"{number:,}"
    unit = next(unit for unit in _UNITS if number < 999.5 * _UNITS[unit] or unit == "T")
    scaled = number / _UNITS[unit]
    return f"{scaled:.1f} {unit}" if scaled < 99.95 else f"{scaled:,.0f} {unit}"


def _hash_of_files(stores: list[TokenStore]) -> str:
    """Hash of name, size and both ends of each file, and of the borders between stores."""
    hashed = hashlib.sha256()
    for store in stores:
        for shard in store.shards:
            hashed.update(f"{shard.path.name}\0{shard.tokens}\0".encode(errors="surrogateescape"))
            hashed.update(_ends(shard, shard.tokens * store.dtype.itemsize))
        hashed.update(b"\n")
    return hashed.hexdigest()[:16]


def _ends(shard: Shard, nbytes: int) -> bytes:
    with Path(shard.path).open("rb") as file:
        file.seek(shard.first_byte)
        first = file.read(min(_END_NBYTES, nbytes))
        file.seek(shard.first_byte + nbytes - len(first))
        return first + file.read(len(first))


def _hash_of_rows(train: TokenWindows, validation: TokenWindows) -> str:
    hashed = hashlib.sha256()
    for side in (train, validation):
        for array in side.layout.arrays():
            hashed.update(array.data)
        hashed.update(b"\n")
    return hashed.hexdigest()[:16]
