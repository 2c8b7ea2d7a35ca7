"""Guesses the real content of a file that should hold only tokens. Any bytes are tokens: without a look, text, or
tokens of another size, would be learnt."""

import codecs
import re
from pathlib import Path

import numpy as np

from zerotrain.data.store.containers import container_of

SAMPLE_NBYTES = 1 << 13
"""Bytes looked at in each file, of which there may be 50,000."""
_MIN_NUM_WORDS = 32
"""Fewer say nothing about the rest."""


def require_plain_tokens(path: Path, dtype: np.dtype, *, vocab_size: int | None, name: str) -> None:
    """Check that the beginning of a file can be that of tokens of `dtype`.

    Args:
        name: what the file is called in messages.

    Raises:
        OSError: it cannot be read.
        ValueError: it looks like something else; with what to set.
    """
    with path.open("rb") as file:
        sample = file.read(SAMPLE_NBYTES)
    if (found := container_of(sample)) is not None:
        raise ValueError(f"{name} is {found.name}; {found.for_tokens}")
    other = _looks_like(sample, dtype, vocab_size)
    if other is not None:
        raise ValueError(f"{name} looks like {other}")


def _looks_like(sample: bytes, dtype: np.dtype, vocab_size: int | None) -> str | None:
    if dtype.itemsize == 1 or len(sample) < _MIN_NUM_WORDS * dtype.itemsize:
        return None
    if _is_text(sample):
        return "text; choose data=text"
    for wider in ("uint64", "uint32"):
        if dtype.itemsize < np.dtype(wider).itemsize and _is_of(wider, sample):
            return f"{wider} tokens, not {dtype.name}: the upper half of each is 0 or small; set data.dtype={wider}"
    words = _words(sample, dtype)
    if vocab_size is None or int(words.max()) < vocab_size:
        return None
    if int(words.byteswap().max()) < vocab_size:
        return (
            f"big-endian {dtype.name}: all tokens are below data.vocab_size={vocab_size} only if they are read so; "
            f"write them with numpy's astype('<u{dtype.itemsize}')"
        )
    if dtype.itemsize > 2 and int(_words(sample, np.dtype("<u2")).max()) < vocab_size:
        return f"uint16 tokens, not {dtype.name}; set data.dtype=uint16"
    return None


def _words(sample: bytes, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(sample[: len(sample) // dtype.itemsize * dtype.itemsize], dtype=dtype.newbyteorder("<"))


def _is_of(dtype: str, sample: bytes) -> bool:
    """Whether these are words of a wider dtype: their upper halves are as small as only those of tokens are."""
    halves = _words(sample, np.dtype(f"<u{np.dtype(dtype).itemsize // 2}"))
    halves = halves[: len(halves) // 2 * 2]
    lower, upper = halves[::2], halves[1::2]
    if len(upper) < _MIN_NUM_WORDS // 2:
        return False
    # All zero, or one of the few a vocabulary of a million tokens has, beside lower halves that are not small.
    return bool((upper.max() == 0 and len(np.unique(lower)) >= 8) or (upper.max() < 16 and lower.max() >= 256))


def _is_text(sample: bytes) -> bool:
    """Whether it is UTF-8 without control characters, or nearly all printable ASCII."""
    values = np.frombuffer(sample, dtype=np.uint8)
    printable = ((values >= 32) & (values < 127)) | ((values >= 9) & (values <= 13))
    if printable.mean() > 0.95:
        return True
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False
    return re.search(r"[\x00-\x08\x0e-\x1f\x7f]", text) is None
